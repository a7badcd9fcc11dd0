"""Reading `_delta_log` without a JVM: one commit is one JSON file, one action a line."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

import orjson

from lakehouse.contract import lake
from serve.errors import TableGone, TableUnreadable
from serve.model import CommitFacts

_COMMIT_FILE = re.compile(r"(\d{20})\.json")


@dataclass(frozen=True, slots=True)
class AddedFile:
    """A data file that a commit added.

    Attributes:
        path: as the log has it; the file's name in the table.
        partition: values of partition columns, as text.
        data_change: False where the file only holds rows that were there before (compaction).
    """

    path: str
    partition: Mapping[str, str | None]
    data_change: bool

    def located(self, folder: Path) -> Path:
        """Where the file lies."""
        if self.path.startswith("file:"):
            return Path(unquote(urlparse(self.path).path))
        return folder / unquote(self.path)


@dataclass(frozen=True, slots=True)
class RemovedFile:
    """A data file that a commit took out of the table."""

    path: str
    data_change: bool


@dataclass(frozen=True, slots=True)
class Commit:
    """One version of a table as its log file tells it.

    Attributes:
        version: Delta version.
        added, removed: data files.
        facts: from commitInfo.
        metadata: the metaData action, where the commit has one.
    """

    version: int
    added: tuple[AddedFile, ...]
    removed: tuple[RemovedFile, ...]
    facts: CommitFacts
    metadata: Mapping[str, Any] | None = None


def commit_path(folder: Path, version: int) -> Path:
    """The log file of a version of the table in ``folder``."""
    return folder / "_delta_log" / f"{version:020d}.json"


def commit_stamp(folder: Path, version: int) -> tuple[int, int] | None:
    """What tells a commit from one of the same version of a table that was there before: its file's inode and time of
    change, ns. None: the log does not have it any more."""
    try:
        found = commit_path(folder, version).stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_ino, found.st_mtime_ns


def versions(folder: Path) -> list[int]:
    """Versions whose log file exists, ascending; empty if there is no log."""
    try:
        names = [path.name for path in (folder / "_delta_log").iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(int(match[1]) for name in names if (match := _COMMIT_FILE.fullmatch(name)))


def read_commit(folder: Path, version: int) -> Commit:
    """The commit.

    Raises:
        TableGone: there is no such file.
        TableUnreadable: an action in it is not supported.
        ValueError: it is not JSON (on some file systems: not yet written to its end).
    """
    name = folder.name
    try:
        content = commit_path(folder, version).read_bytes()
    except FileNotFoundError:
        raise TableGone(name, f"the log has no version {version}") from None
    added: list[AddedFile] = []
    removed: list[RemovedFile] = []
    info: Mapping[str, Any] = {}
    metadata: Mapping[str, Any] | None = None
    for action in _actions(content):
        if (add := action.get("add")) is not None:
            if add.get("deletionVector"):
                raise TableUnreadable(name, "it has deletion vectors", "Set delta.enableDeletionVectors=false")
            added.append(AddedFile(add["path"], add.get("partitionValues") or {}, add.get("dataChange", True)))
        elif (remove := action.get("remove")) is not None:
            removed.append(RemovedFile(remove["path"], remove.get("dataChange", True)))
        elif "metaData" in action:
            metadata = action["metaData"]
        elif "commitInfo" in action:
            info = action["commitInfo"]
    return Commit(version, tuple(added), tuple(removed), _facts(name, version, info), metadata)


def _actions(content: bytes) -> Iterator[dict[str, Any]]:
    for line in content.splitlines():
        if line:
            yield orjson.loads(line)


def _facts(name: str, version: int, info: Mapping[str, Any]) -> CommitFacts:
    try:
        through = orjson.loads(info[lake.COMMIT_THROUGH]) if info.get(lake.COMMIT_THROUGH) else None
        return CommitFacts(
            committed_at=int(info.get("timestamp") or 0),
            through=through,
            events=int(info.get(lake.COMMIT_EVENTS) or 0),
            oldest_at=_optional_int(info.get(lake.COMMIT_OLDEST)),
            newest_at=_optional_int(info.get(lake.COMMIT_NEWEST)),
        )
    except (ValueError, TypeError) as error:
        raise TableUnreadable(name, f"commitInfo of version {version} cannot be read: {error}") from None


def _optional_int(value: Any) -> int | None:
    return int(value) if value not in (None, "") else None

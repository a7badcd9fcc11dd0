"""The one reader of a Delta table's log without Spark: a commit is one JSON file, one action a line.

Tables are on a local or mounted file system. Everything here blocks for one or a few file operations.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

import orjson

from lakehouse.contract.errors import MillraceError

_FOLDER = "_delta_log"
_COMMIT = re.compile(r"(\d{20})\.json")
_CHECKPOINT = re.compile(r"(\d{20})\.checkpoint\..*parquet")


class TableGone(MillraceError):
    """Something that was to be read is no longer there: the table was dropped or replaced, or files were cleaned up.

    Attributes:
        table: name of the table.
        detail: what is missing.
    """

    def __init__(self, table: str, detail: str) -> None:
        super().__init__(table, detail)
        self.table = table
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.table}: {self.detail}"


class TableUnreadable(MillraceError):
    """The table uses a feature that Millrace's readers do not support, or its metadata is wrong.

    Attributes:
        table: name of the table.
        problem: what is not supported, or wrong.
        remedy: what to change.
    """

    def __init__(self, table: str, problem: str, remedy: str = "") -> None:
        super().__init__(table, problem)
        self.table = table
        self.problem = problem
        self.remedy = remedy

    def __str__(self) -> str:
        text = f"table {self.table!r} cannot be served: {self.problem}"
        return f"{text}. {self.remedy}" if self.remedy else text


@dataclass(frozen=True, slots=True)
class AddedFile:
    """A data file that a commit added.

    Attributes:
        path: as the log has it; it names the file within the table.
        partition: values of the partition columns, as text.
        data_change: False if the file only holds rows that were in the table before (compaction).
        size: bytes.
    """

    path: str
    partition: Mapping[str, str | None]
    data_change: bool
    size: int = 0

    def located(self, folder: Path) -> Path:
        """The file's place, for a table in ``folder``."""
        if self.path.startswith("file:"):
            return Path(unquote(urlparse(self.path).path))
        return folder / unquote(self.path)


@dataclass(frozen=True, slots=True)
class RemovedFile:
    """A data file that a commit removed from the table."""

    path: str
    data_change: bool


@dataclass(frozen=True, slots=True)
class Commit:
    """One version of a table.

    Attributes:
        version: Delta version.
        added, removed: data files.
        info: the commitInfo action, with the writer's own keys; empty if absent.
        metadata: the metaData action, if the commit has one.
    """

    version: int
    added: tuple[AddedFile, ...]
    removed: tuple[RemovedFile, ...]
    info: Mapping[str, Any]
    metadata: Mapping[str, Any] | None = None


class DeltaLog:
    """The log of the table in ``table``, which need not exist.

    Attributes:
        table: the table's folder; its name is the table's name.
        folder: the log's own folder.
    """

    def __init__(self, table: Path) -> None:
        self.table = table
        self.folder = table / _FOLDER

    def exists(self) -> bool:
        """Whether the table has been created."""
        return self.folder.is_dir()

    def commit_file(self, version: int) -> Path:
        """The commit's file, whether it exists or not."""
        return self.folder / f"{version:020d}.json"

    def has(self, version: int) -> bool:
        """Whether the log has the commit: one `stat`."""
        try:
            os.stat(self.commit_file(version))  # noqa: PTH116 - a third of what Path.stat costs; tails ask all the time
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def written_at(self, version: int) -> float | None:
        """Seconds since the epoch at which the commit's file was written; None if the log does not have it."""
        stamp = self.stamp(version)
        return None if stamp is None else stamp[1] / 1e9

    def stamp(self, version: int) -> tuple[int, int] | None:
        """Inode and modification time (ns) of the commit's file; None if the log does not have it.

        The same version of a table that was dropped and created again has another stamp.
        """
        try:
            found = self.commit_file(version).stat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        return found.st_ino, found.st_mtime_ns

    def versions(self) -> list[int]:
        """Versions whose commit file exists, ascending."""
        return sorted(self._numbers(_COMMIT))

    def newest(self) -> int:
        """The newest version; -1 if there is none."""
        return max(self._numbers(_COMMIT), default=-1)

    def oldest(self) -> int:
        """The oldest version whose commit file exists; -1 if there is none."""
        return min(self._numbers(_COMMIT), default=-1)

    def checkpoints(self) -> list[int]:
        """Versions that have a checkpoint, ascending; one in several parts is listed once."""
        return sorted(set(self._numbers(_CHECKPOINT)))

    def read(self, version: int) -> Commit:
        """The commit.

        Raises:
            TableGone: the log has no such commit, or not any more.
            TableUnreadable: it has deletion vectors.
            ValueError: it is not JSON. Some file systems show a file before all of it is written.
        """
        added: list[AddedFile] = []
        removed: list[RemovedFile] = []
        info: Mapping[str, Any] = {}
        metadata: Mapping[str, Any] | None = None
        for line in self._lines(version):
            action = orjson.loads(line)
            if (add := action.get("add")) is not None:
                if add.get("deletionVector"):
                    remedy = "Set delta.enableDeletionVectors=false"
                    raise TableUnreadable(self.table.name, "it has deletion vectors", remedy)
                partition, size = add.get("partitionValues") or {}, add.get("size") or 0
                added.append(AddedFile(add["path"], partition, add.get("dataChange", True), size))
            elif (remove := action.get("remove")) is not None:
                removed.append(RemovedFile(remove["path"], remove.get("dataChange", True)))
            elif "metaData" in action:
                metadata = action["metaData"]
            elif "commitInfo" in action:
                info = action["commitInfo"]
        return Commit(version, tuple(added), tuple(removed), info, metadata)

    def info(self, version: int) -> Mapping[str, Any]:
        """The commit's commitInfo alone, without parsing its other actions; empty if absent.

        Raises:
            TableGone: the log has no such commit, or not any more.
            ValueError: see :meth:`read`.
        """
        for line in self._lines(version):
            if b'"commitInfo"' in line and (info := orjson.loads(line).get("commitInfo")) is not None:
                return dict(info)
        return {}

    def infos(self, *, newest_first: bool = False) -> Iterator[tuple[int, Mapping[str, Any]]]:
        """Version and commitInfo of every commit; those that are cleaned up meanwhile are passed over."""
        for version in sorted(self._numbers(_COMMIT), reverse=newest_first):
            try:
                yield version, self.info(version)
            except TableGone:
                continue

    def newest_info(self, key: str, within: int | None = 50) -> Any:
        """The key's value in the newest commitInfo that has it, of so many commits; None if none has it."""
        infos = islice(self.infos(newest_first=True), within)
        return next((info[key] for _, info in infos if key in info), None)

    def properties(self) -> Mapping[str, str]:
        """The table's properties as of the newest version. It opens the table with delta-rs, some milliseconds.

        Raises:
            TableGone: there is no table.
        """
        from deltalake import DeltaTable
        from deltalake.exceptions import DeltaError

        try:
            return dict(DeltaTable(self.table).metadata().configuration)
        except (DeltaError, OSError) as error:
            raise TableGone(self.table.name, f"there is no table: {str(error).splitlines()[0]}") from None

    def _lines(self, version: int) -> list[bytes]:
        try:
            content = self.commit_file(version).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            raise TableGone(self.table.name, f"the log has no version {version}") from None
        return [line for line in content.splitlines() if line]

    def _numbers(self, pattern: re.Pattern[str]) -> Iterator[int]:
        try:
            with os.scandir(self.folder) as entries:  # there may be many thousands
                for entry in entries:
                    if match := pattern.fullmatch(entry.name):
                        yield int(match[1])
        except (FileNotFoundError, NotADirectoryError):
            return


class LogFollower:
    """Reads a log version after version, and notices that the table was dropped or replaced, or its log cleaned up.

    It holds the log's folder open. A folder that is deleted meanwhile keeps its inode number for as long, so that a
    table created anew under the same name is told from it.

    Args:
        table: the table's folder.
    """

    def __init__(self, table: Path) -> None:
        self.log = DeltaLog(table)
        self._handle: int | None = None

    def open(self) -> bool:
        """Hold the log as it is now; False if it has no commit yet."""
        self.close()
        try:
            self._handle = os.open(self.log.folder, os.O_RDONLY | os.O_DIRECTORY)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return self.log.newest() >= 0

    def close(self) -> None:
        """Let go of the folder."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def read(self, version: int) -> Commit:
        """The commit, certainly of the log that is held.

        Raises:
            TableGone: there is no such commit, or the table was dropped or replaced.
            TableUnreadable, ValueError: see :meth:`DeltaLog.read`.
        """
        commit = self.log.read(version)
        self.check()
        return commit

    def check(self) -> None:
        """Two `stat` calls.

        Raises:
            TableGone: the table was dropped or replaced.
        """
        assert self._handle is not None, "open() comes first"
        try:
            now = self.log.folder.stat()
        except (FileNotFoundError, NotADirectoryError):
            raise TableGone(self.log.table.name, "the table was dropped") from None
        held = os.fstat(self._handle)
        if (now.st_ino, now.st_dev) != (held.st_ino, held.st_dev):
            raise TableGone(self.log.table.name, "the table was replaced")

    def check_gap(self, version: int) -> None:
        """Lists the log.

        Raises:
            TableGone: the log has later versions but not this one: it was cleaned up before it was read.
        """
        newest = self.log.newest()
        if newest > version and not self.log.has(version):
            raise TableGone(self.log.table.name, f"the log goes on at {newest} without version {version}")

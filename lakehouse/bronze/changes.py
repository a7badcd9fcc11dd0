"""What bronze gained from one version to another, from its log alone: the files that its commits added."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from lakehouse.contract.lake import TableRef
from lakehouse.errors import VersionsGone


@dataclass(frozen=True, slots=True)
class Changes:
    """Rows that one or more commits in a row added.

    Attributes:
        version: of the last of these commits.
        files: data files with the rows; none where the commits only rewrote or removed some.
        bytes: of the files.
    """

    version: int
    files: tuple[str, ...]
    bytes: int


def newest_version(bronze: TableRef, known: int) -> int:
    """The newest version, looked for from one that is known to be there.

    Raises:
        VersionsGone: the table's log is gone.
    """
    log = bronze.path / "_delta_log"
    version = known
    while _commit(log, version + 1).exists():
        version += 1
    if version == known and not log.is_dir():
        raise VersionsGone(bronze.name, f"{log} is gone")
    return version


def reaches(bronze: TableRef, version: int) -> bool:
    """Whether the log still has the commit behind a version."""
    return _commit(bronze.path / "_delta_log", version + 1).exists()


def changes(bronze: TableRef, since: int, until: int, max_bytes: int) -> Iterator[Changes]:
    """All that came behind version ``since``, up to ``until``, in order.

    Args:
        max_bytes: of one item's files, at the most; a single commit may have more.

    Raises:
        VersionsGone: the log or a data file of these versions has been removed.
    """
    files: list[str] = []
    size = 0
    for version in range(since + 1, until + 1):
        found = _added(bronze, version)
        added = sum(found.values())
        if files and size + added > max_bytes:
            yield Changes(version - 1, tuple(files), size)
            files, size = [], 0
        files += found
        size += added
    if until > since:
        yield Changes(until, tuple(files), size)


def _added(bronze: TableRef, version: int) -> dict[str, int]:
    """Data files that a commit added with new rows, and their bytes."""
    try:
        lines = _commit(bronze.path / "_delta_log", version).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise VersionsGone(bronze.name, f"its log no longer has version {version}") from None
    adds = [action["add"] for action in map(json.loads, lines) if "add" in action]
    found = {str(bronze.path / unquote(add["path"])): int(add["size"]) for add in adds if add["dataChange"]}
    gone = next((path for path in found if not Path(path).exists()), None)
    if gone is not None:
        raise VersionsGone(bronze.name, f"data file {gone} of version {version} has been removed")
    return found


def _commit(log: Path, version: int) -> Path:
    return log / f"{version:020d}.json"

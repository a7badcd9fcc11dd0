"""The log of a Delta table, read and appended to without Spark: a commit is one JSON file, one action a line.

delta-rs lists the log's folder and brings its snapshot up to date with each commit, which costs more with each commit
that the log holds. A writer that knows the version appends here for the price of one small file. What needs the table's
contents (a write with a predicate, a new schema, compaction) is delta-rs's.

Everything here blocks for one or a few file operations, or requests to the object store.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlparse
from uuid import uuid4

import orjson

from lakehouse.contract.errors import MillraceError, ProblemWithRemedy
from lakehouse.contract.storage import LakePath, Stamp, StorePath, create_whole, stamp_of

if TYPE_CHECKING:
    from deltalake import DeltaTable

_FOLDER = "_delta_log"
_COMMIT = re.compile(r"(\d{20})\.json")
_CHECKPOINT = re.compile(r"(\d{20})\.checkpoint\..*parquet")
_WRITER_VERSION = 2  # of the protocol: appended commits need nothing of a later one
_DAY_MS = 86_400_000
_KEPT_MS = {"logRetentionDuration": 30 * _DAY_MS, "deletedFileRetentionDuration": 7 * _DAY_MS}  # Delta's defaults
_UNITS_MS = {
    "microsecond": 0.001,
    "millisecond": 1.0,
    "second": 1_000.0,
    "minute": 60_000.0,
    "hour": 3_600_000.0,
    "day": float(_DAY_MS),
    "week": 7.0 * _DAY_MS,
}


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


class TableUnreadable(ProblemWithRemedy):
    """The table uses a feature that Millrace does not support, or its metadata is wrong.

    Attributes:
        table: name of the table.
    """

    def __init__(self, table: str, problem: str, remedy: str = "") -> None:
        super().__init__(problem, remedy)
        self.table = table

    def __str__(self) -> str:
        return f"table {self.table!r} cannot be used: {super().__str__()}"


@dataclass(frozen=True, slots=True)
class AddedFile:
    """A data file that a commit added.

    Attributes:
        path: as the log has it; it names the file within the table.
        partition: values of the partition columns, as text.
        data_change: False if the file only holds rows that were in the table before (compaction).
        size: bytes.
        stats: of its columns, as the log has them: JSON. Only of a file that is to be added.
    """

    path: str
    partition: Mapping[str, str | None]
    data_change: bool
    size: int = 0
    stats: str = "{}"

    def located(self, folder: LakePath) -> LakePath:
        """The file's place, for a table in ``folder``."""
        if self.path.startswith("file:"):
            return Path(unquote(urlparse(self.path).path))
        if "://" in self.path:
            return StorePath(unquote(self.path))
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


def kept_ms(configuration: Mapping[str, str | None], what: str) -> int:
    """A table's ``logRetentionDuration`` or ``deletedFileRetentionDuration``, such as ``interval 6 hours``, in
    milliseconds; Delta's default if the table does not say, or in a form not known here.
    """
    words = (configuration.get(f"delta.{what}") or "").lower().removeprefix("interval").split()
    total = 0.0
    for number, unit in zip(words[::2], words[1::2], strict=False):
        if not number.replace(".", "", 1).isdecimal() or unit.rstrip("s") not in _UNITS_MS:
            return _KEPT_MS[what]
        total += float(number) * _UNITS_MS[unit.rstrip("s")]
    return int(total) if words and len(words) % 2 == 0 else _KEPT_MS[what]


class DeltaLog:
    """The log of the table in ``table``, which need not exist.

    Attributes:
        table: the table's folder; its name is the table's name.
        folder: the log's own folder.
    """

    def __init__(self, table: LakePath) -> None:
        self.table = table
        self.folder = table / _FOLDER

    def exists(self) -> bool:
        """Whether the table has been created."""
        return self.folder.is_dir()

    def commit_file(self, version: int) -> LakePath:
        """The commit's file, whether it exists or not."""
        return self.folder / _named(version)

    def has(self, version: int) -> bool:
        """Whether the log has the commit: one `stat`, or one request."""
        if isinstance(self.folder, StorePath):
            return self.stamp(version) is not None
        try:
            os.stat(f"{self.folder}/{_named(version)}")  # noqa: PTH116 - a third of Path.stat's cost; tails always ask
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def is_newest(self, version: int) -> bool:
        """Whether no later version is there, and the commit's file not cleaned up: two `stat` calls, or one request."""
        if isinstance(self.folder, Path):
            return self.has(version) and not self.has(version + 1)
        names = set(self.folder.names(_named(version - 1) if version else ""))
        return _named(version) in names and _named(version + 1) not in names

    def written_at(self, version: int) -> float | None:
        """Seconds since the epoch at which the commit's file was written; None if the log does not have it."""
        stamp = self.stamp(version)
        return None if stamp is None else stamp.at / 1e9

    def stamp(self, version: int) -> Stamp | None:
        """What tells the commit's file from another of its name; None if the log does not have it.

        The same version of a table that was dropped and created again has another stamp.
        """
        return stamp_of(self.commit_file(version))

    def versions(self) -> list[int]:
        """Versions whose commit file exists, ascending."""
        return sorted(self._numbers(_COMMIT))

    def newest(self, known: int = -1) -> int:
        """The newest version, looked for from one that is known to be there; -1 if there is none."""
        return max(self._numbers(_COMMIT, _named(known) if known >= 0 else ""), default=known)

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
        return self.parsed(version, self._content(version))

    def parsed(self, version: int, content: bytes) -> Commit:
        """The commit in the content of its file; see :meth:`read`."""
        added: list[AddedFile] = []
        removed: list[RemovedFile] = []
        info: Mapping[str, Any] = {}
        metadata: Mapping[str, Any] | None = None
        for line in filter(None, content.splitlines()):
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
        for line in self._content(version).splitlines():
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

    def opened_to_append(self) -> DeltaTable:
        """The table by delta-rs, if :meth:`append` may commit to it.

        Raises TableUnreadable: its protocol asks more of a writer than :meth:`append` does.
        """
        from deltalake import DeltaTable

        delta = DeltaTable(str(self.table))
        if (found := delta.protocol()).min_writer_version > _WRITER_VERSION:
            problem = f"its protocol asks for writers of version {found.min_writer_version}"
            raise TableUnreadable(self.table.name, problem, "Undo what was set on it by another application")
        return delta

    def append(
        self,
        version: int,
        *,
        added: Sequence[AddedFile] = (),
        removed: Sequence[AddedFile] = (),
        info: Mapping[str, str],
        transaction: tuple[str, int] | None = None,
    ) -> bool:
        """Commit files that are in the table's folder; False if another writer has committed since.

        Like delta-rs, it does not wait for the disk: a power failure may take the last commits.

        Args:
            version: the next one, as far as the caller knows.
            info: own keys of the commit's commitInfo.
            transaction: application and its number.
        """
        # Care removes old versions: one may be free although there are later ones. Then the one before it is gone too.
        if not self.is_newest(version - 1):
            return False
        now = time.time_ns() // 1_000_000
        commit = {
            "timestamp": now,
            "operation": "WRITE",
            "operationParameters": {"mode": "Overwrite" if removed else "Append"},
            "engineInfo": "millrace",
            "txnId": str(uuid4()),  # a store's answer may be lost: the writer knows its own commit again by it
            **info,
        }
        lines: list[dict[str, Any]] = [{"commitInfo": commit}]
        if transaction is not None:
            lines.append({"txn": {"appId": transaction[0], "version": transaction[1], "lastUpdated": now}})
        for file in removed:
            gone = {"path": file.path, "deletionTimestamp": now, "dataChange": file.data_change}
            lines.append(
                {"remove": {**gone, "extendedFileMetadata": True, "partitionValues": file.partition, "size": file.size}}
            )
        for file in added:
            new = {"path": file.path, "partitionValues": file.partition, "size": file.size, "modificationTime": now}
            lines.append({"add": {**new, "dataChange": file.data_change, "stats": file.stats}})
        data = b"".join(orjson.dumps(line) + b"\n" for line in lines)
        return create_whole(self.commit_file(version), data, durable=False)

    def properties(self) -> Mapping[str, str]:
        """The table's properties as of the newest version. It opens the table with delta-rs, some milliseconds.

        Raises TableGone: there is no table.
        """
        from deltalake import DeltaTable
        from deltalake.exceptions import DeltaError

        try:
            return dict(DeltaTable(str(self.table)).metadata().configuration)
        except (DeltaError, OSError) as error:
            raise TableGone(self.table.name, f"there is no table: {str(error).splitlines()[0]}") from None

    def _content(self, version: int) -> bytes:
        try:
            return self.commit_file(version).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            raise TableGone(self.table.name, f"the log has no version {version}") from None

    def _numbers(self, pattern: re.Pattern[str], after: str = "") -> Iterator[int]:
        try:
            for name in _names_in(self.folder, after):
                if match := pattern.fullmatch(name):
                    yield int(match[1])
        except (FileNotFoundError, NotADirectoryError):
            return


def _named(version: int) -> str:
    return f"{version:020d}.json"


def _names_in(folder: LakePath, after: str) -> Iterator[str]:
    """Names of the files in a log in any order, at least those after a name."""
    if isinstance(folder, StorePath):
        yield from folder.names(after)
    else:
        with os.scandir(folder) as entries:  # there may be many thousands
            yield from (entry.name for entry in entries)


class LogFollower:
    """Reads a log version after version, and notices that the table was dropped or replaced, or its log cleaned up.

    In a folder of this machine it holds the log's folder open. A folder that is deleted meanwhile keeps its inode
    number for as long, so that a table created anew under the same name is told from it. In an object store it knows
    the stamp of the commit that it read last, at first of the newest.

    Args:
        table: the table's folder.

    Attributes:
        remote: each look is a request, which neither belongs in an event loop nor is free.
    """

    def __init__(self, table: LakePath) -> None:
        self.log = DeltaLog(table)
        self._store = self.log.folder if isinstance(self.log.folder, StorePath) else None
        self.remote = self._store is not None
        self._handle: int | None = None
        self._last: tuple[int, Stamp] | None = None

    def open(self) -> bool:
        """Hold the log as it is now; False if it has no commit yet."""
        self.close()
        if self._store is not None:
            stamps = self._store.stamps()
            if name := max(filter(_COMMIT.fullmatch, stamps), default=""):
                self._last = int(name.partition(".")[0]), stamps[name]
            return bool(name)
        try:
            self._handle = os.open(str(self.log.folder), os.O_RDONLY | os.O_DIRECTORY)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return self.log.newest() >= 0

    def close(self) -> None:
        """Let go of the log."""
        self._last = None
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def look(self, version: int) -> Commit | None:
        """The commit, certainly of the log that is held; None if there is none yet.

        None costs one `stat`, or one request. A commit of an object store costs two.

        Raises:
            TableGone: the table was dropped or replaced.
            TableUnreadable, ValueError: see :meth:`DeltaLog.read`.
        """
        if self._store is None:
            return self.read(version) if self.log.has(version) else None
        try:
            content, stamp = (self._store / _named(version)).read_stamped()
        except FileNotFoundError:
            return None
        commit = self.log.parsed(version, content)
        if self._last is not None:
            self._check_last(self.log.stamp(self._last[0]))
        self._last = version, stamp
        return commit

    def read(self, version: int) -> Commit:
        """As :meth:`look`. Raises TableGone also if there is no such commit."""
        if self._store is not None:
            if (found := self.look(version)) is None:
                raise TableGone(self.log.table.name, f"the log has no version {version}")
            return found
        commit = self.log.read(version)
        self.check()
        return commit

    def check(self) -> None:
        """Two `stat` calls; in an object store nothing, since :meth:`check_gap` and :meth:`look` notice.

        Raises TableGone: the table was dropped or replaced.
        """
        if self._handle is None:
            assert self._store is not None, "open() comes first"
            return
        try:
            now = os.stat(str(self.log.folder))  # noqa: PTH116 - as above
        except (FileNotFoundError, NotADirectoryError):
            raise TableGone(self.log.table.name, "the table was dropped") from None
        held = os.fstat(self._handle)
        if (now.st_ino, now.st_dev) != (held.st_ino, held.st_dev):
            raise TableGone(self.log.table.name, "the table was replaced")

    def check_gap(self, version: int) -> None:
        """Lists the log; in an object store from the commit that was read last, with one request.

        Raises TableGone: the log has later versions but not this one: it was cleaned up before it was read. Or, in an
        object store, the table was dropped or replaced.
        """
        if self._store is None:
            newest = self.log.newest(known=version - 1)
            missing = newest > version and not self.log.has(version)
        else:
            last = version if self._last is None else self._last[0]
            start = min(version, last)
            stamps = self._store.stamps(_named(start - 1) if start > 0 else "")
            newest = max((int(match[1]) for match in map(_COMMIT.fullmatch, stamps) if match), default=-1)
            missing = newest > version and _named(version) not in stamps
            if self._last is not None:
                self._check_last(stamps.get(_named(last)), newest)
        if missing:
            raise TableGone(self.log.table.name, f"the log goes on at {newest} without version {version}")

    def _check_last(self, found: Stamp | None, newest: int | None = None) -> None:
        """Compare what stands where the last commit was read; ``newest``: of the log, if known."""
        assert self._last is not None
        version, stamp = self._last
        if found is None and (self.log.newest() if newest is None else newest) < version:
            raise TableGone(self.log.table.name, "the table was dropped")
        if found is not None and found != stamp:
            raise TableGone(self.log.table.name, "the table was replaced")

"""Rows of files into bronze, exactly once, and the ledger of loaded files.

Steps of one commit, and the effect of a crash after each:

1. The rows are written as a data file beside the table. Crash: a file that no commit names; it is removed later.
2. The loader waits for its turn and reads from bronze's log how far the files are. Rows that another loader has
   committed meanwhile are left out.
3. The file gets the commit's time, moves into the table, and is committed together with the new position of each of
   its source files. Crash: the rows are in, and so is the position to go on from.
4. The ledger notes the positions. After a crash it reads them from the log.

The ledger (LMDB) is an index that is a function of bronze: every commit of the loader names its files and their
positions, and the ledger follows bronze's log. That log is kept for hours only. So the ledger also notes the files of a
commit before it is made, and looks for their rows on the commit's day if the log no longer reaches back. A lost ledger
is filled in from all rows, whose coordinates are (``file:FINGERPRINT``, 0, row number). The index of seen events works
the same way (docs/decisions/0005).
"""

from __future__ import annotations

import json
import logging
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from hashlib import blake2b

import lmdb
import pyarrow.compute as pc
from deltalake import CommitProperties, DeltaTable, PostCommitHookProperties
from deltalake.exceptions import DeltaError
from deltalake.transaction import AddAction, RemoveAction

from lakehouse.bronze.table import COMMIT_LOAD, BronzeClock, create
from lakehouse.contract.deltalog import DeltaLog, TableGone
from lakehouse.contract.errors import crash_point
from lakehouse.contract.lake import FILE_TOPIC as TOPIC
from lakehouse.contract.lake import Lake, TableRef
from lakehouse.contract.pipeline import Source
from lakehouse.contract.pipeline.source import LOADER
from lakehouse.contract.storage import StorePath
from lakehouse.errors import CommitFailed, FileTaken
from lakehouse.load.rows import DataFile, FilePosition, SealedSegment, Sealer, Segment, short_digest, write_data_file

log = logging.getLogger(__name__)

_ABANDONED_S = 86_400.0  # a data file that waits for its commit this long has lost its loader
_MAP_BYTES = 1 << 36  # address space, not disk
_POSITION, _INTENT = b"\x00position", b"\x00intent"


@contextmanager
def at_table(table: str) -> Iterator[None]:
    """Translates errors of the system, of Delta and of the ledger: they are not the fault of the rows.

    Raises CommitFailed: for each of them.
    """
    try:
        yield
    except (OSError, DeltaError, lmdb.Error) as error:
        raise CommitFailed(table, str(error)) from error


class Ledger:
    """The positions of the files of one bronze table, which must exist. One instance a process."""

    def __init__(self, lake: Lake, table: TableRef) -> None:
        folder = lake.state / "loads" / table.name / "ledger"
        folder.mkdir(parents=True, exist_ok=True)
        self._log = DeltaLog(table.path)
        self._env = lmdb.open(str(folder), map_size=_MAP_BYTES, metasync=False, readahead=False, max_readers=256)

    def catch_up(self, delta: DeltaTable) -> None:
        """Take in the commits of bronze's log after the ledger's version.

        Several loaders do so at the same time: one that finds the ledger changed meanwhile reads again.

        Args:
            delta: the bronze table at its newest version.
        """
        while not self._caught_up(delta):
            pass

    def _caught_up(self, delta: DeltaTable) -> bool:
        with self._env.begin() as txn:
            held = _parsed(txn.get(_POSITION))
        table_id, version = held
        if table_id == str(delta.metadata().id) and version > delta.version():
            delta.update_incremental()  # another loader has noted a newer commit
        newest = (str(delta.metadata().id), delta.version())
        if held == newest:
            return True
        if table_id != newest[0] or version > newest[1]:
            return self._put(self._filled(delta), held, newest, clear=True)
        found: dict[str, FilePosition] = {}
        for number in range(version + 1, newest[1] + 1):
            try:
                info = self._log.info(number)
            except TableGone:  # cleaned up: of loaders it can hold the intended commit only
                return self._put([*found.values(), *self._intended(delta)], held, newest)
            loaded = json.loads(info[COMMIT_LOAD])["files"] if COMMIT_LOAD in info else []
            found.update((done.file, done) for done in map(FilePosition.from_json, loaded))
        return self._put(found.values(), held, newest)

    def intend(self, done: Iterable[FilePosition], bronze_at: int) -> None:
        """Note the positions of the commit that follows, whose time is ``bronze_at`` (microseconds since the epoch)."""
        intent = {"bronze_at": bronze_at, "files": [one.to_json() for one in done]}
        with self._env.begin(write=True) as txn:
            txn.put(_INTENT, json.dumps(intent).encode())

    def note(self, done: Iterable[FilePosition], delta: DeltaTable) -> None:
        """Note the positions of the commit at ``delta``'s version, unless the ledger lacks earlier commits."""
        table_id, version = str(delta.metadata().id), delta.version()
        if self._put(done, (table_id, version - 1), (table_id, version)):
            with self._env.begin(write=True) as txn:
                txn.delete(_INTENT)

    def get(self, file: str) -> FilePosition:
        """The position of the file with this fingerprint."""
        with self._env.begin() as txn:
            found = txn.get(file.encode())
        return FilePosition(file) if found is None else FilePosition.from_json(json.loads(found))

    def close(self) -> None:
        self._env.close()

    def _put(
        self, done: Iterable[FilePosition], held: tuple[str, int], newest: tuple[str, int], *, clear: bool = False
    ) -> bool:
        """Move from one table id and version to another; False if the ledger has left the first one."""
        with self._env.begin(write=True) as txn:
            if _parsed(txn.get(_POSITION)) != held:
                return False
            if clear:
                with txn.cursor() as cursor:
                    while cursor.first():
                        cursor.delete()
            for one in done:
                txn.put(one.file.encode(), json.dumps(one.to_json()).encode())
            txn.put(_POSITION, f"{newest[0]}/{newest[1]}".encode())
        return True

    def _intended(self, delta: DeltaTable) -> list[FilePosition]:
        """The noted positions of a commit that no loader confirmed, as far as bronze has its rows."""
        with self._env.begin() as txn:
            text = txn.get(_INTENT)
        if text is None:
            return []
        intent = json.loads(text)
        done = [FilePosition.from_json(item) for item in intent["files"]]
        day = datetime.fromtimestamp(intent["bronze_at"] / 1e6, UTC).date()
        rows = delta.to_pyarrow_dataset().to_table(
            columns=["topic", "offset"],
            filter=(pc.field("date") == day) & pc.field("topic").isin([TOPIC + one.file for one in done]),
        )
        there = set(zip(rows["topic"].to_pylist(), rows["offset"].to_pylist(), strict=True))
        return [one for one in done if not one.rows or (TOPIC + one.file, one.rows - 1) in there]

    def _filled(self, delta: DeltaTable) -> list[FilePosition]:
        """Positions by the rows in bronze. Reading a file shows whether these are all of its rows."""
        rows = delta.to_pyarrow_dataset().to_table(
            columns=["topic", "offset", "reject"], filter=pc.starts_with(pc.field("topic"), TOPIC)
        )
        if not rows.num_rows:
            return []
        log.info("filling in the ledger of loaded files from %d rows of bronze", rows.num_rows)
        begun = delta.to_pyarrow_dataset().to_table(
            columns=["topic", "event_id"],
            filter=pc.starts_with(pc.field("topic"), TOPIC) & (pc.field("offset") == 0) & pc.field("reject").is_null(),
        )
        ids = dict(zip(begun["topic"].to_pylist(), begun["event_id"].to_pylist(), strict=True))
        done = []
        for row in rows.group_by("topic").aggregate([("offset", "max"), ("reject", "count")]).to_pylist():
            file, rejects = row["topic"].removeprefix(TOPIC), row["reject_count"]
            first = short_digest(ids[row["topic"]]) if row["topic"] in ids else ""
            done.append(FilePosition(file, row["offset_max"] + 1, rejects, -1, first=first))
        return done


def _parsed(position: bytes | None) -> tuple[str, int]:
    """Table id and version in the ledger's own entry."""
    table_id, _, version = bytes(position or b"/-1").decode().rpartition("/")
    return table_id, int(version)


class Committer:
    """Appends rows of files to one source's bronze table, which it creates if absent."""

    def __init__(self, lake: Lake, source: str, sealer: Sealer) -> None:
        self._table = lake.bronze(source)
        create(self._table)
        self._sealer = sealer
        self._clock = BronzeClock(lake, self._table)
        self._delta = DeltaTable(str(self._table.path))
        self._ready = lake.state / "loads" / source / "ready"
        self._ready.mkdir(parents=True, exist_ok=True)
        self._sweep()
        self.ledger = Ledger(lake, self._table)
        self.ledger.catch_up(self._delta)

    def position(self, file: str) -> FilePosition:
        """How much of the file with this fingerprint is in bronze."""
        self._delta.update_incremental()
        self.ledger.catch_up(self._delta)
        return self.ledger.get(file)

    def commit(self, parts: Sequence[SealedSegment]) -> int:
        """Append the rows of these segments in one commit; returns its bronze version.

        Raises FileTaken: another loader has loaded one of the files meanwhile; nothing has been committed.
        """
        rows = self._sealer.rows(parts)
        ready = self._ready / f"{uuid.uuid4().hex}.parquet"
        try:
            data = write_data_file(rows, ready) if rows.num_rows else None
            with self._clock.turn() as bronze_at:
                self._delta.update_incremental()
                self.ledger.catch_up(self._delta)
                first = {part.before.file: part.before for part in reversed(parts)}
                for before in first.values():
                    if self.ledger.get(before.file).rows != before.rows:
                        raise FileTaken(before.file)
                done = {part.after.file: part.after for part in parts}
                self.ledger.intend(done.values(), bronze_at)
                crash_point("load.before_commit")
                self._append(data, list(done.values()), bronze_at)
                crash_point("load.after_commit")
                self.ledger.note(done.values(), self._delta)
        finally:
            ready.unlink(missing_ok=True)
        return self._delta.version()

    def close(self) -> None:
        self.ledger.close()

    def _append(self, data: DataFile | None, done: Sequence[FilePosition], bronze_at: int) -> None:
        named = {"bronze_at": bronze_at, "files": [one.to_json() for one in done]}
        adds: list[AddAction | RemoveAction] = [] if data is None else [self._placed(data, bronze_at)]
        self._delta.create_write_transaction(
            adds,
            mode="append",
            schema=self._delta.schema(),
            partition_by=["date"],
            commit_properties=CommitProperties(custom_metadata={COMMIT_LOAD: json.dumps(named, separators=(",", ":"))}),
            # Maintenance writes checkpoints and cleans up, outside any writer's turn.
            post_commithook_properties=PostCommitHookProperties(create_checkpoint=False, cleanup_expired_logs=False),
        )
        self._delta.update_incremental()

    def _placed(self, data: DataFile, bronze_at: int) -> AddAction:
        """Stamp the file and move it into the table's folder."""
        date = datetime.fromtimestamp(bronze_at / 1e6, UTC).date().isoformat()
        data.stamp(bronze_at)
        name = f"date={date}/load-{data.path.name}"
        place = self._table.path / name
        if isinstance(place, StorePath):
            place.upload(data.path)
        else:
            place.parent.mkdir(exist_ok=True)
            data.path.replace(place)
        return AddAction(
            path=name,
            size=data.size,
            partition_values={"date": date},
            modification_time=bronze_at // 1000,
            data_change=True,
            stats=json.dumps({"numRecords": data.rows}),
        )

    def _sweep(self) -> None:
        """Remove data files that crashed loaders left."""
        for path in self._ready.iterdir():
            try:
                if time.time() - path.stat().st_mtime > _ABANDONED_S:
                    path.unlink()
            except FileNotFoundError:
                continue  # committed meanwhile


def write_rows(
    lake: Lake, source: Source, batch: str, rows: Iterable[bytes], *, tenant: str = "default", node: str = LOADER
) -> int:
    """Append a batch of events of a program in one commit, once. Several processes may do so, each one at a time.

    Args:
        batch: its name, unique in the source. A batch whose name is in bronze is skipped, whatever its rows.
        rows: JSON objects. Bronze keeps a refused row with the reason, as it does for a collector.
        node: id of the program, the rows' ``collector``.

    Returns:
        The bronze version of the commit; -1 if the batch was in.

    Raises:
        CommitFailed: bronze does not take them. The program can write the batch again: it counts once.
    """
    sealer = Sealer(source, tenant=tenant, node=node)
    with at_table(source.name):
        committer = Committer(lake, source.name, sealer)
        try:
            before = committer.position(blake2b(batch.encode(), digest_size=16).hexdigest())
            if before.ended or before.rows:
                return -1
            part = sealer.seal(batch, before, Segment(list(rows), ended=True), time.time_ns() // 1000)
            return committer.commit([part])
        except FileTaken:
            return -1
        finally:
            committer.close()

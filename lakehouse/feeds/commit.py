"""Rows of files into bronze, exactly once.

Steps of one commit, and what a crash after each of them means:

1. The rows are written as a data file beside the table. Crash: a file that nobody names; it is removed later.
2. The loader waits for its turn and takes in what bronze's log says of the files. Rows that another loader has
   committed meanwhile are left out.
3. The file is stamped with the commit's time, moved into the table, and committed together with how far each of its
   source files is. Crash: the rows are in, and so is the place to go on from.
4. The ledger is told. It would find out by itself.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import lmdb
from deltalake import CommitProperties, DeltaTable, PostCommitHookProperties
from deltalake.exceptions import DeltaError
from deltalake.transaction import AddAction, RemoveAction

from lakehouse.bronze.clock import COMMIT_LOAD, BronzeClock
from lakehouse.bronze.table import create
from lakehouse.contract.faults import crash_point
from lakehouse.contract.lake import Lake
from lakehouse.feeds.datafile import DataFile, write
from lakehouse.feeds.errors import CommitFailed, FileTaken
from lakehouse.feeds.ledger import Done, Ledger
from lakehouse.feeds.rows import Part, Sealer

_OLD_S = 86_400.0  # a data file that waits for its commit this long has no loader any more


@contextmanager
def at_table(table: str) -> Iterator[None]:
    """Around what is done with a table: what goes wrong in here is not the fault of the rows.

    Raises:
        CommitFailed: for every error of the system, of Delta and of the ledger.
    """
    try:
        yield
    except (OSError, DeltaError, lmdb.Error) as error:
        raise CommitFailed(table, str(error)) from error


class Committer:
    """Appends parts of files to one source's bronze table.

    Args:
        lake: where; the table is created where absent.
        source: name of the source.
        sealer: makes the rows.
    """

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

    def look(self, file: str) -> Done:
        """How far bronze is with the file of this fingerprint."""
        self._delta.update_incremental()
        self.ledger.catch_up(self._delta)
        return self.ledger.get(file)

    def commit(self, parts: Sequence[Part]) -> int:
        """Append the rows of these parts in one commit; returns the bronze version that holds them.

        Raises:
            FileTaken: another loader was quicker with one of the files; nothing has been committed.
        """
        rows = self._sealer.rows(parts)
        ready = self._ready / f"{uuid.uuid4().hex}.parquet"
        try:
            data = write(rows, ready) if rows.num_rows else None
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
        """Close the files."""
        self.ledger.close()

    def _append(self, data: DataFile | None, done: Sequence[Done], bronze_at: int) -> None:
        named = {"bronze_at": bronze_at, "files": [one.to_json() for one in done]}
        adds: list[AddAction | RemoveAction] = [] if data is None else [self._placed(data, bronze_at)]
        self._delta.create_write_transaction(
            adds,
            mode="append",
            schema=self._delta.schema(),
            partition_by=["date"],
            commit_properties=CommitProperties(custom_metadata={COMMIT_LOAD: json.dumps(named, separators=(",", ":"))}),
            # Checkpoints and cleaning are maintenance's, outside any writer's turn.
            post_commithook_properties=PostCommitHookProperties(create_checkpoint=False, cleanup_expired_logs=False),
        )
        self._delta.update_incremental()

    def _placed(self, data: DataFile, bronze_at: int) -> AddAction:
        """Stamp the file and move it into the table's folder."""
        date = datetime.fromtimestamp(bronze_at / 1e6, UTC).date().isoformat()
        data.stamp(bronze_at)
        place = Path(f"date={date}") / f"load-{data.path.name}"
        (self._table.path / place).parent.mkdir(exist_ok=True)
        data.path.replace(self._table.path / place)
        return AddAction(
            path=place.as_posix(),
            size=data.size,
            partition_values={"date": date},
            modification_time=bronze_at // 1000,
            data_change=True,
            stats=json.dumps({"numRecords": data.rows}),
        )

    def _sweep(self) -> None:
        """Remove data files that a crash has left."""
        for path in self._ready.iterdir():
            try:
                if time.time() - path.stat().st_mtime > _OLD_S:
                    path.unlink()
            except FileNotFoundError:
                continue  # it has been committed meanwhile

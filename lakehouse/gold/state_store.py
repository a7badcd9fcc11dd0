"""The table of a product that remembers: live rows in files that each commit replaces, settled rows in files that stay.

A batch costs by the number of rows that may still change, whatever the table holds. Files are committed as such (adds
and removes in one transaction, with the batch's mark), because a write with a predicate would look through the table.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from deltalake.transaction import AddAction, RemoveAction

from lakehouse.contract.lake import TableRef
from lakehouse.contract.pipeline import Product
from lakehouse.contract.pipeline.product import EVENTS
from lakehouse.contract.storage import parquet_file, write_parquet
from lakehouse.errors import BadProduct
from lakehouse.gold.mark import BatchMark, later
from lakehouse.gold.store import EventStore, ProductStore
from lakehouse.operators.base import WINDOW_START, plain, plain_fields
from lakehouse.stateful.base import StatefulOperator, among, times

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def store_of(product: Product, table: TableRef, pipeline: str, declaration: str = "") -> ProductStore:
    """The store of a product, whatever its operator.

    Raises:
        BadProduct: the product cannot be kept as it is declared.
    """
    store = ProductStore(product, table, pipeline, declaration)
    stateful = isinstance(store.operator, StatefulOperator)
    if product.retention and not stateful and WINDOW_START not in store.operator.key:
        raise BadProduct(
            product.name,
            "retention removes windows, and it has none",
            f"Group by window(…) and select window.start AS {WINDOW_START}",
            key="retention",
        )
    if product.operator == EVENTS:
        return EventStore(product, table, pipeline, declaration)
    return StateStore(product, table, pipeline, declaration) if stateful else store


@dataclass(frozen=True, slots=True)
class _File:
    """A data file.

    Attributes:
        last: newest of the operator's ``ends`` in it, microseconds since the epoch.
    """

    path: str
    size: int
    last: int


class StateStore(ProductStore):
    """The one writer of the table of a product that remembers."""

    operator: StatefulOperator

    def __init__(self, product: Product, table: TableRef, pipeline: str, declaration: str = "") -> None:
        super().__init__(product, table, pipeline, declaration)
        self.now: Callable[[], int] = lambda: _now()  # of the wall, in microseconds since the epoch
        self._live: pa.Table | None = None
        self._live_files: list[_File] = []
        self._settled: list[_File] = []
        self._version = -1
        self._clock: int | None = None

    def apply(self, partial: pa.Table, mark: BatchMark) -> int:
        """Go on from the rows that are held and commit; see :meth:`ProductStore.apply`."""
        delta = self._ensure(partial.schema)
        if self.holds(mark.application, mark.transaction):
            return delta.version()
        self._load()
        if self._live is not None:
            self._live = self._live.cast(self.operator.schema)  # tick() may have read it as the table has it
        mark = replace(mark, clock=self._time(mark.clock))
        partial = plain(partial)
        held, opened = self._called_back(partial)
        rows = self.operator.advance(held, partial, mark.clock)
        unchanged = not opened and held is not None and rows.equals(held)
        live = self.operator.live(rows, mark.clock)
        if unchanged and bool(live.all()):
            self._write_files([], [], mark)
        else:
            self._replace_files(rows, live, [*self._live_files, *opened], mark)
        return delta.version()

    def replace(self, rows: pa.Table, mark: BatchMark) -> int:
        """Put a batch build in place of all that the table holds; see :meth:`ProductStore.replace`."""
        self._evolve(rows.schema)
        delta = self._ensure(rows.schema)
        if not self._fits():  # other columns than before: an empty table of the new ones first
            self._write(self._empty(), mark, predicate=None, mode="overwrite", evolve=True)
        self._load(anew=True)
        if self.by_wall_clock:
            mark = replace(mark, clock=later(mark.clock, self.now()))
        partial = plain(rows)
        full = self.operator.advance(None, partial, mark.clock)
        self._replace_files(full, self.operator.live(full, mark.clock), [*self._live_files, *self._settled], mark)
        self._declare(delta)
        self._version = delta.version()
        return delta.version()

    def tick(self) -> bool:
        """Let time go on by the wall clock, although nothing comes; commits if that changes a row."""
        if not self.table.exists():
            return False
        if self.operator.schema is None:  # nothing has come since the start
            self.operator.schema = pa.schema(plain_fields(pa.schema(self._open().schema().to_arrow())))
        self._load()
        now = self._time(self.now())
        if self._live is None or (rows := self.operator.at(self._live, now)).equals(self._live):
            return False
        mark = self.mark()
        assert mark is not None  # else no row would be live
        quiet = replace(mark, events=0, oldest=None, newest=None, clock=now)
        self._replace_files(rows, self.operator.live(rows, now), self._live_files, quiet)
        return True

    @property
    def by_wall_clock(self) -> bool:
        """Whether time goes on without events."""
        return self.product.clock == "wall"

    def _time(self, clock: int | None) -> int | None:
        """The time of a commit; by the wall clock it does not go back to that of the events."""
        return later(clock, self._clock) if self.by_wall_clock else clock

    def results(self, rows: pa.Table, partial: pa.Table, clock: int | None) -> tuple[pa.Table, pa.Table]:
        """See :meth:`ProductStore.results`."""
        self.operator.describe(partial.schema)
        again = self.operator.advance(None, plain(partial), clock)
        live = rows.select(again.schema.names).cast(again.schema)
        horizon = self.horizon(clock)
        if horizon is None:
            return live, again
        whole = [found.filter(pa.array(self.operator.comparable(found, horizon))) for found in (live, again)]
        return whole[0], whole[1]

    def _load(self, anew: bool = False) -> None:
        """Learn which files there are, and the rows that are live, unless the last commit was our own."""
        delta = self._open()
        if delta.version() == self._version and not anew:
            return
        assert self.operator.schema is not None
        mark = self.mark()
        self._clock = mark.clock if mark else None
        adds = pa.table(delta.get_add_actions(flatten=True)).to_pylist()
        if anew:
            self._live, self._live_files = None, []
            self._settled = [_File(add["path"], int(add["size_bytes"]), 0) for add in adds]
            return
        whole = delta.to_pyarrow_table().cast(self.operator.schema)
        keys = self.operator.key
        alive = whole.filter(pa.array(self.operator.live(whole, self._clock))) if whole.num_rows else whole
        self._live, self._live_files, self._settled = alive, [], []
        for add in adds:
            rows = self._rows(add["path"])
            file = _File(add["path"], int(add["size_bytes"]), self._last(rows))
            holds = bool(alive.num_rows) and bool(among(rows, alive, keys).any())
            (self._live_files if holds else self._settled).append(file)
        if self._live_files:  # with the settled rows that share a file with live ones
            self._live = pa.concat_tables([self._rows(file.path) for file in self._live_files])
        self._version = delta.version()

    def _called_back(self, partial: pa.Table) -> tuple[pa.Table | None, list[_File]]:
        """The rows to go on from, and the settled files among them that have to be written anew."""
        reach = self.operator.reach(partial, self._clock)
        if reach is None:
            return self._live, []
        opened: list[_File] = []
        tables = [self._live] if self._live is not None else []
        for file in self._settled:
            if file.last > reach:
                rows = self._rows(file.path)
                if bool(self.operator.called_back(rows, partial).any()):
                    opened.append(file)
                    tables.append(rows)
        return (pa.concat_tables(tables) if tables else None), opened

    def _replace_files(self, rows: pa.Table, live: npt.NDArray[np.bool_], old: list[_File], mark: BatchMark) -> None:
        """Commit ``rows`` in place of the files ``old``, and leave out what retention ends."""
        gone = {file.path for file in old}
        settled = [file for file in self._settled if file.path not in gone]
        horizon = self.horizon(mark.clock)
        if horizon is not None:
            keep = live | (times(rows[self.operator.ends]) > horizon)
            rows, live = rows.filter(pa.array(keep)), live[keep]
            old = [*old, *(file for file in settled if file.last <= horizon)]
            settled = [file for file in settled if file.last > horizon]
        alive = rows.filter(pa.array(live))
        added = [self._new_file(part) for part in (alive, rows.filter(pa.array(~live))) if part.num_rows]
        self._write_files(added, old, mark)
        files = [_File(add.path, add.size, self._last(self._rows(add.path))) for add in added]
        at_hand = 1 if alive.num_rows else 0
        self._live, self._live_files, self._settled = alive, files[:at_hand], [*settled, *files[at_hand:]]

    def _new_file(self, rows: pa.Table) -> AddAction:
        name = f"part-{uuid.uuid4()}.zstd.parquet"
        size = write_parquet(self.table.path / name, rows, compression="zstd")
        ends = times(rows[self.operator.ends])
        stats = {
            "numRecords": rows.num_rows,
            "minValues": {self.operator.ends: _millis(int(ends.min()), 0)},
            "maxValues": {self.operator.ends: _millis(int(ends.max()), 1)},  # readers know milliseconds: not too little
            "nullCount": {self.operator.ends: 0},
        }
        return AddAction(name, size, {}, int(time.time() * 1000), True, json.dumps(stats))

    def _write_files(self, added: list[AddAction], removed: list[_File], mark: BatchMark) -> None:
        delta = self._open()
        now = int(time.time() * 1000)
        actions: list[AddAction | RemoveAction] = [
            *added,
            *(RemoveAction(file.path, True, now, file.size, {}) for file in removed),
        ]
        delta.create_write_transaction(actions, "append", delta.schema(), commit_properties=mark.commit_properties())
        delta.update_incremental()
        self._transactions[mark.application] = mark.transaction
        self._version, self._clock = delta.version(), mark.clock

    def _rows(self, path: str) -> pa.Table:
        assert self.operator.schema is not None
        return parquet_file(self.table.path / path).read().select(self.operator.schema.names).cast(self.operator.schema)

    def _last(self, rows: pa.Table) -> int:
        return int(times(rows[self.operator.ends]).max()) if rows.num_rows else 0


def _now() -> int:
    return time.time_ns() // 1000


def _millis(micros: int, more: int) -> str:
    at = _EPOCH + timedelta(milliseconds=micros // 1000 + more)
    return f"{at:%Y-%m-%dT%H:%M:%S}.{at.microsecond // 1000:03d}Z"

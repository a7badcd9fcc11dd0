"""The table of a product that remembers: live rows in files that each commit replaces, settled rows in files that stay.

A batch costs by the number of rows that may still change, whatever the table holds. Files are committed as such (adds
and removes in one transaction, with the batch's mark), because a write with a predicate would look through the table.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from deltalake import DeltaTable

from lakehouse.contract.deltalog import AddedFile
from lakehouse.contract.lake import TableRef
from lakehouse.contract.pipeline import Product
from lakehouse.contract.pipeline.product import EVENTS
from lakehouse.errors import BadProduct
from lakehouse.gold.mark import BatchMark, later
from lakehouse.gold.store import EventStore, ProductStore
from lakehouse.operators.base import WINDOW_START, StatefulOperator, among, plain, plain_fields, times


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
class _StateFile:
    """A data file, and the newest of the operator's ``ends`` in it, microseconds since the epoch."""

    file: AddedFile
    last: int


class StateStore(ProductStore):
    """The one writer of the table of a product that remembers."""

    operator: StatefulOperator

    def __init__(self, product: Product, table: TableRef, pipeline: str, declaration: str = "") -> None:
        super().__init__(product, table, pipeline, declaration)
        self.now: Callable[[], int] = lambda: _now()  # of the wall, in microseconds since the epoch
        self._live: pa.Table | None = None
        self._live_files: list[_StateFile] = []
        self._settled: list[_StateFile] = []
        self._clock: int | None = None

    def _take(self, partial: pa.Table, mark: BatchMark) -> None:
        if self._live is not None:
            self._live = self._live.cast(self.operator.schema)  # tick() may have read it as the table has it
        mark = replace(mark, clock=self._time(mark.clock))
        partial = plain(partial)
        held, opened = self._called_back(partial)
        rows = self.operator.advance(held, partial, mark.clock)
        unchanged = not opened and held is not None and rows.equals(held)
        live = self.operator.live(rows, mark.clock)
        if unchanged and bool(live.all()):
            self._commit([], [], mark)
        else:
            self._replace_files(rows, live, [*self._live_files, *opened], mark)

    def replace(self, rows: pa.Table, mark: BatchMark) -> int:
        self._evolve(rows.schema)
        self._ensure(rows.schema)
        if not self._fits():  # other columns than before: an empty table of the new ones first
            self._overwrite(self._empty(), mark)
        delta = self.delta()
        self._version, self._clock = delta.version(), None
        self._files.load(delta)
        self._live, self._live_files = None, []
        self._settled = [_StateFile(file, 0) for file in self._files.all()]
        if self.by_wall_clock:
            mark = replace(mark, clock=later(mark.clock, self.now()))
        partial = plain(rows)
        full = self.operator.advance(None, partial, mark.clock)
        self._replace_files(full, self.operator.live(full, mark.clock), [*self._live_files, *self._settled], mark)
        self._declare()
        return self._newest()

    def tick(self) -> bool:
        """Let time go on by the wall clock, although nothing comes; commits if that changes a row."""
        if not self.table.exists():
            return False
        if self.operator.schema is None:  # nothing has come since the start
            self.operator.schema = pa.schema(plain_fields(pa.schema(self._open().schema().to_arrow())))
        self._look()
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
        self.operator.describe(partial.schema)
        again = self.operator.advance(None, plain(partial), clock)
        live = rows.select(again.schema.names).cast(again.schema)
        horizon = self.horizon(clock)
        if horizon is None:
            return live, again
        whole = [found.filter(pa.array(self.operator.comparable(found, horizon))) for found in (live, again)]
        return whole[0], whole[1]

    def _load(self, delta: DeltaTable) -> None:
        """Learn also which rows are live."""
        super()._load(delta)
        assert self.operator.schema is not None
        mark = self.mark()
        self._clock = mark.clock if mark else None
        whole = delta.to_pyarrow_table().cast(self.operator.schema)
        keys = self.operator.key
        alive = whole.filter(pa.array(self.operator.live(whole, self._clock))) if whole.num_rows else whole
        self._live, self._live_files, self._settled = alive, [], []
        for file in self._files.all():
            rows = self._rows_of(file)
            holds = bool(alive.num_rows) and bool(among(rows, alive, keys).any())
            (self._live_files if holds else self._settled).append(_StateFile(file, self._last(rows)))
        if self._live_files:  # with the settled rows that share a file with live ones
            self._live = pa.concat_tables([self._rows_of(held.file) for held in self._live_files])

    def _called_back(self, partial: pa.Table) -> tuple[pa.Table | None, list[_StateFile]]:
        """The rows to go on from, and the settled files among them that have to be written anew."""
        reach = self.operator.reach(partial, self._clock)
        if reach is None:
            return self._live, []
        opened: list[_StateFile] = []
        tables = [self._live] if self._live is not None else []
        for held in self._settled:
            if held.last > reach:
                rows = self._rows_of(held.file)
                if bool(self.operator.called_back(rows, partial).any()):
                    opened.append(held)
                    tables.append(rows)
        return (pa.concat_tables(tables) if tables else None), opened

    def _replace_files(
        self, rows: pa.Table, live: npt.NDArray[np.bool_], old: list[_StateFile], mark: BatchMark
    ) -> None:
        """Commit ``rows`` in place of the files ``old``, and leave out what retention ends."""
        gone = {held.file.path for held in old}
        settled = [held for held in self._settled if held.file.path not in gone]
        horizon = self.horizon(mark.clock)
        if horizon is not None:
            keep = live | (times(rows[self.operator.ends]) > horizon)
            rows, live = rows.filter(pa.array(keep)), live[keep]
            old = [*old, *(held for held in settled if held.last <= horizon)]
            settled = [held for held in settled if held.last > horizon]
        alive = rows.filter(pa.array(live))
        new = self._commit([alive, rows.filter(pa.array(~live))], [held.file for held in old], mark)
        files = [_StateFile(file, self._last(held)) for file, held in new]
        at_hand = 1 if alive.num_rows else 0
        self._live, self._live_files, self._settled = alive, files[:at_hand], [*settled, *files[at_hand:]]

    def _commit_files(self, added: Sequence[AddedFile], removed: Sequence[AddedFile], mark: BatchMark) -> None:
        super()._commit_files(added, removed, mark)
        self._clock = mark.clock

    def _last(self, rows: pa.Table) -> int:
        return int(times(rows[self.operator.ends]).max()) if rows.num_rows else 0


def _now() -> int:
    return time.time_ns() // 1000

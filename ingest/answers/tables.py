"""The tables as the collecting side reads them: progress, events in bronze, rows of products. No JVM, no service.

Bronze commits carry ``userMetadata`` ``{"offsets": {"TOPIC/PARTITION": next offset}}``. Product commits carry
``millrace.through`` of the same form.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import reduce
from itertools import islice
from operator import and_
from typing import Any

import deltalake
import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from deltalake.exceptions import TableNotFoundError

from ingest.border.admission import RAW_ID
from ingest.errors import RequestRefused
from lakehouse.contract.deltalog import DeltaLog, TableGone
from lakehouse.contract.lake import COMMIT_THROUGH, Lake, TableRef
from lakehouse.contract.pipeline.tenants import UNDECLARED, TenantBorder
from lakehouse.contract.rows import KeyedRows, UnknownColumn
from lakehouse.contract.storage import LakePath, is_away

logger = logging.getLogger(__name__)

MAX_ROWS = 1_000
_LOOK_BACK = 1_000  # commits searched for the newest offsets when a table is first read
_TIMES = ("window_start", "window_end")

Reached = Callable[[int, Mapping[str, int]], bool]


@dataclass(frozen=True, slots=True)
class Coordinates:
    """The place of an event in Kafka."""

    topic: str
    partition: int
    offset: int


@dataclass(frozen=True, slots=True)
class BronzeEvent:
    """An event in bronze.

    Attributes:
        coordinates: its place in Kafka; None for an event from a file.
        reject: why the border refused it, or None.
    """

    event_id: str
    coordinates: Coordinates | None
    reject: str | None
    payload: bytes | None


class LakeState:
    """Progress of tables, and events found in them. Thread-safe; blocks."""

    def __init__(self, lake: Lake) -> None:
        self._lake = lake
        self._progress: dict[LakePath, _TableProgress] = {}
        self._products: dict[str, TableRef] = {}
        self._lock = threading.Lock()

    def in_bronze(self, source: str, at: Coordinates) -> bool:
        """Whether bronze has committed the event at these coordinates."""
        return self._held(self._lake.bronze(source), at) is not None

    def product_version(self, name: str, at: Coordinates) -> int | None:
        """Current version of the product if it holds the event at these coordinates, else None."""
        table = self._product(name)
        return None if table is None else self._held(table, at)

    def progress(self, name: str) -> tuple[int, dict[str, int]]:
        """Current version of a product (-1 if absent), and its next offset by ``TOPIC/PARTITION``."""
        table = self._product(name)
        return (-1, {}) if table is None else self._of(table).now()

    def find_event(self, source: str, tenant: str, event_id: str, received_at: int) -> BronzeEvent | None:
        """Find an event in bronze by its id, or by the id that a front node gave it; reads about a day of the table."""
        columns = ["event_id", "topic", "partition", "offset", "reject", "payload"]
        wanted = {"source": source, "tenant": tenant}
        bronze = self._lake.bronze(source)
        row = self._first_row(bronze, columns, {**wanted, "event_id": event_id}, received_at)
        row = row or self._first_row(bronze, columns, wanted, received_at, raw_id=event_id)
        if row is None:
            return None
        at = None if row["offset"] is None else Coordinates(row["topic"], row["partition"], row["offset"])
        return BronzeEvent(row["event_id"], at, row["reject"], row.get("payload"))

    def quarantine_reason(self, source: str, tenant: str, event_id: str) -> str | None:
        """Why the event is in quarantine, or None."""
        wanted = {"event_id": event_id, "source": source, "tenant": tenant}
        row = self._first_row(self._lake.quarantine(), ["reason"], wanted)
        return None if row is None else str(row["reason"])

    def _product(self, name: str) -> TableRef | None:
        """The table of a product; where it is does not change once it is there."""
        if name not in self._products and (found := find_product(self._lake, name)) is not None:
            self._products[name] = found
        return self._products.get(name)

    def _held(self, table: TableRef, at: Coordinates) -> int | None:
        """The current version if it is past these coordinates, else None."""
        version, offsets = self._of(table).now()
        return version if at.offset < offsets.get(f"{at.topic}/{at.partition}", 0) else None

    def _of(self, table: TableRef) -> _TableProgress:
        with self._lock:
            return self._progress.setdefault(table.path, _TableProgress(table))

    def _first_row(
        self,
        table: TableRef,
        columns: list[str],
        wanted: dict[str, str],
        received_at: int | None = None,
        raw_id: str | None = None,
    ) -> dict[str, Any] | None:
        """The first row with these values; None if there is none, or no table.

        Args:
            received_at: the row is of about this day, microseconds since the epoch.
            raw_id: the row is of an event that a front node received at ``received_at`` and gave this id.
        """
        try:
            data = deltalake.DeltaTable(str(table.path)).to_pyarrow_dataset()
        except TableNotFoundError:
            return None
        names = set(data.schema.names)
        tests = [ds.field(column) == value for column, value in wanted.items() if column in names]
        if received_at is not None:
            at = datetime.fromtimestamp(received_at // 1_000_000, UTC) + timedelta(microseconds=received_at % 1_000_000)
            if "date" in names:
                days = [at.date() + timedelta(days=shift) for shift in (-1, 0, 1)]
                is_date = pa.types.is_date(data.schema.field("date").type)
                tests.append(ds.field("date").isin(days if is_date else [day.isoformat() for day in days]))
            if raw_id is not None:
                if "headers" not in names:
                    return None
                if "received_at" in names:  # few row groups have it
                    tests.append(ds.field("received_at") == at)
                tests.append(pc.map_lookup(ds.field("headers"), RAW_ID, "first") == raw_id.encode())
        chosen = [column for column in columns if column in names]
        for batch in data.scanner(columns=chosen, filter=reduce(and_, tests)).to_batches():
            if batch.num_rows:
                return dict(batch.slice(0, 1).to_pylist()[0])
        return None


class _TableProgress:
    """Version and end offsets of a table, read from its new commits only."""

    def __init__(self, table: TableRef) -> None:
        self._log = DeltaLog(table.path)
        self._version = -1
        self._offsets: dict[str, int] = {}
        self._lock = threading.Lock()

    def now(self) -> tuple[int, dict[str, int]]:
        """The current version, -1 if the table is absent, and its end offsets."""
        with self._lock:
            self._refresh()
            return self._version, dict(self._offsets)

    def _refresh(self) -> None:
        if self._version >= 0 and not self._log.has(self._version):  # the table was dropped and created again
            self._version, self._offsets = -1, {}
        if self._version < 0:
            for version, info in islice(self._log.infos(newest_first=True), _LOOK_BACK):
                self._version = max(self._version, version)
                if offsets := end_offsets(info):
                    self._offsets = offsets
                    self._version = version  # later commits are read below
                    break
        with suppress(TableGone):  # no further commit
            while True:
                for name, offset in end_offsets(self._log.info(self._version + 1)).items():
                    self._offsets[name] = max(offset, self._offsets.get(name, 0))
                self._version += 1


class ProductWatch:
    """Wakes tasks that wait for a version of a product: one poll per product with waiters, none otherwise."""

    def __init__(self, lake: LakeState, poll_s: float) -> None:
        self._lake = lake
        self._poll_s = poll_s
        self._waiting: dict[str, list[tuple[Reached, asyncio.Future[int]]]] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def holds(self, product: str, at: Coordinates) -> int:
        """Wait until the product holds the event at these coordinates; returns its version."""
        place = f"{at.topic}/{at.partition}"
        return await self._until(product, lambda _, offsets: offsets.get(place, 0) > at.offset)

    async def newer(self, product: str, than: int) -> int:
        """Wait for a version above ``than``; returns the current one."""
        return await self._until(product, lambda version, _: version > than)

    def close(self) -> None:
        """Stop polling and cancel all waiters."""
        for task in self._tasks.values():
            task.cancel()
        for waiting in self._waiting.values():
            for _, future in waiting:
                future.cancel()

    async def _until(self, product: str, reached: Reached) -> int:
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        entry = (reached, future)
        waiting = self._waiting.setdefault(product, [])
        waiting.append(entry)
        if product not in self._tasks:
            self._tasks[product] = asyncio.create_task(self._look(product), name=f"watch {product}")
        try:
            return await future
        finally:
            if entry in waiting:
                waiting.remove(entry)

    async def _look(self, product: str) -> None:
        """Poll while tasks wait."""
        try:
            while waiting := self._waiting.get(product):
                try:
                    version, offsets = await asyncio.to_thread(self._lake.progress, product)
                except (OSError, ValueError) as error:  # the table is being created or dropped
                    level = logging.DEBUG if is_away(error) else logging.WARNING
                    logger.log(level, "the log of %s cannot be read: %s", product, error)
                else:
                    for reached, future in list(waiting):
                        if not future.done() and reached(version, offsets):
                            future.set_result(version)
                waiting[:] = [entry for entry in waiting if not entry[1].done()]
                if waiting:
                    await asyncio.sleep(self._poll_s)
        finally:
            del self._tasks[product]
            if not self._waiting[product]:
                del self._waiting[product]


@dataclass(frozen=True, slots=True)
class FoundRows:
    """Rows of one key: newest window first, at most :data:`MAX_ROWS`, without binary columns (sketches)."""

    version: int
    rows: list[dict[str, Any]]

    def json(self, **members: Any) -> bytes:
        """As a JSON object with further members."""
        return orjson.dumps(
            {**members, "version": self.version, "rows": self.rows}, default=str, option=orjson.OPT_UTC_Z
        )


@dataclass(frozen=True, slots=True)
class TenantRows:
    """A product as one tenant sees it; ``limit`` is the column and value that each row must have, or empty."""

    product: str
    limit: tuple[tuple[str, str], ...] = ()

    def limited(self, wanted: Mapping[str, Sequence[str]]) -> dict[str, Sequence[str]]:
        """Values by column as they are wanted, of the rows that are seen."""
        limits = {column: [value] if value in wanted.get(column, (value,)) else [] for column, value in self.limit}
        return {**wanted, **limits}


class ProductRows:
    """Rows of products by key (:mod:`lakehouse.contract.rows`), those of one tenant. Thread-safe; blocks.

    Attributes:
        home: the node's tenant, which is that of senders without one.
    """

    def __init__(self, lake: Lake, border: TenantBorder = UNDECLARED) -> None:
        self._lake = lake
        self._border = border
        self.home = border.home
        self._tables: dict[LakePath, KeyedRows] = {}
        self._widths: dict[str, int] = {}
        self._lock = threading.Lock()

    def seen_by(self, tenant: str, product: str) -> TenantRows:
        """The part of a product that a tenant sees; equal parts compare equal. Raises RequestRefused (404)."""
        whose = tenant or self.home
        column = self._border.limit(whose, product)
        if column is None:
            raise _no_product(product)
        return TenantRows(product, ((column, whose),) if column else ())

    def by_key(self, part: TenantRows, values: Sequence[str]) -> FoundRows:
        """Rows with these values in the key columns, not counting the window's.

        Raises RequestRefused: no such table (404), or too many values (400).
        """
        names = self._names(part.product)
        if len(values) > len(names) or not values:
            raise RequestRefused(f"{part.product} is looked up by {', '.join(names) or 'no column'}", 400)
        return self.where(part, dict(zip(names, values, strict=False)))

    def where(self, part: TenantRows, match: Mapping[str, str]) -> FoundRows:
        """Rows with these values, as text, in these columns. Raises RequestRefused: no table (404) or column (400)."""
        try:
            version, rows = self._table(part.product).find(part.limited({name: [text] for name, text in match.items()}))
        except UnknownColumn as error:
            raise RequestRefused(f"{part.product} has no column {error.column!r}", 400) from None
        return FoundRows(version, _newest_first(rows).slice(0, MAX_ROWS).to_pylist())

    def by_keys(self, part: TenantRows, keys: Collection[tuple[str, ...]]) -> tuple[int, dict[tuple[str, ...], bytes]]:
        """A version, and the rows of the newest window of each key as a JSON array, none of them older than it.

        Keys are as in :meth:`by_key` and may differ in length; one with too many values has no rows. Raises
        RequestRefused: no such table (404).
        """
        table = self._table(part.product)
        names = self._names(part.product)
        rows: dict[tuple[str, ...], list[dict[str, Any]]] = {key: [] for key in keys}
        version = table.version()
        for width in {len(key) for key in keys if len(key) <= len(names)}:
            same = [key for key in keys if len(key) == width]
            wanted = {name: sorted({key[n] for key in same}) for n, name in enumerate(names[:width])}
            _, found = table.find(part.limited(wanted))
            for row in _newest_first(found).to_pylist():
                mine = rows.get(tuple(_key_text(row[name]) for name in names[:width]))
                if mine is not None and (not mine or row.get(_TIMES[0]) == mine[0].get(_TIMES[0])):
                    mine.append(row)
        return version, {key: orjson.dumps(mine, default=str, option=orjson.OPT_UTC_Z) for key, mine in rows.items()}

    def width(self, product: str) -> int | None:
        """Most values in a key of the product; None if it has not been read. Does not block."""
        return self._widths.get(product)

    def _names(self, product: str) -> list[str]:
        """The key columns without those of the window."""
        names = [name for name in self._table(product).key() if name not in _TIMES]
        self._widths[product] = len(names)
        return names

    def _table(self, product: str) -> KeyedRows:
        ref = find_product(self._lake, product)
        if ref is None:
            raise _no_product(product)
        with self._lock:
            return self._tables.setdefault(ref.path, KeyedRows(ref.path))


def _no_product(name: str) -> RequestRefused:
    return RequestRefused(f"there is no product {name!r} yet", 404)


class ProductTables:
    """What a node reads of the tables: their progress and the events in them, and rows of products."""

    def __init__(self, lake: Lake, poll_s: float, border: TenantBorder = UNDECLARED) -> None:
        self.lake = lake
        self.state = LakeState(lake)
        self.rows = ProductRows(lake, border)
        self.watch = ProductWatch(self.state, poll_s)


def find_product(lake: Lake, name: str) -> TableRef | None:
    """The table of a product, gold before silver; None if absent."""
    tables = (lake.table(layer, name) for layer in ("gold", "silver"))
    return next((table for table in tables if table.exists()), None)


def end_offsets(info: Mapping[str, Any]) -> dict[str, int]:
    """Next offset by ``TOPIC/PARTITION`` that a commitInfo names; empty for a commit without events."""
    through = info.get(COMMIT_THROUGH)
    if through is not None:
        return dict(orjson.loads(through) if isinstance(through, str) else through)
    try:
        return dict(orjson.loads(info["userMetadata"])["offsets"])
    except (KeyError, TypeError, orjson.JSONDecodeError):  # written by another application, or maintenance
        return {}


def _newest_first(rows: pa.Table) -> pa.Table:
    return rows.sort_by([(_TIMES[0], "descending")]) if _TIMES[0] in rows.schema.names else rows


def _key_text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)

"""The tables as the collecting side reads them: progress, events in bronze, rows of products. No JVM, no service.

Bronze commits carry ``userMetadata`` ``{"offsets": {"TOPIC/PARTITION": next offset}}``. Product commits carry
``millrace.through`` of the same form.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import deltalake
import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from deltalake.exceptions import TableNotFoundError

from ingest.border.admission import RAW_PLACE
from ingest.errors import LookupRefused
from lakehouse.contract.lake import COMMIT_THROUGH, PROPERTY_FOLD, PROPERTY_KEY, PROPERTY_ORDER, Lake, TableRef

_LOOK_BACK = 1_000  # commits searched for the newest offsets when a table is first read
logger = logging.getLogger(__name__)
Reached = Callable[[int, Mapping[str, int]], bool]
MAX_ROWS = 1_000
IN_MEMORY_ROWS = 100_000
_TIMES = ("window_start", "window_end")


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

    coordinates: Coordinates | None
    reject: str | None
    payload: bytes | None = None
    event_id: str = ""


class LakeState:
    """Progress of tables, and events found in them. Thread-safe; blocks."""

    def __init__(self, lake: Lake) -> None:
        self._lake = lake
        self._progress: dict[Path, _TableProgress] = {}
        self._lock = threading.Lock()

    def in_bronze(self, source: str, at: Coordinates) -> bool:
        """Whether bronze has committed the event at these coordinates."""
        return self._of(self._lake.bronze(source)).holds(at) is not None

    def product_version(self, name: str, at: Coordinates) -> int | None:
        """Current version of the product if it holds the event at these coordinates, else None."""
        for layer in ("gold", "silver"):
            table = self._lake.table(layer, name)
            if table.exists():
                return self._of(table).holds(at)
        return None

    def progress(self, name: str) -> tuple[int, dict[str, int]]:
        """Current version of a product (-1 if absent), and its next offset by ``TOPIC/PARTITION``."""
        for layer in ("gold", "silver"):
            table = self._lake.table(layer, name)
            if table.exists():
                return self._of(table).now()
        return -1, {}

    def find_event(self, source: str, tenant: str, event_id: str, received_at: int) -> BronzeEvent | None:
        """Find an event in bronze by its id; reads about a day of the table."""
        row = self._first_row(
            self._lake.bronze(source),
            ["topic", "partition", "offset", "reject", "payload"],
            {"event_id": event_id, "source": source, "tenant": tenant},
            received_at,
        )
        if row is None:
            return None
        at = None if row["offset"] is None else Coordinates(row["topic"], row["partition"], row["offset"])
        return BronzeEvent(at, row["reject"], row.get("payload"), event_id)

    def find_refined(self, source: str, raw: Coordinates, received_at: int) -> BronzeEvent | None:
        """Find the event in bronze that was refined from the raw one at these coordinates; reads about a day."""
        columns = ["event_id", "topic", "partition", "offset", "reject", "headers"]
        rows = self._scan(self._lake.bronze(source), columns, {"source": source}, received_at)
        if rows is None:
            return None
        place = f"{raw.topic}/{raw.partition}/{raw.offset}".encode()
        for batch in rows:
            found = batch.filter(pc.equal(pc.map_lookup(batch["headers"], RAW_PLACE, "first"), place))
            if found.num_rows:
                row = found.slice(0, 1).drop_columns(["headers"]).to_pylist()[0]
                at = Coordinates(row["topic"], row["partition"], row["offset"])
                return BronzeEvent(at, row["reject"], event_id=row["event_id"])
        return None

    def quarantine_reason(self, source: str, tenant: str, event_id: str) -> str | None:
        """Why the event is in quarantine, or None."""
        wanted = {"event_id": event_id, "source": source, "tenant": tenant}
        row = self._first_row(self._lake.quarantine(), ["reason"], wanted)
        return None if row is None else str(row["reason"])

    def _of(self, table: TableRef) -> _TableProgress:
        with self._lock:
            return self._progress.setdefault(table.path, _TableProgress(table.path / "_delta_log"))

    def _first_row(
        self, table: TableRef, columns: list[str], wanted: dict[str, str], received_at: int | None = None
    ) -> dict[str, Any] | None:
        batches = self._scan(table, columns, wanted, received_at)
        for batch in batches or ():
            if batch.num_rows:
                return dict(batch.slice(0, 1).to_pylist()[0])
        return None

    def _scan(
        self, table: TableRef, columns: list[str], wanted: dict[str, str], received_at: int | None
    ) -> Iterable[pa.RecordBatch] | None:
        """Rows with these values, or None if the table is absent."""
        try:
            data = deltalake.DeltaTable(str(table.path)).to_pyarrow_dataset()
        except TableNotFoundError:
            return None
        names = set(data.schema.names)
        match = None
        for column, value in wanted.items():
            if column in names:
                test = ds.field(column) == value
                match = test if match is None else match & test
        if received_at is not None and "date" in names:
            day = datetime.fromtimestamp(received_at / 1e6, UTC).date()
            match = match & ds.field("date").isin(_days(data.schema.field("date").type, day))
        chosen = [column for column in columns if column in names]
        batches: Iterable[pa.RecordBatch] = data.scanner(columns=chosen, filter=match).to_batches()
        return batches


class _TableProgress:
    """Version and end offsets of a table, read from its new commits only."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._version = -1
        self._offsets: dict[str, int] = {}
        self._lock = threading.Lock()

    def holds(self, at: Coordinates) -> int | None:
        """The current version if it is past these coordinates, else None."""
        with self._lock:
            self._refresh()
            return self._version if at.offset < self._offsets.get(f"{at.topic}/{at.partition}", 0) else None

    def now(self) -> tuple[int, dict[str, int]]:
        """The current version and its end offsets."""
        with self._lock:
            self._refresh()
            return self._version, dict(self._offsets)

    def _refresh(self) -> None:
        if self._version >= 0 and not self._path(self._version).exists():  # the table was dropped and made again
            self._version, self._offsets = -1, {}
        if self._version < 0:
            versions = sorted(int(p.stem) for p in self._log.glob("*.json") if p.stem.isdigit())
            for version in versions[: -_LOOK_BACK - 1 : -1]:
                offsets = self._read(version)
                if offsets:
                    self._offsets, self._version = offsets, version
                    break
            self._version = max(self._version, versions[-1] if versions else -1)
            return
        while (offsets := self._read(self._version + 1)) is not None:
            self._version += 1
            for name, offset in offsets.items():
                self._offsets[name] = max(offset, self._offsets.get(name, 0))

    def _read(self, version: int) -> dict[str, int] | None:
        """End offsets that this commit names (maybe none), or None if there is no such commit."""
        try:
            lines = self._path(version).read_bytes().splitlines()
        except FileNotFoundError:
            return None
        for line in lines:
            info = orjson.loads(line).get("commitInfo")
            if info is not None:
                return _offsets_of(info)
        return {}

    def _path(self, version: int) -> Path:
        return self._log / f"{version:020d}.json"


def _offsets_of(info: dict[str, Any]) -> dict[str, int]:
    through = info.get(COMMIT_THROUGH)
    if through is not None:
        return dict(orjson.loads(through) if isinstance(through, str) else through)
    try:
        return dict(orjson.loads(info["userMetadata"])["offsets"])
    except (KeyError, TypeError, orjson.JSONDecodeError):  # somebody else's commit, e.g. maintenance
        return {}


def _days(kind: Any, day: Any) -> list[Any]:
    days = [day + timedelta(days=shift) for shift in (-1, 0, 1)]
    return days if str(kind).startswith("date") else [d.isoformat() for d in days]


class ProductWatch:
    """Wakes tasks that wait for a version of a product: one poll per product with waiters, none otherwise.

    Args:
        lake: reads the progress of tables.
        poll_s: pause between two polls.
    """

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
                except (OSError, ValueError) as error:  # the table is being made, or dropped
                    logger.warning("the log of %s cannot be read: %s", product, error)
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
        return orjson.dumps({**members, "version": self.version, "rows": self.rows}, default=str, option=_JSON_OPTIONS)


_JSON_OPTIONS = orjson.OPT_UTC_Z


class ProductRows:
    """Rows of products by key. Thread-safe; blocks.

    A small product is kept in memory in its newest version, so a look-up reads no file. Of a larger one, only files
    that may hold the key are read. Partial rows of one key are folded as the table's properties say.
    """

    def __init__(self, lake: Lake) -> None:
        self._lake = lake
        self._tables: dict[Path, _ProductTable] = {}
        self._lock = threading.Lock()

    def by_key(self, product: str, values: Sequence[str]) -> FoundRows:
        """Rows with these values in the key columns, not counting the window's.

        Raises:
            LookupRefused: no such table (404), or too many values (400).
        """
        table = self._table(product)
        names = table.columns()
        if len(values) > len(names) or not values:
            raise LookupRefused(f"{product} is looked up by {', '.join(names) or 'no column'}", 400)
        return self.where(product, dict(zip(names, values, strict=False)))

    def where(self, product: str, match: Mapping[str, str]) -> FoundRows:
        """Rows with these values, given as text, in these columns.

        Raises:
            LookupRefused: no such table (404) or column (400).
        """
        return self._table(product).where(match)

    def by_keys(self, product: str, keys: Collection[tuple[str, ...]]) -> tuple[int, dict[tuple[str, ...], bytes]]:
        """Rows of the newest window of each key as a JSON array; none for a key with too many values.

        Args:
            product: whose rows.
            keys: as in :meth:`by_key`; they may differ in length.

        Returns:
            A version that no row is older than, and the rows.

        Raises:
            LookupRefused: no such table (404).
        """
        table = self._table(product)
        names = table.columns()
        rows: dict[tuple[str, ...], list[dict[str, Any]]] = {key: [] for key in keys}
        version = table.version()
        for width in {len(key) for key in keys if len(key) <= len(names)}:
            found = table.any_of(names[:width], [key for key in keys if len(key) == width])
            for row in found.rows:
                mine = rows.get(tuple(_key_text(row[name]) for name in names[:width]))
                if mine is not None and (not mine or row.get(_TIMES[0]) == mine[0].get(_TIMES[0])):
                    mine.append(row)
        return version, {key: orjson.dumps(mine, default=str, option=_JSON_OPTIONS) for key, mine in rows.items()}

    def width(self, product: str) -> int | None:
        """Most values in a key of the product; None if it has not been read. Does not block."""
        for layer in ("gold", "silver"):
            table = self._tables.get(self._lake.table(layer, product).path)
            if table is not None and table.width is not None:
                return table.width
        return None

    def _table(self, product: str) -> _ProductTable:
        for layer in ("gold", "silver"):
            ref = self._lake.table(layer, product)
            if ref.exists():
                with self._lock:
                    return self._tables.setdefault(ref.path, _ProductTable(ref))
        raise LookupRefused(f"there is no product {product!r} yet", 404)


class _ProductTable:
    def __init__(self, ref: TableRef) -> None:
        self._ref = ref
        self._lock = threading.Lock()
        self._delta: deltalake.DeltaTable | None = None
        self._rows: pa.Table | None = None
        self._version = -1
        self.width: int | None = None  # columns of a key, as far as known

    def columns(self) -> list[str]:
        """The key columns without those of the window."""
        with self._lock:
            key = _names(self._open().metadata().configuration.get(PROPERTY_KEY))
        names = [name for name in key if name not in _TIMES]
        self.width = len(names)
        return names

    def version(self) -> int:
        with self._lock:
            return self._open().version()

    def where(self, match: Mapping[str, str]) -> FoundRows:
        return self._found([(column, [value]) for column, value in match.items()], MAX_ROWS)

    def any_of(self, names: Sequence[str], keys: Collection[tuple[str, ...]]) -> FoundRows:
        return self._found([(name, sorted({key[n] for key in keys})) for n, name in enumerate(names)], None)

    def _found(self, tests: Sequence[_ColumnIn], most: int | None) -> FoundRows:
        with self._lock:
            delta = self._open()
            version = delta.version()
            configuration = delta.metadata().configuration
            rows = self._filtered(delta, tests)
        fold = configuration.get(PROPERTY_FOLD)
        if fold:
            key, order = (_names(configuration.get(name)) for name in (PROPERTY_KEY, PROPERTY_ORDER))
            rows = _folded(rows, key, orjson.loads(fold), order)
        plain = [name for name, kind in zip(rows.schema.names, rows.schema.types, strict=True) if not _is_bytes(kind)]
        rows = rows.select(plain)
        if _TIMES[0] in plain:
            rows = rows.sort_by([(_TIMES[0], "descending")])
        return FoundRows(version, rows.slice(0, most).to_pylist())  # None: all

    def _open(self) -> deltalake.DeltaTable:
        if self._delta is None or not (self._ref.path / "_delta_log" / f"{self._version:020d}.json").exists():
            self._delta, self._rows = deltalake.DeltaTable(str(self._ref.path)), None
            self._version = self._delta.version()
        elif (self._ref.path / "_delta_log" / f"{self._version + 1:020d}.json").exists():
            self._delta.update_incremental()
            self._version, self._rows = self._delta.version(), None
        return self._delta

    def _filtered(self, delta: deltalake.DeltaTable, tests: Sequence[_ColumnIn]) -> pa.Table:
        data = delta.to_pyarrow_dataset()
        test: ds.Expression | None = None
        for column, texts in tests:
            if column not in data.schema.names:
                raise LookupRefused(f"{self._ref.name} has no column {column!r}", 400)
            one = ds.field(column).isin(_values(texts, data.schema.field(column).type))
            test = one if test is None else test & one
        if self._rows is None and data.count_rows() <= IN_MEMORY_ROWS:
            names = [f.name for f in data.schema if not _is_bytes(f.type)]
            self._rows = data.to_table(columns=names)
        if self._rows is not None:
            return self._rows.filter(test) if test is not None else self._rows
        return data.to_table(filter=test)


_ColumnIn = tuple[str, Sequence[str]]


def _values(texts: Sequence[str], kind: pa.DataType) -> pa.Array:
    """Texts as values of a column, without those that are not of its type."""
    values = []
    for text in texts:
        try:
            values.append(pa.scalar(text).cast(kind))
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            continue
    return pa.array([value.as_py() for value in values], kind)


def _names(text: str | None) -> list[str]:
    return [name for name in (text or "").split(",") if name]


def _key_text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _folded(rows: pa.Table, key: Sequence[str], fold: Mapping[str, str], order: Sequence[str]) -> pa.Table:
    """Fold partial rows of each key; ``latest`` takes the values of the row that is greatest by ``order``."""
    present = {name: "last" if how == "latest" else how for name, how in fold.items() if name in rows.schema.names}
    if order:
        rows = rows.sort_by([(name, "ascending") for name in order])
    merged = rows.group_by(list(key), use_threads=False).aggregate(list(present.items()))
    names = {f"{name}_{how}": name for name, how in present.items()}
    return merged.rename_columns([names.get(name, name) for name in merged.schema.names])


def _is_bytes(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))

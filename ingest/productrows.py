"""Rows of products by key: what a look-up, an answer and a publish/subscribe connection give. No JVM, no service.

A small product is kept in memory as of its newest version, so that a look-up costs no reading; of a larger one only the
files are read that may hold the key. Rows of one key that are partials are folded, as the table itself says how.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deltalake
import orjson
import pyarrow as pa
import pyarrow.dataset as ds

from ingest.errors import LookupRefused
from lakehouse.contract.lake import PROPERTY_FOLD, PROPERTY_KEY, PROPERTY_ORDER, Lake, TableRef

MAX_ROWS = 1_000
IN_MEMORY_ROWS = 100_000
_TIMES = ("window_start", "window_end")


@dataclass(frozen=True, slots=True)
class Found:
    """Rows of one key.

    Attributes:
        version: of the table that was read.
        rows: newest window first, at most :data:`MAX_ROWS`; binary columns (sketches) are left out.
    """

    version: int
    rows: list[dict[str, Any]]

    def json(self, **members: Any) -> bytes:
        """As a JSON object, with further members."""
        return orjson.dumps({**members, "version": self.version, "rows": self.rows}, default=str, option=_JSON)


_JSON = orjson.OPT_UTC_Z


class ProductRows:
    """Reads products of one lake; may be used from several threads. It blocks: call it from one.

    Args:
        lake: where the tables are.
    """

    def __init__(self, lake: Lake) -> None:
        self._lake = lake
        self._tables: dict[Path, _Table] = {}
        self._lock = threading.Lock()

    def by_key(self, product: str, values: Sequence[str]) -> Found:
        """Rows whose key columns, other than those of the window, have these values.

        Raises:
            LookupRefused: no such table (404), or it has not so many key columns (400).
        """
        table = self._table(product)
        names = table.columns()
        if len(values) > len(names) or not values:
            raise LookupRefused(f"{product} is looked up by {', '.join(names) or 'no column'}", 400)
        return self.where(product, dict(zip(names, values, strict=False)))

    def where(self, product: str, match: Mapping[str, str]) -> Found:
        """Rows in which these columns have these values, given as text.

        Raises:
            LookupRefused: no such table (404) or column (400).
        """
        return self._table(product).where(match)

    def by_keys(self, product: str, keys: Collection[tuple[str, ...]]) -> tuple[int, dict[tuple[str, ...], bytes]]:
        """Rows of the newest window of each key, as a JSON array; of one with more parts than the table's key: none.

        Args:
            product: whose rows.
            keys: as of :meth:`by_key`; they may name differently many columns.

        Returns:
            a version that none of the rows is older than, and the rows.

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
                mine = rows.get(tuple(_text(row[name]) for name in names[:width]))
                if mine is not None and (not mine or row.get(_TIMES[0]) == mine[0].get(_TIMES[0])):
                    mine.append(row)
        return version, {key: orjson.dumps(mine, default=str, option=_JSON) for key, mine in rows.items()}

    def width(self, product: str) -> int | None:
        """How many values a key of the product has at most; None where it has not been read. It does not block."""
        for layer in ("gold", "silver"):
            table = self._tables.get(self._lake.table(layer, product).path)
            if table is not None and table.width is not None:
                return table.width
        return None

    def _table(self, product: str) -> _Table:
        for layer in ("gold", "silver"):
            ref = self._lake.table(layer, product)
            if ref.exists():
                with self._lock:
                    return self._tables.setdefault(ref.path, _Table(ref))
        raise LookupRefused(f"there is no product {product!r} yet", 404)


class _Table:
    def __init__(self, ref: TableRef) -> None:
        self._ref = ref
        self._lock = threading.Lock()
        self._delta: deltalake.DeltaTable | None = None
        self._rows: pa.Table | None = None
        self._version = -1
        self.width: int | None = None  # columns of a key, as far as known

    def columns(self) -> list[str]:
        """Columns that a row is looked up by: the key's, without those of the window."""
        with self._lock:
            key = _names(self._open().metadata().configuration.get(PROPERTY_KEY))
        names = [name for name in key if name not in _TIMES]
        self.width = len(names)
        return names

    def version(self) -> int:
        with self._lock:
            return self._open().version()

    def where(self, match: Mapping[str, str]) -> Found:
        return self._found([(column, [value]) for column, value in match.items()], MAX_ROWS)

    def any_of(self, names: Sequence[str], keys: Collection[tuple[str, ...]]) -> Found:
        return self._found([(name, sorted({key[n] for key in keys})) for n, name in enumerate(names)], None)

    def _found(self, tests: Sequence[_Is], most: int | None) -> Found:
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
        return Found(version, rows.slice(0, most).to_pylist())  # None: all

    def _open(self) -> deltalake.DeltaTable:
        if self._delta is None or not (self._ref.path / "_delta_log" / f"{self._version:020d}.json").exists():
            self._delta, self._rows = deltalake.DeltaTable(str(self._ref.path)), None
            self._version = self._delta.version()
        elif (self._ref.path / "_delta_log" / f"{self._version + 1:020d}.json").exists():
            self._delta.update_incremental()
            self._version, self._rows = self._delta.version(), None
        return self._delta

    def _filtered(self, delta: deltalake.DeltaTable, tests: Sequence[_Is]) -> pa.Table:
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


_Is = tuple[str, Sequence[str]]


def _values(texts: Sequence[str], kind: pa.DataType) -> pa.Array:
    """Texts as values of a column; those that are none of its type are left out."""
    values = []
    for text in texts:
        try:
            values.append(pa.scalar(text).cast(kind))
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            continue
    return pa.array([value.as_py() for value in values], kind)


def _names(text: str | None) -> list[str]:
    return [name for name in (text or "").split(",") if name]


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _folded(rows: pa.Table, key: Sequence[str], fold: Mapping[str, str], order: Sequence[str]) -> pa.Table:
    """Partial rows of a key as one row each; ``latest`` takes the values of the row that is greatest by ``order``."""
    present = {name: "last" if how == "latest" else how for name, how in fold.items() if name in rows.schema.names}
    if order:
        rows = rows.sort_by([(name, "ascending") for name in order])
    merged = rows.group_by(list(key), use_threads=False).aggregate(list(present.items()))
    names = {f"{name}_{how}": name for name, how in present.items()}
    return merged.rename_columns([names.get(name, name) for name in merged.schema.names])


def _is_bytes(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))

"""Rows of products by key, as look-ups, answers and publish/subscribe connections give them (see contract.rows)."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa

from ingest.errors import LookupRefused
from lakehouse.contract.lake import Lake
from lakehouse.contract.rows import KeyedRows, UnknownColumn

MAX_ROWS = 1_000
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
        self._tables: dict[Path, KeyedRows] = {}
        self._widths: dict[str, int] = {}
        self._lock = threading.Lock()

    def by_key(self, product: str, values: Sequence[str]) -> Found:
        """Rows whose key columns, other than those of the window, have these values.

        Raises:
            LookupRefused: no such table (404), or it has not so many key columns (400).
        """
        names = self._names(product)
        if len(values) > len(names) or not values:
            raise LookupRefused(f"{product} is looked up by {', '.join(names) or 'no column'}", 400)
        return self.where(product, dict(zip(names, values, strict=False)))

    def where(self, product: str, match: Mapping[str, str]) -> Found:
        """Rows in which these columns have these values, given as text.

        Raises:
            LookupRefused: no such table (404) or column (400).
        """
        try:
            version, rows = self._table(product).find({column: [value] for column, value in match.items()})
        except UnknownColumn as error:
            raise LookupRefused(f"{product} has no column {error.column!r}", 400) from None
        return Found(version, _newest_first(rows).slice(0, MAX_ROWS).to_pylist())

    def by_keys(self, product: str, keys: Collection[tuple[str, ...]]) -> tuple[int, dict[tuple[str, ...], bytes]]:
        """Rows of the newest window of each key, as a JSON array; none for a key with more parts than the table's.

        Args:
            product: whose rows.
            keys: as of :meth:`by_key`; they may name differently many columns.

        Returns:
            a version that none of the rows is older than, and the rows.

        Raises:
            LookupRefused: no such table (404).
        """
        table = self._table(product)
        names = self._names(product)
        rows: dict[tuple[str, ...], list[dict[str, Any]]] = {key: [] for key in keys}
        version = table.version()
        for width in {len(key) for key in keys if len(key) <= len(names)}:
            same = [key for key in keys if len(key) == width]
            _, found = table.find({name: sorted({key[n] for key in same}) for n, name in enumerate(names[:width])})
            for row in _newest_first(found).to_pylist():
                mine = rows.get(tuple(_text(row[name]) for name in names[:width]))
                if mine is not None and (not mine or row.get(_TIMES[0]) == mine[0].get(_TIMES[0])):
                    mine.append(row)
        return version, {key: orjson.dumps(mine, default=str, option=_JSON) for key, mine in rows.items()}

    def width(self, product: str) -> int | None:
        """How many values a key of the product has at most; None if it has not been read. It does not block."""
        return self._widths.get(product)

    def _names(self, product: str) -> list[str]:
        """Columns that a row is looked up by: the key's, without those of the window."""
        names = [name for name in self._table(product).key() if name not in _TIMES]
        self._widths[product] = len(names)
        return names

    def _table(self, product: str) -> KeyedRows:
        for layer in ("gold", "silver"):
            ref = self._lake.table(layer, product)
            if ref.exists():
                with self._lock:
                    return self._tables.setdefault(ref.path, KeyedRows(ref.path))
        raise LookupRefused(f"there is no product {product!r} yet", 404)


def _newest_first(rows: pa.Table) -> pa.Table:
    return rows.sort_by([(_TIMES[0], "descending")]) if _TIMES[0] in rows.schema.names else rows


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)

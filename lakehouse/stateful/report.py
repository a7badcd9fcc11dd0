"""What products remember, read without Spark, whether their writer runs or not."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable

from lakehouse.contract.errors import ConfigError
from lakehouse.contract.lake import Lake, TableRef
from lakehouse.contract.pipeline import Pipeline, Product
from lakehouse.contract.pipeline.product import STATEFUL
from lakehouse.gold.state_store import StateStore, store_of
from lakehouse.stateful.join_index import LEFT, JoinIndex, index_folder

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class StateFacts:
    """What one product remembers."""

    product: str
    operator: str
    live: int  # rows, or events of both sides of a join, that later events go on from
    settled: int  # rows that stay as they are; 0 for a join
    bytes: int  # of a join's index on disk; 0 for others, whose table is their state
    clock: datetime | None  # newest event time that it knows of, or None


def stateful_products(pipeline: Pipeline) -> list[Product]:
    """The products of a pipeline that remember, in the order of the file."""
    return [product for product in pipeline.products.values() if product.operator in STATEFUL]


def report(lake: Lake, pipeline: Pipeline, product: Product) -> StateFacts | None:
    """What the product remembers; None if its table does not exist yet."""
    store = store_of(product, lake.table(product.layer, product.name), pipeline.name)
    if not store.table.exists():
        return None
    mark = store.mark()
    micros = mark.clock if mark else None
    clock = None if micros is None else _EPOCH + timedelta(microseconds=micros)
    if isinstance(store, StateStore):
        rows = _rows(store.table)
        live = int(store.operator.live(rows, micros).sum()) if rows.num_rows else 0
        return StateFacts(product.name, product.operator, live, rows.num_rows - live, 0, clock)
    folder = index_folder(lake, product.name)
    with closing(JoinIndex(folder, product, readonly=True)) as index:
        size = sum(file.stat().st_blocks * 512 for file in folder.iterdir())
        return StateFacts(product.name, product.operator, len(index), 0, size, clock)


def remembered(lake: Lake, product: Product, key: Mapping[str, str]) -> list[dict[str, Any]]:
    """Everything that the product remembers of one key.

    Args:
        key: column to its value as text: the left columns of a join's ``on``, or columns of the product's key.

    Raises:
        ConfigError: a column of the key is missing, or is none.
    """
    joined = product.operator == "join"
    known = [left for left, _ in product.columns_on] if joined else list(product.by)
    if set(key) - set(known) or (joined and set(key) != set(known)):
        raise ConfigError(
            f"{', '.join(key) or 'nothing'} is not its key", key="key", remedy=f"Give: {', '.join(known) or 'no key'}"
        )
    if not joined:
        rows = _rows(lake.table(product.layer, product.name))
        plain = rows.select([f.name for f in rows.schema if not pa.types.is_binary(f.type)]).to_pylist()
        return [row for row in plain if all(str(row[name]) == value for name, value in key.items())]
    with closing(JoinIndex(index_folder(lake, product.name), product, readonly=True)) as index:
        return [
            {
                "side": product.source if side == LEFT else product.right,
                "at": _EPOCH + timedelta(microseconds=at),
                "event": json.loads(body),
            }
            for side, at, body in index.lookup(join_key([key[name] for name in known]))
        ]


def join_key(values: Sequence[str]) -> bytes:
    """The 16 bytes that stand for these values, as Spark makes them (:mod:`lakehouse.stateful.live_join`)."""
    text = json.dumps(list(values), separators=(",", ":"), ensure_ascii=False)
    return hashlib.md5(text.encode(), usedforsecurity=False).digest()


def _rows(table: TableRef) -> pa.Table:
    return DeltaTable(str(table.path)).to_pyarrow_table()

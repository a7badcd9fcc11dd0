"""The latest row of each key: the same whatever the order, the batches and the repetitions, and for every reader."""

from __future__ import annotations

import random
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lakehouse.contract.errors import ConfigError
from lakehouse.contract.pipeline import Product
from lakehouse.contract.rows import Fold
from lakehouse.errors import BadProduct
from lakehouse.operators.registry import operator_of
from lakehouse.operators.rows import Latest

PRODUCT = Product(
    "gold",
    "offers",
    "SELECT * FROM offers",
    operator="latest",
    by=("merchant", "offer"),
    version="version",
    storage="append",
    name="catalogue",
)
SCHEMA = pa.schema(
    [
        ("merchant", pa.string()),
        ("offer", pa.int64()),
        ("version", pa.int64()),
        ("price", pa.float64()),
        ("tie", pa.int64()),
    ]
)
row = st.fixed_dictionaries(
    {
        "merchant": st.sampled_from(["a", "b"]),
        "offer": st.integers(0, 2),
        "version": st.integers(-2, 3),
        "price": st.none() | st.integers(0, 4).map(float),
    }
)


def with_tie(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The tie is a function of the row."""
    return [{**one, "tie": random.Random(repr(sorted(one.items()))).getrandbits(62)} for one in found]


def table(found: list[dict[str, Any]]) -> pa.Table:
    return pa.Table.from_pylist(found, schema=SCHEMA)


def plain(one: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(one[name] for name in SCHEMA.names)


def latest() -> Latest:
    operator = operator_of(PRODUCT)
    assert isinstance(operator, Latest)
    operator.describe(SCHEMA)
    return operator


def expected(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    best: dict[tuple[str, int], dict[str, Any]] = {}
    for one in found:
        key = one["merchant"], one["offer"]
        if key not in best or (one["version"], one["tie"]) > (best[key]["version"], best[key]["tie"]):
            best[key] = one
    return [best[key] for key in sorted(best)]


def in_order(found: pa.Table) -> list[dict[str, Any]]:
    return sorted(found.to_pylist(), key=lambda one: (one["merchant"], one["offer"]))


@settings(max_examples=30)
@given(st.lists(row, min_size=1, max_size=14).map(with_tie), st.integers(1, 4), st.randoms(use_true_random=False))
def test_any_split_any_order_any_repetition(found: list[dict[str, Any]], size: int, shuffler: random.Random) -> None:
    operator = latest()
    arriving = found + shuffler.choices(found, k=3)
    shuffler.shuffle(arriving)
    held: pa.Table | None = None
    for start in range(0, len(arriving), size):
        held = operator.merge(held, table(arriving[start : start + size]))
    assert held is not None
    assert in_order(held) == expected(found)
    # What readers make of partials that were only appended: DuckDB, and the server's memory.
    fold = Fold(operator.key, operator.fold, operator.order)
    with duckdb.connect(config={"threads": "1"}) as connection:
        connection.register("partials", table(arriving))
        folded = connection.sql(fold.sql("partials", SCHEMA.names)).to_arrow_table()
    assert in_order(pa.table(folded).cast(SCHEMA)) == expected(found)
    fold = Fold(operator.key, operator.fold, operator.order)
    rows: dict[Any, Any] = {}
    for start in range(0, len(arriving), size):
        rows.update(fold.rows(SCHEMA.names, [plain(one) for one in arriving[start : start + size]], rows))
    assert [rows[key] for key in sorted(rows)] == [plain(one) for one in expected(found)]


def test_what_latest_needs() -> None:
    operator = latest()
    assert operator.key == ("merchant", "offer")
    assert operator.order == ("version", "tie")
    assert operator.fold == {"version": "latest", "price": "latest", "tie": "latest"}
    for wrong in ({"by": ()}, {"version": ""}, {"version": "a b"}):
        with pytest.raises(ConfigError, match="key and its version"):
            Product(
                "gold",
                "s",
                "SELECT 1",
                operator="latest",
                **{"by": ("a",), "version": "v", **wrong},  # type: ignore[arg-type]
            )
    with pytest.raises(BadProduct, match="no column offer"):
        Latest(PRODUCT).describe(pa.schema([("merchant", pa.string()), ("version", pa.int64())]))
    with pytest.raises(BadProduct, match="has a column 'tie'"):
        Latest(PRODUCT).describe(pa.schema([*SCHEMA, ("tie", pa.int64())]))

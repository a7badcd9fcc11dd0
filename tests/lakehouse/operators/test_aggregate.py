"""SQL aggregates: what merges, and what is refused."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import pairwise

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lakehouse.contract.pipeline import Product, load_pipeline
from lakehouse.contract.settings import conf_dir
from lakehouse.errors import BadProduct
from lakehouse.operators.aggregate import Aggregate
from lakehouse.operators.base import Operator
from lakehouse.operators.registry import operator_of

START = datetime(2026, 1, 1, tzinfo=UTC)
SQL = """
SELECT window.start AS window_start, city, count(*) AS n, count_if(price > 2) AS dear,
  sum(price) AS total, min(price) AS low, max(price) AS high
FROM r GROUP BY window(t, '1 minute'), city;
"""
SCHEMA = pa.schema(
    [
        ("window_start", pa.timestamp("us")),  # as Spark may say it: without a zone
        ("city", pa.string()),
        ("n", pa.int64()),
        ("dear", pa.int64()),
        ("total", pa.int64()),
        ("low", pa.int32()),
        ("high", pa.int32()),
    ]
)
Event = tuple[int, str | None, int | None]  # minute, city, price


def aggregate(sql: str = SQL) -> Operator:
    return operator_of(Product("silver", "r", sql, name="p"))


def rows_of(batch: list[Event]) -> list[dict[str, object]]:
    """The query's rows over the events, in plain Python."""
    groups: dict[tuple[int, str | None], list[int | None]] = {}
    for minute, city, price in batch:
        groups.setdefault((minute, city), []).append(price)
    rows: list[dict[str, object]] = []
    for (minute, city), prices in groups.items():
        known = [price for price in prices if price is not None]
        rows.append(
            {
                "window_start": START + timedelta(minutes=minute),
                "city": city,
                "n": len(prices),
                "dear": sum(price > 2 for price in known),
                "total": sum(known) if known else None,
                "low": min(known, default=None),
                "high": max(known, default=None),
            }
        )
    return rows


def table(batch: list[Event]) -> pa.Table:
    rows = [{**row, "window_start": row["window_start"].replace(tzinfo=None)} for row in rows_of(batch)]  # type: ignore[attr-defined]
    return pa.Table.from_pylist(rows, schema=SCHEMA)


def in_order(rows: list[dict[str, object]]) -> list[dict[str, object]]:
    return sorted(rows, key=lambda row: (str(row["window_start"]), str(row["city"])))


@settings(deadline=None, max_examples=80)
@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.sampled_from(["a", "b", None]), st.none() | st.integers(-5, 5)), max_size=40
    ),
    st.lists(st.integers(0, 40), max_size=5),
    st.randoms(use_true_random=False),
)
def test_any_batches_in_any_order_give_the_same_rows(batch: list[Event], cuts: list[int], random: object) -> None:
    operator = aggregate()
    shuffled = list(batch)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    places = sorted({0, len(batch), *(cut % (len(batch) + 1) for cut in cuts)})
    parts = [table(shuffled[a:b]) for a, b in pairwise(places)] or [table([])]
    expected = in_order(rows_of(batch))
    assert in_order(operator.merge(None, pa.concat_tables(parts)).to_pylist()) == expected
    rows = operator.merge(None, parts[0])
    for part in parts[1:]:
        rows = operator.merge(rows, part)
    assert in_order(rows.to_pylist()) == expected
    assert in_order(operator.merge(rows, table([])).to_pylist()) == expected


def test_what_the_query_says_of_itself() -> None:
    operator = aggregate()
    assert operator.key == ("window_start", "city")
    assert operator.unit == ("window_start",)
    assert operator.fold == {"n": "sum", "dear": "sum", "total": "sum", "low": "min", "high": "max"}
    assert operator.counts == "n"
    assert operator.schema is None
    operator.describe(SCHEMA)
    assert operator.schema is not None
    assert operator.schema.field("window_start").type == pa.timestamp("us", "UTC")
    assert not operator.partial_sql().endswith(";")


@pytest.mark.parametrize(
    ("sql", "key"),
    [
        ("SELECT city, count(*) AS n FROM r GROUP BY ALL", ("city",)),
        ("SELECT city AS c, count(*) AS n FROM r GROUP BY 1", ("c",)),
        ("SELECT upper(city) AS c, count(*) AS n FROM r GROUP BY c", ("c",)),
        ("SELECT upper(city) AS c, count(*) AS n FROM r GROUP BY upper(city)", ("c",)),
        ("SELECT place.city, sum(x) AS n FROM r GROUP BY place.city", ("city",)),
        ("SELECT t AS city, count(*) AS n FROM r LATERAL VIEW explode(x) e AS t GROUP BY t", ("city",)),
        ("SELECT city, count(*) AS n FROM (SELECT explode(cities) AS city FROM r) GROUP BY city", ("city",)),
        ("SELECT window.end AS w, count(*) AS n FROM r GROUP BY WINDOW (t, '1 minute')", ("w",)),
    ],
)
def test_queries_that_merge(sql: str, key: tuple[str, ...]) -> None:
    operator = aggregate(sql)
    assert isinstance(operator, Aggregate)
    assert operator.key == key
    assert operator.unit == ()


def test_the_shipped_pipeline_merges() -> None:
    products = load_pipeline(conf_dir() / "pipelines" / "meetup").products.values()
    assert [operator_of(product).key for product in products] == [
        ("window_start", "window_end", "city", "country"),
        ("window_start", "rank"),
        ("window_start",),
    ]


@pytest.mark.parametrize(
    ("sql", "says"),
    [
        ("SELECT city, avg(x) AS a FROM r GROUP BY city", "Keep sums and counts"),
        ("SELECT city, count(DISTINCT x) AS a FROM r GROUP BY city", "operator = 'distinct'"),
        ("SELECT city, sum(DISTINCT x) AS a FROM r GROUP BY city", "cannot be merged"),
        ("SELECT city, sum(x) + 1 AS a FROM r GROUP BY city", "cannot be merged"),
        ("SELECT city, sum(x) FILTER (WHERE y) AS a FROM r GROUP BY city", "cannot be merged"),
        ("SELECT city, collect_list(x) AS a FROM r GROUP BY city", "cannot be merged"),
        ("SELECT city, hll_sketch_agg(x) AS a FROM r GROUP BY city", "neither grouped by nor an aggregate"),
        ("SELECT city, count(*) AS n FROM r GROUP BY city HAVING n > 1", "Apply them when reading"),
        ("SELECT city, count(*) AS n FROM r GROUP BY city LIMIT 3", "Apply them when reading"),
        ("SELECT city, count(*) AS n FROM r GROUP BY city ORDER BY n", "Apply them when reading"),
        ("SELECT DISTINCT city, count(*) AS n FROM r GROUP BY city", "Apply them when reading"),
        ("SELECT city FROM r", "Use an operator"),
        ("SELECT count(*) AS n FROM r", "Use an operator"),
        ("DELETE FROM r", "Use an operator"),
        ("SELECT city, count(*) FROM r GROUP BY city", r"column COUNT\(\*\) has no name. Add AS name"),
        ("SELECT city, sum(x) FROM r GROUP BY city", "Add AS name"),
        ("SELECT *, count(*) AS n FROM r GROUP BY city", "Add AS name"),
        ("SELECT city, count(*) AS n FROM r GROUP BY city, country", "Add country to SELECT"),
        ("SELECT city, count(*) AS n FROM r GROUP BY window(t, '1 minute'), city", r"Add window\.start AS"),
        ("SELECT city, country, count(*) AS n FROM r GROUP BY city", "Group by it"),
        ("SELECT city, count(*) AS n FROM r GROUP BY ROLLUP(city)", "Group by columns"),
        ("SELECT city, count(*) AS n FROM r GROUP BY city WITH CUBE", "Group by columns"),
        ("SELECT a.c, count(*) AS n FROM r a JOIN r b ON a.x = b.x GROUP BY a.c", "row by row"),
        ("SELECT c, count(*) AS n FROM (SELECT DISTINCT c FROM r) GROUP BY c", "row by row"),
        ("SELECT c, sum((SELECT max(x) FROM r)) AS n FROM r GROUP BY c", "row by row"),
        ("SELECT c, count(*) AS n FROM (SELECT c, lag(x) OVER (ORDER BY t) FROM r) GROUP BY c", "row by row"),
        ("SELECT a b c FROM", "does not parse"),
        (" ", "does not parse"),
    ],
)
def test_queries_that_do_not_merge_are_refused_with_a_remedy(sql: str, says: str) -> None:
    with pytest.raises(BadProduct, match=says) as caught:
        aggregate(sql)
    assert caught.value.name == "p"
    assert str(caught.value).startswith("product p: ")

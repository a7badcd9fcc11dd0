"""What SQL of the run time may be."""

from __future__ import annotations

import pytest

from lakehouse.contract.errors import QueryRefused
from lakehouse.contract.sql.spark import (
    SOURCE_FUNCTIONS,
    VIEW_FUNCTIONS,
    check_columns,
    check_functions,
    check_relations,
    grouped,
    outputs,
    parse_condition,
    parse_query,
    to_spark,
)


def check(sql: str, functions: frozenset[str] = SOURCE_FUNCTIONS) -> None:
    tree = parse_query(sql, max_bytes=2_000)
    check_relations(tree, ["t"])
    check_functions(tree, functions)
    outputs(tree, limit=5)


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT a, count(*) AS n, sum(coalesce(b, 0)) AS s FROM t GROUP BY a",
        "SELECT window.start AS w, `g`.city AS c, count_if(a = 'x') AS n FROM t GROUP BY window(at, '1 minute'), c",
        "SELECT explode(tags) AS tag, timestamp_millis(at) AS at FROM t",
        "SELECT transform(tags, x -> upper(x)) AS tags FROM t",
        "WITH w AS (SELECT a, max(b) AS b FROM t GROUP BY a) SELECT a, b FROM w",
        "SELECT a FROM t UNION ALL SELECT b AS a FROM t",
        "SELECT CASE WHEN a > 1 THEN 'x' ELSE b || 'y' END AS c, cast(a AS DOUBLE) / 2 AS d FROM t WHERE NOT a IN (1)",
    ],
)
def test_what_is_taken(sql: str) -> None:
    check(sql)


@pytest.mark.parametrize(
    ("sql", "code"),
    [
        ("SELECT reflect('java.lang.System', 'exit', 1) AS a FROM t", "function"),
        ("SELECT java_method('a', 'b') AS a FROM t", "function"),
        ("SELECT input_file_name() AS a FROM t", "function"),
        ("SELECT current_user() AS a FROM t", "function"),
        ("SELECT now() AS a FROM t", "function"),
        ("SELECT current_timestamp AS a FROM t", "function"),
        ("SELECT rand() AS a FROM t", "function"),
        ("SELECT a FROM t WHERE b > (SELECT max(uuid()) FROM t)", "function"),
        ("SELECT transform(a) USING 'cat' AS (b) FROM t", "sql"),
        ("SELECT a FROM other", "relation"),
        ("SELECT a FROM t, other", "relation"),
        ("SELECT a FROM (SELECT * FROM other) AS t", "relation"),
        ("SELECT a FROM db.t", "relation"),
        ("SELECT a FROM parquet.`/etc/passwd`", "relation"),
        ("SELECT * FROM read_parquet('/etc/passwd')", "relation"),
        ("SELECT id AS a FROM range(10)", "relation"),
        ("SELECT 1 AS a", "relation"),
        ("SELECT a FROM t; SELECT b FROM t", "sql"),
        ("SELECT a FROM", "sql"),
        ("DROP TABLE t", "sql"),
        ("INSERT INTO t SELECT 1", "sql"),
        ("SET a = 1", "sql"),
        ("SELECT /*+ BROADCAST(t) */ a FROM t", "sql"),
        ("SELECT a FROM t TABLESAMPLE (10 PERCENT)", "sql"),
        ("SELECT ? AS a FROM t", "sql"),
        ("SELECT a\0 FROM t", "sql"),
        ("", "sql"),
        ("SELECT a + 1 FROM t", "column"),
        ("SELECT a, b AS a FROM t", "column"),
        ("SELECT a, b, c, d, e, f FROM t", "quota"),
        (f"SELECT '{'x' * 2_000}' AS a FROM t", "quota"),
        (f"SELECT {'(' * 150}a{')' * 150} AS a FROM t", "quota"),
    ],
)
def test_what_is_refused(sql: str, code: str) -> None:
    with pytest.raises(QueryRefused) as caught:
        check(sql)
    assert caught.value.code == code, str(caught.value)


def test_views_have_the_shorter_list() -> None:
    assert VIEW_FUNCTIONS < SOURCE_FUNCTIONS
    with pytest.raises(QueryRefused, match="the function explode is not taken here"):
        check("SELECT explode(a) AS a FROM t", VIEW_FUNCTIONS)


@pytest.mark.parametrize("sql", ["count > 100", "a IS NULL OR b LIKE 'x%'", "abs(a - b) >= 0.5 -- and so on"])
def test_a_condition(sql: str) -> None:
    parse_condition(sql)


@pytest.mark.parametrize(
    "sql",
    [
        "",
        "*",
        "a, b",
        "a FROM t",
        "a LIMIT 1",
        "a; b",
        "count(*) > 1",
        "(SELECT 1) > 0",
        "sum(a) OVER () > 1",
        "now() > a",
        "a >",
    ],
)
def test_what_is_no_condition(sql: str) -> None:
    with pytest.raises(QueryRefused):
        parse_condition(sql)


def test_columns_that_are_not_there_are_named_with_the_nearest() -> None:
    tree = parse_query(
        "SELECT r.response AS x, place.city AS city, x AS again FROM t AS r WHERE window.start > 1", max_bytes=999
    )
    check_columns(tree, ["response", "place"])
    tree = parse_query("SELECT respons FROM t", max_bytes=999)
    with pytest.raises(QueryRefused, match=r"there is no column 'respons'. Did you mean 'response'\?"):
        check_columns(tree, ["response", "place"])


def test_what_a_query_gives() -> None:
    tree = parse_query("SELECT a.b AS x, count(*) AS n, y FROM t GROUP BY ALL", max_bytes=999)
    assert (outputs(tree, limit=3), grouped(tree)) == (("x", "n", "y"), ("x", "y"))
    assert outputs(parse_query("SELECT *, 1 AS b FROM t", max_bytes=999), limit=1) == ()
    assert grouped(parse_query("SELECT a FROM t", max_bytes=999)) == ()


def test_in_either_dialect() -> None:
    tree = parse_query("SELECT window.start AS w FROM t GROUP BY window(at, '1 minute')", max_bytes=999)
    assert to_spark(tree) == "SELECT window.start AS w FROM t GROUP BY window(at, '1 minute')"
    tree = parse_query("SELECT if(a, 1, 2) AS x, max_by(a, b) AS m FROM t", max_bytes=999)
    assert tree.sql(dialect="duckdb") == "SELECT CASE WHEN a THEN 1 ELSE 2 END AS x, ARG_MAX(a, b) AS m FROM t"

"""What a statement may be, and what it sees."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from lakehouse.contract.lake import UnknownTable
from serve.core.model import OPEN, Principal
from serve.errors import SqlError
from serve.sql.statement import Statement, StatementResult, run
from tests.serve.lakes import TOPICS, Product, city, rsvps_by_city, top_topics, topics, window

BONN = Principal(rows={"*": "city = 'Bonn'"})


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Version 1 and 2 of topics; cities in partials; a bronze table without a key."""
    root = tmp_path_factory.mktemp("lake")
    product = top_topics(root)
    product.overwrite(topics(0, [5, 4, 3]), [window(0)])
    product.overwrite(topics(0, [50]), [window(0)])
    cities = rsvps_by_city(root)
    cities.append([city(0, "Berlin", 1), city(0, "Bonn", 2)])
    cities.append([city(0, "Berlin", 10), city(0, "Bonn", 20), city(1, "Secret town", 7)])
    Product(root / "bronze" / "rsvps", TOPICS, {}).append(topics(0, [1]))
    return root


def rows(root: Path, sql: str, principal: Principal = OPEN, **more: Any) -> list[Any]:
    answer = run(Statement(root, sql, principal, **more))
    found: list[Any] = json.loads(answer.body)
    assert len(found) == answer.rows
    return found


def test_tables_fold_and_join(root: Path) -> None:
    assert rows(root, "SELECT city, yes FROM rsvps_by_city WHERE city LIKE 'B%' ORDER BY \"yes\"") == [
        {"city": "Berlin", "yes": 11},
        {"city": "Bonn", "yes": 22},
    ]
    assert rows(root, "SELECT count(*) AS n FROM rsvps_by_city__partials") == [{"n": 5}]
    assert rows(root, "WITH x AS (SELECT count AS n FROM top_topics) SELECT n FROM x, rsvps") == [{"n": 50}]
    assert [row["name"] for row in rows(root, "SHOW TABLES")] == ["rsvps", "rsvps_by_city", "top_topics"]
    assert rows(root, "SELECT sum(range) AS s FROM range(4)") == [{"s": 6}]


def test_a_table_as_it_was(root: Path) -> None:
    both = "SELECT o.count AS was, n.count AS now FROM top_topics FOR VERSION AS OF 1 o JOIN top_topics n USING (rank)"
    assert rows(root, both) == [{"was": 5, "now": 50}]
    assert rows(root, "SELECT count(*) AS n FROM top_topics", as_of="1") == [{"n": 3}]
    later = run(Statement(root, "SELECT count(*) AS n FROM top_topics FOR TIMESTAMP AS OF '2999-01-01'", OPEN))
    assert (json.loads(later.body), later.versions) == ([{"n": 1}], {"top_topics": 2})
    assert rows(root, "SELECT sum(yes) AS n FROM rsvps_by_city", as_of="1") == [{"n": 3}]
    for wrong in ("FOR VERSION AS OF 99", "FOR TIMESTAMP AS OF '2001-01-01'", "FOR TIMESTAMP AS OF 'noon'"):
        with pytest.raises(SqlError):
            rows(root, f"SELECT * FROM top_topics {wrong}")


@pytest.mark.parametrize(
    "sql",
    [
        "DROP TABLE top_topics",
        "INSERT INTO top_topics SELECT * FROM top_topics",
        "SELECT 1; SELECT 2",
        "COPY top_topics TO '/tmp/x'",
        "ATTACH '/tmp/x.db'",
        "PRAGMA database_list",
        "SET memory_limit = '1TB'",
        "INSTALL httpfs",
        "CALL pragma_version()",
        "SELECT * FROM read_csv('/etc/passwd')",
        "SELECT * FROM read_text('/etc/passwd')",
        "SELECT * FROM '/etc/passwd'",
        "SELECT * FROM query_table('rsvps_by_city')",
        "SELECT * FROM query('SELECT 1')",
        "SELECT * FROM duckdb_settings()",
        "SELECT * FROM information_schema.tables",
        "SELECT getenv('HOME')",
        "SELECT current_setting('memory_limit')",
        "SELECT content FROM glob('/*')",
        "EXPLAIN ANALYZE SELECT 1",
        "not sql at all (",
        "SELECT " + "(" * 5_000 + "1" + ")" * 5_000,
        "WITH RECURSIVE x AS (SELECT 1) DELETE FROM x",
    ],
)
def test_what_is_not_taken(root: Path, sql: str) -> None:
    with pytest.raises((SqlError, UnknownTable)):
        run(Statement(root, sql, OPEN))


def test_a_row_filter_cannot_be_got_round(root: Path) -> None:
    assert rows(root, "SELECT city, yes FROM rsvps_by_city", BONN) == [{"city": "Bonn", "yes": 22}]
    assert rows(root, "SELECT city FROM rsvps_by_city FOR VERSION AS OF 1", BONN) == [{"city": "Bonn"}]
    assert rows(root, "SELECT count(*) AS n FROM rsvps_by_city WHERE 1=1 OR city <> 'x'", BONN) == [{"n": 1}]
    for probe in ("SELECT * FROM rsvps_by_city__partials", "SELECT * FROM __source"):
        with pytest.raises((SqlError, UnknownTable)):
            run(Statement(root, probe, BONN))
    with pytest.raises(SqlError) as told:  # an error of the statement's own says nothing of hidden rows
        run(Statement(root, "SELECT * FROM rsvps_by_city WHERE CAST(city AS INT) > 0", BONN))
    assert "Bonn" in str(told.value) and "Secret" not in str(told.value) and "Berlin" not in str(told.value)
    hidden = Principal(rows={"rsvps_by_city": "city = 'x' OR nothere = 1"})
    with pytest.raises(SqlError, match="does not fit"):
        run(Statement(root, "SELECT * FROM rsvps_by_city", hidden))


def test_tables_that_are_not_ones_own_do_not_exist(root: Path) -> None:
    some = Principal(tables=frozenset({"top_topics"}))
    assert [row["name"] for row in rows(root, "SHOW TABLES", some)] == ["top_topics"]
    for sql in (
        "SELECT * FROM rsvps_by_city",
        "SELECT * FROM rsvps_by_city__partials",
        "DESCRIBE rsvps_by_city",
        "SELECT (SELECT count(*) FROM rsvps_by_city) AS n",
        "SELECT * FROM top_topics WHERE EXISTS (SELECT 1 FROM rsvps)",
        "WITH a AS (WITH rsvps AS (SELECT 1) SELECT * FROM rsvps) SELECT * FROM a, rsvps",
    ):
        with pytest.raises((UnknownTable, SqlError)) as refused:
            run(Statement(root, sql, some))
        assert "Berlin" not in str(refused.value)
        assert "there are: rsvps" not in str(refused.value)


def test_the_answer_is_bounded(root: Path) -> None:
    few = run(Statement(root, "SELECT range AS a FROM range(100000)", OPEN, rows=5_000))
    assert (few.rows, few.truncated, len(json.loads(few.body))) == (5_000, True, 5_000)
    small = run(Statement(root, "SELECT repeat('x', 1000) AS a FROM range(100000)", OPEN, size=100_000))
    assert small.truncated and len(small.body) <= 100_000
    with pytest.raises(SqlError, match="Memory"):
        run(Statement(root, "SELECT list(range) FROM range(100000000)", OPEN, memory_mb=50))


def test_arrow(root: Path) -> None:
    answer: StatementResult = run(
        Statement(root, "SELECT city, yes FROM rsvps_by_city ORDER BY 1 LIMIT 1", OPEN, arrow=True)
    )
    assert pa.ipc.open_stream(io.BytesIO(answer.body)).read_all().to_pylist() == [{"city": "Berlin", "yes": 11}]

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import orjson
import pyarrow as pa
import pytest

from lakehouse.contract.lake import Lake, UnknownTable
from serve.errors import SqlError
from serve.sql.statement import rows_as_json, run_sql
from tests.serve.lakes import city, rsvps_by_city, top_topics, topics, window


@pytest.fixture
def lake(root: Path) -> Lake:
    cities = rsvps_by_city(root)
    cities.append([city(0, "Bonn", 3), city(0, "Ulm", 1)])
    cities.append([city(0, "Bonn", 2), city(1, "Bonn", 1)])
    top_topics(root).overwrite(topics(0, [3, 2]), [window(0)])
    return Lake(root)


def answer(lake: Lake, sql: str, limit: int | None = None) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = orjson.loads(rows_as_json(run_sql(lake, sql, limit=limit)))
    return rows


@pytest.mark.parametrize(
    ("sql", "rows"),
    [
        ("SELECT rank, count FROM top_topics ORDER BY rank", [{"rank": 1, "count": 3}, {"rank": 2, "count": 2}]),
        ("SELECT window_start FROM top_topics LIMIT 1;", [{"window_start": "2026-01-01T00:00:00Z"}]),
        ("SELECT sketch FROM top_topics WHERE rank = 1", [{"sketch": "AP8="}]),
        ("SELECT city, yes FROM rsvps_by_city ORDER BY yes DESC LIMIT 1", [{"city": "Bonn", "yes": 5}]),
        ("SELECT count(*) AS n FROM rsvps_by_city", [{"n": 3}]),
        ("SELECT count(*) AS n FROM rsvps_by_city__partials", [{"n": 4}]),
        ("SELECT sum(yes) AS s FROM RSVPS_BY_CITY", [{"s": 7}]),
        ("WITH c AS (SELECT 1 AS x) SELECT x FROM c UNION SELECT 1", [{"x": 1}]),
        ("WITH top_topics AS (SELECT * FROM top_topics) SELECT count(*) AS n FROM top_topics", [{"n": 2}]),
        ("FROM top_topics SELECT max(count) AS m", [{"m": 3}]),
        ("SHOW TABLES", [{"name": "rsvps_by_city"}, {"name": "top_topics"}]),
        ("SELECT TIMESTAMPTZ '2026-01-01 00:00:00'::VARCHAR AS t", [{"t": "2026-01-01 00:00:00+00"}]),
    ],
)
def test_answers(lake: Lake, sql: str, rows: list[dict[str, object]]) -> None:
    assert answer(lake, sql) == rows


def test_columns_of_a_folded_table_keep_their_types(lake: Lake) -> None:
    described = {row["column_name"]: row["column_type"] for row in answer(lake, "DESCRIBE rsvps_by_city")}
    assert described["yes"] == "BIGINT"
    assert described["window_end"] == "TIMESTAMP WITH TIME ZONE"
    assert list(described) == ["window_start", "window_end", "city", "country", "yes", "no", "guests"]


def test_the_limit_holds(lake: Lake) -> None:
    assert len(answer(lake, "SELECT * FROM range(1000000)", limit=5)) == 5
    assert len(answer(lake, "SHOW TABLES", limit=1)) == 1


def test_an_unknown_table_is_named_with_the_known_ones(lake: Lake) -> None:
    with pytest.raises(UnknownTable) as error:
        run_sql(lake, "SELECT * FROM top_topic JOIN rsvps_by_city USING (window_start)")
    assert (error.value.name, error.value.known) == ("top_topic", ["rsvps_by_city", "top_topics"])


@pytest.mark.parametrize(
    "sql",
    [
        "",
        "selec 1",
        "SELECT 1; SELECT 2",
        "INSERT INTO top_topics SELECT * FROM top_topics",
        "DELETE FROM top_topics",
        "DROP TABLE top_topics",
        "CREATE TABLE x AS SELECT 1",
        "COPY top_topics TO '/tmp/stolen.csv'",
        "ATTACH '/tmp/x.db'",
        "INSTALL httpfs",
        "LOAD httpfs",
        "SET enable_external_access = true",
        "PRAGMA database_list",
        "CALL pragma_version()",
        "EXPORT DATABASE '/tmp/x'",
        "SELECT * FROM read_csv('/etc/hostname')",
        "SELECT * FROM read_text('/etc/hostname')",
        "SELECT * FROM glob('/*')",
        "SELECT * FROM gold.top_topics",
        "SELECT nothing FROM top_topics",
        "SELECT * FROM information_schema.tables",
    ],
)
def test_what_is_refused(lake: Lake, sql: str) -> None:
    with pytest.raises(SqlError) as error:
        run_sql(lake, sql)
    assert str(error.value)
    assert not Path("/tmp/stolen.csv").exists()


def test_a_file_is_not_a_table(lake: Lake) -> None:
    with pytest.raises((UnknownTable, SqlError)):
        run_sql(lake, "SELECT * FROM '/etc/hostname'")


def test_json_of_any_result() -> None:
    table = pa.table(
        {
            "t": pa.array([datetime(2026, 1, 1, 0, 0, 0, 250_000, tzinfo=UTC)], pa.timestamp("us", "UTC")),
            "big": pa.array([2**70], pa.decimal128(38, 0)),
            "b": [b"\x00"],
            "n": pa.array([None], pa.int64()),
        }
    )
    assert (
        rows_as_json(table) == b'[{"t":"2026-01-01T00:00:00.250000Z","big":1180591620717411303424,"b":"AA==","n":null}]'
    )
    assert rows_as_json(table.slice(0, 0)) == b"[]"

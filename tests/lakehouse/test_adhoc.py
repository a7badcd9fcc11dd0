"""Ad-hoc SQL by Spark: the same tables and the same folded rows as by DuckDB, and nothing but reading."""

from __future__ import annotations

import json
from typing import Any

import pytest
from deltalake import write_deltalake
from pyspark.sql import SparkSession
from typer.testing import CliRunner

from jobs.cli import app
from jobs.commands.tables import named_tables, spark_rows
from lakehouse.contract.lake import Lake, UnknownTable
from lakehouse.contract.pipeline import Pipeline
from serve.errors import SqlError
from serve.sql.payloads import payload_schemas
from serve.sql.statement import run_sql
from tests.lakehouse.lakes import bronze_rows, click, pipeline_in
from tests.serve.lakes import city, rsvps_by_city

pytestmark = pytest.mark.spark


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    lake = Lake(tmp_path_factory.mktemp("lake"))
    cities = rsvps_by_city(lake.root)
    cities.append([city(0, "Bonn", 3), city(0, "Ulm", 1)])
    cities.append([city(0, "Bonn", 2), city(1, "Bonn", 1)])
    events = [*map(click, range(5)), {**click(9), "price": "dear"}]
    write_deltalake(str(lake.bronze("clicks").path), bronze_rows([json.dumps(event).encode() for event in events]))
    return lake


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    return pipeline_in(tmp_path_factory.mktemp("pipeline"), "clicks")


@pytest.mark.parametrize(
    ("sql", "rows"),
    [
        ("SELECT city, yes FROM rsvps_by_city ORDER BY yes DESC LIMIT 1", [{"city": "Bonn", "yes": 5}]),
        ("SELECT count(*) AS n FROM rsvps_by_city__partials", [{"n": 4}]),
        ("WITH c AS (SELECT city FROM rsvps_by_city) SELECT count(*) AS n FROM c;", [{"n": 3}]),
        ("SELECT id, place.city FROM clicks__events WHERE id = 1", [{"id": 1, "city": click(1)["place"]["city"]}]),
        ("SELECT count(*) AS n FROM clicks", [{"n": 6}]),
    ],
)
def test_both_engines_give_the_same_rows(
    lake: Lake, pipeline: Pipeline, spark: SparkSession, sql: str, rows: list[dict[str, Any]]
) -> None:
    names = named_tables(lake, pipeline.sources, sql)
    assert spark_rows(spark.newSession(), lake, pipeline.sources, names, sql).to_pylist() == rows
    assert run_sql(lake, sql, payloads=payload_schemas(pipeline.sources.values())).to_pylist() == rows


def test_spark_judges_events_as_the_driver_does(lake: Lake, pipeline: Pipeline, spark: SparkSession) -> None:
    sql = "SELECT event_time, reason FROM clicks__events WHERE id IS NULL OR reason IS NOT NULL"
    found = spark_rows(spark.newSession(), lake, pipeline.sources, named_tables(lake, pipeline.sources, sql), sql)
    assert found.to_pylist() == [{"event_time": None, "reason": "does not fit the schema"}]


def test_an_error_of_sparks_own_is_told_without_a_stack(lake: Lake, pipeline: Pipeline, spark: SparkSession) -> None:
    sql = "SELECT nothing FROM rsvps_by_city"
    with pytest.raises(SqlError, match="UNRESOLVED_COLUMN") as told:
        spark_rows(spark.newSession(), lake, {}, named_tables(lake, {}, sql), sql)
    assert "at org.apache" not in str(told.value) and "Project" not in str(told.value)


@pytest.mark.parametrize(
    "sql",
    [
        "DELETE FROM clicks", "INSERT INTO clicks SELECT * FROM clicks", "DROP TABLE clicks", "SELECT 1; SELECT 2",
        "WITH c AS (SELECT 1) INSERT INTO clicks SELECT * FROM c", "CREATE VIEW v AS SELECT 1", "SET a = 1",
        "MERGE INTO clicks USING clicks AS o ON true WHEN MATCHED THEN DELETE", "ADD JAR '/tmp/x.jar'",
        "OPTIMIZE clicks",
        "FROM clicks INSERT INTO clicks SELECT *", "VACUUM clicks", "UPDATE clicks SET id = 1",
    ],
)  # fmt: skip
def test_what_writes_is_refused_before_spark_starts(lake: Lake, sql: str) -> None:
    with pytest.raises(SqlError):
        named_tables(lake, {}, sql)


def test_unknown_names(lake: Lake, pipeline: Pipeline) -> None:
    for name in ("click", "rsvps_by_city__events", "clicks__event"):
        with pytest.raises(UnknownTable):
            named_tables(lake, pipeline.sources, f"SELECT * FROM {name}")


def test_the_command_refuses_without_starting_spark(lake: Lake) -> None:
    told = CliRunner().invoke(app, ["sql", "--engine", "spark", "SELECT * FROM click", "--lake", str(lake.root)])
    assert isinstance(told.exception, UnknownTable)

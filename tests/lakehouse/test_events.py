"""Events of a batch: in the driver or in Spark they are the same, and they are computed once."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_schema

from lakehouse.bronze.query import RECORDS
from lakehouse.bronze.seen import JUDGED
from lakehouse.bronze.table import COLUMNS
from lakehouse.contract.errors import ConfigError
from lakehouse.contract.pipeline import Pipeline, Product
from lakehouse.contract.pipeline.expectations import WARN, Expectation
from lakehouse.events import (
    Events,
    LocalQueries,
    SparkEvents,
    as_bronze,
    check_repeatable,
    columns_read,
    compiled_session,
    materialized,
)
from lakehouse.operators.registry import operator_of
from lakehouse.operators.sql import NamesRead
from lakehouse.prepared import PreparedQuery, Table
from lakehouse.silver.conform import conform
from tests.lakehouse.lakes import bronze_rows, mixture, pipeline_in

pytestmark = pytest.mark.spark
SEEN = (*JUDGED, "received_at", "event_time", "warned")


def product(sql: str) -> Product:
    return Product(layer="gold", source="clicks", sql=sql, name="p")


COUNTED = "SELECT page, count(*) AS n, max(clicks.who) AS w FROM clicks GROUP BY page"


def test_columns_read_are_those_of_every_product() -> None:
    read = columns_read([product(COUNTED)])
    assert read is not None
    assert read.every == {"page", "n", "w", "who", "clicks"}
    assert columns_read([product("SELECT * FROM clicks"), product(COUNTED)]) is None
    assert columns_read([product("SELECT c.* FROM clicks c")]) is None
    assert columns_read([product(COUNTED)], sql=["not )( SQL"]) is None
    assert columns_read([]) == NamesRead()


@pytest.mark.parametrize(
    ("sql", "whole"),
    [
        ("SELECT place.city.name AS a FROM t", {"name", "a", "t"}),
        ("SELECT t.place.city.name.first FROM t", {"first", "t"}),
        ("SELECT place.city, PLACE FROM t", {"place", "city", "t"}),
        ("SELECT to_json(place) AS a, place['city'] AS b FROM t", {"place", "a", "b", "t"}),
        ("SELECT explode(places.city) AS x FROM t", {"city", "x", "t"}),
        ("SELECT transform(places, p -> p.city) AS x FROM t", {"places", "p", "city", "x", "t"}),
        ("SELECT e.city FROM (SELECT explode(places) AS e FROM t)", {"places", "e", "city", "t"}),
    ],
)
def test_a_name_without_a_field_behind_it_may_be_read_whole(sql: str, whole: set[str]) -> None:
    read = columns_read([product(sql)])
    assert read is not None
    assert read.whole == whole


@pytest.mark.parametrize(
    ("changed", "key"),
    [
        ({"event_time": "now()"}, "sources.clicks.event_time"),
        ({"expectations": {"old": Expectation("at < unix_millis(current_timestamp())", WARN)}}, "expectations.old"),
        ({}, "products.p.sql"),
    ],
)
def test_sql_that_depends_on_when_it_is_computed(pipeline: Pipeline, changed: dict[str, Any], key: str) -> None:
    source = dataclasses.replace(pipeline.sources["clicks"], **changed)
    odd = product("SELECT who, count_if(at > unix_timestamp()) AS n FROM clicks GROUP BY who")
    with pytest.raises(ConfigError, match="another answer on a replay") as caught:
        check_repeatable(source, [] if changed else [odd])
    assert caught.value.key.endswith(key)
    check_repeatable(pipeline.sources["clicks"], pipeline.products.values())


@pytest.fixture
def pipeline(tmp_path: Path) -> Pipeline:
    found = pipeline_in(tmp_path / "clicks", "clicks")
    found.sources["clicks"].expectations["known"] = Expectation("who <> 'w1'", WARN)
    return found


@pytest.fixture
def queries(spark: SparkSession, pipeline: Pipeline) -> Iterator[LocalQueries]:
    products = list(pipeline.products.values())
    found = LocalQueries(spark, pipeline.sources["clicks"], products, list(map(operator_of, products)), SEEN, "default")
    yield found
    found.close()


def rows_of_bronze() -> pa.Table:
    records = mixture(0, 150)
    rejects = [record.reject for record in records]
    ids = [record.event_id or f"@clicks/0/{number}" for number, record in enumerate(records)]
    return bronze_rows([record.payload for record in records], event_id=ids, reject=rejects)


def in_order(rows: pa.Table) -> list[str]:
    return sorted(json.dumps(row, default=str, sort_keys=True) for row in rows.to_pylist())


def results(events: Events, queries: LocalQueries, since: int) -> dict[str, list[str]]:
    """All that products and tables take of the events; sketches by what Spark's bytes are."""
    partials = [partial() for partial in events.partials(queries.operators, since)]
    found = {f"partial {number}": in_order(rows) for number, rows in enumerate(partials)}
    return {**found, "rejected": in_order(events.rejected()), "warned": in_order(events.warned())}


def test_small_and_long_batches_are_the_same(spark: SparkSession, pipeline: Pipeline, queries: LocalQueries) -> None:
    assert queries.usable
    bronze = rows_of_bronze()
    frame = spark.createDataFrame(bronze, from_arrow_schema(COLUMNS))
    source = pipeline.sources["clicks"]
    small = queries.of_bronze(bronze)
    parsed, read_again = queries.parsed(frame).coalesce(1), queries.read_again(frame).coalesce(1)
    with materialized(parsed) as rows, materialized(read_again) as kept:
        again = SparkEvents(kept, source)
        assert in_order(again.columns(SEEN)) == in_order(small.columns(SEEN))
        assert results(again, queries, 0) == results(small, queries, 0)
        long = SparkEvents(rows, source)
        assert in_order(small.columns(SEEN)) == in_order(long.columns(SEEN))
        assert as_bronze(rows).toArrow().sort_by("offset").select(["event_id", "reject", "payload"]) == bronze.sort_by(
            "offset"
        ).select(["event_id", "reject", "payload"])
        for since in (0, int(bronze["bronze_at"][0].value)):
            assert results(small, queries, since) == results(long, queries, since)
        judged = [one.columns(SEEN) for one in (small, long)]
        for first in (9, 700):  # few copies are named, more are joined
            chosen = [np.array([offset.as_py() % first != 0 for offset in one["offset"]]) for one in judged]
            left = [one.only(*pair) for one, *pair in zip((small, long), judged, chosen, strict=True)]
            assert results(left[0], queries, 0) == results(left[1], queries, 0)


def test_views_of_the_sources_name_do_not_disturb_the_queries(
    pipeline: Pipeline, queries: LocalQueries, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A build registers a view of the source's name too, and may do so while the queries are planned."""
    planned = queries._union

    def disturbed(table: Table) -> DataFrame:
        empty = queries.session.createDataFrame([], table().schema)
        empty.createOrReplaceTempView("clicks")
        found = planned(table)
        empty.createOrReplaceTempView("clicks")
        return found

    monkeypatch.setattr(queries, "_union", disturbed)
    queries.plan()
    for rehearsal in queries.rehearsals():
        rehearsal()
    events = queries.of_bronze(rows_of_bronze())
    columns = events.columns(["topic", "partition", "offset"])
    partials = dict(zip(pipeline.products, events.partials(queries.operators, 0), strict=True))
    counted = sum(partials["totals"]()["n"].to_pylist())
    assert counted == columns.num_rows - sum(columns["rejected"].to_pylist()) > 0


def test_records_of_kafka_are_what_bronze_gives_back(pipeline: Pipeline, queries: LocalQueries) -> None:
    """Whether the driver has their bytes parsed, or Spark parses them where it has read them."""
    records = [record for record in mixture(0, 40) if record.event_id is not None]
    headers = [[{"key": key, "value": value} for key, value in record.headers()] for record in records]
    table = pa.table(
        {
            "key": pa.array([b"k"] * len(records)),
            "value": pa.array([record.payload for record in records], pa.binary()),
            "topic": pa.array(["clicks"] * len(records)),
            "partition": pa.array([0] * len(records), pa.int32()),
            "offset": pa.array(range(len(records)), pa.int64()),
            "timestamp": pa.array([0] * len(records), pa.timestamp("us", "UTC")),
            "timestampType": pa.array([0] * len(records), pa.int32()),
            "headers": headers,
        }
    )
    events, bronze = queries.of_records(table)
    assert bronze["payload"].to_pylist() == [record.payload for record in records]
    assert bronze["event_id"].to_pylist() == [record.event_id for record in records]
    assert bronze["reject"].to_pylist() == [record.reject for record in records]
    assert bronze.schema.names == [name for name in COLUMNS.names if name not in ("bronze_at", "date")]
    at = pa.array([0] * len(records), pa.timestamp("us", "UTC"))
    whole = bronze.append_column("bronze_at", at).append_column("date", at.cast(pa.date32()))
    again = queries.of_bronze(whole.select(COLUMNS.names).cast(COLUMNS)).columns(("dedupe_key", "reason", "event_time"))
    assert events.select(["dedupe_key", "reason", "event_time"]).equals(again.drop_columns("rejected"))

    frame = queries.session.createDataFrame(table, from_arrow_schema(RECORDS))
    # Of another source and tenant too: those travel, the usual ones do not.
    for tenant in ("default", "another"):
        queries._tenant = tenant
        long_events, long_bronze = queries.of_batch(frame.coalesce(1))
        assert long_bronze.select(bronze.schema.names).cast(bronze.schema).equals(bronze)
        assert long_events.select(events.schema.names).cast(events.schema).equals(events)
        del queries._batch_columns


_WORDS = r"""
5 null true NaN -Infinity 1e999 "\ud800" "\u0000" 'a' {"x":[1,{}]} [5] ["a",{"b":"c"}] [{"a":1,"b":{}}] [{"b":"x"},null]
{"city":"Ulm","name":[1],"lat":2} {"city":1,"lat":"x"} {"city":{"x":1},"name":} "open { 01 +1 tru
"""
ODD = [*_WORDS.split(), "", '"a\tb"', "1" * 1_500, "[" * 1_200]


def test_texts_that_nobody_reads_are_not_parsed_and_change_nothing(spark: SparkSession, pipeline: Pipeline) -> None:
    schema = "id BIGINT, at BIGINT, who STRING, price BIGINT, note STRING, source STRING, "
    schema += "names STRUCT<c: STRING, d: STRING>, "
    schema += "place STRUCT<city: STRING, name: STRING, lat: DOUBLE>, tags ARRAY<STRUCT<a: STRING, b: STRING>>"
    source = dataclasses.replace(pipeline.sources["clicks"], schema=schema)
    sql = "SELECT event_time, who, place.city AS city, explode(tags.b) AS tag, source_ FROM clicks"
    queries = LocalQueries(spark, source, [product(sql)], [], SEEN, "default")
    assert queries._fields.simpleString() == (
        "struct<id:bigint,at:bigint,who:string,price:bigint,source:string,names:struct<c:string>,"
        "place:struct<city:string,lat:double>,tags:array<struct<b:string>>>"
    )
    valid = '{"id": 1, "at": 5, "who": "w", "price": 1, "place": {"city": "Ulm"}'
    payloads = [
        f'{valid}, "{field}": {value}}}' for field in ("note", "source", "names", "place", "tags") for value in ODD
    ]
    frame = spark.createDataFrame(bronze_rows([text.encode() for text in payloads]), from_arrow_schema(COLUMNS))
    read = ("reason", "event_id", "dedupe_key", "event_time", "who", "place.city", "place.lat", "tags.b", "source_")
    whole, lean = (
        events.select(*read).toArrow().to_pylist() for events in (conform(frame, source), queries._conformed(frame))
    )
    for text, *rows in zip(payloads, whole, lean, strict=True):
        # Nobody takes the fields of a refused event from here.
        names = [name.rpartition(".")[2] for name in (read if rows[0]["reason"] is None else read[:3])]
        first, second = ([row[name] for name in names] for row in rows)
        assert first == second, text
    refused = sum(row["reason"] is not None for row in lean)
    assert 30 < refused < len(payloads) - 30
    queries.close()


def test_what_is_not_utf8_is_refused_in_a_long_batch(queries: LocalQueries) -> None:
    def records(**last: object) -> pa.Table:
        events = [record for record in mixture(0, 40) if record.event_id is not None and record.payload]
        rows = [
            {
                "value": record.payload,
                "topic": "clicks",
                "partition": 0,
                "offset": number,
                "timestamp": 0,
                "headers": [{"key": key, "value": value} for key, value in record.headers()],
            }
            for number, record in enumerate(events)
            if b"\xff" not in record.payload
        ]
        rows[-1].update(last)
        return pa.Table.from_pylist(rows, schema=RECORDS)

    def long_batch(table: pa.Table) -> tuple[pa.Table, pa.Table]:
        frame = queries.session.createDataFrame(table, from_arrow_schema(RECORDS))
        return queries.of_batch(frame.coalesce(1))

    def assert_as_short(table: pa.Table) -> pa.Table:
        events, bronze = queries.of_records(table)
        long_events, long_bronze = long_batch(table)
        assert long_events.select(events.schema.names).cast(events.schema).equals(events)
        assert long_bronze.select(bronze.schema.names).cast(bronze.schema).equals(bronze)
        return long_events

    assert_as_short(records())
    assert not queries._checks_text
    ordinary = records()["headers"][-1].as_py()
    for name in ("id", "tenant", "collector"):
        changed = [{**one, "value": b"\xff"} if one["key"] == name else one for one in ordinary]
        assert_as_short(records(headers=changed))
        assert queries._checks_text
        queries._checks_text = False
        del queries._batch_columns
    found = assert_as_short(records(value=b'{"who": "\xff"}'))
    assert found["reason"][-1].as_py() == "not valid UTF-8"
    assert queries._checks_text


def test_arrow_takes_the_same_bytes_for_utf8_as_spark(spark: SparkSession) -> None:
    """A long batch is checked by the one, a replay by the other."""
    edges = b"\x00\x7f\x80\x8f\x90\x9f\xa0\xbf\xc0\xc1\xc2\xdf\xe0\xe1\xec\xed\xee\xef\xf0\xf3\xf4\xf5\xff"
    texts = [bytes(text) for size in (1, 2, 3) for text in itertools.product(edges, repeat=size)]
    texts += [bytes([first, second, 0x80, last]) for first in edges for second in edges for last in edges]

    def is_text(*values: bytes) -> bool:
        try:
            pa.array(values, pa.binary()).cast(pa.string())
        except pa.ArrowInvalid:
            return False
        return True

    frame = spark.createDataFrame(pa.table({"text": pa.array(texts, pa.binary())}))
    found = frame.selectExpr("text", "is_valid_utf8(text) AS valid").toArrow().to_pylist()
    assert len(found) == len(texts)
    assert all(row["valid"] == is_text(row["text"]) for row in found)
    assert not is_text(b"\xc3", b"\xa9"), "each value by itself"


def test_a_source_without_products(spark: SparkSession, pipeline: Pipeline) -> None:
    queries = LocalQueries(spark, pipeline.sources["clicks"], [], [], SEEN, "default")
    queries.plan()
    for rehearsal in queries.rehearsals():
        rehearsal()
    events = queries.of_bronze(rows_of_bronze())
    assert events.partials([], 0) == []
    assert events.rejected().num_rows > 0
    queries.close()


def test_a_prepared_query_runs_over_one_table_after_another(spark: SparkSession) -> None:
    schema = pa.schema(
        [("n", pa.int64()), ("tags", pa.list_(pa.string())), ("more", pa.map_(pa.string(), pa.binary()))]
    )
    rows = [{"n": n, "tags": [f"t{n}", None], "more": {"a": b"\xff"} if n % 2 else None} for n in range(7)]

    def doubled(table: Table) -> DataFrame:
        return table().withColumn("n", F.col("n") * 2)

    query = PreparedQuery(compiled_session(spark), from_arrow_schema(schema), doubled, tasks=2)
    for count in (7, 1, 0, 3):
        table = pa.Table.from_pylist(rows[:count], schema=schema)
        found = query.run(table)
        assert found["n"].to_pylist() == [2 * n for n in range(count)]  # in their order
        assert found.drop_columns("n").to_pylist() == table.drop_columns("n").to_pylist()
    query.close()
    query.close()


def test_events_are_read_once_and_let_go(spark: SparkSession, tmp_path: Path) -> None:
    file = str(tmp_path / "events")
    rows = [(1, "a", [("x", 1)]), (2, None, []), (3, "ä" * 100, None)]
    kind = "id INT, text STRING, parts ARRAY<STRUCT<name: STRING, n: INT>>"
    spark.createDataFrame(rows, kind).coalesce(1).write.parquet(file)
    held = spark.sparkContext._jsc.sc().getPersistentRDDs
    before = held().size()
    # A random number tells two computations apart.
    events = spark.read.schema(kind).parquet(file).withColumn("once", F.rand())
    with materialized(events) as same:
        first = same.orderBy("id").toArrow()
        assert held().size() == before + 1
        assert same.orderBy("id").toArrow().equals(first)
        assert same.where("id = 3").select("once").toArrow()["once"][0] == first["once"][2]
        assert [row["text"] for row in first.to_pylist()] == ["a", None, "ä" * 100]
        assert first["parts"].to_pylist() == [[{"name": "x", "n": 1}], [], None]
    assert held().size() == before

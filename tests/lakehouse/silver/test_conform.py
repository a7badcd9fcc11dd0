"""Bronze rows as typed events, or refused with a reason."""

from __future__ import annotations

import dataclasses
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from ingest.border.admission import Border
from lakehouse.batch import rejected_rows, run_partial
from lakehouse.bronze.query import to_bronze
from lakehouse.contract.errors import ConfigError
from lakehouse.contract.pipeline import Product, Source, load_pipeline
from lakehouse.contract.pipeline.expectations import BORDER, WARN, Expectation
from lakehouse.contract.pipeline.source import ENVELOPE_COLUMNS, EnrichSpec
from lakehouse.contract.settings import conf_dir
from lakehouse.declaration import source_declaration
from lakehouse.operators.rows import Latest
from lakehouse.silver.conform import conform, misfits, payload_schema
from tests.lakehouse.lakes import T0, bronze_rows, click

pytestmark = pytest.mark.spark

CLICKS = Source(
    topic="clicks",
    schema="id BIGINT, at BIGINT, who STRING, price INT, place STRUCT<city: STRING, lat: DOUBLE>, tags ARRAY<STRING>, "
    "lines ARRAY<STRUCT<n: INT>>",
    event_time="timestamp_millis(at)",
    event_id="{id}",
    required=("id", "at", "place.city"),
    expectations={
        "cheap": Expectation("price IS NULL OR price < 100"),
        "sound": Expectation("price IS NULL OR 10 div price >= 0"),
    },
    name="clicks",
)
LOOSE = Source(topic="clicks", schema="id BIGINT, at BIGINT", event_time="timestamp_millis(at)", name="clicks")


def conformed(
    spark: SparkSession, source: Source, payloads: list[bytes | None], **columns: Any
) -> list[dict[str, Any]]:
    rows = spark.createDataFrame(bronze_rows(payloads, **columns))
    found: list[dict[str, Any]] = conform(rows, source).orderBy("offset").toArrow().to_pylist()
    return found


def valid(**changed: Any) -> bytes:
    return json.dumps(click(7, tags=["a"], price=3, **changed)).encode()


def test_a_valid_event(spark: SparkSession) -> None:
    (row,) = conformed(spark, CLICKS, [valid()])
    event = click(7)
    assert row["reason"] is None
    assert (row["id"], row["who"], row["place"], row["tags"]) == (7, event["who"], event["place"], ["a"])
    assert row["event_time"] == datetime.fromtimestamp(event["at"] / 1000, UTC)
    assert (row["event_id"], row["received_at"], row["tenant"]) == ("e0", T0, "default")
    assert len(row["dedupe_key"]) == 16
    assert set(ENVELOPE_COLUMNS) <= set(row)


def test_the_weight_of_an_event(spark: SparkSession) -> None:
    assert [row["weight"] for row in conformed(spark, CLICKS, [valid()] * 2, weight=[None, 10.0])] == [1.0, 10.0]


def test_the_time_of_an_event_may_be_in_a_header(spark: SparkSession) -> None:
    by_header = dataclasses.replace(CLICKS, event_time="to_timestamp(string(headers['ce_time']))")
    headers = [[("ce_time", b"2026-03-01T10:00:00.5Z")], []]
    first, second = conformed(spark, by_header, [valid()] * 2, headers=headers)
    assert (first["reason"], first["event_time"]) == (None, datetime(2026, 3, 1, 10, 0, 0, 500_000, UTC))
    assert second["reason"] == "no event_time, or one out of range"
    assert "headers" not in first


def test_reference_data_of_the_headers(spark: SparkSession) -> None:
    spec = EnrichSpec("{who}", "who", "people.csv")
    rich = dataclasses.replace(CLICKS, enrich={"people": spec})
    headers = [[("people", b'{"team":"red","age":7}'), ("people_version", b"1")], []]
    first, second = conformed(spark, rich, [valid()] * 2, headers=headers)
    assert dict(first["people"]) == {"team": "red", "age": "7"}
    assert second["people"] is None
    with pytest.raises(ConfigError, match="'who' would stand for two things"):
        payload_schema(dataclasses.replace(CLICKS, enrich={"who": spec}))


NOT_JSON = "does not fit the schema: not JSON"
NO_OBJECT = "does not fit the schema: not a JSON object"


REASONS: list[tuple[bytes | None, str | None]] = [
    (None, "no payload"),
    (b"", NOT_JSON),
    (b"  \n", NOT_JSON),
    (b"not json", NOT_JSON),
    (b'{"id": 7', NOT_JSON),
    (b"null", NO_OBJECT),
    (b"5", NO_OBJECT),
    (b'"text"', NO_OBJECT),
    (b"[1, 2]", NO_OBJECT),
    (b'[{"id": 7}]', NO_OBJECT),
    (b'{"id": "seven"}', "does not fit the schema: id"),
    (b'{"id": 1.5}', "does not fit the schema: id"),
    (b'{"id": true, "price": "x"}', "does not fit the schema: id, price"),
    (b'{"id": 99999999999999999999}', "does not fit the schema: id"),
    (b'{"id": 7, "price": 3000000000}', "does not fit the schema: price"),
    (b'{"id": 7, "place": 5}', "does not fit the schema: place"),
    (b'{"id": 7, "place": {"city": "x", "lat": "north"}}', "does not fit the schema: place.lat"),
    (b'{"id": 7, "tags": {"a": 1}}', "does not fit the schema: tags"),
    (b'{"id": 7, "lines": [{"n": "x"}]}', "does not fit the schema: an element of an array"),
    (b"\xff\xfe", "not valid UTF-8"),
    (b'{"who": "\xff"}', "not valid UTF-8"),
    (b"{}", "missing id"),
    (b'{"id": null, "at": 5}', "missing id"),
    (b'{"id": 7, "at": 5}', "missing place.city"),
    (b'{"id": 7, "at": 5, "place": {}}', "missing place.city"),
    (valid().replace(b'"price": 3', b'"price": 100'), "expectation cheap failed"),
    (valid().replace(b'"price": 3', b'"price": 0'), "expectation sound failed"),
    (valid().replace(b'"price": 3', b'"price": null'), None),
    (valid() + b" ", None),
    (valid().replace(b'{"id"', b'{"unknown": [{}], "id"'), None),
]


@pytest.fixture(scope="module")
def reasons(spark: SparkSession) -> dict[int, str]:
    """Reason of each refused payload by its number, of all in one go."""
    frame = spark.createDataFrame(bronze_rows([payload for payload, _ in REASONS]))
    return {row["offset"]: row["reason"] for row in rejected_rows(conform(frame, CLICKS), CLICKS).to_pylist()}


@pytest.mark.parametrize("number", range(len(REASONS)), ids=[str(payload) for payload, _ in REASONS])
def test_reasons(reasons: dict[int, str], number: int) -> None:
    assert reasons.get(number) == REASONS[number][1]


def test_odd_payloads_have_a_reason_too(spark: SparkSession) -> None:
    schema = payload_schema(dataclasses.replace(CLICKS, schema="a STRUCT<b: STRUCT<c: INT, d: INT>, e: INT>, id INT"))
    assert misfits("[" * 100_000, "{}", schema) == "not JSON"
    assert misfits('{"id": ' + "9" * 5_000 + "}", "{}", schema) == "not JSON"
    payload = '{"a": {"b": {"c": 1, "d": 2, "x": 5}, "e": null}, "unknown": 1}'
    assert misfits(payload, '{"a": {"b": {"d": 2}}}', schema) == "a.b.c"


def test_what_the_border_refused_keeps_its_reason(spark: SparkSession) -> None:
    rows = conformed(spark, CLICKS, [valid(), b"x"], reject=["too large", "too large"])
    assert [row["reason"] for row in rows] == ["too large", "too large"]


def test_a_time_out_of_range_goes_to_quarantine_and_stops_nothing(spark: SparkSession) -> None:
    """Some of these make Spark's own function raise, others give a year that Python does not know."""
    times = [2**63 - 1, -(2**63), 10**15, -(10**15), None, 1000]
    rows = conformed(spark, LOOSE, [json.dumps({"id": 1, "at": at}).encode() for at in times])
    assert [row["reason"] for row in rows] == ["no event_time, or one out of range"] * 5 + [None]
    assert [row["event_time"] for row in rows] == [None] * 5 + [datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC)]


def test_the_shipped_pipeline_refuses_a_time_out_of_range(spark: SparkSession) -> None:
    source = load_pipeline(conf_dir() / "pipelines" / "meetup").sources["rsvps"]
    group = {"group_city": "Ulm", "group_country": "de"}
    rsvp = {"rsvp_id": 1, "mtime": 2**62, "response": "yes", "member": {"member_id": 1}, "group": group}
    rows = conformed(spark, source, [json.dumps(rsvp).encode(), json.dumps({**rsvp, "mtime": 5}).encode()])
    assert [row["reason"] for row in rows] == ["expectation mtime_is_a_time failed", None]


def test_an_id_is_computed_for_records_without_an_envelope(spark: SparkSession) -> None:
    kafka = "key BINARY, value BINARY, headers ARRAY<STRUCT<key: STRING, value: BINARY>>, topic STRING, "
    kafka += "partition INT, offset BIGINT, timestamp TIMESTAMP"
    values = [valid(), valid(), valid().replace(b'"id": 7', b'"id": 8'), b"{}"]
    records = [(None, bytearray(value), None, "clicks", 0, offset, T0) for offset, value in enumerate(values)]
    bronze = to_bronze(spark.createDataFrame(records, kafka), source="clicks", tenant="default")  # type: ignore[arg-type]
    bronze = bronze.withColumn("bronze_at", bronze["broker_time"])

    def ids(source: Source) -> list[str]:
        found: list[str] = conform(bronze, source).orderBy("offset").toArrow()["event_id"].to_pylist()
        return found

    assert ids(CLICKS) == ["7", "7", "8", "@clicks/0/3"]
    assert ids(dataclasses.replace(CLICKS, event_id="")) == [f"@clicks/0/{offset}" for offset in range(4)]
    assert ids(dataclasses.replace(CLICKS, event_id="<{id}:{place.city}>"))[3] == "@clicks/0/3"
    assert ids(dataclasses.replace(CLICKS, event_id="<{id}:{place.city}>"))[0].startswith("<7:")


def test_which_events_are_one_and_the_same(spark: SparkSession) -> None:
    bad = valid().replace(b'"price": 3', b'"price": 100')
    rows = conformed(
        spark,
        CLICKS,
        [valid(), valid().replace(b'"a"', b'"b"'), valid(), valid(), bad, bad],
        event_id=["e", "e", "f", "e", "e", "e"],
        tenant=["t", "t", "t", "u", "t", "t"],
    )
    keys = [row["dedupe_key"] for row in rows]
    assert keys[0] == keys[1]  # the same id, whatever the payload
    assert len({keys[0], keys[2], keys[3], keys[4]}) == 4  # another id, another tenant; a refused copy stands apart
    assert keys[4] == keys[5]


def test_rejected_rows_can_be_read(spark: SparkSession) -> None:
    frame = spark.createDataFrame(bronze_rows([b"\xff{", None, valid(), b"{}", b'{"id": "x"}']))
    found = rejected_rows(conform(frame, CLICKS), CLICKS).sort_by("offset")
    assert found["payload"].to_pylist() == ["\ufffd{", None, "{}", '{"id": "x"}']
    assert found["reason"].to_pylist() == [
        "not valid UTF-8",
        "no payload",
        "missing id",
        "does not fit the schema: id",
    ]
    assert pa.types.is_string(found.schema.field("payload").type)


def test_a_schema_that_is_none(spark: SparkSession) -> None:
    with pytest.raises(ConfigError, match="not a Spark DDL schema") as caught:
        payload_schema(dataclasses.replace(CLICKS, schema="id BIGINTEGER"))
    assert caught.value.key == "sources.clicks.schema"


@pytest.mark.parametrize("name", ["event_id", "tenant", "payload", "reason", "dedupe_key"])
def test_a_field_with_the_name_of_an_envelope_column_has_another_name_in_sql(spark: SparkSession, name: str) -> None:
    schema = f"id BIGINT, at BIGINT, `{name}` STRUCT<n: INT>"
    source = dataclasses.replace(LOOSE, schema=schema, event_id=f"{{{name}.n}}", required=(f"{name}.n",))
    texts = [json.dumps({"at": 7, name: given}).encode() for given in ({"n": 3}, {}, {"n": "x"})]
    good, absent, misfit = conformed(spark, source, texts, event_id=["@a", "@b", "@c"])
    assert (good["reason"], good[f"{name}_"], good["event_id"]) == (None, {"n": 3}, "3")
    assert absent["reason"] == f"missing {name}.n"
    taken = json.dumps({"at": 7, f"{name}_": misfit[f"{name}_"]})
    assert misfits(texts[2].decode(), taken, payload_schema(source)) == f"{name}.n"
    for taken, schema in (
        (f"{name}_", f"`{name}` STRING, `{name}_` STRING"),
        ("_corrupt_record", "_corrupt_record INT"),
    ):
        with pytest.raises(ConfigError, match=f"column '{taken}' would stand for two things"):
            payload_schema(dataclasses.replace(CLICKS, schema=schema))


ROW = "STRUCT<id: BIGINT, name: STRING>"
CHANGES = Source(
    topic="changes",
    schema=f"before {ROW}, after {ROW}, source STRUCT<lsn: BIGINT>, op STRING, ts_ms BIGINT",
    unwrap="payload",
    event_id="{source.lsn}",
    event_time="timestamp_millis(ts_ms)",
    required=("op", "source.lsn"),
    name="changes",
)


def change(lsn: int, op: str, before: dict[str, Any] | None, after: dict[str, Any] | None) -> bytes:
    """A change as Debezium writes it with Kafka Connect's JSON converter."""
    inner = {"before": before, "after": after, "source": {"lsn": lsn, "db": "shop"}, "op": op, "ts_ms": 1000 + lsn}
    return json.dumps({"schema": {"type": "struct", "fields": []}, "payload": inner}).encode()


def test_changes_of_a_database_in_an_envelope(spark: SparkSession) -> None:
    ann, bob, eve = ({"id": n, "name": name} for n, name in enumerate(["Ann", "Bob", "Eve"]))
    texts = [
        change(1, "c", None, ann),
        change(2, "c", None, bob),
        change(3, "u", bob, {"id": 1, "name": "Rob"}),
        change(4, "d", ann, None),
        change(5, "r", None, eve),
        None,  # the tombstone behind the deletion
        b'{"schema": null}',
        b'{"payload": 5}',
        change(6, "c", None, {"id": "x"}),
    ]
    columns = {"event_id": [f"@{n}" for n in range(len(texts))]}
    rows = conformed(spark, CHANGES, texts, **columns)
    assert [row["reason"] for row in rows] == [
        *[None] * 5, "no payload", "missing payload", "does not fit the schema", "does not fit the schema",
    ]  # fmt: skip
    assert [row["event_id"] for row in rows[:5]] == ["1", "2", "3", "4", "5"]
    events = conform(spark.createDataFrame(bronze_rows(texts, **columns)), CHANGES)
    reasons = {row["reason"] for row in rejected_rows(events, CHANGES).to_pylist()}
    assert reasons == {
        "no payload", "missing payload",
        "does not fit the schema: payload is no object", "does not fit the schema: after.id",
    }  # fmt: skip
    product = Product(
        layer="gold",
        source="changes",
        name="customers",
        operator="latest",
        by=("id",),
        version="lsn",
        sql=(
            "SELECT coalesce(after.id, before.id) AS id, after.name AS name, op = 'd' AS deleted, source_.lsn AS lsn "
            "FROM changes"
        ),
    )
    found = run_partial(events.where("reason IS NULL"), "changes", Latest(product)).to_pylist()
    assert {row["id"]: row["name"] for row in found if not row["deleted"]} == {1: "Rob", 2: "Eve"}


def test_the_border_unwraps_too() -> None:
    border = Border(CHANGES, tenant="default", collector="n1")
    texts = [change(7, "c", None, None), b'{"schema": null}', b'{"payload": []}']
    for events in (border.admit_all(texts), [border.admit(text) for text in texts]):
        assert [event.envelope.reject for event in events] == [None, "missing payload", "missing payload"]
        assert events[0].envelope.event_id == "7" and events[0].payload == texts[0]


def test_it_reads_nothing_by_itself(spark: SparkSession, tmp_path: Path) -> None:
    """A transform: an empty frame is enough to plan it."""
    frame = conform(spark.createDataFrame(bronze_rows([])), CLICKS)
    assert frame.schema["event_time"].dataType.simpleString() == "timestamp"
    assert frame.count() == 0


def test_where_an_expectation_is_judged_is_no_other_declaration() -> None:
    at_border = {name: dataclasses.replace(found, at=BORDER) for name, found in CLICKS.expectations.items()}
    moved = dataclasses.replace(CLICKS, expectations=at_border)
    assert moved != CLICKS
    assert source_declaration(moved) == source_declaration(CLICKS)


SANE = [
    "n > 0",
    "t BETWEEN -100 AND 56",
    "NOT (n BETWEEN 2 AND 9 OR id <> 7)",
    "id IN (7, -9223372036854775808, 9223372036854775807)",
    "d >= 0.1 AND d < 1e3",
    "f = 0.1 OR f > 16777216 OR 0.5 <= f",
    "f < d",
    "n <= id",
    "s NOT IN ('', 'a ', '😀')",
    "s > 'e' OR s IS NULL",
    "length(s) <= 2",
    "ok OR P.City = 's'",
    "ok IS NOT TRUE",
    "! p.city = s",
    "p.city IS NULL OR NOT p.city < '￿'",
]
ODD = {
    "n": ["null", "0", "-0", "5", "-1", "2147483647", "2147483648", "-2147483649", "5.0", "1e1", '"5"', '""', "true"],
    "t": ["0", "56", "57", "127", "128", "200", "255", "256", "-128", "-129", "[]"],
    "id": ["7", "9223372036854775807", "9223372036854775808", "-9223372036854775808", "-9223372036854775809"],
    "d": ["0.1", "0.09999999999999999", "-0.0", "1000", "9007199254740993", "5e-324", '"NaN"', '"Infinity"', "true"],
    "f": ["0.1", "0.5", "16777217", "16777218", "1e39", "1e-46", "0.49999999", "1.0000000596046447754", '"1"', '"NaN"'],
    "s": ['""', '"a"', '"a "', r'"e\u0301"', r'"\u00e9"', r'"\ud83d\ude00"', r'"\u0000"', r'"\uffff"', "5", "{}"],
    "ok": ["true", "false", "null", '"true"', "1"],
    "p": ["null", "{}", "[]", '"s"', '{"city": null}', '{"city": 5}', r'{"city": "\ud83d\ude00"}', '{"City": ""}'],
    "tags": ["null", "[1]", "{}"],
}


def test_what_the_border_refuses_spark_refuses_too(spark: SparkSession) -> None:
    """The same expectations in three ways: by the border, in Spark as the reason, and each by itself in Spark."""
    plain = {"n": "1", "t": "1", "id": "7", "d": "0.5", "f": "0.5", "s": '"m"', "ok": "true", "p": '{"city": "s"}'}
    texts = [plain | {name: value} for name, values in ODD.items() for value in values]
    texts += [{**plain, "n": n, "s": s, "ok": "false"} for n in ("0", "5", "null") for s in ('"a "', '"s"', "null")]
    texts += [{key: value for key, value in plain.items() if key != absent} for absent in plain]
    payloads = [("{" + ", ".join(f'"{k}": {v}' for k, v in text.items()) + "}").encode() for text in texts]
    payloads += [payload[:-1] + b', "n": -1, "n": 5}' for payload in payloads[:3]]
    payloads += [payload[:-1] + b', "n": 5, "n": -1, "N": 1}' for payload in payloads[:3]] + [b"{}", b'{"p": {}}']
    schema = "n INT, t TINYINT, id BIGINT, d DOUBLE, f FLOAT, s STRING, ok BOOLEAN, p STRUCT<city: STRING>, "
    source = Source(topic="t", schema=schema + "tags ARRAY<STRING>", event_time="timestamp_millis(1)", name="clicks")

    def asked(sqls: dict[str, str], **options: str) -> Source:
        found = {name: Expectation(sql, **options) for name, sql in sqls.items()}
        return dataclasses.replace(source, expectations=found)

    def refused(by: Source) -> list[str | None]:
        border = Border(by, tenant="default", collector="n1")
        return [event.envelope.reject for event in border.admit_all(payloads)]

    every = {f"e{number}": sql for number, sql in enumerate(SANE)}
    reasons = [row["reason"] for row in conformed(spark, asked(every, at=BORDER), list(payloads))]
    rows = conformed(spark, asked(every, action=WARN), list(payloads))
    for payload, at_border, in_spark in zip(payloads, refused(asked(every, at=BORDER)), reasons, strict=True):
        assert at_border in (None, in_spark), payload
    for name, sql in every.items():
        told = refused(asked({name: sql}, at=BORDER))
        assert 0 < sum(reason is not None for reason in told) < len(told), sql
        for payload, at_border, row in zip(payloads, told, rows, strict=True):
            fails = row["reason"] is None and name in (row["warned"] or ())
            assert at_border is None or fails, (sql, payload)
            if fails and payload in payloads[-25:]:  # nothing in these is odd: all that Spark refuses is refused here
                assert at_border is not None, (sql, payload)

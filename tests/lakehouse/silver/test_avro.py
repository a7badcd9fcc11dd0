"""Payloads in Avro: decoded by the schemas of a real registry, and again without it."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import shutil
import struct
import subprocess
from collections.abc import Iterator
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import fastavro
import httpx
import pytest
from pyspark.sql import SparkSession

from lakehouse.contract.errors import ConfigError
from lakehouse.contract.pipeline import CollectorSpec, Source
from lakehouse.errors import RegistryProblem
from lakehouse.silver import avro

FIRST = {
    "type": "record",
    "name": "Order",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}},
        {"name": "price", "type": {"type": "bytes", "logicalType": "decimal", "precision": 30, "scale": 10}},
        {"name": "note", "type": ["null", "string"], "default": None},
    ],
}
SECOND = FIRST | {
    "fields": [
        *FIRST["fields"],
        {"name": "mark", "type": "bytes"},
        {"name": "day", "type": {"type": "int", "logicalType": "date"}},
    ]
}  # type: ignore[misc]
WHEN = datetime(2026, 3, 1, 10, 0, 0, 250_000, UTC)
ORDER = {"id": 1, "at": WHEN, "price": Decimal("12345678901234567890.0123456789"), "note": "é"}
ORDERS = Source(
    topic="orders",
    schema="id BIGINT, at TIMESTAMP, price DECIMAL(30, 10), note STRING, mark BINARY, day DATE",
    format="avro",
    event_id="{id}",
    event_time="at",
    name="orders",
)


def written(schema: Any, number: int, value: Any) -> bytes:
    """A value as Confluent's serializers write it."""
    text = io.BytesIO()
    fastavro.schemaless_writer(text, fastavro.parse_schema(schema), value)
    return struct.pack(">bI", 0, number) + text.getvalue()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A lake's schemas, as a driver has kept them."""
    avro._schema.cache_clear()
    for number, schema in ((1, FIRST), (2, SECOND)):
        (tmp_path / f"{number}.json").write_text(json.dumps({"schema": json.dumps(schema), "references": []}))
    (tmp_path / "4.json").write_text(json.dumps({"schema": '{"type": "nope"}', "references": []}))
    (tmp_path / "3.json").write_text(json.dumps({"flaw": "the registry has no schema 3"}))
    return tmp_path


def decoded(payload: bytes, folder: Path, registry: str = "") -> Any:
    found = avro._decode(payload, str(folder), registry)
    assert found is not None
    return json.loads(found["text"], parse_float=Decimal) if found["text"] is not None else found["flaw"]


def test_a_replay_needs_no_registry(folder: Path) -> None:
    assert decoded(written(FIRST, 1, ORDER), folder) == ORDER | {"at": WHEN.isoformat()}
    more = ORDER | {"mark": b"\x00\xff", "day": date(2026, 3, 1)}
    assert decoded(written(SECOND, 2, more), folder)["mark"] == "AP8="


def test_what_cannot_be_decoded_has_a_reason(folder: Path) -> None:
    good = written(FIRST, 1, ORDER)
    wire = "not Avro in the wire format of a schema registry"
    assert [decoded(payload, folder) for payload in (b"", b"\0\0\0", b'{"id": 1}')] == [wire] * 3
    for bad in (good[:-1], good + b"x", good[:5], good[:5] + b"\xff" * 40):
        assert decoded(bad, folder) == "does not fit Avro schema 1"
    assert decoded(written(FIRST, 3, ORDER), folder) == "the registry has no schema 3"
    assert decoded(written(FIRST, 4, ORDER), folder).startswith("Avro schema 4 cannot be read")


def test_a_registry_that_gives_no_answer_rejects_nothing(folder: Path) -> None:
    """The schema may be good: the batch fails, and is taken again."""
    with pytest.raises(
        RegistryProblem, match=r"Avro schema 9 is needed, and http://127.0.0.1:1/x gives no answer"
    ) as told:
        decoded(written(FIRST, 9, ORDER), folder, "http://ann:secret@127.0.0.1:1/x/")
    assert "secret" not in str(told.value)
    with pytest.raises(RegistryProblem, match=r"Set kafka\.schema_registry"):
        decoded(written(FIRST, 9, ORDER), folder)
    assert not (folder / "9.json").exists()


def test_declarations_that_cannot_work() -> None:
    with pytest.raises(ConfigError, match="collectors and feeds bring JSON"):
        dataclasses.replace(ORDERS, collectors=(CollectorSpec("http"),))
    with pytest.raises(ConfigError, match="is no path"):
        dataclasses.replace(ORDERS, unwrap="a b")


@pytest.mark.spark
def test_events_and_rejects_of_a_topic_in_avro(
    spark: SparkSession, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lakehouse.batch import rejected_rows
    from lakehouse.silver.conform import conform
    from tests.lakehouse.lakes import bronze_rows

    monkeypatch.setattr(spark.sparkContext, "getConf", lambda: {avro.FOLDER: str(folder)})
    more = ORDER | {"id": 2, "note": None, "mark": b"\x00\xff", "day": date(2026, 3, 1)}
    payloads = [written(FIRST, 1, ORDER), written(SECOND, 2, more), b'{"id": 3}', written(FIRST, 1, ORDER)[:-1]]
    rows = spark.createDataFrame(bronze_rows(payloads, event_id=[f"@{n}" for n in range(4)]))
    events = conform(rows, ORDERS)
    found = events.orderBy("offset").toArrow().to_pylist()
    assert [row["reason"] for row in found[:2]] == [None, None]
    assert [row["event_id"] for row in found[:2]] == ["1", "2"]
    assert (found[0]["event_time"], found[0]["price"], found[0]["mark"]) == (WHEN, ORDER["price"], None)
    assert (found[1]["mark"], found[1]["day"], found[1]["note"]) == (b"\x00\xff", date(2026, 3, 1), None)
    rejects = {row["reason"]: row["payload"] for row in rejected_rows(events, ORDERS).to_pylist()}
    assert set(rejects) == {"not Avro in the wire format of a schema registry", "does not fit Avro schema 1"}


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of the registry of franz-go, in a process of its own. (Karapace is on PyPI no longer.)"""
    if shutil.which("go") is None:
        pytest.skip("there is no Go, which builds the registry")
    place = tmp_path_factory.mktemp("registry")
    shutil.copy(Path(__file__).with_name("registry.go"), place / "main.go")
    for command in (
        ["go", "mod", "init", "registry"],
        ["go", "get", f"{MODULE}@v1.8.0"],
        ["go", "build", "-o", "registry"],
    ):
        subprocess.run(command, cwd=place, check=True, capture_output=True)
    with subprocess.Popen([place / "registry"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdin is not None
        yield process.stdout.readline().strip()
        process.stdin.close()


MODULE = "github.com/twmb/franz-go/pkg/sr"


def registered(registry: str, subject: str, schema: Any, **more: Any) -> int:
    answer = httpx.post(
        f"{registry}/subjects/{subject}/versions", json={"schema": json.dumps(schema), **more}, timeout=60
    )
    assert answer.status_code == 200, answer.text
    return int(answer.json()["id"])


@pytest.mark.soak
def test_schemas_of_a_registry_are_kept(registry: str, tmp_path: Path) -> None:
    number = registered(registry, "orders-value", FIRST)
    place = {"type": "record", "name": "Place", "fields": [{"name": "city", "type": "string"}]}
    registered(registry, "place", place)
    stay = {"type": "record", "name": "Stay", "fields": [{"name": "at", "type": "Place"}]}
    references = [{"name": "Place", "subject": "place", "version": 1}]
    whole = stay | {"fields": [{"name": "at", "type": place}]}
    second = registered(registry, "stays-value", stay, references=references)
    avro._schema.cache_clear()
    for where in (registry, "http://127.0.0.1:1"):  # asked once
        assert decoded(written(FIRST, number, ORDER), tmp_path, where) == ORDER | {"at": WHEN.isoformat()}
        assert decoded(written(whole, second, {"at": {"city": "Ulm"}}), tmp_path, where) == {"at": {"city": "Ulm"}}
        assert decoded(written(FIRST, 999, ORDER), tmp_path, where) == "the registry has no schema 999"
        avro._schema.cache_clear()


@pytest.mark.soak
@pytest.mark.spark
@pytest.mark.broker
def test_from_a_topic_in_avro_to_a_product_and_back_by_a_replay_without_the_registry(
    registry: str, broker: Any, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A schema changes under way; a topic in JSON of Debezium goes beside it."""
    from kafka import KafkaProducer

    from jobs.local.broker import ensure_topics
    from lakehouse.contract.lake import Lake
    from lakehouse.contract.pipeline import load_pipeline
    from lakehouse.contract.settings import load_settings
    from lakehouse.replay import verify
    from tests.lakehouse.lakes import Site, eventually, result
    from tests.lakehouse.silver.test_conform import change

    (tmp_path / "pipeline.toml").write_text(PIPELINE)
    pipeline, lake = load_pipeline(tmp_path), Lake(tmp_path / "lake")
    conf = {avro.FOLDER: str(lake.state / "schemas"), avro.REGISTRY: registry}
    monkeypatch.setattr(spark.sparkContext, "getConf", lambda: conf)
    settings = load_settings({}, lake=str(lake.root), pipeline=str(tmp_path), kafka__bootstrap=broker.bootstrap)
    place = Site(settings, pipeline, broker.bootstrap, [])
    ensure_topics(pipeline.sources.values(), broker.bootstrap)
    first = registered(registry, "orders-avro-value", FIRST | {"name": "Live"})
    second = registered(registry, "orders-avro-value", SECOND | {"name": "Live"})
    producer = KafkaProducer(bootstrap_servers=broker.bootstrap)
    with contextlib.closing(producer), place.running(spark) as alive:
        for n in range(40):
            value = ORDER | {"id": n, "mark": b"m", "day": date(2026, 3, 1)}
            payload = written(*((FIRST, first) if n < 20 else (SECOND, second)), value)
            for _ in range(1 + n % 2):  # some twice
                producer.send("orders-avro", payload)
        producer.send("orders-avro", b"nonsense")
        for lsn, (op, before, after) in enumerate([("c", None, 1), ("c", None, 2), ("u", 2, 3), ("d", 1, None)], 1):
            both = [None if n is None else {"id": n % 2, "name": f"n{n}"} for n in (before, after)]
            producer.send("changes-json", change(lsn, op, *both))
        producer.flush()
        tables = [lake.table("gold", name) for name in pipeline.products]
        eventually(lambda: all(table.exists() for table in tables), alive=alive)

        def counted() -> int:
            return sum(row["n"] for row in result(lake, pipeline, "orders_by_day").to_pylist())

        eventually(lambda: counted() == 40, alive=alive)
        eventually(lambda: result(lake, pipeline, "customers").num_rows == 2, alive=alive)
    conf[avro.REGISTRY] = "http://127.0.0.1:1"
    assert all(found.equal for found in verify(spark, settings, pipeline))


PIPELINE = """
[sources.orders]
topic = "orders-avro"
schema = "id BIGINT, at TIMESTAMP, price DECIMAL(30, 10), day DATE"
format = "avro"
event_id = "{id}"
event_time = "at"

[sources.changes]
topic = "changes-json"
schema = '''
before STRUCT<id: BIGINT, name: STRING>, after STRUCT<id: BIGINT, name: STRING>, source STRUCT<lsn: BIGINT>,
op STRING, ts_ms BIGINT'''
unwrap = "payload"
event_id = "{source.lsn}"
event_time = "timestamp_millis(ts_ms)"

[products.orders_by_day]
layer = "gold"
source = "orders"
sql = '''
SELECT window.start AS window_start, day, count(*) AS n, sum(price) AS total
FROM orders GROUP BY window(event_time, '1 day'), day'''

[products.customers]
layer = "gold"
source = "changes"
operator = "latest"
by = ["id"]
version = "lsn"
sql = '''
SELECT coalesce(after.id, before.id) AS id, after.name AS name, op = 'd' AS deleted, source_.lsn AS lsn
FROM changes'''
"""

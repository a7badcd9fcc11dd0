"""Two-step collection: a front node that reads nothing, refiners that share the work; once, in order, rejects kept."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from deltalake import CommitProperties, write_deltalake
from kafka import KafkaAdminClient, KafkaProducer
from kafka.admin import ConfigResource, ConfigResourceType

from ingest import relay
from ingest.answers.acks import RecentEvents, Signer, ack_state
from ingest.answers.tables import LakeState
from ingest.border.admission import Border, front_source
from ingest.broker import EmbeddedBroker
from ingest.kafka import ensure_topics
from ingest.relay import GroupReader, RefineNode, Refiner
from lakehouse.contract.envelope import Envelope
from lakehouse.contract.lake import Lake
from lakehouse.contract.pipeline import Pipeline, load_pipeline
from lakehouse.contract.pipeline.source import EnrichSpec
from lakehouse.contract.settings import ClientSecurity, KafkaSettings
from tests.ingest.conftest import (
    at_broker,
    consume,
    event,
    eventually,
    get,
    pipeline_of,
    request,
    running_node,
    settings_of,
)

pytestmark = pytest.mark.broker
LINES = {"content_type": "application/x-ndjson"}


def two_step(topic: str, folder: Path) -> Pipeline:
    """One source with an enrichment that the second step makes."""
    (folder / "people.json").write_text(json.dumps([{"who": f"k{n}", "team": n % 3} for n in range(6)]), "utf-8")
    source = replace(
        pipeline_of(topic, "http", max_event_bytes=5_000, partitions=4).sources["clicks"],
        enrich={"people": EnrichSpec("{who}", "who", "people.json")},
    )
    return Pipeline({"clicks": source}, path=folder / "pipeline.toml")


@asynccontextmanager
async def refining(settings: Any, pipeline: Pipeline, bootstrap: str, node: str) -> AsyncIterator[RefineNode]:
    refiner, stop, ready = (
        RefineNode(at_broker(settings, bootstrap), pipeline, node=node),
        asyncio.Event(),
        asyncio.Event(),
    )
    task = asyncio.create_task(refiner.run(ready.set, stop))
    try:
        async with asyncio.timeout(60):
            await ready.wait()
        yield refiner
    finally:
        stop.set()
        await task


async def test_two_steps(broker: EmbeddedBroker, tmp_path: Path) -> None:
    pipeline, settings = two_step("two-step", tmp_path), settings_of(tmp_path / "lake")
    async with running_node(settings, pipeline, broker.bootstrap, front=True) as url:
        payloads = [event(n) for n in range(300)] + [b"{broken", b'{"id":1000}', b'{"pad":"%b"}' % (b"x" * 6_000)]
        status, _, answer = await request(url, "POST", "/v1/clicks", b"\n".join(payloads), **LINES)
        assert status == 202
        assert [item["index"] for item in answer["rejected"]] == [302], "the front looks at nothing but the size"
        raw = await asyncio.to_thread(consume, broker.bootstrap, "two-step.raw", 303)
        assert {r.value for r in raw if r.value != payloads[302][:65_536]} == set(payloads[:302])

        async with contextlib.AsyncExitStack() as stack:
            for n in range(2):
                await stack.enter_async_context(refining(settings, pipeline, broker.bootstrap, f"r{n}"))
            records = await asyncio.to_thread(consume, broker.bootstrap, "two-step", 303, 60)
        found = {Envelope.from_headers(r.headers).event_id: r for r in records}
        assert {found[str(n)].value for n in range(300)} == set(payloads[:300])
        assert {r.key for r in records if r.value == event(8)} == {b"k1"}, "keyed as the source says"
        headers = {name: value.decode() for name, value in found["8"].headers}
        assert (json.loads(headers["people"]), len(headers["people_version"])) == ({"who": "k1", "team": 1}, 16)
        assert headers["refined_by"].startswith("r")
        assert "people" not in dict(found["6"].headers) and "people_version" in dict(found["6"].headers)
        place = headers["raw"].split("/")
        before = next(r for r in raw if (r.topic, str(r.partition), str(r.offset)) == tuple(place))
        told, kept = (Envelope.from_headers(record.headers) for record in (before, found["8"]))
        assert (kept.received_at, kept.collector) == (told.received_at, told.collector), "what the front said of it"
        refused = {
            r.value[:9]: Envelope.from_headers(r.headers) for r in records if Envelope.from_headers(r.headers).reject
        }
        assert set(refused) == {b"{broken", b'{"id":100', b'{"pad":"x'}
        assert "more than the 5000" in (refused[b'{"pad":"x'].reject or "")

        token = answer["tokens"][8]
        _, _, state = await get(url, f"/v1/acks/{token}")
        assert (state["state"], state["topic"]) == ("queued", "two-step.raw")
        lake = Lake(tmp_path / "lake")
        _bronze(lake, found["8"])
        _, _, state = await get(url, f"/v1/acks/{token}")
        assert (state["state"], state["topic"], state["offset"]) == ("in_bronze", "two-step", found["8"].offset)
        assert state["event_id"] == "8"
        tokens = [Signer.of_lake(lake.shared).open(text) for text in answer["tokens"][8:10]]
        other = [ack_state(token, RecentEvents({}), LakeState(lake), []) for token in tokens]
        assert [(found.state, found.event_id) for found in other] == [("in_bronze", "8"), ("unknown", None)]


def _bronze(lake: Lake, record: Any) -> None:
    """The record in bronze, as the lakehouse puts it there."""
    envelope = Envelope.from_headers(record.headers)
    schema = pa.schema(
        [
            *[(name, pa.string()) for name in ("event_id", "source", "tenant", "reject", "topic")],
            ("headers", pa.map_(pa.string(), pa.binary())), ("partition", pa.int32()), ("offset", pa.int64()),
            ("received_at", pa.timestamp("us", "UTC")),
        ]
    )  # fmt: skip
    row = {
        "event_id": envelope.event_id, "source": "clicks", "tenant": "default", "reject": None, "topic": record.topic,
        "headers": [(name, value) for name, value in record.headers], "partition": record.partition,
        "offset": record.offset, "received_at": envelope.received_at,
    }  # fmt: skip
    offsets = {"offsets": {f"{record.topic}/{record.partition}": record.offset + 1}}
    write_deltalake(
        str(lake.bronze("clicks").path),
        pa.Table.from_pylist([row], schema),
        commit_properties=CommitProperties(custom_metadata={"userMetadata": json.dumps(offsets)}),
    )


PIPELINE = """
[sources.clicks]
topic = "refine-again"
schema = "id BIGINT, who STRING"
event_time = "received_at"
key = "{who}"
partitions = 2
collectors = [{ kind = "http" }]
"""


async def test_a_refiner_that_is_killed_sends_again_under_the_same_ids(broker: EmbeddedBroker, tmp_path: Path) -> None:
    folder = tmp_path / "again"
    folder.mkdir()
    (folder / "pipeline.toml").write_text(PIPELINE, encoding="utf-8")
    pipeline, settings = load_pipeline(folder), settings_of(tmp_path / "lake")
    async with running_node(settings, pipeline, broker.bootstrap, front=True) as url:
        body = b"\n".join(event(n) for n in range(500))
        assert (await request(url, "POST", "/v1/clicks", body, **LINES))[0] == 202
    command = [
        "collect",
        "--role",
        "refine",
        "--pipeline",
        str(folder),
        "--lake",
        str(settings.lake),
        "--set",
        f"kafka={broker.bootstrap}",
    ]
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "jobs.cli", *command, env={**os.environ, "MILLRACE_CRASH_AT": "refine.before_commit"}
    )
    try:
        async with asyncio.timeout(120):
            assert await child.wait() == -signal.SIGKILL
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    first = await asyncio.to_thread(consume, broker.bootstrap, "refine-again", 1, 60)
    async with refining(settings, pipeline, broker.bootstrap, "r1") as refiner:
        await eventually(lambda: refiner.counts["clicks"]["read"] == 500, 60)
    records = await asyncio.to_thread(consume, broker.bootstrap, "refine-again", 500, 60)  # all is sent by its end
    copies: dict[str, set[bytes]] = defaultdict(set)
    for record in records:
        copies[Envelope.from_headers(record.headers).event_id].add(record.value)
    assert len(records) == 500 + len(first), "the batch was sent, its offsets were not committed, so it was sent again"
    assert (len(copies), {len(values) for values in copies.values()}) == (500, {1}), "one id, one event"


async def test_a_poll_that_ends_while_partitions_are_assigned(
    broker: EmbeddedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Metadata that comes after the first assignment makes the leader join again."""
    monkeypatch.setattr(relay, "_POLL_MS", 1)
    source = pipeline_of("refine-short").sources["clicks"]
    await asyncio.to_thread(ensure_topics, broker.bootstrap, [source], ClientSecurity())
    producer = await asyncio.to_thread(lambda: KafkaProducer(bootstrap_servers=broker.bootstrap, metrics_enabled=False))
    producer.send("refine-short", value=event(1))
    await asyncio.to_thread(producer.close)

    def read(number: int) -> None:
        kafka = KafkaSettings(bootstrap=broker.bootstrap)
        reader = GroupReader(kafka, f"short-{number}", {"refine-short": "clicks"})
        deadline = time.monotonic() + 60
        try:
            while not reader.poll():
                assert time.monotonic() < deadline, "it does not complete its join"
        finally:
            reader.close()

    await asyncio.gather(*(asyncio.to_thread(read, number) for number in range(8)))


async def test_what_somebody_else_put_into_the_raw_topic(broker: EmbeddedBroker, tmp_path: Path) -> None:
    pipeline, settings = two_step("refine-others", tmp_path), settings_of(tmp_path / "lake")
    async with refining(settings, pipeline, broker.bootstrap, "r1"):
        producer = await asyncio.to_thread(
            lambda: KafkaProducer(bootstrap_servers=broker.bootstrap, metrics_enabled=False)
        )
        raw = front_source(pipeline.sources["clicks"]).topic
        for value in (event(1), None, b"\xff"):
            producer.send(raw, key=b"k", value=value)
        await asyncio.to_thread(producer.flush)
        records = await asyncio.to_thread(consume, broker.bootstrap, "refine-others", 3, 60)
        await asyncio.to_thread(producer.close)
    found = {Envelope.from_headers(r.headers).event_id: r for r in records}
    assert found["1"].value == event(1)
    assert sum(Envelope.from_headers(r.headers).reject is not None for r in records) == 2


async def test_it_ends_while_kafka_does_not_take_what_it_sends(
    broker: EmbeddedBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "STOP_S", 0.1)
    pipeline, settings = two_step("refine-stuck", tmp_path), settings_of(tmp_path / "lake")
    refiner, stop, ready = (
        RefineNode(at_broker(settings, broker.bootstrap), pipeline, node="r1"), asyncio.Event(), asyncio.Event(),
    )  # fmt: skip
    task = asyncio.create_task(refiner.run(ready.set, stop))
    async with asyncio.timeout(60):
        await ready.wait()
    await asyncio.to_thread(_needs_two_replicas, broker.bootstrap, "refine-stuck")  # which one broker never has
    producer = await asyncio.to_thread(lambda: KafkaProducer(bootstrap_servers=broker.bootstrap, metrics_enabled=False))
    producer.send("refine-stuck.raw", value=event(1))
    await asyncio.to_thread(producer.close)
    await eventually(lambda: refiner.counts["clicks"]["read"] == 1)
    stop.set()
    async with asyncio.timeout(60):
        await task


def _needs_two_replicas(bootstrap: str, topic: str) -> None:
    admin = KafkaAdminClient(bootstrap_servers=bootstrap)
    try:
        admin.alter_configs([ConfigResource(ConfigResourceType.TOPIC, topic, configs={"min.insync.replicas": "2"})])
    finally:
        admin.close()


async def test_it_ends_while_there_is_no_kafka(tmp_path: Path) -> None:
    """In a process of its own, since kafka-python leaves refused sockets to the garbage collector."""
    folder = tmp_path / "away"
    folder.mkdir()
    (folder / "pipeline.toml").write_text(PIPELINE, encoding="utf-8")
    command = [
        "collect",
        "--role",
        "refine",
        "--pipeline",
        str(folder),
        "--lake",
        str(tmp_path / "lake"),
        "--set",
        "kafka=127.0.0.1:1",
    ]
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "jobs.cli", *command, stderr=asyncio.subprocess.PIPE
    )
    assert child.stderr is not None
    try:
        async with asyncio.timeout(60):
            while b"trying until it is" not in await child.stderr.readline():
                pass
            child.send_signal(signal.SIGTERM)
            assert await child.wait() == 0
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()


@pytest.mark.parametrize("template", ["", "{id}"])
@pytest.mark.parametrize("suspect", [False, True])
def test_a_record_of_another_application_has_the_id_of_its_place(template: str, suspect: bool) -> None:
    source = replace(pipeline_of("t", "http").sources["clicks"], event_id=template)
    record = SimpleNamespace(topic="t.raw", partition=0, offset=5, value=event(1), headers=())
    envelope, _, payload = Refiner(Border(source, tenant="t", collector="r1")).refine(record, suspect=suspect)
    assert (envelope.event_id, payload) == ("1" if template else "@t.raw/0/5", event(1))
    assert envelope.suspect is suspect, "a repeated batch may be in the topic already"

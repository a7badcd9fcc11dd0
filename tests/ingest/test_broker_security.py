"""A secure broker: who comes in, who may do what, and that nobody listens on the way."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import os
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
from deltalake import DeltaTable

from ingest.broker import USERS, EmbeddedBroker
from ingest.enrich import TopicReader
from ingest.errors import BrokerUnavailable
from ingest.kafka import ensure_topics
from ingest.relay import RefineNode
from jobs.local.broker import apply_topics, embedded, resolve_kafka
from jobs.local.broker import ensure_topics as ensure_from_jobs
from lakehouse.contract.errors import ConfigError, EnvironmentProblem
from lakehouse.contract.lake import Lake
from lakehouse.contract.pipeline import load_pipeline
from lakehouse.contract.settings import ClientSecurity, KafkaSettings, Settings
from tests.ingest.conftest import event, eventually, pipeline_of, request, running_node, settings_of

pytestmark = pytest.mark.broker

PIPELINE = pipeline_of("secure", "http", latest_topic=True, partitions=1)
ROOT = Path(__file__).parents[2]
TRACED = """
[sources.clicks]
topic = "secure"
schema = "id BIGINT, who STRING"
event_id = "{id}"
key = "{who}"
event_time = "received_at"
partitions = 1

[[sources.clicks.collectors]]
kind = "http"

[products.totals]
layer = "gold"
source = "clicks"
sql = "SELECT window.start AS window_start, count(*) AS n FROM clicks GROUP BY window(event_time, '1 minute')"
"""


@dataclass(frozen=True, slots=True)
class Place:
    """A lake with a running secure broker."""

    settings: Settings
    broker: EmbeddedBroker

    def options(self, user: str) -> dict[str, str]:
        return {"bootstrap.servers": self.broker.bootstrap, **self.broker.security(user).for_librdkafka()}

    def read(self, topic: str, user: str, event_id: str, group: str = "spark-kafka-looks") -> bytes:
        """Payload of an event, as a user gets to see it; the name of Kafka's error where it does not."""
        consumer = Consumer({**self.options(user), "group.id": group, "enable.auto.commit": "false"})
        with contextlib.closing(consumer):
            consumer.assign([TopicPartition(topic, 0, 0)])
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline:
                message = consumer.poll(0.2)
                if message is None:
                    continue
                if message.error():
                    return str(message.error().name()).encode()
                if dict(message.headers() or ()).get("id") == event_id.encode():
                    return bytes(message.value())
            return b"nothing came"

    def write(self, topic: str, user: str) -> str:
        """Name of Kafka's error; empty where it took the event."""
        producer = Producer(self.options(user))
        found: list[str] = []
        producer.produce(topic, b"x", on_delivery=lambda error, _: found.append(error.name() if error else ""))
        producer.flush(60)
        return found[0]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    settings = settings_of(tmp_path_factory.mktemp("lake"))
    settings = dataclasses.replace(settings, kafka=KafkaSettings(secure=True))
    broker = embedded(settings, die_with_parent=True)
    broker.start(timeout_s=180)
    try:
        apply_topics(settings, PIPELINE)
        yield Place(settings, broker)
    finally:
        broker.stop()


async def test_an_event_goes_through(place: Place) -> None:
    settings = resolve_kafka(place.settings, "collector")
    async with running_node(settings, PIPELINE, settings.kafka.bootstrap) as url:
        status, _, _ = await request(url, "POST", "/v1/clicks", event(1), content_type="application/json")
        assert status == 202
        for user in ("lakehouse", "admin"):
            assert await asyncio.to_thread(place.read, "secure", user, "1") == event(1)


async def test_the_second_step_and_references_log_in_too(place: Place) -> None:
    settings = resolve_kafka(place.settings, "collector")
    bootstrap = settings.kafka.bootstrap
    stop, ready = asyncio.Event(), asyncio.Event()
    refiner = asyncio.create_task(RefineNode(settings, PIPELINE, node="refiner-1").run(ready.set, stop))
    try:
        async with running_node(settings, PIPELINE, bootstrap, node="front", front=True) as url:
            await request(url, "POST", "/v1/clicks", event(77), content_type="application/json")
            assert await asyncio.to_thread(place.read, "secure", "lakehouse", "77") == event(77)
    finally:
        stop.set()
        await refiner
    reader = TopicReader(resolve_kafka(place.settings, "lakehouse").kafka, "secure")
    try:
        found: list[tuple[str, bytes | None]] = []
        while ("k0", event(77)) not in found:
            found += await asyncio.to_thread(reader.poll)
    finally:
        reader.close()


def test_who_is_not_allowed_is_refused(place: Place) -> None:
    assert place.write("secure", "collector") == ""
    for topic, user in (("secure", "lakehouse"), ("secure", "reader"), ("secure.latest", "reader")):
        assert place.write(topic, user) == "TOPIC_AUTHORIZATION_FAILED", (topic, user)
    assert place.read("secure", "collector", "1", "millrace-refine-x") == b"TOPIC_AUTHORIZATION_FAILED"
    refusals = (b"GROUP_AUTHORIZATION_FAILED", b"TOPIC_AUTHORIZATION_FAILED")  # whichever the client hears first
    assert place.read("secure", "collector", "1") in refusals
    seen = Producer(place.options("reader")).list_topics(timeout=60).topics
    assert set(seen) == {"secure.latest"}, "the rest is not even named"
    with pytest.raises(BrokerUnavailable, match="millrace kafka apply"):  # no topic is the collector's to make
        other = pipeline_of("never-granted").sources["clicks"]
        ensure_topics(place.broker.bootstrap, [other], place.broker.security("collector"))


@pytest.mark.parametrize(
    ("how", "code"),
    [
        ("wrong password", "_AUTHENTICATION"),
        ("unknown user", "_AUTHENTICATION"),
        ("unknown authority", "_SSL"),
        ("encrypted without a name", "_ALL_BROKERS_DOWN"),
        ("plaintext", "_ALL_BROKERS_DOWN"),
    ],
)
def test_who_is_unknown_is_refused(place: Place, tmp_path: Path, how: str, code: str) -> None:
    """By librdkafka, which says why; kafka-python leaves sockets open where it is not let in."""
    wrong = tmp_path / "password"
    wrong.write_text("guessed")
    good = place.broker.security("collector")
    security = {
        "wrong password": dataclasses.replace(good, password_file=str(wrong)),
        "unknown user": dataclasses.replace(good, user="nobody"),
        "unknown authority": dataclasses.replace(good, ca_file=""),
        "encrypted without a name": ClientSecurity("SSL", ca_file=good.ca_file),
        "plaintext": ClientSecurity(),
    }[how]
    said: list[str] = []
    options = {"bootstrap.servers": place.broker.bootstrap, "log_level": 0, **security.for_librdkafka()}
    producer = Producer(options, error_cb=lambda error: said.append(error.name()))
    deadline = time.monotonic() + 60
    while code not in said and time.monotonic() < deadline:
        producer.poll(0.1)
    assert code in said, said
    with pytest.raises(KafkaException):
        producer.list_topics(timeout=0.2)


def test_secrets_are_kept_and_not_told(place: Place) -> None:
    secrets = place.broker.secrets
    assert stat.S_IMODE(secrets.folder.stat().st_mode) == 0o700
    texts = [place.broker.security(user).read_password() for user in USERS]
    assert len(set(texts)) == len(USERS) and all(len(text) >= 32 for text in texts)
    for file in secrets.folder.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    shown = repr(place.settings) + repr(resolve_kafka(place.settings, "admin")) + repr(place.broker.security("admin"))
    written = (place.broker.folder / "broker.log").read_text() + (place.broker.folder / "server.properties").read_text()
    for text in texts:
        assert text not in shown
        assert text not in written


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"kafka\.password_file"):
        ClientSecurity("SASL_SSL", user="u", password_file=str(tmp_path / "none")).read_password()
    with pytest.raises(ConfigError, match="user and a password"):
        _ = KafkaSettings(protocol="SASL_SSL").security
    with pytest.raises(ConfigError, match="no use for certificates"):
        _ = KafkaSettings(ca_file="x").security
    with pytest.raises(EnvironmentProblem, match="kafka start"):
        resolve_kafka(Settings(lake=tmp_path, kafka=KafkaSettings(secure=True)), "collector")


def test_the_java_client_gets_the_same(place: Place) -> None:
    options = place.broker.security("lakehouse").for_java()
    assert options["security.protocol"] == "SASL_SSL"
    assert options["ssl.truststore.certificates"] == place.broker.secrets.ca.read_text()
    with pytest.raises(ConfigError, match="No such file"):
        dataclasses.replace(place.broker.security("lakehouse"), ca_file="absent.pem").for_java()
    assert place.broker.security("lakehouse").read_password() in options["sasl.jaas.config"]
    assert ClientSecurity().for_java() == ClientSecurity().for_librdkafka() == ClientSecurity().for_kafka_python() == {}


async def test_one_id_from_the_socket_to_the_product_by_spark(
    place: Place, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The Spark driver logs in to the secure broker, and every place tells an event by the same id."""
    caplog.set_level(logging.INFO)
    (tmp_path / "pipeline.toml").write_text(TRACED)
    pipeline, good, bad = load_pipeline(tmp_path), 4_711_081_500, 4_711_081_501
    settings = resolve_kafka(dataclasses.replace(place.settings, pipeline=str(tmp_path)), "collector")
    async with running_node(settings, pipeline, settings.kafka.bootstrap, node="traced") as url:
        kind = {"content_type": "application/json"}
        _, _, taken = await request(url, "POST", "/v1/clicks", event(good), **kind)
        status, _, refused = await request(url, "POST", "/v1/clicks", b'{"id":%d}' % bad, **kind)
        assert status == 422
        many = b'{"id":%d,"who":"x"}\n{"id":%d}\n{"id":%d}' % (good + 2, bad + 2, bad + 3)
        await request(url, "POST", "/v1/clicks", many, content_type="application/x-ndjson")
        for number in (bad + 2, bad + 3):
            assert [record for record in caplog.records if getattr(record, "event_id", "") == str(number)]
        told = [record for record in caplog.records if getattr(record, "event_id", "") == str(bad)]
        assert [(record.name, record.source) for record in told] == [("ingest.border.admission", "clicks")]  # type: ignore[attr-defined]
        log = b"".join(file.read_bytes() for file in (Lake(settings.lake).state / "log" / "traced").glob("*.seg"))
        assert str(good).encode() in log and str(bad).encode() in log
        for number, payload in ((good, event(good)), (bad, b'{"id":%d}' % bad)):
            assert await asyncio.to_thread(place.read, "secure", "lakehouse", str(number)) == payload  # by its header

        async def become(answer: dict[str, str], state: str) -> dict[str, object]:
            deadline = time.monotonic() + 400
            while True:
                _, _, found = await request(url, "GET", f"/v1/acks/{answer['token']}")
                if found["state"] == state:
                    return dict(found)
                assert driver.poll() is None and time.monotonic() < deadline, (found, (tmp_path / "out").read_text())
                await asyncio.sleep(0.2)

        with running_driver(settings, tmp_path) as driver:
            kept = await become(taken, "in_product")
            assert (kept["event_id"], list(dict(kept["products"]))) == (str(good), ["totals"])  # type: ignore[call-overload]
            assert (await become(refused, "rejected"))["event_id"] == str(bad)
            rows = DeltaTable(str(Lake(settings.lake).bronze("clicks").path)).to_pyarrow_table(columns=["event_id"])
            assert {str(good), str(bad)} <= set(rows["event_id"].to_pylist())

            def in_quarantine() -> list[dict[str, object]]:
                lines = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines() if line[:1] == "{"]
                return [line for line in lines if line.get("event_id") == str(bad)]

            await eventually(lambda: bool(in_quarantine()))
            assert in_quarantine()[0]["logger"] == "lakehouse.silver.quarantine"


@contextlib.contextmanager
def running_driver(settings: Settings, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The Spark driver, as a process that has only the switch to know of the broker's security; prints to ``out``."""
    command = [sys.executable, "jobs/run_pipeline.py", "--lake", str(settings.lake), "--pipeline", str(folder)]
    changed = {"KAFKA_SECURE": "true", "LOG": "json", "SPARK_REHEARSE": "false", "SPARK_DRIVER_MEMORY": "512m"}
    environ = {**os.environ, **{f"MILLRACE_{name}": value for name, value in changed.items()}}
    with (folder / "out").open("ab") as out:
        driver = subprocess.Popen(command, cwd=ROOT, env=environ, stdout=out, stderr=out)
    try:
        yield driver
    finally:
        driver.terminate()
        driver.wait(120)


def test_jobs_wait_with_the_same_proof(place: Place) -> None:
    ensure_from_jobs(PIPELINE.sources.values(), place.broker.bootstrap, security=place.broker.security("collector"))

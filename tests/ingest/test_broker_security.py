"""A secure broker: who comes in, who may do what, and that nobody listens on the way."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition

from ingest.broker import EmbeddedBroker
from ingest.broker_security import USERS
from ingest.errors import BrokerUnavailable
from ingest.publish import ensure_topics
from jobs.broker import apply_topics, embedded, resolve_kafka
from jobs.broker import ensure_topics as ensure_from_jobs
from lakehouse.contract.errors import ConfigError, EnvironmentProblem
from lakehouse.contract.kafkasecurity import ClientSecurity
from lakehouse.contract.settings import KafkaSettings, Settings
from tests.ingest.conftest import event, pipeline_of, request, running_node, settings_of

pytestmark = pytest.mark.broker

PIPELINE = pipeline_of("secure", "http", latest_topic=True, partitions=1)


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
    settings = dataclasses.replace(settings, kafka=KafkaSettings(secure=True, heap_mb=192))
    broker = embedded(settings, die_with_parent=True)
    broker.start(timeout_s=180)
    try:
        apply_topics(settings, PIPELINE)
        yield Place(settings, broker)
    finally:
        broker.stop()


@pytest.mark.parametrize("client", ["kafka-python", "confluent-kafka"])
async def test_an_event_goes_through(place: Place, client: str) -> None:
    settings = resolve_kafka(place.settings, "collector")
    kafka = dataclasses.replace(settings.kafka, client=client)
    settings = dataclasses.replace(settings, kafka=kafka)
    number = {"kafka-python": 1, "confluent-kafka": 2}[client]
    async with running_node(settings, PIPELINE, settings.kafka.bootstrap, node=client) as url:
        status, _, _ = await request(url, "POST", "/v1/clicks", event(number), content_type="application/json")
        assert status == 202
        for user in ("lakehouse", "admin"):
            assert await asyncio.to_thread(place.read, "secure", user, str(number)) == event(number)


def test_who_is_not_allowed_is_refused(place: Place) -> None:
    assert place.write("secure", "collector") == ""
    for topic, user in (("secure", "lakehouse"), ("secure", "reader"), ("secure.latest", "reader")):
        assert place.write(topic, user) == "TOPIC_AUTHORIZATION_FAILED", (topic, user)
    assert place.read("secure", "collector", "1", "millrace-refine-x") == b"TOPIC_AUTHORIZATION_FAILED"
    refusals = (b"GROUP_AUTHORIZATION_FAILED", b"TOPIC_AUTHORIZATION_FAILED")  # whichever the client hears first
    assert place.read("secure", "collector", "1") in refusals
    seen = Producer(place.options("reader")).list_topics(timeout=60).topics
    assert set(seen) == {"secure.latest"}, "the rest is not even named"
    with pytest.raises(BrokerUnavailable, match="millrace topics --apply"):  # no topic is the collector's to make
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
    assert options["ssl.truststore.location"] == str(place.broker.secrets.ca)
    assert place.broker.security("lakehouse").read_password() in options["sasl.jaas.config"]
    assert ClientSecurity().for_java() == ClientSecurity().for_librdkafka() == ClientSecurity().for_kafka_python() == {}


def test_jobs_wait_with_the_same_proof(place: Place) -> None:
    ensure_from_jobs(PIPELINE, place.broker.bootstrap, security=place.broker.security("collector"))

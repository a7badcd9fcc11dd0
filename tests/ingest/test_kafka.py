"""The publisher, and the topics at start."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kafka import KafkaAdminClient
from kafka.admin import ConfigResource, ConfigResourceType
from kafka.partitioner import murmur2

from ingest.broker import EmbeddedBroker
from ingest.delivery import KafkaDelivery
from ingest.kafka import Headers, KafkaPublisher, SendOutcome, ensure_topics
from ingest.log.message_log import MessageLog
from ingest.log.segments import LoggedEvent
from lakehouse.contract.envelope import Envelope
from lakehouse.contract.pipeline import Source
from lakehouse.contract.settings import KafkaSettings
from tests.ingest.conftest import append, consume, eventually


def source(topic: str, partitions: int = 2) -> Source:
    return Source(
        topic=topic, schema="", event_time="received_at", name="rsvps", partitions=partitions, retention="3 days"
    )


@pytest.mark.broker
def test_the_topic_is_made_as_declared_and_left_alone_later(broker: EmbeddedBroker) -> None:
    ensure_topics(broker.bootstrap, [source("made", 3)])
    ensure_topics(broker.bootstrap, [source("made", 5)])
    admin = KafkaAdminClient(bootstrap_servers=broker.bootstrap)
    try:
        (topic,) = admin.describe_topics(["made"])
        assert len(topic["partitions"]) == 3
        config = admin.describe_configs([ConfigResource(ConfigResourceType.TOPIC, "made")])
        assert str(3 * 86_400_000) in str(config)
    finally:
        admin.close()


@pytest.mark.broker
async def test_events_arrive_and_outcomes_say_where(
    broker: EmbeddedBroker, open_log: Callable[..., MessageLog]
) -> None:
    topic = "publish"
    ensure_topics(broker.bootstrap, [source(topic)])
    log = open_log()
    lane = log.lane("rsvps/http/0", "rsvps")
    publisher = KafkaPublisher(KafkaSettings(bootstrap=broker.bootstrap), {"rsvps": topic})
    outcomes: list[SendOutcome] = []
    await asyncio.to_thread(publisher.start, outcomes.extend)
    events = [append(log, lane, n) for n in range(500)]
    events.insert(250, append(log, lane, 999, size=5_000_000))  # more than the broker takes
    publisher.send(events[:200])
    publisher.send(events[200:])
    await eventually(lambda: len(outcomes) >= 501)
    final = [outcome for outcome in outcomes if outcome.final]
    assert [outcome.event.envelope.event_id for outcome in final] == ["e999"]
    assert "bytes, more than the" in final[0].error
    again = [outcome.event for outcome in outcomes if outcome.error and not outcome.final]  # Kafka's mishaps, if any
    publisher.send(again, afresh=True)
    await eventually(lambda: len({outcome.event.seq for outcome in outcomes if not outcome.error}) == 500)
    records = await asyncio.to_thread(consume, broker.bootstrap, topic, 500)
    at = {(record.partition, record.offset): record for record in records}
    partitions: dict[bytes, set[int]] = {}

    def of_key(key: bytes) -> int:
        return (int(murmur2(key)) & 0x7FFF_FFFF) % 2

    for outcome in outcomes:
        if not outcome.error:
            record = at[outcome.partition, outcome.offset]
            assert record.value == outcome.event.payload
            assert Envelope.from_headers(record.headers) == outcome.event.envelope
            assert record.key == outcome.event.key
            partitions.setdefault(record.key, set()).add(record.partition)
    assert partitions == {key: {of_key(key)} for key in partitions}, "the partition that the Java clients choose"
    await asyncio.to_thread(publisher.close, 2.0)
    await log.close()


@pytest.mark.broker
async def test_outcomes_go_on_coming_after_they_could_not_be_taken(
    broker: EmbeddedBroker, open_log: Callable[..., MessageLog]
) -> None:
    ensure_topics(broker.bootstrap, [source("publish-taken")])
    log, outcomes = open_log(), list[SendOutcome]()
    lane = log.lane("rsvps/http/0", "rsvps")

    def deliver(batch: Sequence[SendOutcome]) -> None:
        outcomes.extend(batch)
        if len(outcomes) == 1:
            raise TypeError("a fault of whoever takes them")

    publisher = KafkaPublisher(KafkaSettings(bootstrap=broker.bootstrap, linger_ms=500), {"rsvps": "publish-taken"})
    await asyncio.to_thread(publisher.start, deliver)
    publisher.send([append(log, lane, 1)])
    await asyncio.to_thread(publisher._producer.flush, 60)  # the first is there, and nobody has been told
    publisher.send([append(log, lane, 2)])
    await eventually(lambda: len(outcomes) == 2)
    await asyncio.to_thread(publisher.close, 2.0)
    await log.close()


@pytest.mark.broker
async def test_order_within_a_key_outlives_a_client_that_fails(
    broker: EmbeddedBroker, open_log: Callable[..., MessageLog]
) -> None:
    class Failing(KafkaPublisher):
        """Fails on a few events, each once, when it is given them."""

        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.to_fail = {5, 6, 90, 333}

        def _send(self, events: Sequence[LoggedEvent]) -> None:
            for event in events:
                if event.seq in self.to_fail and not self._holding:
                    self.to_fail.remove(event.seq)
                    self._fail(event, "a fault in the client")
                else:
                    super()._send([event])

    def make(topic: str) -> Failing:
        return Failing(KafkaSettings(bootstrap=broker.bootstrap, linger_ms=0), {"rsvps": topic})

    publisher, suspects = await _order_under(make, broker, open_log(), "failing", 600)
    assert not publisher.to_fail
    assert suspects >= 4


@pytest.mark.broker
async def test_order_within_a_key_outlives_a_batch_that_kafka_refuses(
    broker: EmbeddedBroker, open_log: Callable[..., MessageLog]
) -> None:
    """The topic takes less than before: the batches that are under way are refused, some of them whole."""
    topic = "refused"

    def make(topic: str) -> KafkaPublisher:
        return KafkaPublisher(KafkaSettings(bootstrap=broker.bootstrap, linger_ms=30), {"rsvps": topic})

    def lower() -> None:
        admin = KafkaAdminClient(bootstrap_servers=broker.bootstrap)
        limit = ConfigResource(ConfigResourceType.TOPIC, topic, {"max.message.bytes": "3000"})
        admin.alter_configs([limit])
        admin.close()

    await _order_under(make, broker, open_log(), topic, 3000, lower)


async def _order_under(
    make: Callable[[str], Any],
    broker: EmbeddedBroker,
    log: MessageLog,
    topic: str,
    count: int,
    meanwhile: Callable[[], None] | None = None,
) -> tuple[Any, int]:
    """The publisher, and how many events were sent again; all that Kafka may take has come, in order within its key."""
    ensure_topics(broker.bootstrap, [source(topic)])
    lane = log.lane("rsvps/http/0", "rsvps")
    publisher = make(topic)
    delivery = KafkaDelivery(log, publisher, lambda _: None)
    await asyncio.to_thread(publisher.start, delivery.deliver)
    task = asyncio.create_task(delivery.run())
    changing, large = None, meanwhile is not None
    for n in range(count):
        delivery.offer(append(log, lane, n, size=5_000 if large and n % 50 == 7 else 100))
        if n == 200 and meanwhile is not None:
            changing = asyncio.create_task(asyncio.to_thread(meanwhile))
        if n % 20 == 0:
            await asyncio.sleep(0.005)
    if changing is not None:
        await changing
        while True:  # until the topic takes less for certain: its leader hears of it in its own time
            for n in range(count, count + 500):
                delivery.offer(append(log, lane, n, size=5_000 if n % 50 == 7 else 100))
            count += 500
            await asyncio.wait_for(delivery.drained(), 60)
            if log.failed:
                break
    await asyncio.wait_for(delivery.drained(), 60)
    failed = {item.event.envelope.event_id for item in log.failed if item.event is not None}
    count -= len(failed)
    assert bool(failed) == large
    first: dict[str, int] = {}
    order: dict[bytes, list[int]] = {}
    suspects = 0
    for record in await asyncio.to_thread(consume, broker.bootstrap, topic, count):
        envelope = Envelope.from_headers(record.headers)
        suspects += envelope.suspect
        if first.setdefault(envelope.event_id, record.offset) == record.offset:
            order.setdefault(record.key, []).append(int(envelope.event_id[1:]))
    assert not failed & first.keys()
    assert len(first) == sum(map(len, order.values())) == count
    assert all(numbers == sorted(numbers) for numbers in order.values())
    task.cancel()
    await asyncio.to_thread(publisher.close, 2.0)
    await log.close()
    return publisher, suspects


@pytest.mark.broker
async def test_an_event_of_a_source_that_is_gone_is_kept_as_failed(
    broker: EmbeddedBroker, open_log: Callable[..., MessageLog]
) -> None:
    ensure_topics(broker.bootstrap, [source("left")])
    log = open_log()
    publisher = KafkaPublisher(KafkaSettings(bootstrap=broker.bootstrap), {"others": "left"})
    delivery = KafkaDelivery(log, publisher, lambda _: None)
    await asyncio.to_thread(publisher.start, delivery.deliver)
    delivery.offer(append(log, log.lane("rsvps/http/0", "rsvps"), 1))
    await asyncio.wait_for(delivery.drained(), 60)
    assert [item.reason for item in log.failed] == ["the pipeline has no source 'rsvps' any more"]
    await asyncio.to_thread(publisher.close, 2.0)
    await log.close()


@pytest.mark.broker
async def test_a_broker_that_is_not_there() -> None:
    """In a process of its own: kafka-python leaves the sockets of refused connections to the garbage collector."""
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", AWAY, stdout=subprocess.PIPE)
    said, _ = await asyncio.wait_for(child.communicate(), 60)
    assert said.decode().split() == ["BrokerUnavailable", "127.0.0.1:1"] * 2


AWAY = """
import asyncio
from ingest import kafka
from ingest.errors import BrokerUnavailable
from lakehouse.contract.settings import KafkaSettings
kafka.CONNECT_MS = 300
async def main():
    publisher = kafka.KafkaPublisher(KafkaSettings(bootstrap="127.0.0.1:1"), {"rsvps": "nowhere"})
    for _ in range(2):
        try:
            await asyncio.to_thread(publisher.start, lambda _: None)
        except BrokerUnavailable as error:
            print(type(error).__name__, error.bootstrap)
    await asyncio.to_thread(publisher.close, 0.1)
asyncio.run(main())
"""


ENVELOPES = st.builds(
    Envelope,
    event_id=st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    source=st.sampled_from(["clicks", "rsvps"]),
    tenant=st.sampled_from(["default", "acme"]),
    received_at=st.integers(1, 2),
    collector=st.sampled_from(["n1", "n2"]),
    fingerprint=st.sampled_from(["a", "b"]),
    suspect=st.booleans(),
    reject=st.none() | st.just("bad"),
    extra=st.sampled_from([(), (("weight", "2.0"),)]),
)


@given(st.lists(ENVELOPES, max_size=8))
@settings(max_examples=30)
def test_headers_of_one_after_the_other_are_those_of_each(envelopes: list[Envelope]) -> None:
    headers = Headers()
    for envelope in envelopes:
        assert headers.of(envelope) == envelope.to_headers()

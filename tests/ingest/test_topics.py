"""Topics against their declaration, the compacted ones, and what a collector does where an event's fate is unknown."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kafka import KafkaAdminClient, KafkaConsumer, TopicPartition

from ingest.broker import EmbeddedBroker
from ingest.delivery import KafkaDelivery
from ingest.kafka import ALARM, WARN, SendOutcome, check_topics, ensure_topics, judge
from ingest.log.message_log import MessageLog
from ingest.log.segments import LoggedEvent
from ingest.relay import LatestMirror
from lakehouse.contract.errors import ConfigError, EnvironmentProblem
from tests.ingest.conftest import append, event, eventually, pipeline_of, request, running_node, settings_of

GOOD = {"retention.ms": "604800000", "cleanup.policy": "delete", "min.insync.replicas": "1"}


@pytest.mark.parametrize(
    ("partitions", "replicas", "configs", "declared", "found"),
    [
        (2, 1, {}, {}, []),
        (9, 1, {}, {}, []),
        (1, 1, {}, {}, [(WARN, "1 partitions, 2 are declared")]),
        (2, 1, {"retention.ms": "3600000"}, {}, [(WARN, "keeps events for 1 h, 7 days are declared")]),
        (2, 1, {"retention.ms": "-1"}, {}, []),
        (2, 1, {"cleanup.policy": "compact,delete"}, {}, [(ALARM, "compacted")]),
        (2, 1, {"min.insync.replicas": "2"}, {}, [(ALARM, "no event would ever be acknowledged")]),
        (2, 3, {}, {"replicas": 3, "min_isr": 2}, [(WARN, "once 1 replicas have it, 2 are declared")]),
        (2, 2, {"min.insync.replicas": "2"}, {"replicas": 3, "min_isr": 2}, [(WARN, "2 replicas, 3 are declared")]),
    ],
)
def test_what_is_otherwise_is_said(
    partitions: int, replicas: int, configs: dict[str, str], declared: dict[str, int], found: list[tuple[str, str]]
) -> None:
    source = pipeline_of("t", **declared).sources["clicks"]
    remarks = judge(source, partitions, replicas, GOOD | configs)
    assert [remark.severity for remark in remarks] == [severity for severity, _ in found]
    for remark, (_, text) in zip(remarks, found, strict=True):
        assert text in remark.problem
        assert remark.remedy


@settings(max_examples=20)
@given(st.integers(1, 50), st.integers(1, 50))
def test_fewer_partitions_are_remarked_and_more_are_not(there: int, declared: int) -> None:
    source = pipeline_of("t", partitions=declared).sources["clicks"]
    assert bool(judge(source, there, 1, GOOD)) == (there < declared)


def test_declarations_that_cannot_be() -> None:
    for wrong in ({"min_isr": 2}, {"replicas": 0}, {"guarantee": "sometimes"}):
        with pytest.raises(ConfigError):
            pipeline_of("t", **wrong)


@pytest.mark.broker
def test_a_topic_that_would_lose_events_stops_the_start(broker: EmbeddedBroker) -> None:
    source = pipeline_of("compacted-by-mistake").sources["clicks"]
    admin = KafkaAdminClient(bootstrap_servers=broker.bootstrap)
    config = {"cleanup.policy": "compact"}
    admin.create_topics({source.topic: {"num_partitions": 2, "replication_factor": 1, "configs": config}})
    admin.close()
    with pytest.raises(EnvironmentProblem, match=r"compacted.*cleanup\.policy=delete"):
        ensure_topics(broker.bootstrap, [source])
    other = pipeline_of("never-there").sources["clicks"]
    assert [remark.problem for remark in check_topics(broker.bootstrap, [other])] == ["it is absent"]
    with pytest.raises(EnvironmentProblem, match="replicas"):
        ensure_topics(broker.bootstrap, [dataclasses.replace(other, replicas=3)])


@pytest.mark.broker
async def test_the_newest_event_of_each_key_is_kept_beside(broker: EmbeddedBroker, tmp_path: Path) -> None:
    pipeline = pipeline_of("newest", "http", latest_topic=True)
    stop = asyncio.Event()
    async with running_node(settings_of(tmp_path), pipeline, broker.bootstrap) as url:
        body = b"\n".join([event(n) for n in range(70)] + [b'{"id":'])
        status, _, answer = await request(url, "POST", "/v1/clicks", body, content_type="application/x-ndjson")
        assert (status, len(answer["rejected"])) == (202, 1)
        mirror = LatestMirror(settings_of(tmp_path, broker.bootstrap), pipeline)
        copying = asyncio.create_task(mirror.run(lambda: None, stop))
        try:
            await eventually(lambda: mirror.counts["clicks"]["copied"] == 70, 60)
            newest = await asyncio.to_thread(_newest, broker.bootstrap, "newest.latest", 70)
        finally:
            stop.set()
            await copying
    assert newest == {f"k{n % 7}": event(n) for n in range(63, 70)}
    admin = KafkaAdminClient(bootstrap_servers=broker.bootstrap)
    with contextlib.closing(admin):
        assert len(admin.describe_topics(["newest.latest"])[0]["partitions"]) == 2
    with pytest.raises(ConfigError, match="latest_topic"):
        LatestMirror(settings_of(tmp_path, broker.bootstrap), pipeline_of("none"))


def _newest(bootstrap: str, topic: str, count: int) -> dict[str, bytes]:
    consumer = KafkaConsumer(bootstrap_servers=bootstrap, auto_offset_reset="earliest", metrics_enabled=False)
    with contextlib.closing(consumer):
        consumer.assign([TopicPartition(topic, number) for number in range(2)])
        found: dict[str, bytes] = {}
        seen = 0
        for _ in range(300):
            for records in consumer.poll(timeout_ms=200).values():
                seen += len(records)
                found |= {record.key.decode(): record.value for record in records}
            if seen >= count:
                break
        return found


class Unsure:
    """A Kafka that has taken event 3 and says that it does not know, and then holds back, as a client does."""

    def __init__(self) -> None:
        self.taken: list[tuple[int, bool]] = []
        self.holding = False
        self.unsure = {3}

    def start(self, deliver: Callable[[Sequence[SendOutcome]], None]) -> None:
        self.deliver = deliver

    def send(self, events: Sequence[LoggedEvent], *, afresh: bool = False) -> None:
        self.holding = self.holding and not afresh
        outcomes = []
        for item in events:
            number = int(item.envelope.event_id[1:])
            if self.holding:
                outcomes.append(SendOutcome(item, -1, -1, "held back behind an event that is sent again"))
                continue
            self.taken.append((number, item.envelope.suspect))
            if number in self.unsure:
                self.unsure.discard(number)
                self.holding = True
                outcomes.append(SendOutcome(item, -1, -1, "the connection was cut"))
            else:
                outcomes.append(SendOutcome(item, 0, number))
        asyncio.get_running_loop().call_soon(self.deliver, outcomes)

    def close(self, timeout_s: float) -> None:
        pass


@pytest.mark.parametrize(
    ("guarantee", "third"),
    [("exactly_once", [False, True]), ("at_least_once", [False, False]), ("at_most_once", [False])],
)
async def test_what_each_guarantee_does(open_log: Callable[..., MessageLog], guarantee: str, third: list[bool]) -> None:
    """The interface is real, Kafka behind it is not: its answer must be lost at a known event."""
    log, kafka = open_log(), Unsure()
    lane = log.lane("rsvps/http/0", "rsvps")
    delivery = KafkaDelivery(log, kafka, lambda _: None, hand_over_s=0.0, guarantee=lambda _: guarantee)
    kafka.start(delivery.deliver)
    running = asyncio.create_task(delivery.run())
    for number in range(8):
        delivery.offer(append(log, lane, number))
    async with asyncio.timeout(60):
        await delivery.drained()
    running.cancel()
    assert [suspect for number, suspect in kafka.taken if number == 3] == third
    firsts = list(dict.fromkeys(number for number, _ in kafka.taken))
    assert firsts == list(range(8)), "in order, and what was held back is not lost"
    assert (lane.failed, lane.in_log) == (int(guarantee == "at_most_once"), 0)
    assert lane.published == 8 - lane.failed
    await log.close()


async def test_at_most_once_outlives_a_crash(open_log: Callable[..., MessageLog], tmp_path: Path) -> None:
    log = open_log()
    lane = log.lane("rsvps/http/0", "rsvps")
    last = [append(log, lane, number) for number in range(5)][-1]
    assert last.group is not None
    await last.group.wait()
    await log.close()  # nothing was acknowledged by Kafka: what it has, nobody knows
    log, kafka = open_log(), Unsure()
    assert log.recovery.to_replay == 5
    delivery = KafkaDelivery(log, kafka, lambda _: None, hand_over_s=0.0, guarantee=lambda _: "at_most_once")
    kafka.start(delivery.deliver)
    running = asyncio.create_task(delivery.run())
    async with asyncio.timeout(60):
        await delivery.recovered()
        await delivery.drained()
    running.cancel()
    assert kafka.taken == []
    assert log.lane("rsvps/http/0", "rsvps").failed == 5
    await log.close()

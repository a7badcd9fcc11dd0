"""Delivery with a publisher that the test holds in its hand: order, bounds, sending again, recovery."""

from __future__ import annotations

import asyncio
import os
import random
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import pytest

from ingest import delivery as delivery_module
from ingest.delivery import KafkaDelivery
from ingest.kafka import SendOutcome
from ingest.log.message_log import AHEAD, MessageLog
from ingest.log.segments import LoggedEvent
from tests.ingest.conftest import append, eventually

OpenLog = Callable[..., MessageLog]


class ByHand:
    """A publisher that keeps what it gets until the test says what became of it."""

    def __init__(self) -> None:
        self.got: list[LoggedEvent] = []
        self.seen: list[int] = []
        self.suspects: set[int] = set()

    def start(self, deliver: Callable[[Sequence[SendOutcome]], None]) -> None:
        raise AssertionError("the node starts it")

    def send(self, events: Sequence[LoggedEvent], *, afresh: bool = False) -> None:
        self.got += events
        self.seen += [event.seq for event in events]
        self.suspects |= {event.seq for event in events if event.envelope.suspect}

    def close(self, timeout_s: float) -> None:
        raise AssertionError("the node closes it")

    def take(self, count: int | None = None) -> list[LoggedEvent]:
        taken, self.got = self.got[:count], self.got[len(self.got) if count is None else count :]
        return taken


def sent(events: Sequence[LoggedEvent]) -> list[SendOutcome]:
    return [SendOutcome(event, 0, event.seq) for event in events]


@pytest.fixture
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery_module, "IN_FLIGHT_BYTES", 20_000)
    monkeypatch.setattr(delivery_module, "TAIL_BYTES", 30_000)


@asynccontextmanager
async def delivering(log: MessageLog) -> AsyncIterator[tuple[KafkaDelivery, ByHand, list[SendOutcome]]]:
    publisher, known = ByHand(), list[SendOutcome]()
    delivery = KafkaDelivery(log, publisher, known.append, hand_over_s=0)
    task = asyncio.create_task(delivery.run())
    yield delivery, publisher, known
    task.cancel()
    await log.close()


async def test_straight_through(open_log: OpenLog) -> None:
    log = open_log(group_commit_ms=60_000)
    lane = log.lane("rsvps/http/0", "rsvps")
    async with delivering(log) as (delivery, publisher, known):
        for n in range(100):
            delivery.offer(append(log, lane, n))
        await eventually(lambda: len(publisher.got) == 100)  # sent before it is durable
        assert log.durable_seq == 0
        delivery.deliver(sent(publisher.take()))
        await asyncio.wait_for(delivery.drained(), 60)
        assert len(known) == 100
        assert lane.published == 100


@pytest.mark.usefixtures("small_limits")
async def test_in_flight_is_bounded_and_the_rest_is_read_back_in_order(open_log: OpenLog) -> None:
    log = open_log(segment_bytes=50_000)
    lane = log.lane("rsvps/http/0", "rsvps")
    async with delivering(log) as (delivery, publisher, _):
        for n in range(2000):
            delivery.offer(append(log, lane, n, 1000))
            if n % 100 == 0:
                await asyncio.sleep(0.01)
        await eventually(lambda: len(publisher.got) >= 20)
        assert len(publisher.got) == 20
        await eventually(lambda: delivery._tail_bytes <= 30_000)  # when the disk has it
        while lane.published < 2000:
            await eventually(lambda: bool(publisher.got))
            assert len(publisher.got) <= 2300, "one batch read back at most beyond the bound"
            delivery.deliver(sent(publisher.take(50)))
            await asyncio.sleep(0)
        await asyncio.wait_for(delivery.drained(), 60)
        assert publisher.seen == list(range(1, 2001)), "each once, in order"
        assert not publisher.suspects
        delivery.offer(append(log, lane, 5000))
        await eventually(lambda: publisher.seen[-1] == 2001)  # straight through again
        delivery.deliver(sent(publisher.take()))


async def test_no_more_than_so_many_go_ahead_of_the_disk(open_log: OpenLog, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, sync = threading.Event(), os.fdatasync

    def when_the_disk_is_ready(handle: int) -> None:
        disk.wait(120)
        sync(handle)

    log = open_log()
    monkeypatch.setattr("ingest.log.protocols.os.fdatasync", when_the_disk_is_ready)
    lane = log.lane("rsvps/http/0", "rsvps")
    async with delivering(log) as (delivery, publisher, _):
        try:
            for n in range(AHEAD + 300):
                delivery.offer(append(log, lane, n))
            await eventually(lambda: len(publisher.got) >= AHEAD)
            await asyncio.sleep(0.1)
            assert len(publisher.got) == AHEAD
        finally:
            disk.set()
        await eventually(lambda: len(publisher.got) == AHEAD + 300)
        await eventually(lambda: log.durable_seq == AHEAD + 300)
        assert publisher.seen == sorted(publisher.seen)
        delivery.deliver(sent(publisher.take()))


async def test_what_failed_is_sent_again_before_anything_newer(open_log: OpenLog) -> None:
    log = open_log()
    lane = log.lane("rsvps/http/0", "rsvps")
    async with delivering(log) as (delivery, publisher, known):
        for n in range(10):
            delivery.offer(append(log, lane, n))
        await eventually(lambda: len(publisher.got) == 10)
        first = publisher.take()
        failed = [SendOutcome(event, -1, -1, "epoch bump") for event in (first[5], first[2])]
        delivery.deliver([*sent(first[:2]), *failed])
        for n in range(10, 20):
            delivery.offer(append(log, lane, n))
        await asyncio.sleep(0.2)
        assert publisher.got == [], "not while others are in flight"
        delivery.deliver(sent([first[3], first[4], *first[6:]]))
        await eventually(lambda: len(publisher.got) == 12)
        assert [event.seq for event in publisher.got] == [3, 6, *range(11, 21)]
        assert publisher.suspects == {3, 6}
        delivery.deliver(sent(publisher.take()))
        await asyncio.wait_for(delivery.drained(), 60)
        assert len(known) == 20


async def test_what_kafka_will_never_take_goes_to_the_failed_store(open_log: OpenLog) -> None:
    log = open_log()
    lane = log.lane("rsvps/http/0", "rsvps")
    async with delivering(log) as (delivery, publisher, known):
        for n in range(3):
            delivery.offer(append(log, lane, n))
        await eventually(lambda: len(publisher.got) == 3)
        one, two, three = publisher.take()
        delivery.deliver([*sent([one]), SendOutcome(two, -1, -1, "MessageSizeTooLarge", final=True), *sent([three])])
        await asyncio.wait_for(delivery.drained(), 60)
        assert [(item.seq, item.reason) for item in log.failed] == [(2, "MessageSizeTooLarge")]
        assert (lane.received, lane.published, lane.failed, lane.in_log) == (3, 2, 1, 0)
        assert [outcome.error for outcome in known] == ["", "", "MessageSizeTooLarge"]


async def test_an_outage_may_last_thousands_of_attempts(open_log: OpenLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ingest.delivery._BACKOFF_MAX_S", 0.001)
    log = open_log(group_commit_ms=1)
    async with delivering(log) as (delivery, publisher, _):
        delivery.offer(append(log, log.lane("rsvps/http/0", "rsvps"), 1))
        delivery._attempts = 1_000
        for _ in range(50):  # 2**1_024 is more than a float holds
            await eventually(lambda: len(publisher.got) == 1)
            delivery.deliver([SendOutcome(event, -1, -1, "timed out") for event in publisher.take()])
        await eventually(lambda: len(publisher.got) == 1)
        delivery.deliver(sent(publisher.take()))
        await asyncio.wait_for(delivery.drained(), 60)


async def test_recovery_sends_again_in_order_marked_suspect(open_log: OpenLog) -> None:
    log = open_log(segment_bytes=10_000)
    lane = log.lane("rsvps/http/0", "rsvps")
    events = [append(log, lane, n) for n in range(300)]
    log.acked(events[:50], 51)
    await log.close()
    log = open_log()
    lane = log.lane("rsvps/http/0", "rsvps")
    async with delivering(log) as (delivery, publisher, _):
        delivery.offer(append(log, lane, 300))  # comes while the old ones are still being read
        await eventually(lambda: len(publisher.got) == 251)
        assert publisher.seen == list(range(51, 302))
        assert publisher.suspects == set(range(51, 301))
        waiting = asyncio.ensure_future(delivery.recovered())
        assert delivery.to_replay == 250
        delivery.deliver(sent(publisher.take(100)))
        assert delivery.to_replay == 150
        await asyncio.sleep(0.01)
        assert not waiting.done()
        delivery.deliver(sent(publisher.take(150)))
        await asyncio.wait_for(waiting, 60)
        assert delivery.to_replay == 0
        delivery.deliver(sent(publisher.take()))
        await asyncio.wait_for(delivery.drained(), 60)
    again = open_log()
    assert again.recovery.to_replay == 0
    await again.close()


@pytest.mark.usefixtures("small_limits")
async def test_events_that_came_together_are_sent_once_and_in_order(open_log: OpenLog) -> None:
    log = open_log()
    lane = log.lane("rsvps/http/0", "rsvps")
    async with delivering(log) as (delivery, publisher, known):
        made = random.Random(5)
        number = 0
        while number < 3_000:
            count = made.choice([0, 1, 7, 60])
            delivery.offer_all([append(log, lane, n) for n in range(number, number + count)])
            number += count
            if made.random() < 0.3:
                await asyncio.sleep(0)
                delivery.deliver(sent(publisher.take(made.randrange(200))))
        while len(known) < number:
            await asyncio.sleep(0.001)
            delivery.deliver(sent(publisher.take()))
        assert publisher.seen == sorted(publisher.seen) and len(publisher.seen) == number
        await asyncio.wait_for(delivery.drained(), 60)

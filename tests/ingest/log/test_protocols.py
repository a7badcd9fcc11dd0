"""The three logging protocols: one guarantee, three times of writing."""

from __future__ import annotations

import asyncio
import ctypes
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from ingest.delivery import KafkaDelivery
from ingest.errors import LogFull, LogUnavailable
from ingest.kafka import SendOutcome
from ingest.log.message_log import MessageLog
from ingest.log.protocols import PROTOCOLS, SegmentPart, SegmentWriter
from ingest.log.segments import SEGMENT_MAGIC, LogSegment, segment_path
from tests.ingest.conftest import append, eventually, everything
from tests.ingest.test_delivery import ByHand, sent

OpenLog = Callable[..., MessageLog]
ALL = sorted(PROTOCOLS)


class Disk:
    """Counts what reaches it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.syncs = 0
        sync = os.fdatasync

        def count(handle: int) -> None:
            sync(handle)
            self.syncs += 1

        monkeypatch.setattr("ingest.log.protocols.os.fdatasync", count)


async def test_rbml_writes_each_event_before_anything_is_done_with_it(
    open_log: OpenLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = open_log(protocol="rbml")
    lane = log.lane("rsvps/http/0", "rsvps")
    disk = Disk(monkeypatch)
    for n in range(10):
        event = append(log, lane, n)
        assert disk.syncs == n + 1
        assert log.durable_seq == event.seq and lane.durable == n + 1
        assert event.group is not None and event.group.acknowledgeable
    assert len(everything(log)) == 10
    await log.close()


async def test_sbml_writes_each_event_when_it_is_sent_and_deletes_on_kafkas_answer(
    open_log: OpenLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = open_log(protocol="sbml")
    lane = log.lane("rsvps/http/0", "rsvps")
    publisher = ByHand()
    delivery = KafkaDelivery(log, publisher, lambda _: None, hand_over_s=3600)
    disk = Disk(monkeypatch)
    events = [append(log, lane, n) for n in range(10)]
    for event in events:
        delivery.offer(event)
    assert disk.syncs == 0 and not publisher.got, "received, and neither written nor sent"
    delivery._flush()
    assert disk.syncs >= 10, "each by itself"
    assert [event.seq for event in publisher.take()] == list(range(1, 11))
    assert log.durable_seq == 10 and lane.durable == 10
    assert all(event.group is not None and event.group.acknowledgeable for event in events)
    before = disk.syncs
    delivery.deliver(sent(events[:6]))
    assert disk.syncs == before + 1, "one write for an answer"
    await log.close()
    again = open_log(protocol="hml")
    assert [event.envelope.event_id for event in everything(again)] == ["e6", "e7", "e8", "e9"]
    await again.close()


async def test_hml_writes_many_events_at_once_while_they_are_under_way(
    open_log: OpenLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = open_log(protocol="hml")
    lane = log.lane("rsvps/http/0", "rsvps")
    publisher = ByHand()
    delivery = KafkaDelivery(log, publisher, lambda _: None, hand_over_s=3600)
    disk = Disk(monkeypatch)
    events = [append(log, lane, n) for n in range(200)]
    for event in events:
        delivery.offer(event)
    delivery._flush()
    assert len(publisher.got) == 200 and log.durable_seq == 0, "sent before it is on the disk"
    assert events[-1].group is not None
    await asyncio.wait_for(events[-1].group.wait(), 60)
    assert 1 <= disk.syncs <= 3
    delivery.deliver(sent(publisher.take()))
    await log.close()


@pytest.mark.parametrize("protocol", ALL)
async def test_a_log_of_one_is_read_by_the_others(protocol: str, open_log: OpenLog) -> None:
    log = open_log(protocol=protocol, segment_bytes=4096)
    lane = log.lane("rsvps/http/0", "rsvps")
    publisher = ByHand()
    delivery = KafkaDelivery(log, publisher, lambda _: None, hand_over_s=0)
    task = asyncio.create_task(delivery.run())
    for n in range(100):
        delivery.offer(append(log, lane, n))
    await eventually(lambda: len(publisher.got) == 100)
    delivery.deliver(sent(publisher.take(40)))
    await log.close()
    task.cancel()
    other = ALL[(ALL.index(protocol) + 1) % len(ALL)]
    again = open_log(protocol=other)
    assert [event.envelope.event_id for event in everything(again)] == [f"e{n}" for n in range(40, 100)]
    assert again.recovery.clean
    await again.close()


SENDER = """
import asyncio, os, random, sys
from pathlib import Path
from ingest.delivery import KafkaDelivery
from ingest.log.message_log import MessageLog
from ingest.kafka import SendOutcome
from tests.ingest.conftest import append

class Kafka:
    # Keeps what it acknowledges in a file, late and not always.
    def __init__(self, path, seed):
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.random = random.Random(seed)
        self.deliver = None
    def send(self, events, *, afresh=False):
        loop = asyncio.get_running_loop()
        loop.call_later(self.random.random() * 0.02, self.take, list(events))
    def take(self, events):
        os.write(self.file, b"".join(b"%s\\n" % e.envelope.event_id.encode() for e in events))
        self.deliver([SendOutcome(e, 0, e.seq) for e in events])

async def main():
    folder, protocol, seed = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    log = MessageLog(folder / "log", "n1", limit=64 << 20, segment_bytes=100_000, protocol=protocol)
    lane = log.lane("rsvps/http/0", "rsvps")
    kafka = Kafka(folder / "kafka", seed)
    delivery = KafkaDelivery(log, kafka, lambda _: None, hand_over_s=0.002)
    kafka.deliver = delivery.deliver
    asyncio.create_task(delivery.run())
    n = lane.received
    while True:
        events = []
        for _ in range(random.Random(seed + n).randint(1, 20)):
            events.append(append(log, lane, n, 300))
            delivery.offer(events[-1])
            n += 1
        for event in events:
            await event.group.wait()
        os.write(1, b"%d\\n" % n)
        await asyncio.sleep(0)
asyncio.run(main())
"""


def test_kill_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    """Everything acknowledged is in Kafka's file or comes out of the log; two kills each at random moments."""
    seed = random.SystemRandom().randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    acknowledged = dict.fromkeys(ALL, 0)
    for run in range(2):
        children = {
            name: subprocess.Popen(
                [sys.executable, "-c", SENDER, str(tmp_path / name), name, str(seed + run)], stdout=subprocess.PIPE
            )
            for name in ALL
        }
        for name, child in children.items():
            assert child.stdout is not None
            wanted = rng.randint(5, 25)
            for lines, line in enumerate(child.stdout, 1):
                acknowledged[name] = int(line)
                if lines == wanted:
                    child.send_signal(signal.SIGKILL)
            child.wait()
            child.stdout.close()

    async def left(protocol: str) -> set[str]:
        log = MessageLog(tmp_path / protocol / "log", "n1", limit=64 << 20, protocol=protocol)
        found = {event.envelope.event_id for event in everything(log)}
        assert not log.recovery.clean and not log.recovery.corrupt
        await log.close()
        return found

    for name in ALL:
        in_kafka = set((tmp_path / name / "kafka").read_text().split())
        assert {f"e{n}" for n in range(acknowledged[name])} <= in_kafka | asyncio.run(left(name)), name
        assert acknowledged[name] > 10


# --- a full disk


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of half a mebibyte."""
    place = tmp_path / "disk"
    place.mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"tmpfs", str(place).encode(), b"tmpfs", 0, b"size=512k"):
        pytest.skip(f"no tmpfs may be mounted here: {os.strerror(ctypes.get_errno())}")
    yield place
    libc.umount2(str(place).encode(), 2)


class Later(ByHand):
    """Takes nothing while it is away."""

    def __init__(self) -> None:
        super().__init__()
        self.away = True
        self.has: list[str] = []

    def give(self, delivery: KafkaDelivery) -> None:
        events = self.take()
        self.has += [event.envelope.event_id for event in events]
        delivery.deliver([SendOutcome(event, 0, event.seq) for event in events])


@pytest.mark.parametrize("protocol", ALL)
async def test_a_full_disk_pushes_back_and_loses_nothing(protocol: str, small_disk: Path) -> None:
    log = MessageLog(small_disk / "log", "n1", limit=64 << 20, segment_bytes=64 << 10, protocol=protocol)
    lane = log.lane("rsvps/http/0", "rsvps")
    kafka = Later()
    delivery = KafkaDelivery(log, kafka, lambda _: None, hand_over_s=0)
    task = asyncio.create_task(delivery.run())
    taken, acknowledged = [], []
    try:
        for n in range(5_000):
            event = append(log, lane, n, 1_000)
            delivery.offer(event)
            taken.append(event)
            if n % 20 == 0:  # the disk keeps up, or is full
                await eventually(lambda: log.durable_seq >= log.next_seq - 100 or bool(log.problem))
    except (LogUnavailable, LogFull) as error:
        assert isinstance(error, LogUnavailable) and "No space left on device" in str(error)
    assert 200 < len(taken) < 5_000
    acknowledged = [event for event in taken if event.group is not None and event.group.acknowledgeable]
    assert 100 < len(acknowledged) <= len(taken), "what did not reach the disk is not acknowledged"
    assert not log.has_room(10)
    room = asyncio.ensure_future(log.room())
    for _ in range(3_000):  # Kafka is back: it takes everything, which makes room on the disk
        await asyncio.sleep(0.02)
        kafka.give(delivery)
        if room.done() and len(kafka.has) == len(taken):
            break
    assert kafka.has == [f"e{n}" for n in range(len(taken))], "each once, in order"
    await asyncio.wait_for(room, 60)
    assert not log.problem
    event = append(log, lane, 9_999)
    delivery.offer(event)
    assert event.group is not None
    await asyncio.wait_for(event.group.wait(), 60)
    task.cancel()
    await log.close()
    again = MessageLog(small_disk / "log", "n1", limit=64 << 20)
    assert [found.envelope.event_id for found in everything(again)] == ["e9999"]
    await again.close()


@pytest.mark.parametrize("protocol", ALL)
async def test_what_a_full_disk_holds_comes_back_after_a_crash(protocol: str, small_disk: Path) -> None:
    log = MessageLog(small_disk / "log", "n1", limit=64 << 20, segment_bytes=64 << 10, protocol=protocol)
    lane = log.lane("rsvps/http/0", "rsvps")
    delivery = KafkaDelivery(log, ByHand(), lambda _: None, hand_over_s=0)
    taken: Sequence[int] = range(0)
    with pytest.raises(LogUnavailable):
        for n in range(5_000):
            event = append(log, lane, n, 1_000)
            delivery.offer(event)
            taken = range(n + 1)
            if n % 20 == 0:  # the disk keeps up, or is full
                await eventually(lambda: log.durable_seq >= log.next_seq - 100 or bool(log.problem))
    durable = log.durable_seq
    os.close(log._lock)  # as if killed
    again = MessageLog(small_disk / "log", "n1", limit=64 << 20) if _make_room(small_disk) else log
    found = [event.envelope.event_id for event in everything(again)]
    assert found[:durable] == [f"e{n}" for n in range(durable)] and len(found) <= len(taken)
    await again.close()
    log._commit.problem = "given up"
    if log._commit._again is not None:  # type: ignore[attr-defined]
        log._commit._again.cancel()  # type: ignore[attr-defined]
    log._commit.worker.shutdown()


def _make_room(place: Path) -> bool:
    """The administrator gives the disk more space."""
    libc = ctypes.CDLL(None, use_errno=True)
    return libc.mount(b"tmpfs", str(place).encode(), b"tmpfs", 32, b"size=4m") == 0  # MS_REMOUNT


# The worker's writes: what is removed, and when


def part(folder: Path, number: int, offset: int = 0) -> SegmentPart:
    segment = LogSegment(number, segment_path(folder, number))
    return SegmentPart(segment, offset, [SEGMENT_MAGIC, b"x" * 100])


def names(folder: Path) -> list[str]:
    return sorted(path.stem.lstrip("0") for path in folder.glob("*.seg"))


def test_the_last_segment_stays_until_its_successor_is_on_the_disk(tmp_path: Path) -> None:
    writer, one, two = SegmentWriter(tmp_path), part(tmp_path, 1), part(tmp_path, 2)
    writer.write([one], [one.segment])
    assert names(tmp_path) == ["1"], "the state is nowhere else"
    writer.write([], [])
    assert names(tmp_path) == ["1"]
    writer.write([two], [])
    assert names(tmp_path) == ["2"]
    writer.close()


def test_a_write_that_is_repeated_keeps_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What has become free meanwhile is brought by the repetition, though its successor is not in that write."""
    writer, one, two, three = SegmentWriter(tmp_path), *(part(tmp_path, number) for number in (1, 2, 3))
    writer.write([one], [])
    sync = os.fdatasync
    monkeypatch.setattr(os, "fdatasync", lambda _: (_ for _ in ()).throw(OSError("the disk refuses")))
    with pytest.raises(OSError, match="refuses"):
        writer.write([two], [one.segment])
    assert names(tmp_path) == ["1", "2"]
    monkeypatch.setattr(os, "fdatasync", sync)
    writer.write([two], [one.segment, two.segment])
    assert names(tmp_path) == ["2"]
    writer.write([three], [])
    assert names(tmp_path) == ["3"]
    writer.close()

"""The message log on a real disk: commit groups, deletion on acknowledgement, the limit, recovery."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from ingest.border.admission import Admitted
from ingest.errors import LogFull, LogUnavailable
from ingest.log.message_log import AHEAD, MARK_INTERVAL_S, MessageLog, least_limit
from ingest.log.protocols import PROTOCOLS
from ingest.log.segments import CommitGroup
from lakehouse.contract.errors import EnvironmentProblem
from tests.ingest.conftest import append, envelope, eventually, everything

OpenLog = Callable[..., MessageLog]


async def test_a_group_becomes_durable_together(open_log: OpenLog) -> None:
    log = open_log()
    lane = log.lane("rsvps/http/0", "rsvps")
    events = [append(log, lane, n) for n in range(10)]
    assert len({id(event.group) for event in events}) == 1
    group = events[0].group
    assert group is not None and not group.acknowledgeable
    await asyncio.wait_for(asyncio.gather(group.wait(), group.wait()), 60)
    assert log.durable_seq == events[-1].seq
    assert lane.durable == 10
    assert [event.payload for event in everything(log)] == [event.payload for event in events]
    await log.close()


async def test_kafkas_acknowledgement_is_enough_for_a_group(open_log: OpenLog) -> None:
    log = open_log(group_commit_ms=30)
    lane = log.lane("rsvps/http/0", "rsvps")
    event = append(log, lane, 1)
    log.acked([event], event.seq + 1)
    assert event.group is not None and not event.group.acknowledgeable, "the group may still grow"
    held = threading.Event()
    disk = log._commit.worker.submit(held.wait, 120)  # a disk that is busy for longer than the group is open
    await asyncio.wait_for(event.group.wait(), 60)
    assert log.durable_seq < event.seq
    held.set()
    disk.result()
    await log.close()


async def test_nothing_is_replayed_when_kafka_has_everything(open_log: OpenLog) -> None:
    log = open_log(segment_bytes=4096)
    lane = log.lane("rsvps/ws/0", "rsvps")
    events = [append(log, lane, n, position=n + 1) for n in range(500)]
    assert events[-1].group is not None
    await events[-1].group.wait()
    assert log.segment_count > 10
    log.acked(events, log.next_seq)
    await asyncio.sleep(MARK_INTERVAL_S + 0.1)
    await eventually(lambda: log.segment_count == 1 and len(list(log._folder.glob("*.seg"))) == 1, 60)
    os.close(log._lock)  # as if killed: no clean close

    again = open_log()
    assert again.recovery.to_replay == 0
    assert everything(again) == []
    found = again.lane("rsvps/ws/0", "rsvps")
    assert (found.position, found.received, found.durable, found.published) == (500, 500, 500, 500)
    assert again.next_seq == 501
    await again.close()
    await log._commit.close()


async def test_what_kafka_has_not_acknowledged_comes_back_in_order(open_log: OpenLog) -> None:
    log = open_log(segment_bytes=4096)
    lane = log.lane("rsvps/ws/0", "rsvps")
    events = [append(log, lane, n, position=n + 1) for n in range(300)]
    log.acked([*events[:100], *events[200:250]], 101)  # one partition is ahead of the other
    await log.close()

    again = open_log()
    assert again.recovery.clean
    replayed = [int(event.envelope.event_id[1:]) for event in everything(again)]
    assert replayed == sorted(replayed)
    assert {*range(100, 200), *range(250, 300)} <= set(replayed) <= set(range(100, 300))
    assert again.recovery.to_replay == len(replayed) < 200, "segments that are done are gone, behind the first gap too"
    assert everything(again)[0].envelope.received_at == events[100].envelope.received_at
    found = again.lane("rsvps/ws/0", "rsvps")
    assert (found.received, found.in_log, found.published) == (300, len(replayed), 300 - len(replayed))
    assert found.suspect_left == 0, "a clean close leaves nothing unknown"
    await again.close()


async def test_full_refuses_and_recovers(open_log: OpenLog) -> None:
    log = open_log(limit=100_000)
    lane = log.lane("rsvps/ws/0", "rsvps")
    events = []
    with pytest.raises(LogFull) as caught:
        for n in range(10_000):
            events.append(append(log, lane, n, 1000))
    assert "of 100000 bytes" in str(caught.value)
    assert log.full and not log.has_room(10)
    assert 60_000 < log.used <= 100_000
    waiting = asyncio.ensure_future(log.room())
    await asyncio.sleep(0.05)
    assert not waiting.done()
    assert sum(p.stat().st_size for p in log._folder.glob("*.seg")) <= 100_000
    log.acked(events[:5], 6)
    await asyncio.sleep(0)
    assert not waiting.done(), "not before a tenth is free"
    log.acked(events[5:], log.next_seq)
    await asyncio.wait_for(waiting, 60)
    append(log, lane, 1, 1000)
    assert lane.received == len(events) + 1, "what was refused was not counted"
    await log.close()


async def test_a_large_event_waits_until_it_fits(open_log: OpenLog) -> None:
    log = open_log(limit=100_000)
    lane = log.lane("rsvps/ws/0", "rsvps")
    events = [append(log, lane, n, 1000) for n in range(50)]
    with pytest.raises(LogFull) as caught:
        append(log, lane, 50, 60_000)
    assert 60_000 < caught.value.size < 61_000
    assert not log.full, "small ones are taken"
    await asyncio.wait_for(log.room(), 60)
    waiting = asyncio.ensure_future(log.room(caught.value.size))
    assert events[-1].group is not None
    await events[-1].group.wait()
    assert not waiting.done()
    log.acked(events, log.next_seq)
    await asyncio.wait_for(waiting, 60)
    for n in range(50, 53):  # each alone in a segment that nothing else comes into
        large = append(log, lane, n, 60_000)
        with pytest.raises(LogFull):
            append(log, lane, n, 60_000)
        log.acked([large], log.next_seq)
    large = append(log, lane, 60, 60_000)
    log.acked([large], log.next_seq)
    await asyncio.wait_for(log.room(60_000), 60)  # nothing is outstanding, and nothing comes that would say so
    await log.close()
    closed = asyncio.ensure_future(log.room())
    await asyncio.sleep(0.01)
    assert not closed.done(), "it never takes any again"
    closed.cancel()


def test_the_least_bound_takes_the_event(tmp_path: Path) -> None:
    async def check(size: int, number: int) -> None:
        log = MessageLog(tmp_path / str(number), "n1", limit=least_limit(size))
        lanes = [log.lane(f"rsvps/ws/{n}", "rsvps") for n in range(5)]
        log.acked([append(log, lanes[0], 1, size)], log.next_seq)
        append(log, lanes[0], 2, size)
        await log.close()

    for number, size in enumerate((1, 65_536, 1_000_000)):
        asyncio.run(check(size, number))


async def test_one_process_a_folder(open_log: OpenLog, tmp_path: Path) -> None:
    log = open_log()
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", OPENER, str(tmp_path / "log"), stderr=subprocess.PIPE
    )
    said = (await child.communicate())[1].decode()
    assert "EnvironmentProblem" in said
    assert f"in use by process {os.getpid()}" in said
    with pytest.raises(EnvironmentProblem):
        open_log()
    await log.close()
    await open_log().close()


async def test_a_torn_tail_is_cut_off(open_log: OpenLog) -> None:
    log = open_log()
    lane = log.lane("rsvps/ws/0", "rsvps")
    events = [append(log, lane, n, position=n + 1) for n in range(20)]
    assert events[0].group is not None
    await events[0].group.wait()
    os.close(log._lock)
    (path,) = log._folder.glob("*.seg")
    os.truncate(path, path.stat().st_size - 30)

    again = open_log()
    size = len(events[-1].payload) + 20 + 27 + len("e19defaultk5")
    assert again.recovery.torn_bytes == size - 30
    assert not again.recovery.clean
    assert [event.envelope.event_id for event in everything(again)] == [f"e{n}" for n in range(19)]
    found = again.lane("rsvps/ws/0", "rsvps")
    assert (found.position, found.received) == (19, 19), "the upstream is read from the event that was lost"
    assert found.suspect_left == AHEAD
    await again.close()
    await log._commit.close()


async def test_a_corrupt_record_is_named_and_the_rest_is_read(open_log: OpenLog) -> None:
    log = open_log(segment_bytes=4096)
    lane = log.lane("rsvps/ws/0", "rsvps")
    events = [append(log, lane, n) for n in range(100)]
    await log.close()
    victim = events[10]
    with victim.segment.path.open("r+b") as file:
        file.seek(victim.offset + 80)
        file.write(b"\0")

    again = open_log()
    assert [(c.segment, c.offset) for c in again.recovery.corrupt] == [(victim.segment.path.name, victim.offset)]
    assert [event.envelope.event_id for event in everything(again)] == [f"e{n}" for n in range(100) if n != 10]
    (kept,) = again.failed
    size = len(victim.payload) + 20 + 27 + len("e10defaultk3")
    assert kept.reason == (
        f"{victim.segment.path.name}: {size} bytes at {victim.offset} are corrupt: "
        f"events 11 to 11 of rsvps/ws/0, LOST unless their senders repeat them"
    )
    assert b"10:xxx" in kept.data
    await again.close()
    third = open_log()
    assert len(third.failed) == 1, "kept once"
    await third.close()


async def test_a_disk_that_refuses_pushes_back_and_then_takes_the_same_bytes(open_log: OpenLog) -> None:
    log = open_log()
    lane = log.lane("rsvps/http/0", "rsvps")
    log._folder.chmod(0o500)
    handles = log._commit._files._open
    path = next(log._folder.glob("*.seg"))
    for number in list(handles):  # a read-only handle makes the kernel refuse the write, even for root
        os.close(handles[number])
        handles[number] = os.open(path, os.O_RDONLY)
    event = append(log, lane, 1)
    await eventually(lambda: "Bad file descriptor" in log.problem)
    assert event.group is not None and not event.group.acknowledgeable
    with pytest.raises(LogUnavailable):
        append(log, lane, 2)
    room = asyncio.ensure_future(log.room())
    for number in list(handles):
        os.close(handles[number])
        handles[number] = os.open(path, os.O_WRONLY)
    await asyncio.wait_for(room, 60)
    assert event.group.acknowledgeable
    assert not log.problem
    log._folder.chmod(0o700)
    await log.close()
    again = open_log()
    assert [found.envelope.event_id for found in everything(again)] == ["e1"]
    await again.close()


OPENER = """
import sys
from pathlib import Path
from ingest.log.message_log import MessageLog
MessageLog(Path(sys.argv[1]), "n1", limit=64 << 20)
"""

WRITER = """
import asyncio, os, sys
from pathlib import Path
from ingest.log.message_log import MessageLog
from tests.ingest.conftest import append
async def main():
    log = MessageLog(Path(sys.argv[1]), "n1", limit=64 << 20, segment_bytes=200_000)
    lane = log.lane("rsvps/ws/0", "rsvps")
    n = lane.position or 0
    while True:
        group = None
        for _ in range(50):
            group = append(log, lane, n, 900, position=n + 1).group
            n += 1
        await group.wait()
        os.write(1, b"%d\\n" % n)
asyncio.run(main())
"""


def test_kill_in_the_middle_of_appends_loses_nothing_that_was_durable(tmp_path: Path) -> None:
    folder = tmp_path / "log"
    said = 0
    for run in range(3):
        child = subprocess.Popen([sys.executable, "-c", WRITER, str(folder)], stdout=subprocess.PIPE)
        assert child.stdout is not None
        for lines, line in enumerate(child.stdout, 1):
            said = max(said, int(line))
            if lines == 40 + run:
                child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()

        async def check(said: int = said) -> None:
            log = MessageLog(folder, "n1", limit=64 << 20)
            found = [int(event.payload.partition(b":")[0]) for event in everything(log)]
            lane = log.lane("rsvps/ws/0", "rsvps")
            assert found == list(range(lane.position or 0)), "all of them, once and in order, up to the position"
            assert len(found) >= said
            assert lane.received == len(found)
            assert not log.recovery.clean
            await log.close()

        asyncio.run(check())


@pytest.mark.parametrize("protocol", sorted(PROTOCOLS))
@pytest.mark.parametrize("segment_bytes", [4096, 1 << 20])
async def test_events_that_came_together_are_logged_as_each_of_them_is(
    open_log: OpenLog, protocol: str, segment_bytes: int
) -> None:
    log = open_log(protocol=protocol, segment_bytes=segment_bytes)
    lane = log.lane("rsvps/http/0", "rsvps")
    first = append(log, lane, 0)
    events = [admitted(n, reject="bad" if n % 5 == 0 else None) for n in range(1, 61)]
    logged = [first, *log.append_all(lane, events[:30]), *log.append_all(lane, events[30:]), *log.append_all(lane, [])]
    assert [event.seq for event in logged] == list(range(first.seq, first.seq + 61))
    assert (lane.received, lane.in_log, lane.rejected) == (61, 61, 12)
    log.sending(logged[-1].seq)
    for event in logged:
        assert event.group is not None
        await asyncio.wait_for(event.group.wait(), 60)
    assert log.durable_seq == logged[-1].seq and lane.durable == 61
    back = everything(log)
    assert [event.envelope for event in back[1:]] == [event.envelope for event in events]
    assert [(e.seq, e.offset, e.segment, e.key) for e in back] == [(e.seq, e.offset, e.segment, e.key) for e in logged]
    log.acked(logged, log.next_seq)
    assert lane.in_log == 0
    await eventually(lambda: log.segment_count == 1)
    await log.close()


async def test_all_are_taken_or_none(open_log: OpenLog) -> None:
    log = open_log(limit=40_000)
    lane = log.lane("rsvps/http/0", "rsvps")
    kept = log.append_all(lane, [admitted(n) for n in range(100)])
    with pytest.raises(LogFull):
        log.append_all(lane, [admitted(n) for n in range(100, 400)])
    assert lane.received == 100 and log.next_seq == kept[-1].seq + 1
    assert kept[-1].group is not None
    await kept[-1].group.wait()
    assert len(everything(log)) == 100
    await log.close()


def admitted(number: int, reject: str | None = None) -> Admitted:
    payload = f"{number}:".encode().ljust(100, b"x")
    return Admitted(envelope(number, payload, reject=reject), b"k", payload, None)


async def test_one_that_cannot_be_told_keeps_nobody_else_from_it() -> None:
    told: list[str] = []

    def fail() -> None:
        told.append("fails")
        raise TypeError("recursion limit reached")

    group = CommitGroup()
    for call in (lambda: told.append("before"), fail, lambda: told.append("after")):
        group.then(call)
    waiting = asyncio.create_task(group.wait())
    await asyncio.sleep(0)
    group.close()
    async with asyncio.timeout(60):
        await waiting
    assert (told, group.acknowledgeable) == (["before", "fails", "after"], True)

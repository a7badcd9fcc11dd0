"""Events by UDP: real datagrams; what is lost is counted, nothing is acknowledged."""

from __future__ import annotations

import random
import socket
from collections.abc import Callable
from dataclasses import replace

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingest.collectors import CollectorContext
from ingest.collectors.udp import LossCount, UdpCollector
from ingest.intake import Intake
from ingest.log.message_log import MessageLog
from lakehouse.contract.errors import EnvironmentProblem
from lakehouse.contract.pipeline.source import CollectorSpec
from tests.ingest.conftest import event, eventually
from tests.ingest.streams import SOURCE, collecting

OpenLog = Callable[..., MessageLog]
TAGS = replace(SOURCE, event_id="", key="{tag}")


def read(tag: int, seq: int) -> bytes:
    return orjson.dumps({"id": f"{tag}:{seq}", "who": "r1", "tag": tag, "seq": seq})


def send(port: int, *datagrams: bytes) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        for datagram in datagrams:
            sender.sendto(datagram, ("127.0.0.1", port))


def at(intake: Intake) -> CollectorContext:
    return CollectorContext(intake, "", 1.0)


async def test_a_datagram_is_an_event(open_log: OpenLog) -> None:
    async with collecting(open_log(), lambda i: UdpCollector(CollectorSpec("udp"), at(i))) as (
        collector,
        kafka,
    ):
        assert isinstance(collector, UdpCollector)
        send(collector.port, event(0), b"{broken", b"", event(1))
        await eventually(lambda: len(kafka.got) == 3, 60)
        status = collector.status()
        assert kafka.payloads() == [event(0), b"{broken", event(1)]
        assert kafka.got[1].envelope.reject is not None
        assert (status.connected, status.url) == (True, f"udp://127.0.0.1:{collector.port}")
        assert (status.counts["datagrams"], status.counts["events"], status.counts["kernel_dropped"]) == (4, 3, 0)


async def test_lines_in_a_datagram_and_losses_by_the_senders_counters(open_log: OpenLog) -> None:
    spec = CollectorSpec("udp", framing="lines", sequence="{seq}", sender="{tag}")
    async with collecting(open_log(), lambda i: UdpCollector(spec, at(i)), TAGS) as (
        collector,
        kafka,
    ):
        assert isinstance(collector, UdpCollector)
        rng = random.Random(7)
        sent = dropped = 0
        for tag in range(20):
            reads = [read(tag, seq) for seq in range(100, 150)]
            lost = set(rng.sample(range(1, 49), 5))  # neither the first nor the last: those nobody can miss
            kept = [line for place, line in enumerate(reads) if place not in lost]
            dropped += len(lost)
            sent += len(kept)
            for start in range(0, len(kept), 10):
                send(collector.port, b"\n".join(kept[start : start + 10]))
            send(collector.port, kept[3])  # a copy
        await eventually(lambda: len(kafka.got) == sent + 20, 60)
        counts = collector.status().counts
        assert (counts["lost"], counts["copies"], counts["events"]) == (dropped, 20, sent + 20)
        assert len({e.envelope.event_id for e in kafka.got}) == sent + 20, "each has an id of its own"


async def test_a_full_log_drops_and_counts(open_log: OpenLog) -> None:
    log = open_log(limit=60_000)
    async with collecting(log, lambda i: UdpCollector(CollectorSpec("udp"), at(i))) as (
        collector,
        kafka,
    ):
        assert isinstance(collector, UdpCollector)
        kafka.acks = False
        for _ in range(8):
            send(collector.port, *[event(n) for n in range(50)])
            received = collector.status().counts["datagrams"]
            await eventually(lambda received=received: collector.status().counts["datagrams"] >= received, 60)  # type: ignore[misc]
        await eventually(lambda: collector.status().counts["no_room"] > 0, 60)
        counts = collector.status().counts
        assert counts["no_room"] + log.lane("clicks/test/0", "clicks").received == counts["events"]


async def test_a_port_that_is_taken_is_said_at_once(open_log: OpenLog) -> None:
    log = open_log()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
        other.bind(("127.0.0.1", 0))
        port = other.getsockname()[1]
        with pytest.raises(EnvironmentProblem, match=f"{port} cannot be bound"):
            async with collecting(log, lambda i: UdpCollector(CollectorSpec("udp", port=port), at(i))):
                raise AssertionError("never")
    await log.close()


@settings(max_examples=30)
@given(st.integers(1, 80), st.floats(0, 0.5), st.integers(0, 30), st.integers(0, 2**32))
def test_losses_of_a_jumbled_stream(count: int, share: float, jumble: int, seed: int) -> None:
    """Whatever is lost, repeated and out of order (within the window): what is missing in the middle is counted."""
    rng = random.Random(seed)
    kept = [n for n in range(count) if n in (0, count - 1) or rng.random() >= share]
    copies = [n for n in kept if rng.random() < 0.2]
    jumbled = sorted([*kept, *copies], key=lambda n: n + rng.random() * jumble)
    losses = LossCount()
    for number in jumbled:
        losses.seen("a", number)
    assert losses.copies == len(copies)
    assert losses.lost == count - len(kept)


def test_senders_are_bounded_and_a_restart_is_no_loss() -> None:
    losses = LossCount(senders=2)
    for name in ("a", "b", "c"):
        losses.seen(name, 1)
        losses.seen(name, 4)
    assert losses.lost == 6, "what was lost of one that is forgotten stays counted"
    losses.seen("c", 10_000_000)
    losses.seen("c", 10_000_001)
    assert losses.lost == 6

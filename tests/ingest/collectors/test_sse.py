"""The client of an SSE upstream: our own player behind a link that is cut, and servers that answer other things."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from ingest.collectors import Gap
from ingest.collectors.sse import SseCollector
from ingest.intake import Intake
from ingest.log.message_log import MessageLog
from lakehouse.contract.envelope import UPSTREAM_ID
from tests.ingest.conftest import LIMIT, event, eventually
from tests.ingest.streams import Link, answer, collecting, playing, saying

OpenLog = Callable[..., MessageLog]


async def test_resumes_after_cuts_and_after_a_restart(open_log: OpenLog, tmp_path: Path) -> None:
    total = 3000
    async with playing(tmp_path, [event(n) for n in range(total)], 4000.0) as port, Link(port) as link:

        def make(intake: Intake) -> SseCollector:
            return SseCollector(f"http://127.0.0.1:{link.port}/sse", intake, backoff_max_s=0.1)

        async with collecting(open_log(), make) as (collector, kafka):
            for seen in (300, 900, 1500):
                await eventually(lambda seen=seen: len(kafka.got) >= seen, 60)  # type: ignore[misc]
                link.cut()
        first = kafka.payloads()
        assert first == [event(n) for n in range(len(first))], "nothing is lost, nothing comes twice, in order"
        assert collector.status().gap_count == 0
        assert dict(kafka.got[7].envelope.extra) == {UPSTREAM_ID: "7"}
        async with collecting(open_log(), make) as (collector, kafka):
            await eventually(lambda: collector.status().cursor == str(total - 1), 60)
            await eventually(lambda: kafka.got[-1].payload == event(total - 1), 60)
            again = kafka.payloads()
        # What stood unacknowledged in the log when the first run ended is sent once more, and only that.
        overlap = [n for n, payload in enumerate(first) if payload == again[0]]
        assert again == [event(n) for n in range(overlap[0] if overlap else len(first), total)]


async def test_after_a_crash_it_goes_on_from_the_log(open_log: OpenLog, tmp_path: Path) -> None:
    async with playing(tmp_path, [event(n) for n in range(2_000)], 4_000.0) as port:

        def make(intake: Intake) -> SseCollector:
            return SseCollector(f"http://127.0.0.1:{port}/sse", intake, backoff_max_s=0.1)

        log = open_log()
        async with collecting(log, make) as (_, kafka):
            kafka.acks = False
            await eventually(lambda: log.durable_seq >= 200, 60)
            shutil.copytree(tmp_path / "log", tmp_path / "crashed")  # what a crash at this moment leaves
        log = MessageLog.open(tmp_path / "crashed", "n1", limit=LIMIT)
        lane = log.lane("clicks/test/0", "clicks")
        start = lane.received
        assert (lane.cursor, start >= 200, log.recovery.clean) == (str(start - 1), True, False)
        async with collecting(log, make) as (_, kafka):
            await eventually(lambda: len({e.envelope.event_id for e in kafka.got}) == 2_000, 60)
            resumed = [e for e in kafka.got if int(e.envelope.event_id) >= start]
            assert [e.payload for e in resumed] == [event(n) for n in range(start, 2_000)]
            assert resumed[0].envelope.suspect, "Kafka may have had it before the disk"


async def test_an_upstream_without_ids_leaves_gaps_and_its_retry_is_kept(open_log: OpenLog) -> None:
    gaps: list[Gap] = []
    body = b"retry: 20\ndata: " + event(1) + b"\n\n"
    async with (
        saying(answer(body)) as (url, asked),
        collecting(open_log(), lambda i: SseCollector(url, i, backoff_max_s=0.05, on_gap=gaps.append)) as (
            sse,
            kafka,
        ),
    ):
        await eventually(lambda: len(kafka.got) >= 3, 60)
        assert isinstance(sse, SseCollector)
        assert sse._least_pause_s == 0.02
        assert "ended the stream" in gaps[0].reason
        assert not sse.status().cursor
    assert all(b"last-event-id" not in request.lower() for request in asked)
    assert b"accept: text/event-stream" in asked[0].lower()


async def test_other_answers_are_no_stream(open_log: OpenLog) -> None:
    answers = [
        answer(b"busy", "text/plain", "503 Service Unavailable"),
        answer(b"<html>", "text/html"),
        b"rubbish\r\n\r\n",
        answer(b"data: " + event(5) + b"\nid: a\xc3\xa9\n\n"),
    ]
    ended: list[str] = []

    class Telling(SseCollector):
        async def _session(self) -> None:
            ended.append(self._ended)
            await super()._session()

    async with (
        saying(*answers) as (url, asked),
        collecting(open_log(), lambda i: Telling(url, i, backoff_max_s=0.02)) as (_, kafka),
    ):
        await eventually(lambda: len(kafka.got) >= 2, 60)
    assert "503 Service Unavailable" in ended[1]
    assert "text/html" in ended[2]
    assert "RemoteProtocolError" in ended[3]
    assert "last-event-id: aé".encode() in asked[-1].lower()


@pytest.mark.parametrize("odd", [b"7 ", b"7\t", b" ", b"7\x01", b"7\x0c7"])
async def test_an_id_that_no_header_can_carry_is_not_asked_for(open_log: OpenLog, odd: bytes) -> None:
    first = b"id: 6\ndata: " + event(6) + b"\n\nid: " + odd + b"\ndata: " + event(7) + b"\n\n"
    async with (
        saying(answer(first), answer(b"id: a b\ndata: " + event(8) + b"\n\n")) as (url, asked),
        collecting(open_log(), lambda i: SseCollector(url, i, backoff_max_s=0.02)) as (_, kafka),
    ):
        await eventually(lambda: len(asked) >= 3)
        await eventually(lambda: kafka.payloads()[:3] == [event(6), event(7), event(8)])
    assert [request.lower().partition(b"last-event-id: ")[2].partition(b"\r")[0] for request in asked[:3]] == [
        b"", b"6", b"a b",
    ]  # fmt: skip


async def test_an_id_of_an_older_log_that_no_header_can_carry_is_not_sent(open_log: OpenLog) -> None:
    log = open_log()
    lane = log.lane("clicks/test/0", "clicks")
    lane.cursor, lane.last_at = "7 ", 1
    async with (
        saying(answer(b"data: " + event(8) + b"\n\n")) as (url, asked),
        collecting(log, lambda i: SseCollector(url, i, backoff_max_s=0.02)) as (sse, kafka),
    ):
        await eventually(lambda: len(kafka.got) >= 1)
        assert sse.status().gap_count >= 1
    assert b"last-event-id" not in asked[0].lower()


async def test_an_event_beyond_every_bound_is_kept_as_rejected(open_log: OpenLog) -> None:
    class Small(SseCollector):
        _most_bytes = 500  # type: ignore[assignment]

    body = b"data: " + b"x" * 2_000 + b"\n\ndata: " + event(1) + b"\n\n"
    async with (
        saying(answer(body)) as (url, _),
        collecting(open_log(), lambda i: Small(url, i, backoff_max_s=0.05)) as (_, kafka),
    ):
        await eventually(lambda: len(kafka.got) >= 2, 60)
    assert "more than 500 bytes" in (kafka.got[0].envelope.reject or "")
    assert kafka.got[1].payload == event(1)


async def test_an_event_that_fits_only_later_is_waited_for_in_peace(open_log: OpenLog) -> None:
    payloads = [b'{"id":%d,"who":"a","pad":"%b"}' % (n, b"x" * 40_000) for n in range(4)]
    stream = answer(b"".join(b"id: %d\ndata: %b\n\n" % found for found in enumerate(payloads)))
    log = open_log(limit=100_000)
    async with (
        saying(stream, answer(b"", status="204 No Content")) as (url, _),
        collecting(log, lambda intake: SseCollector(url, intake, backoff_max_s=0.01)) as (_, kafka),
    ):
        kafka.acks = False
        await eventually(lambda: bool(log._room))  # and the event loop runs meanwhile
        await eventually(lambda: kafka.payloads() == payloads[:2])
        for _ in range(100):
            await asyncio.sleep(0)
        assert len(log._room) == 1
        kafka.acks = True
        kafka.ack()
        await eventually(lambda: kafka.payloads() == payloads)

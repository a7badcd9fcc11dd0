"""The client of an SSE upstream, and the parser on the standard's own cases, cut into any chunks."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingest.collectors.upstream import EventStreamParser, SseCollector
from ingest.intake import Intake
from ingest.log.message_log import MessageLog
from lakehouse.contract.envelope import UPSTREAM_ID
from tests.ingest.conftest import LIMIT, event, eventually
from tests.ingest.streams import Link, answer, client, collecting, playing, saying

OpenLog = Callable[..., MessageLog]


async def test_resumes_after_cuts_and_after_a_restart(open_log: OpenLog, tmp_path: Path) -> None:
    total = 3000
    async with playing(tmp_path, [event(n) for n in range(total)], 4000.0) as port, Link(port) as link:

        def make(intake: Intake) -> SseCollector:
            return client(SseCollector, f"http://127.0.0.1:{link.port}/sse", intake, backoff_max_s=0.1)

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
            return client(SseCollector, f"http://127.0.0.1:{port}/sse", intake, backoff_max_s=0.1)

        log = open_log()
        async with collecting(log, make) as (_, kafka):
            kafka.acks = False
            await eventually(lambda: log.durable_seq >= 200, 60)
            shutil.copytree(tmp_path / "log", tmp_path / "crashed")  # what a crash at this moment leaves
        log = MessageLog(tmp_path / "crashed", "n1", limit=LIMIT)
        lane = log.lane("clicks/test/0", "clicks")
        start = lane.received
        assert (lane.cursor, start >= 200, log.recovery.clean) == (str(start - 1), True, False)
        async with collecting(log, make) as (_, kafka):
            await eventually(lambda: len({e.envelope.event_id for e in kafka.got}) == 2_000, 60)
            resumed = [e for e in kafka.got if int(e.envelope.event_id) >= start]
            assert [e.payload for e in resumed] == [event(n) for n in range(start, 2_000)]
            assert resumed[0].envelope.suspect, "Kafka may have had it before the disk"


async def test_an_upstream_without_ids_leaves_gaps_and_its_retry_is_kept(open_log: OpenLog) -> None:
    body = b"retry: 20\ndata: " + event(1) + b"\n\n"
    async with (
        saying(answer(body)) as (url, asked),
        collecting(open_log(), lambda i: client(SseCollector, url, i, backoff_max_s=0.05)) as (
            sse,
            kafka,
        ),
    ):
        await eventually(lambda: len(kafka.got) >= 3, 60)
        assert isinstance(sse, SseCollector)
        assert sse._least_pause_s == 0.02
        assert "ended the stream" in sse.status().gaps[0].reason
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
        collecting(open_log(), lambda i: client(Telling, url, i, backoff_max_s=0.02)) as (_, kafka),
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
        collecting(open_log(), lambda i: client(SseCollector, url, i, backoff_max_s=0.02)) as (_, kafka),
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
        collecting(log, lambda i: client(SseCollector, url, i, backoff_max_s=0.02)) as (sse, kafka),
    ):
        await eventually(lambda: len(kafka.got) >= 1)
        assert sse.status().gap_count >= 1
    assert b"last-event-id" not in asked[0].lower()


async def test_an_event_beyond_every_bound_is_kept_as_rejected(open_log: OpenLog) -> None:
    class Small(SseCollector):
        max_bytes = 500

    body = b"data: " + b"x" * 2_000 + b"\n\ndata: " + event(1) + b"\n\n"
    async with (
        saying(answer(body)) as (url, _),
        collecting(open_log(), lambda i: client(Small, url, i, backoff_max_s=0.05)) as (_, kafka),
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
        collecting(log, lambda intake: client(SseCollector, url, intake, backoff_max_s=0.01)) as (_, kafka),
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


def sent(data: bytes | None, name: str = "") -> tuple[bytes | None, str]:
    """As the parser returns it; data that is too large is None."""
    return data, name


CASES: list[tuple[str, bytes, list[tuple[bytes | None, str]]]] = [
    ("the standard, first example", b"data: YHOO\ndata: +2\ndata: 10\n\n", [sent(b"YHOO\n+2\n10")]),
    (
        "the standard, ids and comments",
        b": test stream\n\ndata: first event\nid: 1\n\ndata:second event\nid\n\ndata:  third event\n",
        [sent(b"first event", "1"), sent(b"second event", "")],
    ),
    ("the standard, empty data", b"data\n\ndata\ndata\n\ndata:", [sent(b""), sent(b"\n")]),
    ("the standard, one space", b"data:test\n\ndata: test\n\n", [sent(b"test"), sent(b"test")]),
    ("only one space is taken off", b"data:  x\n\n", [sent(b" x")]),
    ("a byte order mark", b"\xef\xbb\xbfdata: 1\n\n\xef\xbb\xbfdata: 2\n\ndata: 3\n\n", [sent(b"1"), sent(b"3")]),
    ("two byte order marks", b"\xef\xbb\xbf\xef\xbb\xbfdata: 1\n\ndata: 2\n\n", [sent(b"2")]),
    ("CR, LF and CRLF", b"data: a\rdata: b\r\ndata: c\n\r\n", [sent(b"a\nb\nc")]),
    ("CR alone ends lines", b"data: a\r\rdata: b\r\r", [sent(b"a"), sent(b"b")]),
    ("types", b"event: add\ndata: 1\n\nevent:\ndata: 2\n\ndata: 3\n\n", [sent(b"1"), sent(b"2"), sent(b"3")]),
    ("a type without data is forgotten", b"event: add\n\ndata: 1\n\n", [sent(b"1")]),
    ("an unknown field", b"data: a\nfoo: b\n data: c\ndata : d\nDATA: e\n\n", [sent(b"a")]),
    ("NUL in the name of a field", b"data: a\n\0data: b\ndata\0: c\ndata\n\n", [sent(b"a\n")]),
    ("a comment within", b"data: a\n:data: b\ndata: c\n\n", [sent(b"a\nc")]),
    ("a long comment with NUL", b":" + 2_000 * b"x" + b"\r:\0\ndata: a\n:" + 2_000 * b"\0" + b"\n\n", [sent(b"a")]),
    ("a colon in the value", b"data: a:b\n\n", [sent(b"a:b")]),
    ("an id stays", b"id: 7\ndata: a\n\ndata: b\n\n", [sent(b"a", "7"), sent(b"b", "7")]),
    ("an id without data counts", b"id: 7\n\ndata: b\n\n", [sent(b"b", "7")]),
    (
        "an id with NUL does not",
        b"id: 7\ndata: a\n\nid: 8\0\ndata: b\n\n",
        [sent(b"a", "7"), sent(b"b", "7")],
    ),
    ("an id of another script", "id: …é\ndata: a\n\n".encode(), [sent(b"a", "…é")]),
    ("NUL in data", b"data: a\0b\n\n", [sent(b"a\0b")]),
    ("bytes that are no UTF-8 stay", b"data: \xff\n\n", [sent(b"\xff")]),
    ("cut off at the end", b"data: a\n\ndata: b\n", [sent(b"a")]),
    ("empty lines", b"\n\n\ndata: a\n\n\n", [sent(b"a")]),
]


@pytest.mark.parametrize(("stream", "expected"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_cases(stream: bytes, expected: list[tuple[bytes | None, str]]) -> None:
    assert EventStreamParser().feed(stream) == expected
    parser = EventStreamParser()
    assert [event for byte in stream for event in parser.feed(bytes([byte]))] == expected, "byte by byte"


@settings(max_examples=30)
@given(st.sampled_from([case[1] for case in CASES]), st.lists(st.integers(0, 80), max_size=6))
def test_chunks_do_not_matter(stream: bytes, cuts: list[int]) -> None:
    whole = EventStreamParser().feed(stream)
    places = sorted({min(cut, len(stream)) for cut in cuts} | {0, len(stream)})
    parser = EventStreamParser()
    pieces = [stream[a:b] for a, b in pairwise(places)]
    assert [event for piece in pieces for event in parser.feed(piece)] == whole


@settings(max_examples=30)
@given(st.lists(st.binary(max_size=40), max_size=8))
def test_rubbish_raises_nothing(chunks: list[bytes]) -> None:
    parser = EventStreamParser(max_bytes=16)
    for chunk in chunks:
        assert all(len(data or b"") <= 16 for data, _ in parser.feed(chunk))


def test_retry() -> None:
    parser = EventStreamParser()
    parser.feed(b"retry: 3000\nretry: 1x\nretry:\nretry: -1\n")
    assert parser.retry_ms == 3000
    parser.feed(b"retry:50\n")
    assert parser.retry_ms == 50


def test_the_id_of_the_connection_before_stays_in_force() -> None:
    parser = EventStreamParser("41")
    assert parser.feed(b"data: a\n\nid: 42\ndata: b\n\n") == [sent(b"a", "41"), sent(b"b", "42")]


def test_what_is_too_large_is_passed_over_and_named() -> None:
    parser = EventStreamParser(max_bytes=10)
    found = parser.feed(b"data: 12345\ndata: 678901\nid: 1\n\ndata: 12345678901\n\n: " + b"x" * 50 + b"\ndata: b\n\n")
    assert found == [sent(None, "1"), sent(None, "1"), sent(b"b", "1")]
    assert parser.feed(b"data: " + b"y" * 100) == []
    assert parser.feed(b"y" * 100) == []
    assert parser.feed(b"\n\ndata: c\n\n") == [sent(None, "1"), sent(b"c", "1")]


@pytest.mark.parametrize("at", range(1, 8))
def test_what_is_too_large_is_named_wherever_a_chunk_ends(at: int) -> None:
    parser = EventStreamParser(max_bytes=10)
    text = b"data: " + b"x" * 50 + b"\n\n"
    assert parser.feed(text[:at]) + parser.feed(text[at:]) == [sent(None)]

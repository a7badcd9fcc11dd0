"""Clients of WebSocket and JSON-lines upstreams, against real servers: reconnect, resume, gaps, back-pressure."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingest.collectors.upstream import LinesCollector, LineSplitter, WebSocketCollector, shown_url
from ingest.intake import Intake
from ingest.log.message_log import AHEAD, MessageLog
from tests.ingest.conftest import Upstream, event, eventually
from tests.ingest.streams import Kafka, Link, answer, client, collecting, playing, saying

OpenLog = Callable[..., MessageLog]


@asynccontextmanager
async def reading(
    log: MessageLog, upstream: Upstream, **options: Any
) -> AsyncIterator[tuple[WebSocketCollector, Kafka]]:
    def make(intake: Intake) -> WebSocketCollector:
        return client(WebSocketCollector, upstream.url, intake, backoff_max_s=0.1, **options)

    async with collecting(log, make) as (collector, kafka):
        assert isinstance(collector, WebSocketCollector)
        yield collector, kafka


async def test_reconnects_and_resumes_without_a_gap(open_log: OpenLog) -> None:
    async with Upstream() as upstream, reading(open_log(), upstream, resume_param="from") as (collector, kafka):
        for limit in (100, 200, 300):
            upstream.limit = limit
            await eventually(lambda limit=limit: len(kafka.got) >= limit)
            await upstream.connections[-1].close()
        await eventually(lambda: len(upstream.requests) == 4)
        assert kafka.payloads() == [event(n) for n in range(300)]
        assert upstream.requests == [f"/stream?from={n}" for n in (0, 100, 200, 300)]
        status = collector.status()
        assert (status.position, status.gap_count) == (300, 0)


async def test_an_upstream_that_cannot_resume_leaves_gaps(open_log: OpenLog) -> None:
    times = iter(range(10**15, 10**16, 10**12))
    async with Upstream() as upstream:
        log = open_log()
        async with reading(log, upstream, clock=lambda: next(times)) as (collector, kafka):
            upstream.limit = 10
            await eventually(lambda: len(kafka.got) >= 10)
            heard = log.lane("clicks/test/0", "clicks").last_at
            assert collector.status().gap_count == 0, "the first connection follows nothing"
            await upstream.connections[-1].close(1012, "restart")
            await eventually(lambda: bool(collector.status().gaps))
            status = collector.status()
            (gap,) = status.gaps
            assert gap.since == heard
            assert gap.until == 10**12, "microseconds"
            assert "1012 (service restart) restart" in gap.reason
            assert (status.gap_count, status.position) == (1, None)
        log = open_log()
        async with reading(log, upstream) as (collector, _):
            await eventually(lambda: bool(collector.status().gaps))
            assert collector.status().gaps[0].reason == "the collector was started again"
            assert collector.status().gap_count == 2, "counted over restarts"


async def test_pauses_grow_with_jitter_up_to_the_bound(open_log: OpenLog) -> None:
    asked: list[float] = []

    def jitter(most: float) -> float:
        asked.append(most)
        return 0.001

    async with Upstream() as upstream, reading(open_log(), upstream, jitter=jitter) as (collector, kafka):
        upstream.limit = 1
        await eventually(lambda: len(kafka.got) == 1)
        upstream.limit = 0
        server = upstream._server
        assert server is not None
        collector._backoff_max_s = 1.0
        server.close()
        await server.wait_closed()
        await eventually(lambda: len(asked) >= 7)
        assert asked[:7] == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 1.0]
        assert not collector.status().connected


async def test_a_full_log_slows_the_upstream_down_and_nothing_is_lost(open_log: OpenLog) -> None:
    total = 5000
    log = open_log(limit=200_000)
    async with Upstream() as upstream, reading(log, upstream, resume_param="from") as (_, kafka):
        kafka.acks = False
        upstream.limit = total
        await eventually(lambda: log.full)
        await asyncio.sleep(0.3)
        taken = len(kafka.got)
        assert taken < 700
        assert log.used <= 200_000
        kafka.acks = True
        kafka.ack()
        await eventually(lambda: len(kafka.got) >= total)
        assert kafka.payloads() == [event(n) for n in range(total)]
        assert len(upstream.requests) == 1, "the connection was kept"


async def test_after_a_crash_what_may_have_been_sent_is_suspect(open_log: OpenLog) -> None:
    log = open_log()
    log._commit.worker.shutdown()
    os.close(log._lock)  # no clean close
    async with Upstream() as upstream, reading(open_log(), upstream, resume_param="from") as (_, kafka):
        upstream.limit = AHEAD + 100
        await eventually(lambda: len(kafka.got) >= AHEAD + 100)
        assert [found.envelope.suspect for found in kafka.got] == [True] * AHEAD + [False] * 100


async def test_malformed_messages_are_kept_as_rejected(open_log: OpenLog) -> None:
    messages = [b'{"id":0,"who":"a"}', b"{", b'{"id":2,"who":"b"}', b'{"id":3}']
    upstream = Upstream(messages.__getitem__)
    async with upstream, reading(open_log(), upstream, resume_param="from") as (_, kafka):
        upstream.limit = 4
        await eventually(lambda: len(kafka.got) == 4)
        assert kafka.payloads() == messages
        assert [found.envelope.reject is None for found in kafka.got] == [True, False, True, False]
        assert kafka.got[1].lane.rejected == 2


async def test_a_message_beyond_every_bound_does_not_stop_the_stream(
    open_log: OpenLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WebSocketCollector, "max_bytes", 5_000)
    messages = [event(0), b'{"id":1,"pad":"' + b"x" * 10_000 + b'"}', event(2)]
    upstream = Upstream(messages.__getitem__)
    async with upstream, reading(open_log(), upstream, resume_param="from") as (_, kafka):
        upstream.limit = 3
        await eventually(lambda: len(kafka.got) == 3)
        assert kafka.payloads() == [event(0), b"", event(2)]
        assert kafka.got[1].envelope.reject == "message 1 of the upstream has more than 5000 bytes"
        assert upstream.requests == ["/stream?from=0", "/stream?from=2"]


def test_secrets_are_not_shown() -> None:
    assert shown_url("wss://me:pw@example.org:1/a") == "wss://example.org:1/a"
    with_key, other = shown_url("ws://h/a?key=s3cret"), shown_url("ws://h/a?key=other")
    assert "s3cret" not in with_key
    assert with_key != other


async def test_resumes_after_cuts_where_it_can(open_log: OpenLog, tmp_path: Path) -> None:
    total = 2000
    async with playing(tmp_path, [event(n) for n in range(total)], 4000.0) as port, Link(port) as link:

        def make(intake: Intake) -> LinesCollector:
            url = f"http://127.0.0.1:{link.port}/lines"
            return client(LinesCollector, url, intake, resume_param="from", backoff_max_s=0.1)

        async with collecting(open_log(), make) as (collector, kafka):
            for seen in (300, 900):
                await eventually(lambda seen=seen: len(kafka.got) >= seen, 60)  # type: ignore[misc]
                link.cut()
            await eventually(lambda: len(kafka.got) >= total, 60)
        assert kafka.payloads() == [event(n) for n in range(total)]
        assert (collector.status().position, collector.status().gap_count) == (total, 0)


async def test_a_full_log_stops_the_reading(open_log: OpenLog, tmp_path: Path) -> None:
    total = 4000
    async with playing(tmp_path, [event(n) for n in range(total)], 100_000.0) as port:
        log = open_log(limit=200_000)

        def make(intake: Intake) -> LinesCollector:
            return client(
                LinesCollector, f"http://127.0.0.1:{port}/lines", intake, resume_param="from", backoff_max_s=0.1
            )

        async with collecting(log, make) as (collector, kafka):
            kafka.acks = False
            await eventually(lambda: log.full, 60)
            await asyncio.sleep(0.2)
            assert len(kafka.got) < 700 and log.used <= 200_000
            assert collector.status().connected
            kafka.acks = True
            kafka.ack()
            await eventually(lambda: len(kafka.got) >= total, 60)
            assert kafka.payloads() == [event(n) for n in range(total)]


async def test_without_resume_a_reconnect_is_a_gap(open_log: OpenLog) -> None:
    body = event(0) + b"\r\n\r\n" + b"{broken\n" + event(1)  # the last has no end: it was cut off
    async with (
        saying(answer(body, "application/x-ndjson")) as (url, asked),
        collecting(open_log(), lambda i: client(LinesCollector, url, i, backoff_max_s=0.05)) as (lines, kafka),
    ):
        await eventually(lambda: lines.status().gap_count >= 2, 60)
    assert kafka.payloads()[:2] == [event(0), b"{broken"]
    assert kafka.got[1].envelope.reject is not None
    assert asked[0].startswith(b"GET / HTTP/1.1")


@settings(max_examples=30)
@given(st.lists(st.binary(max_size=12), max_size=8), st.lists(st.integers(0, 60), max_size=5))
def test_chunks_do_not_matter(pieces: list[bytes], cuts: list[int]) -> None:
    data = b"\n".join(pieces)
    places = sorted({min(cut, len(data)) for cut in cuts} | {0, len(data)})
    whole, splitter = LineSplitter(10).feed(data), LineSplitter(10)
    assert [line for a, b in pairwise(places) for line in splitter.feed(data[a:b])] == whole


def test_a_line_that_is_too_long_is_named_and_the_next_is_read() -> None:
    splitter = LineSplitter(5)
    assert splitter.feed(b"123456\n12345\n \r\n1") == [None, b"12345"]
    assert splitter.feed(b"23456") == []
    assert splitter.feed(b"7\nok\n") == [None, b"ok"]

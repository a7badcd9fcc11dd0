"""The client of a WebSocket upstream, against a real server: reconnect, resume, gaps, back-pressure."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from ingest.collectors import Gap
from ingest.collectors import upstream as upstream_module
from ingest.collectors.upstream import WebSocketCollector, shown_url
from ingest.intake import Intake
from ingest.log.message_log import AHEAD, MessageLog
from tests.ingest import streams
from tests.ingest.conftest import Upstream, event, eventually
from tests.ingest.streams import Kafka

OpenLog = Callable[..., MessageLog]


@asynccontextmanager
async def collecting(
    log: MessageLog, upstream: Upstream, **options: Any
) -> AsyncIterator[tuple[WebSocketCollector, Kafka]]:
    def make(intake: Intake) -> WebSocketCollector:
        return WebSocketCollector(upstream.url, intake, backoff_max_s=0.1, **options)

    async with streams.collecting(log, make) as (collector, kafka):
        assert isinstance(collector, WebSocketCollector)
        yield collector, kafka


async def test_reconnects_and_resumes_without_a_gap(open_log: OpenLog) -> None:
    async with Upstream() as upstream, collecting(open_log(), upstream, resume_param="from") as (collector, kafka):
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
    gaps: list[Gap] = []
    times = iter(range(10**15, 10**16, 10**12))
    async with Upstream() as upstream:
        log = open_log()
        async with collecting(log, upstream, on_gap=gaps.append, clock=lambda: next(times)) as (collector, kafka):
            upstream.limit = 10
            await eventually(lambda: len(kafka.got) >= 10)
            heard = log.lane("clicks/test/0", "clicks").last_at
            assert collector.status().gap_count == 0, "the first connection follows nothing"
            await upstream.connections[-1].close(1012, "restart")
            await eventually(lambda: len(gaps) == 1)
            assert gaps[0].since == heard
            assert gaps[0].until == 10**12, "microseconds"
            assert "1012 (service restart) restart" in gaps[0].reason
            status = collector.status()
            assert (status.gaps, status.gap_count, status.position) == (tuple(gaps), 1, None)
        log = open_log()
        async with collecting(log, upstream, on_gap=gaps.append) as (collector, _):
            await eventually(lambda: len(gaps) == 2)
            assert gaps[1].reason == "the collector was started again"
            assert collector.status().gap_count == 2, "counted over restarts"


async def test_pauses_grow_with_jitter_up_to_the_bound(open_log: OpenLog) -> None:
    asked: list[float] = []

    def jitter(most: float) -> float:
        asked.append(most)
        return 0.001

    async with Upstream() as upstream, collecting(open_log(), upstream, jitter=jitter) as (collector, kafka):
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
    async with Upstream() as upstream, collecting(log, upstream, resume_param="from") as (_, kafka):
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
    async with Upstream() as upstream, collecting(open_log(), upstream, resume_param="from") as (_, kafka):
        upstream.limit = AHEAD + 100
        await eventually(lambda: len(kafka.got) >= AHEAD + 100)
        assert [found.envelope.suspect for found in kafka.got] == [True] * AHEAD + [False] * 100


async def test_malformed_messages_are_kept_as_rejected(open_log: OpenLog) -> None:
    messages = [b'{"id":0,"who":"a"}', b"{", b'{"id":2,"who":"b"}', b'{"id":3}']
    upstream = Upstream(messages.__getitem__)
    async with upstream, collecting(open_log(), upstream, resume_param="from") as (_, kafka):
        upstream.limit = 4
        await eventually(lambda: len(kafka.got) == 4)
        assert kafka.payloads() == messages
        assert [found.envelope.reject is None for found in kafka.got] == [True, False, True, False]
        assert kafka.got[1].lane.rejected == 2


async def test_a_message_beyond_every_bound_does_not_stop_the_stream(
    open_log: OpenLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upstream_module, "MAX_MESSAGE_BYTES", 5_000)
    messages = [event(0), b'{"id":1,"pad":"' + b"x" * 10_000 + b'"}', event(2)]
    upstream = Upstream(messages.__getitem__)
    async with upstream, collecting(open_log(), upstream, resume_param="from") as (_, kafka):
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

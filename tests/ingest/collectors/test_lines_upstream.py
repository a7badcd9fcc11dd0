"""The client of an upstream of JSON lines: our own player behind a link that is cut; a full log; lines of any cut."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from ingest.collectors import Gap
from ingest.collectors.upstream import LinesCollector, LineSplitter
from ingest.intake import Intake
from ingest.log.message_log import MessageLog
from tests.ingest.conftest import event, eventually
from tests.ingest.streams import Link, answer, collecting, playing, saying

OpenLog = Callable[..., MessageLog]


async def test_resumes_after_cuts_where_it_can(open_log: OpenLog, tmp_path: Path) -> None:
    total = 2000
    async with playing(tmp_path, [event(n) for n in range(total)], 4000.0) as port, Link(port) as link:

        def make(intake: Intake) -> LinesCollector:
            url = f"http://127.0.0.1:{link.port}/lines"
            return LinesCollector(url, intake, resume_param="from", backoff_max_s=0.1)

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
            return LinesCollector(f"http://127.0.0.1:{port}/lines", intake, resume_param="from", backoff_max_s=0.1)

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
    gaps: list[Gap] = []
    body = event(0) + b"\r\n\r\n" + b"{broken\n" + event(1)  # the last has no end: it was cut off
    async with (
        saying(answer(body, "application/x-ndjson")) as (url, asked),
        collecting(open_log(), lambda i: LinesCollector(url, i, backoff_max_s=0.05, on_gap=gaps.append)) as (_, kafka),
    ):
        await eventually(lambda: len(gaps) >= 2, 60)
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

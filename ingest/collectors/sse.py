"""The client of a server-sent events upstream: one event is one event of ours.

It reconnects with the ``Last-Event-ID`` of the last event in the log, which stands there with the event (and in its
Kafka headers, as ``upstream_id``), so that a crash resumes too. An upstream that names no ids, or only such that no
header can carry (one that ends with a blank, say), cannot resume: a reconnect is reported as a gap. ``retry:`` is
honoured, up to five minutes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ingest.collectors import Place
from ingest.collectors.eventstream import EventStreamParser, ServerSentEvent
from ingest.collectors.httpstream import open_stream, request_headers
from ingest.collectors.upstream import UpstreamClient
from ingest.source import Intake
from lakehouse.contract.collector import CollectorSpec

MAX_ID_BYTES = 8_192
_FIELD_VALUE = re.compile(rb"[\x21-\x7e\x80-\xff](?:[\t\x20-\x7e\x80-\xff]*[\x21-\x7e\x80-\xff])?")  # RFC 9110 §5.5
_MAX_RETRY_MS = 300_000


def build(spec: CollectorSpec, place: Place) -> SseCollector:
    """The collector that the pipeline declares."""
    headers = request_headers(spec.headers, source=place.intake.border.source.name)
    return SseCollector(place.url, place.intake, headers=headers, backoff_max_s=place.backoff_max_s)


class SseCollector(UpstreamClient):
    """Reads one SSE upstream until cancelled.

    Args:
        headers: of the request.
        options: of :class:`UpstreamClient`.
    """

    def __init__(self, url: str, intake: Intake, *, headers: Mapping[str, str] | None = None, **options: Any) -> None:
        super().__init__(url, intake, **options)
        self._headers = dict(headers or {})

    @property
    def _resumes(self) -> bool:
        return _can_be_sent(self._lane.cursor or "")

    async def _session(self) -> None:
        headers = {**self._headers, "Accept": "text/event-stream", "Cache-Control": "no-store"}
        last_id = self._lane.cursor or ""
        if self._resumes:
            headers["Last-Event-ID"] = last_id
        parser = EventStreamParser(last_id, max_bytes=self._most_bytes)
        async with open_stream(self._url, headers, kinds=("text/event-stream",)) as body:
            self._opened()
            async for chunk in body:
                events = parser.feed(chunk)
                if parser.retry_ms is not None:
                    self._least_pause_s = min(parser.retry_ms, _MAX_RETRY_MS) / 1000
                for event in events:
                    await self._event(event)

    async def _event(self, event: ServerSentEvent) -> None:
        if event.oversize:
            await self._skip_oversize("server-sent event")
        elif _can_be_sent(event.id):
            await self._received_named(event.data, event.id)
        else:
            await self._received(event.data)


def _can_be_sent(name: str) -> bool:
    """Whether an event id can stand in a header: with any other no request would come about."""
    found = name.encode()
    return len(found) <= MAX_ID_BYTES and _FIELD_VALUE.fullmatch(found) is not None

"""Clients of stream upstreams: reconnect, resume, gaps, back-pressure. WebSocket, JSON lines and server-sent events.

A client connects and reads until the upstream ends the stream. It then pauses (exponential back-off with full jitter:
Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog, 2015) and connects again. An upstream that can resume
is asked for what follows the last event in the log, so a reconnect or a crash loses nothing. For any other, the time
without a connection is reported as a gap. While the log is full nothing is read: TCP slows the upstream down.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import random
import re
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from urllib.parse import urlencode, urlsplit, urlunsplit

import httpx
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, WebSocketException
from websockets.frames import CloseCode

from ingest.border.admission import Admitted, Extra, Refusal
from ingest.collectors import CollectorContext, Gap, UpstreamStatus
from ingest.errors import LogFull, LogUnavailable, UpstreamEnded
from lakehouse.contract.envelope import UPSTREAM_ID
from lakehouse.contract.errors import ConfigError
from lakehouse.contract.pipeline.source import CollectorSpec

logger = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 16 * 1024 * 1024  # a message above the source's limit is rejected, one above this not even read
CONNECT_S = 10.0
SILENCE_S = 120.0  # an upstream that sends nothing for this long, not even a comment, is considered gone
_CLOSE_S = 1.0  # a throttled upstream does not send its close frame in time anyway
_FIRST_BACKOFF_S = 0.1
_GAPS_KEPT = 20
MAX_ID_BYTES = 8_192
_MAX_RETRY_MS = 300_000
_FIELD_VALUE = re.compile(rb"[\x21-\x7e\x80-\xff](?:[\t\x20-\x7e\x80-\xff]*[\x21-\x7e\x80-\xff])?")  # RFC 9110 §5.5
_LINE_END = re.compile(rb"\r\n|\n|\r")
_LINES_TYPES = ("application/x-ndjson", "application/jsonl", "application/json", "application/json-seq", "text/plain")


def shown_url(url: str) -> str:
    """The address without user, password and query; a digest of the query tells addresses apart."""
    parts = urlsplit(url)
    mark = f"?{hashlib.blake2b(parts.query.encode(), digest_size=4).hexdigest()}" if parts.query else ""
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}{mark}"


class UpstreamClient(ABC):
    """Reads one upstream until cancelled.

    Args:
        spec: headers and ``resume_param`` as declared.
        clock: nanoseconds since the epoch.
        jitter: draws a pause between 0 and its argument.

    Raises:
        ConfigError: a header needs a variable that is not set.
    """

    max_bytes = MAX_MESSAGE_BYTES

    def __init__(
        self,
        spec: CollectorSpec,
        context: CollectorContext,
        *,
        clock: Callable[[], int] = time.time_ns,
        jitter: Callable[[float], float] = lambda most: random.uniform(0, most),
    ) -> None:
        self._url = context.url
        self._shown = shown_url(context.url)
        self._intake = context.intake
        self._lane = context.intake.lane
        self._headers = request_headers(spec.headers, source=context.intake.border.source.name)
        self._resume_param = spec.resume_param
        self._backoff_max_s = context.backoff_max_s
        self._clock = clock
        self._jitter = jitter
        self._connected = False
        self._gaps: deque[Gap] = deque(maxlen=_GAPS_KEPT)
        self._ended = "the collector was started again"
        self._failures = 0
        self._least_pause_s = 0.0

    @abstractmethod
    async def _session(self) -> None:
        """Connect, call :meth:`_opened`, and read until the upstream ends the stream.

        Raises:
            UpstreamEnded: the stream ended with an error, or no connection was made.
        """

    @property
    def _resumes(self) -> bool:
        """Whether the upstream can be asked for what follows the last event in the log."""
        return bool(self._resume_param)

    def status(self) -> UpstreamStatus:
        lane = self._lane
        return UpstreamStatus(
            lane.name,
            self._shown,
            self._connected,
            lane.position,
            tuple(self._gaps),
            lane.gaps,
            lane.cursor,
            ended="" if self._connected else self._ended,
        )

    def close(self) -> None:
        self._connected = False

    async def run(self) -> None:
        """Read and reconnect until cancelled."""
        while True:
            try:
                await self._session()
                self._ended = "the upstream ended the stream"
            except UpstreamEnded as error:
                self._ended = str(error)
            finally:
                self._connected = False
            most = min(self._backoff_max_s, _FIRST_BACKOFF_S * 2 ** min(self._failures, 20))
            pause = self._least_pause_s + self._jitter(most)
            self._failures += 1
            logger.info("upstream %s is not connected (%s); next attempt in %.2f s", self._shown, self._ended, pause)
            await asyncio.sleep(pause)

    def _address(self) -> str:
        """The address, with the index of the next message if the upstream takes one."""
        if not self._resume_param:
            return self._url
        parts = urlsplit(self._url)
        resume = urlencode({self._resume_param: self._lane.position or 0})
        return urlunsplit(parts._replace(query=f"{parts.query}&{resume}" if parts.query else resume))

    def _opened(self) -> None:
        """Note that the connection is open; reports a gap if the upstream cannot resume."""
        self._connected = True
        if self._resumes:
            place = self._lane.cursor or f"message {self._lane.position or 0}"
            logger.info("upstream %s is connected, from %s", self._shown, place)
            return
        if self._lane.last_at:  # events were received before, so there is a gap
            gap = Gap(self._lane.last_at, self._clock() // 1000, self._ended)
            self._gaps.append(gap)
            self._lane.gaps += 1
            seconds = (gap.until - gap.since) / 1e6
            logger.warning(
                "upstream %s cannot resume after %.1f s without a connection: %s", self._shown, seconds, gap.reason
            )

    async def _received(self, payload: bytes, name: str = "") -> None:
        """Take the next message; the upstream can resume after a ``name``, its own id of the message."""
        border, lane = self._intake.border, self._lane
        if name or self._resume_param:
            index = lane.position or 0
            suspect = lane.suspect_left > 0
            event = border.admit(payload, suspect=suspect, origin=f"{lane.name}#{name or index}")
            extra = ((UPSTREAM_ID, name),) if name else ()
            await self._take(event, None if name else index + 1, extra)
            lane.suspect_left -= suspect
        else:
            await self._take(border.admit(payload))
        self._failures = 0

    async def _take(self, event: Admitted, position: int | None = None, extra: Extra = ()) -> None:
        """Hand the event on. While the log is full this waits, and TCP slows the upstream down."""
        while True:
            try:
                self._intake.take(event, position, extra)
                break
            except (LogFull, LogUnavailable) as error:
                logger.warning("upstream %s waits: %s", self._shown, error)
                await self._intake.log.room(error.size if isinstance(error, LogFull) else 0)

    async def _skip_oversize(self, what: str = "message") -> None:
        """Reject a message that is too large to read, and skip it: repeated, it would end the connection again."""
        index = self._lane.position or 0
        name = f"{what} {index} of the upstream" if self._resume_param else f"a {what} of the upstream"
        refusal = Refusal(f"{name} has more than {self.max_bytes} bytes", 413, "too-large")
        event = self._intake.border.admit(b"", origin=f"{self._lane.name}#{index}", refusal=refusal)
        logger.error("upstream %s: %s", self._shown, event.envelope.reject)
        await self._take(event, index + 1 if self._resume_param else None)


class WebSocketCollector(UpstreamClient):
    """Reads a WebSocket upstream: each message is an event."""

    async def _session(self) -> None:
        try:
            async with connect(
                self._address(),
                max_size=self.max_bytes,
                compression=None,
                close_timeout=_CLOSE_S,
                user_agent_header="millrace",
            ) as connection:
                self._opened()
                while True:
                    await self._received(await connection.recv(decode=False))
        except ConnectionClosed as error:
            if self._resume_param and error.sent is not None and error.sent.code == CloseCode.MESSAGE_TOO_BIG:
                await self._skip_oversize()
            raise UpstreamEnded(str(error)) from None
        except (OSError, WebSocketException) as error:  # TimeoutError is an OSError
            raise UpstreamEnded(f"{type(error).__name__}: {error}") from None


@asynccontextmanager
async def open_stream(
    url: str, headers: Mapping[str, str], *, kinds: tuple[str, ...]
) -> AsyncIterator[AsyncIterator[bytes]]:
    """The body of a GET as it arrives; redirects are followed. httpx's errors are translated here.

    Raises:
        UpstreamEnded: no answer, another status than 200, another content type, or a broken connection.
    """
    timeout = httpx.Timeout(CONNECT_S, read=SILENCE_S)
    wanted = {"Accept-Encoding": "identity", **headers}
    in_utf8 = {name.encode(): value.encode() for name, value in wanted.items()}  # a Last-Event-ID may be any text
    try:
        async with (
            httpx.AsyncClient(timeout=timeout, follow_redirects=True, max_redirects=5) as client,
            client.stream("GET", url, headers=in_utf8) as answer,
        ):
            kind = answer.headers.get("content-type", "").partition(";")[0].strip().lower()
            if answer.status_code != 200:
                raise UpstreamEnded(f"it answers {answer.status_code} {answer.reason_phrase}")
            if kind not in kinds:
                raise UpstreamEnded(f"it answers {kind or 'without a content type'}, not {kinds[0]}")
            yield answer.aiter_bytes()
    except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError) as error:
        raise UpstreamEnded(f"{type(error).__name__}: {error}") from None


def request_headers(declared: Mapping[str, str], *, source: str) -> dict[str, str]:
    """The headers that a pipeline declares; ``$NAME`` is read from the environment, which keeps secrets out of files.

    Raises:
        ConfigError: a variable is not set.
    """
    found: dict[str, str] = {"User-Agent": "millrace"}
    for name, value in declared.items():
        if value.startswith("$"):
            if value[1:] not in os.environ:
                raise ConfigError(
                    f"header {name} needs the variable {value[1:]}",
                    key=f"sources.{source}.collectors",
                    remedy=f"Set {value[1:]} in the environment",
                )
            value = os.environ[value[1:]]
        found[name] = value
    return found


class LinesCollector(UpstreamClient):
    """Reads an upstream of JSON lines (chunked HTTP): each line is an event; empty lines do not count."""

    async def _session(self) -> None:
        splitter = LineSplitter(self.max_bytes)
        async with open_stream(
            self._address(), {**self._headers, "Accept": _LINES_TYPES[0]}, kinds=_LINES_TYPES
        ) as body:
            self._opened()
            async for chunk in body:
                for line in splitter.feed(chunk):
                    if line is None:
                        await self._skip_oversize("line")
                    else:
                        await self._received(line)


class SseCollector(UpstreamClient):
    """Reads an upstream of server-sent events: each of them is an event.

    The client reconnects with the ``Last-Event-ID`` of the last event in the log. The id is stored with the event, and
    in its Kafka headers as ``upstream_id``, so a crash resumes too. An upstream without ids, or with ids that no header
    can carry, cannot resume. ``retry:`` is honored, up to five minutes.
    """

    @property
    def _resumes(self) -> bool:
        return _can_be_sent(self._lane.cursor or "")

    async def _session(self) -> None:
        headers = {**self._headers, "Accept": "text/event-stream", "Cache-Control": "no-store"}
        last_id = self._lane.cursor or ""
        if self._resumes:
            headers["Last-Event-ID"] = last_id
        parser = EventStreamParser(last_id, max_bytes=self.max_bytes)
        async with open_stream(self._url, headers, kinds=("text/event-stream",)) as body:
            self._opened()
            async for chunk in body:
                events = parser.feed(chunk)
                if parser.retry_ms is not None:
                    self._least_pause_s = min(parser.retry_ms, _MAX_RETRY_MS) / 1000
                for data, name in events:
                    if data is None:
                        await self._skip_oversize("server-sent event")
                    else:
                        await self._received(data, name if _can_be_sent(name) else "")


def _can_be_sent(name: str) -> bool:
    """Whether an event id can stand in a request header."""
    found = name.encode()
    return len(found) <= MAX_ID_BYTES and _FIELD_VALUE.fullmatch(found) is not None


class EventStreamParser:
    """Parses a stream of server-sent events in chunks, without I/O.

    The HTML standard (WHATWG, 9.2.6 "Interpreting an event stream"): a byte order mark at the start is skipped; lines
    end with CR, LF or CRLF; a line that starts with a colon is a comment; ``data`` lines are joined by LF; an ``id``
    stays in force until the next one, and is ignored if it contains NUL; ``retry`` counts if it is all digits; an event
    without ``data`` is none; an incomplete event at the end is dropped. Data stays bytes, even if not UTF-8. Types of
    events are ignored.

    Args:
        last_id: last event id of the previous connection, which stays in force.
        max_bytes: limit of an event's data and of a line.

    Attributes:
        retry_ms: pause before a reconnect that the stream asked for, or None.
    """

    def __init__(self, last_id: str = "", *, max_bytes: int = MAX_MESSAGE_BYTES) -> None:
        self.retry_ms: int | None = None
        self._max = max_bytes
        self._first = True  # the line may begin with a byte order mark
        self._after_cr = False
        self._rest: list[bytes] = []  # of a line
        self._rest_bytes = 0
        self._cut = False  # the line is too long: the rest is skipped
        self._id = last_id
        self._data: list[bytes] = []
        self._data_bytes = 0
        self._oversize = False

    def feed(self, chunk: bytes) -> list[tuple[bytes | None, str]]:
        """Data and id of the events that this chunk completes.

        Data are lines joined by LF; None: they exceeded the limit. The id is empty if there is none.
        """
        if self._after_cr and chunk:
            self._after_cr = False
            chunk = chunk.removeprefix(b"\n")  # the LF of a CRLF that two chunks share
        found: list[tuple[bytes | None, str]] = []
        at = 0
        for end in _LINE_END.finditer(chunk):
            line = self._whole(chunk[at : end.start()])
            at = end.end()
            if line:
                self._field(line)
                continue
            # The standard drops an event whose data buffer is empty: no data line at all. One empty line makes "\n".
            if self._data or self._oversize:
                found.append((None if self._oversize else b"\n".join(self._data), self._id))
            self._data, self._data_bytes, self._oversize = [], 0, False
        if chunk.endswith(b"\r"):
            self._after_cr = True
        self._keep(chunk[at:])
        return found

    def _keep(self, piece: bytes) -> None:
        if self._rest_bytes + len(piece) > self._max:
            self._cut = True
            self._rest = [(b"".join(self._rest) + piece[:8])[:8]]  # enough to identify the field
            return
        if piece:
            self._rest.append(piece)
            self._rest_bytes += len(piece)

    def _whole(self, piece: bytes) -> bytes:
        """The line that ends with this piece."""
        if not (self._rest or self._cut or self._first) and len(piece) <= self._max:
            return piece
        self._keep(piece)
        line, cut = b"".join(self._rest), self._cut
        self._rest, self._rest_bytes, self._cut = [], 0, False
        if self._first:
            self._first = False
            line = line.removeprefix(b"\xef\xbb\xbf")
        if cut:
            self._oversize |= line.startswith(b"data")
            return b":"
        return line

    def _field(self, line: bytes) -> None:
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            self._data_bytes += len(value) + 1
            if self._data_bytes > self._max + 1:
                self._oversize, self._data = True, []
            else:
                self._data.append(value)
        elif field == b"id":
            if b"\0" not in value:
                self._id = value.decode("utf-8", "replace")
        elif field == b"retry" and value.isdigit():
            self.retry_ms = int(value[:12])


class LineSplitter:
    """Bytes in, lines out, without line ends and empty lines. An incomplete last line is dropped.

    Args:
        max_bytes: longest line; a longer one comes out as None.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max = max_bytes
        self._rest: list[bytes] = []
        self._size = 0
        self._cut = False

    def feed(self, chunk: bytes) -> list[bytes | None]:
        """The lines that this chunk completes."""
        first, *others = chunk.split(b"\n")
        self._add(first)
        found: list[bytes | None] = []
        for piece in others:
            line = b"".join(self._rest).strip(b"\r \t")
            if self._cut:
                found.append(None)
            elif line:
                found.append(line)
            self._rest, self._size, self._cut = [], 0, False
            self._add(piece)
        return found

    def _add(self, piece: bytes) -> None:
        self._size += len(piece)
        if self._size > self._max:
            self._cut, self._rest = True, []
        elif piece:
            self._rest.append(piece)

"""The client of a WebSocket upstream: one message is one event.

An upstream that can resume (``resume_param``) is asked for the message after the last one in the log, so that a
reconnect or a crash loses nothing. With any other, the time without a connection is reported as a gap.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
import time
from collections import deque
from collections.abc import Callable
from urllib.parse import urlencode, urlsplit, urlunsplit

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, WebSocketException
from websockets.frames import CloseCode

from ingest.border import Admitted
from ingest.errors import LogFull, LogUnavailable
from ingest.source import Gap, Intake, UpstreamStatus

logger = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 16 * 1024 * 1024  # larger ones than the source allows are kept as rejected, up to this
_FIRST_BACKOFF_S = 0.1
_CLOSE_S = 1.0  # an upstream that was slowed down does not get to its close frame in time anyway
_GAPS_KEPT = 20


def shown_url(url: str) -> str:
    """The address without what may be secret: user, password, and the query but for a mark that tells it apart."""
    parts = urlsplit(url)
    mark = f"?{hashlib.blake2b(parts.query.encode(), digest_size=4).hexdigest()}" if parts.query else ""
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}{mark}"


class WebSocketCollector:
    """Reads one upstream until cancelled.

    Args:
        url: of the upstream.
        intake: where the events go.
        resume_param: query parameter that takes the index of the first message wanted; empty: it cannot resume.
        backoff_max_s: the longest pause before a reconnect.
        on_gap: told of each gap.
        clock: nanoseconds since the epoch.
        jitter: draws a pause between 0 and its argument.
    """

    def __init__(
        self,
        url: str,
        intake: Intake,
        *,
        resume_param: str = "",
        backoff_max_s: float = 10.0,
        on_gap: Callable[[Gap], None] = lambda _: None,
        clock: Callable[[], int] = time.time_ns,
        jitter: Callable[[float], float] = lambda most: random.uniform(0, most),
    ) -> None:
        self._url = url
        self._shown = shown_url(url)
        self._intake = intake
        self._lane = intake.lane
        self._resume_param = resume_param
        self._backoff_max_s = backoff_max_s
        self._on_gap = on_gap
        self._clock = clock
        self._jitter = jitter
        self._connected = False
        self._gaps: deque[Gap] = deque(maxlen=_GAPS_KEPT)
        self._ended = "the collector was started again"
        self._failures = 0

    def status(self) -> UpstreamStatus:
        """The state of the upstream now."""
        return UpstreamStatus(
            self._lane.name, self._shown, self._connected, self._lane.position, tuple(self._gaps), self._lane.gaps
        )

    async def run(self) -> None:
        """Read, reconnect, read on, until cancelled."""
        while True:
            try:
                async with connect(
                    self._address(),
                    max_size=MAX_MESSAGE_BYTES,
                    compression=None,
                    close_timeout=_CLOSE_S,
                    user_agent_header="millrace",
                ) as connection:
                    self._opened()
                    await self._read(connection)
            except ConnectionClosed as error:
                self._closed(error)
            except (OSError, WebSocketException) as error:  # TimeoutError is an OSError
                self._ended = f"{type(error).__name__}: {error}"
            finally:
                self._connected = False
            pause = self._jitter(min(self._backoff_max_s, _FIRST_BACKOFF_S * 2 ** min(self._failures, 20)))
            self._failures += 1
            logger.info("upstream %s is not connected (%s); next attempt in %.2f s", self._shown, self._ended, pause)
            await asyncio.sleep(pause)

    def _address(self) -> str:
        if not self._resume_param:
            return self._url
        parts = urlsplit(self._url)
        resume = urlencode({self._resume_param: self._lane.position or 0})
        return urlunsplit(parts._replace(query=f"{parts.query}&{resume}" if parts.query else resume))

    def _opened(self) -> None:
        self._connected = True
        if self._resume_param:
            logger.info("upstream %s is connected, from message %d", self._shown, self._lane.position or 0)
            return
        if self._lane.last_at:  # something was heard before, so there is a time in which nothing was
            gap = Gap(self._lane.last_at, self._clock() // 1000, self._ended)
            self._gaps.append(gap)
            self._lane.gaps += 1
            seconds = (gap.until - gap.since) / 1e6
            logger.warning(
                "upstream %s was not heard for %.1f s and cannot resume: %s", self._shown, seconds, gap.reason
            )
            self._on_gap(gap)

    async def _read(self, connection: ClientConnection) -> None:
        border, lane, resumes = self._intake.border, self._lane, bool(self._resume_param)
        while True:
            payload = await connection.recv(decode=False)
            if not resumes:
                await self._take(border.admit(payload), None)
            else:
                index = lane.position or 0
                suspect = lane.suspect_left > 0
                await self._take(border.admit(payload, suspect=suspect, origin=f"{lane.name}#{index}"), index + 1)
                if suspect:
                    lane.suspect_left -= 1
            self._failures = 0

    async def _take(self, event: Admitted, position: int | None) -> None:
        """Hand the event on; while the log is full nothing is read, so the upstream is slowed down by TCP."""
        while True:
            try:
                self._intake.take(event, position)
                return
            except (LogFull, LogUnavailable) as error:
                logger.warning("upstream %s waits: %s", self._shown, error)
                await self._intake.log.room()

    def _closed(self, error: ConnectionClosed) -> None:
        self._ended = str(error)
        if self._resume_param and error.sent is not None and error.sent.code == CloseCode.MESSAGE_TOO_BIG:
            # Asked for again it would end the connection again. Its place is kept, as rejected, and reading goes on.
            index = self._lane.position or 0
            event = self._intake.border.refuse(
                f"message {index} of the upstream has more than {MAX_MESSAGE_BYTES} bytes",
                origin=f"{self._lane.name}#{index}",
            )
            logger.error("upstream %s: %s", self._shown, event.envelope.reject)
            try:
                self._intake.take(event, index + 1)
            except (LogFull, LogUnavailable) as problem:
                logger.warning("upstream %s waits: %s", self._shown, problem)

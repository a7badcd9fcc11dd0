"""What the clients of an upstream share: reconnecting, resuming, gaps, and reading no faster than the log takes.

A client connects and reads until the upstream ends it; then it pauses (exponential back-off, full jitter: Brooker,
"Exponential Backoff And Jitter", AWS Architecture Blog, 2015) and connects again. Where the upstream can resume, it is
asked for what follows the last event in the log, so that a reconnect or a crash loses nothing. With any other, the time
without a connection is reported as a gap. While the log is full nothing is read: TCP slows the upstream down.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from urllib.parse import urlencode, urlsplit, urlunsplit

from ingest.border import Admitted
from ingest.errors import LogFull, LogUnavailable, UpstreamEnded
from ingest.source import Gap, Intake, UpstreamStatus
from lakehouse.contract.envelope import UPSTREAM_ID

logger = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 16 * 1024 * 1024  # larger ones than the source allows are kept as rejected, up to this
_FIRST_BACKOFF_S = 0.1
_GAPS_KEPT = 20


def shown_url(url: str) -> str:
    """The address without what may be secret: user, password, and the query but for a mark that tells it apart."""
    parts = urlsplit(url)
    mark = f"?{hashlib.blake2b(parts.query.encode(), digest_size=4).hexdigest()}" if parts.query else ""
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}{mark}"


class UpstreamClient(ABC):
    """Reads one upstream until cancelled.

    Args:
        url: of the upstream.
        intake: where the events go.
        resume_param: query parameter that takes the index of the first message wanted; empty: it has none.
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
        self._least_pause_s = 0.0

    @abstractmethod
    async def _session(self) -> None:
        """Connect, tell :meth:`_opened`, and read until the upstream ends it.

        Raises:
            UpstreamEnded: why it ended, or why there was no connection.
        """

    @property
    def _resumes(self) -> bool:
        """Whether the upstream can be asked for what follows the last event in the log."""
        return bool(self._resume_param)

    def status(self) -> UpstreamStatus:
        """The state of the upstream now."""
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
        """Nothing is held while it does not run."""
        self._connected = False

    async def run(self) -> None:
        """Read, reconnect, read on, until cancelled."""
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
        """The address, with the index of the message that is wanted next where the upstream takes one."""
        if not self._resume_param:
            return self._url
        parts = urlsplit(self._url)
        resume = urlencode({self._resume_param: self._lane.position or 0})
        return urlunsplit(parts._replace(query=f"{parts.query}&{resume}" if parts.query else resume))

    def _opened(self) -> None:
        """The connection stands."""
        self._connected = True
        if self._resumes:
            place = self._lane.cursor or f"message {self._lane.position or 0}"
            logger.info("upstream %s is connected, from %s", self._shown, place)
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

    async def _received(self, payload: bytes) -> None:
        """Take the next message of an upstream whose messages are counted, or of one that cannot resume."""
        border, lane = self._intake.border, self._lane
        if not self._resume_param:
            await self._take(border.admit(payload))
        else:
            index = lane.position or 0
            suspect = lane.suspect_left > 0
            event = border.admit(payload, suspect=suspect, origin=f"{lane.name}#{index}")
            await self._take(event, index + 1, suspect=suspect)
        self._failures = 0

    async def _received_named(self, payload: bytes, name: str) -> None:
        """Take a message that its upstream gave a name, after which it can be asked to go on."""
        lane = self._lane
        suspect = lane.suspect_left > 0
        event = self._intake.border.admit(payload, suspect=suspect, origin=f"{lane.name}#{name}")
        await self._take(event, suspect=suspect, extra=((UPSTREAM_ID, name),))
        self._failures = 0

    async def _take(
        self,
        event: Admitted,
        position: int | None = None,
        *,
        suspect: bool = False,
        extra: tuple[tuple[str, str], ...] = (),
    ) -> None:
        """Hand the event on; while the log is full nothing is read, so the upstream is slowed down by TCP."""
        while True:
            try:
                self._intake.take(event, position, extra)
                break
            except (LogFull, LogUnavailable) as error:
                logger.warning("upstream %s waits: %s", self._shown, error)
                await self._intake.log.room(error.size if isinstance(error, LogFull) else 0)
        if suspect:
            self._lane.suspect_left -= 1

    async def _skip_oversize(self, what: str = "message") -> None:
        """Keep the place of a message that is too large to be read, as rejected.

        Asked for again it would end the connection again.
        """
        index = self._lane.position or 0
        name = f"{what} {index} of the upstream" if self._resume_param else f"a {what} of the upstream"
        event = self._intake.border.refuse(
            f"{name} has more than {self._most_bytes} bytes", origin=f"{self._lane.name}#{index}"
        )
        logger.error("upstream %s: %s", self._shown, event.envelope.reject)
        await self._take(event, index + 1 if self._resume_param else None)

    @property
    def _most_bytes(self) -> int:
        return MAX_MESSAGE_BYTES

"""The base of transports that own their connection: an asyncio protocol beneath uvicorn, without a task or a queue.

A task lives only while a subscriber waits for a table or a replay.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any

from serve.access import ReaderGate
from serve.core.hub import Hub
from serve.core.messages import Codec
from serve.core.model import OPEN, Principal, SubscribeRequest
from serve.core.ring import Subscriber
from serve.errors import RequestError
from serve.tables.tables import Tables, clock_ms

if TYPE_CHECKING:
    from uvicorn.server import ServerState

log = logging.getLogger(__name__)

GOING_AWAY = 1001
UNSENT_BYTES = 131_072  # most that the kernel holds for a subscriber that does not read


def _nowhere(data: bytes) -> None:
    """Sink for bytes before the first message may be written and after the last."""


class SubscriberConnection(asyncio.Protocol):
    """One connection; also its subscribers' :class:`~serve.core.ring.Link`.

    Args:
        server_state, app_state: as uvicorn passes them; ``app_state`` has ``hub``, ``tables`` and ``gate``.
        codec: for subscribers that have not asked for another.
    """

    def __init__(self, server_state: ServerState, app_state: dict[str, Any], codec: Codec) -> None:
        self.hub: Hub = app_state["hub"]
        self.tables: Tables = app_state["tables"]
        self.gate: ReaderGate = app_state["gate"]
        self.principal = OPEN
        self.peer = ""
        self.lost = False
        self.open = False  # whether messages may be written now
        self.write: Callable[[bytes], None] = _nowhere  # bytes of whole messages; the transport's own while it is open
        self.transport: asyncio.Transport = None  # type: ignore[assignment]
        self.subscribers: list[Subscriber] = [Subscriber(self, codec)]
        self.loop = asyncio.get_running_loop()
        self._connections: set[Any] = server_state.connections
        self._tasks: tuple[asyncio.Task[None], ...] = ()
        self._drain: asyncio.Future[None] | None = None

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        self._connections.add(self)
        peer = transport.get_extra_info("peername")
        self.peer = f"{peer[0]}:{peer[1]}" if peer else "?"
        for subscriber in self.subscribers:
            subscriber.label = self.peer
        if transport.get_extra_info("sslcontext") is None:
            # Write at once what the socket takes. By default uvloop collects what is written in a turn of the loop: the
            # first of 10,000 subscribers would wait for the last one's bytes, about 10 ms.
            self.transport.set_write_buffer_limits(0)
        raw: socket.socket | None = transport.get_extra_info("socket")
        if raw is not None and hasattr(socket, "TCP_NOTSENT_LOWAT") and raw.family != socket.AF_UNIX:
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
            # A peer that vanished acknowledges nothing: the kernel reports it, later than our own cut.
            patience = self.hub.settings.cut_after_ms + 5_000
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, patience)

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        self.shut()
        self._connections.discard(self)
        self.gate.leave(self.principal, self)
        self.unsubscribe()
        for task in self._tasks:
            task.cancel()
        self._release()

    def pause_writing(self) -> None:
        for subscriber in self.subscribers:
            subscriber.paused = True
            self.hub.paused(subscriber, clock_ms())

    def resume_writing(self) -> None:
        for subscriber in self.subscribers:
            self.hub.drained(subscriber, clock_ms())
        self._release()
        self.pump()

    # Link

    def pump(self) -> None:
        """Write what the hub has, until these subscribers have everything or the socket takes no more."""
        for subscriber in self.subscribers:
            while self.open and not subscriber.paused:
                data = self.hub.data_to_send(subscriber)
                if not data:
                    break
                self.transport.write(data)

    def close(self, code: int, reason: str) -> None:
        raise NotImplementedError

    def buffered(self) -> int:
        return 0 if self.lost else self.transport.get_write_buffer_size()

    async def drained(self) -> None:
        if any(subscriber.paused for subscriber in self.subscribers) and not self.lost:
            self._drain = self._drain or self.loop.create_future()
            await asyncio.shield(self._drain)

    def shutdown(self) -> None:
        """Called by uvicorn when it stops."""
        self.close(GOING_AWAY, "the server stops; reconnect with your last position")

    # For the transports

    def opened(self) -> None:
        """Messages may be written from now on."""
        self.open, self.write = True, self.transport.write

    def shut(self) -> None:
        """Messages may no longer be written."""
        self.open, self.write = False, _nowhere

    def refuse(self, error: RequestError) -> None:
        """Say what is wrong with the request, then close."""
        raise NotImplementedError

    def admit(self, headers: Mapping[str, str], query: str) -> Principal:
        """Authenticate; the connection counts towards its key until it is gone. Raises RequestError."""
        self.principal = self.gate.admit(headers, query)
        self.gate.enter(self.principal, self)
        return self.principal

    def subscribe(self, request: SubscribeRequest, accepted: Callable[[], None] | None = None) -> None:
        """Join a table in a task of its own; see :meth:`serve.tables.tables.Tables.join`."""

        async def join() -> None:
            try:
                await self.tables.join(self.subscribers[0], request, accepted)
            except RequestError as error:
                self.refuse(error)

        self.run(join())

    def unsubscribe(self) -> None:
        """End all subscriptions of this connection."""
        for subscriber in self.subscribers:
            self.hub.unsubscribed(subscriber)

    def run(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a task for this connection; its failure closes the connection."""
        task = self.loop.create_task(work)
        self._tasks = (*self._tasks, task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks = tuple(other for other in self._tasks if other is not task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s: the subscription failed", self.peer, exc_info=error)
            self.close(RequestError.FAILED, "the server failed; its log says how")

    def _release(self) -> None:
        if self._drain is not None and not self._drain.done():
            self._drain.set_result(None)
        self._drain = None

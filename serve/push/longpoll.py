"""Long polling: ``GET /v1/poll?table=&from=&wait=``. An answer holds what came after a position, and the next position.

A poll is a subscriber as long as the request lives, so it works as the other transports do: whatever came between two
polls is in the ring or the log. A request waits in the task that uvicorn gives every request.
"""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from serve.access import ReaderGate
from serve.core.hub import Hub
from serve.core.messages import Message, heartbeat, slow, to_json
from serve.core.model import Principal
from serve.core.ring import Subscriber
from serve.errors import RequestError
from serve.push.request import admitted, hung_up, invalid, query_of, subscription_of, whole_number
from serve.tables.tables import Tables, clock_ms, now_ms

MAX_WAIT_S = 60
DEFAULT_WAIT_S = 25
MAX_BYTES = 1_048_576  # of changes in one answer; a snapshot is never split
_FIRST_BYTES_S = 60.0  # until a snapshot or a replay must have its first bytes
_EXTRA = frozenset({"wait"})


class PollCodec:
    """JSON messages with a comma behind each, for a list. ``resumed`` is omitted: a poll from a position implies it."""

    name = "poll"
    answers = False

    def frame(self, message: Message) -> bytes:
        return b"" if message.kind == "resumed" else message.body + b","

    def heartbeat(self, message: Message) -> bytes:
        """Nothing: an answer without changes has its own heartbeat."""
        return b""


CODEC = PollCodec()


class PollLink:
    """Gathers one answer: it stops fetching at :data:`MAX_BYTES`, unless a snapshot is under way."""

    def __init__(self, hub: Hub, principal: Principal, peer: str) -> None:
        self.principal = principal
        self.subscriber = Subscriber(self, CODEC, peer, principal)
        self.parts: list[bytes] = []
        self.size = 0
        self.some = asyncio.Event()
        self.closed: RequestError | None = None
        self._hub = hub

    def write(self, data: bytes) -> None:
        if data:
            self.parts.append(data)
            self.size += len(data)
            self.some.set()

    def pump(self) -> None:
        subscriber = self.subscriber
        while self.closed is None and (self.size < MAX_BYTES or subscriber.snapshot is not None):
            data = self._hub.data_to_send(subscriber)
            if not data:
                return
            self.write(data)

    def close(self, code: int, reason: str) -> None:
        """End the poll: with an error, or with what there is. If the stream ended, its reason is the error."""
        stream = self.subscriber.stream
        self.closed = RequestError(code, "closed", reason)
        if stream is not None and stream.ended is not None:
            self.closed = stream.ended
            self.parts.clear()
        self.some.set()

    def buffered(self) -> int:
        return 0

    async def drained(self) -> None:
        """Not before this answer is full."""

    @property
    def whole(self) -> bool:
        """Whether it holds something, and not half a snapshot."""
        return self.closed is not None or (bool(self.parts) and self._hub.reached(self.subscriber) is not None)

    @property
    def fetching(self) -> bool:
        """Whether its snapshot is being made."""
        stream = self.subscriber.stream
        return stream is not None and self.subscriber in stream.waiting


async def poll(request: Request) -> Response:
    """Long polling, what came after a position: ``?table=&from=&where=&columns=&select=&conflate=&wait=``"""
    tables: Tables = request.state.tables
    hub: Hub = request.state.hub
    gate: ReaderGate = request.state.gate
    query = query_of(request.url.query)
    wait = whole_number(query.get("wait", str(DEFAULT_WAIT_S)), "wait", 0, MAX_WAIT_S)
    wanted = subscription_of(query, hub.seal, also=_EXTRA)
    if wanted.window:
        raise invalid("bad_request", "the next poll acknowledges this one: there is no window")
    peer = f"{request.client.host}:{request.client.port}" if request.client else "?"
    link = PollLink(hub, admitted(request), peer)
    gate.enter(link.principal, link)
    joining = asyncio.create_task(tables.join(link.subscriber, wanted))
    try:
        await _wait(request, link, joining, wait)
        if link.closed is not None and not link.parts:
            raise link.closed
        return _answer(hub, link)
    finally:
        joining.cancel()
        hub.unsubscribed(link.subscriber)
        gate.leave(link.principal, link)


async def _wait(request: Request, link: PollLink, joining: asyncio.Task[None], seconds: float) -> None:
    """Wait for an answer, the end of the time, or a hang-up."""
    gone = asyncio.ensure_future(hung_up(request))
    for task in (gone, joining):
        task.add_done_callback(lambda _: link.some.set())
    loop = asyncio.get_running_loop()
    until = loop.time() + seconds
    patience = loop.time() + max(seconds, _FIRST_BYTES_S)
    try:
        while not link.whole and not gone.done():
            if joining.done():
                joining.result()
            busy = not joining.done() or link.parts or link.fetching
            link.some.clear()
            async with asyncio.timeout_at(patience if busy else until):
                await link.some.wait()
    except TimeoutError:
        pass
    finally:
        gone.cancel()
    if joining.done():
        joining.result()


def _answer(hub: Hub, link: PollLink) -> Response:
    subscriber = link.subscriber
    position, stream = hub.reached(subscriber), subscriber.stream
    if position is None or stream is None:
        raise RequestError(RequestError.FULL, "busy", "the answer was not ready in time; ask again")
    token, (behind, late) = hub.seal.token(position), hub.behind(subscriber, clock_ms())
    parts = link.parts
    if not parts:
        told = heartbeat(stream.channel.name, token, behind, stream.channel.state.facts.newest_at, now_ms())
        parts = [CODEC.frame(told)]
    elif not subscriber.told_slow and late >= hub.settings.slow_after_ms:
        hub.counters.slow += 1
        parts = [CODEC.frame(slow(stream.channel.name, behind, int(late), hub.settings.cut_after_ms)), *parts]
    body = b'{"messages":[' + b"".join(parts).removesuffix(b",") + b"],"
    body += to_json({"position": token, "behind": behind})[1:]
    return Response(body, headers={"Cache-Control": "no-store"}, media_type="application/json")

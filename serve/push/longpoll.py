"""Long polling: ``GET /v1/poll?table=&from=&wait=``. An answer holds what came after a position, and the next position.

A poll is a subscriber as long as the request lives, so it works as the other transports do: whatever came between two
polls is in the ring or the log. A request waits in the task that uvicorn gives every request.
"""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from serve.core.codec import as_msgpack
from serve.core.hub import Hub
from serve.core.messages import Message, heartbeat, slow
from serve.core.subscriber import Subscriber
from serve.core.values import to_json
from serve.errors import RequestError
from serve.push.request import admitted, hung_up, invalid, peer_of, query_of, refused, subscription_of, whole_number
from serve.security.access import Access, Principal
from serve.tables.tables import Tables, clock_ms, now_ms

MAX_WAIT_S = 60
DEFAULT_WAIT_S = 25
MAX_BYTES = 1_048_576  # of changes in one answer; a snapshot is never split
_FIRST_BYTES_S = 60.0  # until a snapshot or a replay must have its first bytes
POSITION_HEADER = "Millrace-Position"
_EXTRA = frozenset({"wait", "codec"})


class PollCodec:
    """JSON messages with a comma behind each, for a list. ``resumed`` is omitted: a poll from a position implies it."""

    name = "poll json"
    answers = False
    media_type = "application/json"

    def frame(self, message: Message) -> bytes:
        return b"" if message.kind == "resumed" else message.body + b","

    def heartbeat(self, message: Message) -> bytes:
        """Nothing: an answer without changes has its own heartbeat."""
        return b""

    def answer(self, data: bytes, position: str, behind: int) -> bytes:
        tail = to_json({"position": position, "behind": behind})
        return b'{"messages":[' + data.removesuffix(b",") + b"]," + tail[1:]


class PollPackCodec(PollCodec):
    """MessagePack objects in sequence; position and lag are in headers."""

    name = "poll msgpack"
    media_type = "application/vnd.msgpack"

    def frame(self, message: Message) -> bytes:
        return b"" if message.kind == "resumed" else as_msgpack(message)[0]

    def answer(self, data: bytes, position: str, behind: int) -> bytes:
        return data


CODECS = {"json": PollCodec(), "msgpack": PollPackCodec()}


class PollLink:
    """Gathers one answer: it stops fetching at :data:`MAX_BYTES`, unless a snapshot is under way."""

    def __init__(self, hub: Hub, principal: Principal) -> None:
        self.subscriber: Subscriber | None = None
        self.principal = principal
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
        assert subscriber is not None
        while self.closed is None and (self.size < MAX_BYTES or subscriber.snapshot is not None):
            data = self._hub.data_to_send(subscriber)
            if not data:
                return
            self.write(data)

    def close(self, code: int, reason: str) -> None:
        """End the poll: with an error, or with what there is. If the stream ended, its reason is the error."""
        stream = None if self.subscriber is None else self.subscriber.stream
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
        subscriber = self.subscriber
        waits = subscriber is not None and self._hub.reached(subscriber) is None
        return self.closed is not None or (bool(self.parts) and not waits)


async def poll(request: Request) -> Response:
    tables: Tables = request.state.tables
    hub: Hub = request.state.hub
    access: Access = request.state.access
    principal = admitted(request)
    link = PollLink(hub, principal)
    subscriber: Subscriber | None = None
    joining: asyncio.Task[None] | None = None
    try:
        query = query_of(request.url.query)
        codec = CODECS.get(query.get("codec", "json"))
        if codec is None:
            raise invalid("bad_request", f"codec is one of {', '.join(CODECS)} here")
        wait = whole_number(query.get("wait", str(DEFAULT_WAIT_S)), "wait", 0, MAX_WAIT_S)
        wanted = subscription_of(query, hub.seal, also=_EXTRA)
        if wanted.window:
            raise invalid("bad_request", "the next poll acknowledges this one: there is no window")
        access.enter(principal, link)
        subscriber = link.subscriber = Subscriber(link, codec, peer_of(request), principal)
        joining = asyncio.create_task(tables.join(subscriber, wanted))
        await _wait(request, link, joining, wait)
        if link.closed is not None and not link.parts:
            raise link.closed
        return _answer(hub, subscriber, codec, link)
    except RequestError as error:
        return refused(error)
    finally:
        if joining is not None and not joining.done():
            joining.cancel()
        if subscriber is not None:
            hub.unsubscribed(subscriber)
        access.leave(principal, link)


async def _wait(request: Request, link: PollLink, joining: asyncio.Task[None], seconds: float) -> None:
    """Wait for an answer, the end of the time, or a hang-up."""
    gone = asyncio.ensure_future(hung_up(request))
    loop = asyncio.get_running_loop()
    until = loop.time() + seconds
    patience = loop.time() + max(seconds, _FIRST_BYTES_S)
    try:
        while not link.whole and not gone.done():
            busy = not joining.done() or link.parts or _fetching(link)
            left = (patience if busy else until) - loop.time()
            if left <= 0:
                return
            link.some.clear()
            waits = {gone, asyncio.ensure_future(link.some.wait())}
            if not joining.done():
                waits.add(joining)
            done, _ = await asyncio.wait(waits, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            for task in waits - {gone, joining}:
                task.cancel()
            if joining in done:
                joining.result()
    finally:
        gone.cancel()
    if joining.done():
        joining.result()


def _fetching(link: PollLink) -> bool:
    """Whether its snapshot is being made."""
    subscriber = link.subscriber
    return subscriber is not None and subscriber.stream is not None and subscriber in subscriber.stream.waiting


def _answer(hub: Hub, subscriber: Subscriber, codec: PollCodec, link: PollLink) -> Response:
    position, stream = hub.reached(subscriber), subscriber.stream
    if position is None or stream is None:
        raise RequestError(RequestError.FULL, "busy", "the answer was not ready in time; ask again")
    token, behind = hub.seal.token(position), hub.behind(subscriber)
    notes: list[Message] = []
    if not link.parts:
        notes.append(heartbeat(stream.channel.name, token, behind, stream.channel.state.facts.newest_at, now_ms()))
    elif not subscriber.told_slow and (late := _late_ms(subscriber)) >= hub.settings.slow_after_ms:
        hub.counters.slow += 1
        notes.append(slow(stream.channel.name, behind, int(late), hub.settings.cut_after_ms))
    data = b"".join([*map(codec.frame, notes), *link.parts])
    headers = {"Cache-Control": "no-store", POSITION_HEADER: token, "Millrace-Behind": str(behind)}
    return Response(codec.answer(data, token, behind), headers=headers, media_type=codec.media_type)


def _late_ms(subscriber: Subscriber) -> float:
    """Age of the first message that comes after this answer, ms."""
    wire_channel = subscriber.wire_channel
    if subscriber.live or wire_channel is None or subscriber.cursor >= wire_channel.ring.next:
        return 0.0
    return clock_ms() - wire_channel.ring.frame(max(subscriber.cursor, wire_channel.ring.first)).at

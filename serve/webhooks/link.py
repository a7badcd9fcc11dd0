"""What the hub writes to and a webhook's runner reads from: messages one at a time, fetched a few at a time."""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from dataclasses import dataclass

import orjson

from serve.errors import RequestError
from serve.hub import Hub
from serve.messages import Message
from serve.principal import Principal
from serve.subscriber import Subscriber

_LENGTHS = struct.Struct(">II")
# For whoever holds a connection. What an `error` says stands in the webhook's state, and is not posted at each try.
_SKIPPED = frozenset({"resumed", "slow", "heartbeat", "error"})


class HookCodec:
    """Messages with their lengths, so that they can be told apart again. Empty changes are marked."""

    name = "webhook json"
    answers = False

    def frame(self, message: Message) -> bytes:
        """Lengths, head and body."""
        if message.kind in _SKIPPED:
            return b""
        position = message.head["position"] if message.position is not None else ""
        empty = message.kind == "change" and not message.rows and not message.deletes
        lagged = message.kind == "expired" and message.head["reason"] == "lagged"
        head = orjson.dumps([message.kind, position, message.head.get("after", ""), empty, lagged])
        return _LENGTHS.pack(len(head), len(message.body)) + head + message.body

    def heartbeat(self, message: Message) -> bytes:
        """None."""
        return b""


CODEC = HookCodec()


@dataclass(frozen=True, slots=True)
class Record:
    """A message out of the link.

    Attributes:
        kind, body: of the message.
        position, after: tokens; empty: it has none.
        empty: a change without rows.
        lagged: the hub has forgotten what comes next; the table's log has it.
    """

    kind: str
    position: str
    after: str
    empty: bool
    lagged: bool
    body: bytes


class HookLink:
    """The hub's side of a webhook; see :class:`serve.push.link.Link`. It takes in no more before it is empty.

    Args:
        hub: where it fetches.
        principal: whose it is.
    """

    def __init__(self, hub: Hub, principal: Principal) -> None:
        self.principal = principal
        self.subscriber = Subscriber(self, CODEC, "webhook", principal)
        self.closed: RequestError | None = None
        self.some = asyncio.Event()
        self._hub = hub
        self._records: deque[Record] = deque()
        self._empty = asyncio.Event()

    def write(self, data: bytes) -> None:
        """Never of a change: a subscriber with a window fetches."""
        self._take(data)
        self.some.set()

    def _take(self, data: bytes) -> None:
        at = 0
        while at < len(data):
            head, body = _LENGTHS.unpack_from(data, at)
            at += _LENGTHS.size
            kind, position, after, empty, lagged = orjson.loads(data[at : at + head])
            self._records.append(Record(kind, position, after, empty, lagged, data[at + head : at + head + body]))
            at += head + body

    def pump(self) -> None:
        """There is something to fetch."""
        self.some.set()

    def close(self, code: int, reason: str) -> None:
        """Nothing more comes."""
        self.closed = RequestError(code, "closed", reason)
        self.some.set()

    def buffered(self) -> int:
        """What was fetched and is not delivered is no socket's."""
        return 0

    async def drained(self) -> None:
        """Returns when everything fetched has been delivered."""
        while self._records and self.closed is None:
            self._empty.clear()
            await self._empty.wait()

    def next(self) -> Record | None:
        """The next message; None: wait for :attr:`some`."""
        if not self._records and self.closed is None:
            self._take(self._hub.data_to_send(self.subscriber))
        record = self._records.popleft() if self._records else None
        if not self._records:
            self._empty.set()
        return record

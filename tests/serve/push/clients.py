"""A subscriber over each transport, with one face: messages as JSON has them, whatever the wire form.

They check on the way what every transport promises: each change's ``after`` is where the one before it led.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import deque
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlencode

import httpx
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed
from websockets.typing import Subprotocol

PATIENCE_S = 60.0


class Closed(Exception):
    """The server has closed: code and reason."""


class Client:
    """One subscription."""

    def __init__(self, url: str, query: dict[str, str]) -> None:
        self.url = url
        key = query.pop("key", "")
        self.headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.query = query
        self.position: str | None = query.get("from")
        self.complete: str | None = self.position
        self.messages: deque[dict[str, Any]] = deque()
        self._end: Closed | None = None

    async def __aenter__(self) -> Client:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.shut()

    async def open(self) -> None:
        """Connect."""

    async def shut(self) -> None:
        """Disconnect."""

    async def fetch(self) -> None:
        """Wait for something, and put it into :attr:`messages`."""
        raise NotImplementedError

    def stop_reading(self) -> None:
        """Take nothing more off the socket until :meth:`read_on`. Nothing to do where only :meth:`fetch` reads."""

    def read_on(self) -> None:
        """Go on."""

    async def receive(self, kind: str | None = None) -> dict[str, Any]:
        """The next message; of a kind if one is named (heartbeats are passed over in any case)."""
        until = time.monotonic() + PATIENCE_S
        while True:
            while not self.messages:
                if self._end is not None:
                    raise self._end
                async with asyncio.timeout(max(0.01, until - time.monotonic())):
                    try:
                        await self.fetch()
                    except Closed as end:
                        self._end = end
            message = self.messages.popleft()
            self._check(message)
            if message["type"] == kind or (kind is None and message["type"] != "heartbeat"):
                return message
            assert message["type"] == "heartbeat", f"{message} came instead of {kind}"

    async def expiry(self) -> dict[str, Any]:
        """``expired``; where it turns out late, ``resumed`` comes before it."""
        message = await self.receive()
        return await self.receive("expired") if message["type"] == "resumed" else message

    async def closed(self) -> tuple[int, str]:
        """Reads to the end; close code and reason."""
        try:
            while True:
                await self.receive()
        except Closed as end:
            return end.args[0], end.args[1]

    async def changes(self, number: int) -> list[dict[str, Any]]:
        """The next changes, in whole commits."""
        found = []
        while len(found) < number:
            message = await self.receive("change")
            found += [message] if message["last"] else []
        return found

    def _check(self, message: dict[str, Any]) -> None:
        if message["type"] == "change":
            if self.position is not None:
                assert message["after"] == self.position, "a change was lost or came twice"
            self.position = message["position"]
        elif message["type"] in ("snapshot", "resumed"):
            self.position = message["position"]
        elif message["type"] == "expired":
            self.position = None


class WebSocketClient(Client):
    """Over a WebSocket."""

    deflate = False
    subprotocols: tuple[Subprotocol, ...] = ()
    connection: ClientConnection

    async def open(self) -> None:
        self.connection = await connect(
            f"{self.url.replace('http', 'ws')}/v1/subscribe?{urlencode(self.query)}",
            additional_headers=self.headers,
            compression="deflate" if self.deflate else None,
            subprotocols=self.subprotocols or None,
            max_size=None,
            max_queue=2,
            open_timeout=PATIENCE_S,
        )

    async def shut(self) -> None:
        closing = asyncio.ensure_future(self.connection.close())
        with contextlib.suppress(ConnectionClosed):
            while True:  # two unread messages stop the reading, and with it the answer to the close: 20 s of waiting
                await self.connection.recv()
        await closing

    async def fetch(self) -> None:
        try:
            self.messages.append(json.loads(await self.connection.recv()))
        except ConnectionClosed as closed:
            raise ended(closed) from None

    def stop_reading(self) -> None:
        self.connection.transport.pause_reading()

    def read_on(self) -> None:
        self.connection.transport.resume_reading()

    async def send(self, **content: Any) -> None:
        """Say something."""
        await self.connection.send(json.dumps(content))


class DeflateClient(WebSocketClient):
    """… with permessage-deflate."""

    deflate = True


class RpcClient(WebSocketClient):
    """Called back: JSON-RPC over a WebSocket."""

    subprotocols = (Subprotocol("millrace.rpc"),)
    reply = False

    async def open(self) -> None:
        query, self.query = self.query, {}
        await super().open()
        assert self.connection.subprotocol == "millrace.rpc"
        extra = {"reply": True} if self.reply else {}
        await self.send(jsonrpc="2.0", id="s", method="subscribe", params=query | extra)

    async def fetch(self) -> None:
        try:
            call = json.loads(await self.connection.recv())
        except ConnectionClosed as closed:
            raise ended(closed) from None
        assert call["jsonrpc"] == "2.0"
        if "error" in call:
            self.messages.append({"type": "error", "code": call["error"]["data"]["code"]})
            raise Closed(0, call["error"]["message"])
        if "method" in call:
            assert call["method"] == call["params"]["type"]
            assert ("id" in call) == (self.reply and call["method"] == "change")
            if "id" in call:
                await self.send(jsonrpc="2.0", id=call["id"], result=None)
            self.messages.append(call["params"])


class RpcReplyClient(RpcClient):
    """… with a reply to each change."""

    reply = True


class SseClient(Client):
    """Server-sent events."""

    def __init__(self, url: str, query: dict[str, str]) -> None:
        super().__init__(url, query)
        self._http = httpx.AsyncClient(timeout=PATIENCE_S)
        self._stack = contextlib.AsyncExitStack()
        self._lines: AsyncIterator[str] | None = None
        self.last_event_id = ""

    async def open(self) -> None:
        headers = {"Accept": "text/event-stream"} | self.headers
        query = dict(self.query)
        if "from" in query:  # as a browser does that lost its connection
            headers["Last-Event-ID"] = query.pop("from")
        response = await self._stack.enter_async_context(
            self._http.stream("GET", f"{self.url}/v1/subscribe", params=query, headers=headers)
        )
        if response.status_code != 200:
            problem = json.loads(await response.aread())
            self.messages.append({"type": "error", "code": problem["code"]})
            self._status = response.status_code
            return
        assert response.headers["content-type"] == "text/event-stream"
        self._lines = response.aiter_lines()
        assert (await anext(self._lines)).startswith("retry: ")

    async def shut(self) -> None:
        await self._stack.aclose()
        await self._http.aclose()

    async def fetch(self) -> None:
        if self._lines is None:
            raise Closed(self._status, "")
        try:
            async for line in self._lines:
                if line.startswith("id: "):
                    self.last_event_id = line[4:]
                elif line.startswith("data: "):
                    message = json.loads(line[6:])
                    if message["type"] == "close":
                        raise Closed(message["code"], message["detail"])
                    if message["type"] == "change":
                        assert self.last_event_id == message["position"]
                    self.messages.append(message)
                    return
        except (httpx.HTTPError, httpx.StreamError) as error:
            raise Closed(0, repr(error)) from None
        raise Closed(0, "")


class PollClient(Client):
    """Long polling."""

    _answered = False

    def __init__(self, url: str, query: dict[str, str]) -> None:
        super().__init__(url, query)
        self._http = httpx.AsyncClient(timeout=PATIENCE_S, headers=self.headers)

    async def shut(self) -> None:
        await self._http.aclose()

    async def fetch(self) -> None:
        query = {"wait": "1"} | self.query
        try:
            response = await self._http.get(f"{self.url}/v1/poll", params=query)
        except httpx.HTTPError as error:
            raise Closed(0, repr(error)) from None
        if response.status_code != 200:
            code = response.json().get("code", "")
            self.messages.append({"type": "error", "code": code})
            raise Closed(response.status_code, response.json()["detail"])
        if "from" in self.query and not self._answered:  # what streams say with ``resumed`` is that it answers
            self.messages.append({"type": "resumed", "position": self.query["from"]})
        self._answered = True
        answer = response.json()
        self.query["from"] = answer["position"]
        self.messages.extend(answer["messages"])


def ended(closed: ConnectionClosed) -> Closed:
    """What the close frame says; (0, "") where there was none."""
    return Closed(closed.rcvd.code, closed.rcvd.reason) if closed.rcvd is not None else Closed(0, "")


STREAMS: dict[str, type[Client]] = {
    "websocket": WebSocketClient,
    "deflate": DeflateClient,
    "rpc": RpcClient,
    "rpc-reply": RpcReplyClient,
    "sse": SseClient,
}
POLLS: dict[str, type[Client]] = {"poll": PollClient}
TRANSPORTS = STREAMS | POLLS

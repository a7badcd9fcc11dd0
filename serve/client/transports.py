"""Three ways to the server's messages: WebSocket, server-sent events (SSE) and long polling.

:func:`receive` yields the messages of docs/reference/protocol.md, whatever the wire form, and translates errors:
:class:`Refused` and :class:`BadMessage` are final, :class:`ConnectionLost` asks for another attempt, and
:class:`TransportBlocked` asks for another transport.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeAlias
from urllib.parse import quote, urlencode, urlsplit, urlunsplit

import httpx
import orjson
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus

from lakehouse.contract.errors import MillraceError

_MAX_MESSAGE_BYTES = 64 * 1024 * 1024
_SILENCE_S = 75.0  # without a message for this long, a connection is dead; a poll may take 60 s
_ACK_S = 2.0  # between acknowledgements; the server is patient for longer (`serve.slow_after_ms`)
_EVENTS = "text/event-stream"
_WAIT_S = "10"  # of a poll: its heartbeat tells the lag
_UNAVAILABLE = frozenset({429, 502, 503, 504})  # a proxy's answers while there is no server behind it


class ClientError(MillraceError):
    """Base of the client library's errors."""


class Refused(ClientError):
    """The server refuses this request; asking again does not help. ``code`` is machine-readable."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(code, detail)
        self.code = code
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.code}: {self.detail}"


class NoSuchTable(Refused):
    """There is no such table, or the key may not read it."""


class Unauthorized(Refused):
    """The server wants a key, or does not know this one."""


class Forbidden(Refused):
    """This may not be asked from here, or not with this key."""


class BadFilter(Refused):
    """The condition, the columns or the aggregate are refused."""


class BadMessage(ClientError):
    """A message that is not of the protocol."""


class ConnectionLost(ClientError):
    """A connection failed or ended; another attempt may succeed."""


class TransportBlocked(ClientError):
    """What answers does not speak this transport. ``status`` is that of the HTTP answer; 0: none."""

    def __init__(self, problem: str, status: int = 0) -> None:
        super().__init__(problem)
        self.status = status


def http_base(url: str) -> str:
    """The server's address with the scheme of HTTP. Raises ClientError."""
    parts = urlsplit(url)
    scheme = {"ws": "http", "wss": "https"}.get(parts.scheme, parts.scheme)
    if scheme not in ("http", "https") or not parts.netloc:
        raise ClientError(f"{url!r} is no address of a server, such as http://127.0.0.1:8400")
    return urlunsplit((scheme, parts.netloc, parts.path.rstrip("/"), "", ""))


def pause_s(attempt: int, longest_s: float) -> float:
    """Seconds to wait before another attempt; they double with each, up to ``longest_s``, and vary by chance."""
    return min(longest_s, 0.05 * 2.0 ** min(attempt, 12)) * random.uniform(0.5, 1.0)


Messages: TypeAlias = AsyncGenerator[Mapping[str, Any], None]
_FINAL: Mapping[str, type[Refused]] = {
    "no_such_table": NoSuchTable,
    "unauthorized": Unauthorized,
    "forbidden": Forbidden,
    "bad_filter": BadFilter,
    **dict.fromkeys(("bad_request", "bad_position", "bad_message", "not_served"), Refused),
}


def raise_refusal(code: str, detail: str) -> NoReturn:
    """Raise what a code of the protocol means: a Refused, or ConnectionLost if asking again may help."""
    kind = _FINAL.get(code)
    raise ConnectionLost(f"{code}: {detail}") if kind is None else kind(code, detail)


@dataclass(frozen=True, slots=True)
class StreamRequest:
    """A request for a table's messages.

    Attributes:
        url: the server, with the scheme ``http`` or ``https``.
        query: ``table``, ``from``, ``where`` and so on.
        key: the API key; empty: none.
        ticket: fetches a ticket, to be shown instead of a key; None: there are no tickets.
        processed: the position up to which messages are processed, for transports that acknowledge.
    """

    url: str
    query: Mapping[str, str]
    key: str = field(repr=False)
    ticket: Callable[[], Awaitable[str]] | None
    processed: Callable[[], str | None]

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}

    async def shown(self, query: Mapping[str, str]) -> dict[str, str]:
        """The query of one request, with a ticket of its own."""
        return {**query} if self.ticket is None else {**query, "ticket": await self.ticket()}

    def http(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.url, headers=self.headers, timeout=httpx.Timeout(_SILENCE_S, connect=10))


async def receive(transport: str, request: StreamRequest) -> Messages:
    """Messages over a transport, a key of :data:`TRANSPORTS`.

    Raises:
        Refused: the server says no.
        BadMessage: it says something else.
        ConnectionLost: it is not reached, has no place, or the connection ended.
        TransportBlocked: it is reached, and no message comes.
    """
    came = False
    try:
        async with aclosing(_GENERATORS[transport](request)) as messages:
            async for content in messages:
                came = True
                yield content
    except InvalidStatus as error:
        found = error.response
        _raise_answer(found.status_code, found.headers.get("content-type", ""), bytes(found.body or b""))
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        raise ConnectionLost(repr(error)) from None
    except (httpx.HTTPError, ConnectionClosed, InvalidHandshake, TimeoutError) as error:
        raise (ConnectionLost if came else TransportBlocked)(repr(error)) from None
    except OSError as error:
        raise ConnectionLost(repr(error)) from None
    except (KeyError, TypeError) as error:
        raise BadMessage(f"{error!r} in an answer") from None


async def _websocket(request: StreamRequest) -> Messages:
    async with connect(
        f"ws{request.url.removeprefix('http')}/v1/subscribe?{urlencode(await request.shown(request.query))}",
        additional_headers=request.headers,
        max_size=_MAX_MESSAGE_BYTES,
        max_queue=16,
        compression=None,
        ping_interval=None,
        close_timeout=1,
    ) as connection:
        clock = asyncio.get_running_loop().time
        heard = acked_at = clock()
        acked = request.processed()
        while True:
            try:
                async with asyncio.timeout(_ACK_S):
                    text = await connection.recv()
            except TimeoutError:
                if clock() - heard > _SILENCE_S:
                    raise
            else:
                yield _parsed(text)
                heard = clock()
            position = request.processed()
            if position is not None and position != acked and clock() - acked_at >= _ACK_S:
                await connection.send(orjson.dumps({"type": "ack", "position": position}).decode())
                acked, acked_at = position, clock()


async def _sse(request: StreamRequest) -> Messages:
    parts: list[bytes] = []  # of a line
    accept, query = {"Accept": _EVENTS}, await request.shown(request.query)
    async with request.http() as http, http.stream("GET", "/v1/subscribe", params=query, headers=accept) as response:
        kind = response.headers.get("content-type", "")
        if response.status_code != 200 or not kind.startswith(_EVENTS):
            _raise_answer(response.status_code, kind, await response.aread())
        async for chunk in response.aiter_bytes():
            *lines, rest = chunk.split(b"\n")  # httpx would also cut at what a text in a row may hold, such as U+2028
            for line in lines:
                whole, parts = b"".join([*parts, line]), []
                if whole.startswith(b"data:"):
                    yield _parsed(whole[5:])
            parts.append(rest)
    raise httpx.ReadError("the stream ended")


async def _poll(request: StreamRequest) -> Messages:
    query = {**request.query, "wait": _WAIT_S}
    keyed = "from" not in query  # else no message says which columns are the key: the table's address does
    async with request.http() as http:
        while True:
            answer = await _get(http, "/v1/poll", await request.shown(query))
            for content in answer["messages"]:
                if content["type"] == "change" and not keyed:
                    asked = {name: text for name, text in query.items() if name in ("where", "columns", "select")}
                    asked["limit"] = "1"
                    address = f"/v1/tables/{quote(query['table'], safe='')}"
                    shape = await _get(http, address, await request.shown(asked))
                    yield {"type": "resumed", "key": shape["key"], "position": query["from"]}
                keyed = keyed or content["type"] in ("change", "snapshot")
                yield content
            if answer["messages"][-1]["type"] != "heartbeat":
                yield {"type": "heartbeat", "behind": answer["behind"]}
            query["from"] = answer["position"]


_GENERATORS: Mapping[str, Callable[[StreamRequest], Messages]] = {"websocket": _websocket, "sse": _sse, "poll": _poll}
TRANSPORTS = tuple(_GENERATORS)
"""In the order in which they are tried."""


async def _get(http: httpx.AsyncClient, path: str, query: Mapping[str, str]) -> Mapping[str, Any]:
    response = await http.get(path, params=query)
    kind = response.headers.get("content-type", "")
    if response.status_code != 200 or not kind.startswith("application/json"):
        _raise_answer(response.status_code, kind, response.content)
    return _parsed(response.content)


def _parsed(text: str | bytes) -> Mapping[str, Any]:
    """A JSON object."""
    try:
        content = orjson.loads(text)
    except orjson.JSONDecodeError:
        content = None
    if not isinstance(content, dict):
        raise BadMessage(f"{text[:80]!r} is no JSON object")
    return content


def _raise_answer(status: int, kind: str, body: bytes) -> NoReturn:
    """Raise what an HTTP answer means that is not the one asked for: the server's own, or a proxy's."""
    said = f"HTTP {status} {body[:200].decode(errors='replace').strip()}"
    if kind.startswith("application/problem+json"):
        problem = _parsed(body)
        raise_refusal(str(problem.get("code", f"http_{status}")), str(problem.get("detail", "")))
    if status in _UNAVAILABLE:
        raise ConnectionLost(said)
    raise TransportBlocked(said, status)

"""Callbacks: JSON-RPC 2.0 over a WebSocket with the subprotocol ``millrace.rpc``. The server calls the client.

The client calls ``subscribe``, ``unsubscribe``, ``filter`` and ``ack``. Each subscribed table calls the client's method
``change``, ``snapshot``, ``resumed``, ``expired``, ``slow`` or ``heartbeat``, with the message as parameters; with
``alert`` instead of ``change`` there is no snapshot, and only changes with matching rows.

With ``"reply": true`` changes are requests whose id is the position: the reply acknowledges it, and at most ``window``
are unanswered. The id is not a counter, so a call's bytes are the same for every subscriber.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import orjson

from serve.core.codec import WebSocketCodec, header
from serve.core.messages import Message
from serve.core.model import SubscribeRequest
from serve.core.subscriber import Subscriber
from serve.errors import RequestError
from serve.push.base import SubscriberConnection
from serve.push.request import invalid, position_of, subscription_of, texts_of, truth_of
from serve.tables.tables import clock_ms

MAX_SUBSCRIPTIONS = 16
_DEFAULT_WINDOW = 16
_PARSE_ERROR, _INVALID_REQUEST, _NO_METHOD, _REFUSED = -32700, -32600, -32601, -32000
_CODECS: dict[tuple[str, bool, int], WebSocketCodec] = {}


def rpc_codec(method: str, reply: bool, bits: int) -> WebSocketCodec:
    """Messages as calls; the same object each time.

    Args:
        method: called by changes, ``change`` or ``alert``.
        reply: whether calls expect an answer.
        bits: see :class:`~serve.core.codec.WebSocketCodec`.
    """
    key = (method, reply, bits)
    if key not in _CODECS:
        made = WebSocketCodec(f"rpc {method}{' reply' if reply else ''}", _encoder(method, reply), bits)
        _CODECS[key] = _SkippingCodec(made) if method == "alert" else made
    return _CODECS[key]


class _SkippingCodec(WebSocketCodec):
    """For alerts: messages without a row that fulfils the condition make no call."""

    def __init__(self, inner: WebSocketCodec) -> None:
        self.name = inner.name
        self._inner = inner

    def frame(self, message: Message) -> bytes:
        if message.kind == "snapshot" or (message.kind == "change" and not message.rows):
            return b""
        return self._inner.frame(message)


def _encoder(method: str, reply: bool) -> Any:
    def encode(message: Message) -> tuple[bytes, bool]:
        call: dict[str, Any] = {"jsonrpc": "2.0"}
        if message.kind == "change":
            call["method"] = method
            if reply:
                call["id"] = message.head["position"]
        else:
            call["method"] = message.kind
        return orjson.dumps(call | {"params": orjson.Fragment(message.body)}), True

    return encode


@dataclass(slots=True)
class _Subscription:
    """One table of a connection.

    Attributes:
        subscriber: of the hub.
        ident: id of the call to be answered; None: answered, or no answer wanted.
        joining: the task that joins the table; None before it starts.
    """

    subscriber: Subscriber
    ident: Any
    joining: asyncio.Task[None] | None = None


class RpcSession:
    """The subscriptions of one connection.

    Args:
        connection: it is written to, and owns the subscribers.
        bits: window of compression; 0: none.
    """

    def __init__(self, connection: SubscriberConnection, bits: int) -> None:
        self._connection = connection
        self._bits = bits
        self._by_table: dict[str, _Subscription] = {}
        self._methods = {
            "subscribe": self._subscribe,
            "unsubscribe": self._unsubscribe,
            "filter": self._filter,
            "ack": self._ack,
        }

    def received(self, text: bytes) -> None:
        """Handle a call by the client, or its answer to one of ours."""
        try:
            content = orjson.loads(text)
        except orjson.JSONDecodeError:
            self._failed(None, _PARSE_ERROR, "not JSON")
            return
        if not isinstance(content, dict) or content.get("jsonrpc") != "2.0":
            self._failed(None, _INVALID_REQUEST, "a JSON-RPC 2.0 object is wanted; batches are not taken")
        elif "method" not in content:
            self._answered(content)
        else:
            self._called(content)

    def _called(self, content: dict[str, Any]) -> None:
        ident = content.get("id")
        method = self._methods.get(content["method"]) if isinstance(content["method"], str) else None
        if method is None:
            self._failed(ident, _NO_METHOD, f"methods: {', '.join(self._methods)}")
            return
        try:
            params = content.get("params") or {}
            result = method(texts_of(params), ident)
        except RequestError as error:
            self._refused(ident, error)
            return
        if result is not None and ident is not None:
            self._say({"id": ident, "result": result})

    def _answered(self, content: dict[str, Any]) -> None:
        """The reply to a change. After an error nothing more is sent; the client resumes from where it was."""
        ident = content.get("id")
        if "error" in content:
            self._connection.close(RequestError.BAD_REQUEST, "the call of a change failed; resume from before it")
        elif isinstance(ident, str):
            try:
                self._acknowledged(ident)
            except RequestError as error:
                self._refused(None, error)

    # Methods

    def _subscribe(self, params: dict[str, str], ident: Any) -> dict[str, Any] | None:
        method = params.pop("method", "change")
        reply = truth_of(params.pop("reply", ""), "reply")
        if method not in ("change", "alert"):
            raise invalid("bad_request", "method is change or alert")
        if reply:
            params.setdefault("window", str(_DEFAULT_WINDOW))
        request = subscription_of(params, self._connection.hub.seal)
        if request.table in self._by_table:
            raise invalid("bad_request", f"{request.table} is subscribed to already")
        if len(self._by_table) >= MAX_SUBSCRIPTIONS:
            raise invalid("bad_request", f"{MAX_SUBSCRIPTIONS} subscriptions a connection are taken")
        subscriber = Subscriber(
            self._connection, rpc_codec(method, reply, self._bits), self._connection.peer, self._connection.principal
        )
        subscriber.paused = any(other.paused for other in self._connection.subscribers)
        self._connection.subscribers.append(subscriber)
        wanted = self._by_table[request.table] = _Subscription(subscriber, ident)
        wanted.joining = self._connection.run(self._join(wanted, request))
        return None

    async def _join(self, wanted: _Subscription, request: SubscribeRequest) -> None:
        def accepted() -> None:
            ident, wanted.ident = wanted.ident, None
            if ident is not None:
                self._say({"id": ident, "result": {"table": request.table}})

        try:
            await self._connection.tables.join(wanted.subscriber, request, accepted)
        except RequestError as error:
            self._forget(request.table)
            self._refused(wanted.ident, error)

    def _unsubscribe(self, params: dict[str, str], _: Any) -> dict[str, Any]:
        """End a subscription. One still being made has its call refused."""
        wanted = self._forget(params.get("table", ""))
        if wanted is None:
            raise invalid("bad_request", "that table is not subscribed to")
        assert wanted.joining is not None
        wanted.joining.cancel()
        if wanted.ident is not None:
            self._refused(wanted.ident, invalid("bad_request", "it was unsubscribed before it was there"))
        return {"table": params["table"]}

    def _filter(self, params: dict[str, str], _: Any) -> dict[str, Any]:
        wanted = self._by_table.get(params.get("table", ""))
        if wanted is None:
            raise invalid("bad_request", "that table is not subscribed to")
        if params.keys() & {"from", "conflate", "window"}:
            raise invalid("bad_request", "a filter has where, columns and select")
        hub = self._connection.hub
        hub.refiltered(wanted.subscriber, subscription_of(params, hub.seal), clock_ms())
        self._connection.loop.call_soon(self._connection.pump)  # after the answer
        return {"table": params["table"]}

    def _ack(self, params: dict[str, str], _: Any) -> dict[str, Any]:
        self._acknowledged(params.get("position", ""))
        return {}

    def _acknowledged(self, token: str) -> None:
        hub = self._connection.hub
        position = position_of(token, hub.seal)
        for subscriber in self._connection.subscribers:
            stream = subscriber.stream
            if (
                stream is not None
                and stream.head.table_id == position.table_id
                and hub.acknowledged(subscriber, position)
            ):
                self._connection.pump()

    def _forget(self, table: str) -> _Subscription | None:
        wanted = self._by_table.pop(table, None)
        if wanted is not None:
            self._connection.subscribers.remove(wanted.subscriber)
            self._connection.hub.unsubscribed(wanted.subscriber)
        return wanted

    def _refused(self, ident: Any, error: RequestError) -> None:
        self._failed(ident, _REFUSED, error.detail, {"code": error.code})

    def _failed(self, ident: Any, code: int, detail: str, data: Any = None) -> None:
        self._say({"id": ident, "error": {"code": code, "message": detail} | ({"data": data} if data else {})})

    def _say(self, content: dict[str, Any]) -> None:
        text = orjson.dumps({"jsonrpc": "2.0", **content})
        self._connection.write(header(0x81, len(text)) + text)

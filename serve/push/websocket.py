"""WebSocket subscribers: an asyncio protocol that uvicorn installs after the upgrade request.

The sans-I/O protocol of websockets does the handshake and control frames. Data frames are made once for each view and
go straight to the transport. Most subscribers only answer pings, and a pong is known by its shape. A parser is made
when anything else comes: it takes most of a subscriber's memory.

With the subprotocol ``millrace.rpc`` the messages are JSON-RPC 2.0, and the server calls the client. The client calls
``subscribe`` and ``unsubscribe``. Each subscribed table calls the client's method ``change``, ``snapshot``,
``resumed``, ``expired``, ``slow`` or ``heartbeat``, with the message as parameters; with ``alert`` instead of
``change`` there is no snapshot, and only changes with matching rows.

With ``"reply": true`` changes are requests whose id is the position: the reply acknowledges it, and at most ``window``
are unanswered. The id is not a counter, so a call's bytes are the same for every subscriber.
"""

from __future__ import annotations

import asyncio
import http
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import orjson
from websockets.exceptions import InvalidState
from websockets.extensions import Extension
from websockets.extensions.permessage_deflate import PerMessageDeflate, ServerPerMessageDeflateFactory
from websockets.frames import CloseCode, Frame, Opcode
from websockets.http11 import Request
from websockets.protocol import Protocol, Side, State
from websockets.server import ServerProtocol
from websockets.typing import Subprotocol

from lakehouse.contract.listen import is_utf8
from serve.core import messages
from serve.core.messages import PING, Message, WebSocketCodec, header
from serve.core.model import SubscribeRequest
from serve.core.ring import Subscriber
from serve.errors import RequestError
from serve.push.base import SubscriberConnection
from serve.push.request import invalid, query_of, subscription_of, texts_of, truth_of
from serve.tables.tables import clock_ms

if TYPE_CHECKING:
    from uvicorn import Config
    from uvicorn.server import ServerState

log = logging.getLogger(__name__)

PATH = "/v1/subscribe"
RPC = Subprotocol("millrace.rpc")
MAX_INCOMING_BYTES = 16_384
MAX_SUBSCRIPTIONS = 16
_DEFAULT_WINDOW = 16
_PARSE_ERROR, _INVALID_REQUEST, _NO_METHOD, _REFUSED = -32700, -32600, -32601, -32000
_MAX_UNREAD_BYTES = 4_194_304
_MAX_REASON = 120  # bytes; a control frame holds 125
_CLOSE_S = 2.0  # how long the other side has to answer a close
_HEAD_END = b"\r\n\r\n"
_PONG_BYTES = len(PING) + 4  # masked
_PONG_START = b"\x8a" + bytes((0x80 | PING[1],))
# Each message is compressed by itself (RFC 7692, section 7.1.1), so that all who negotiated it get the same bytes. The
# client does so too, or its window would cost 32 KiB a connection.
_DEFLATE = ServerPerMessageDeflateFactory(server_no_context_takeover=True, client_no_context_takeover=True)


class _ClosedAmid(Protocol):
    """Accepts a close between the frames of a message, as any control frame (RFC 6455, 5.4); that message is lost."""

    def recv_frame(self, frame: Frame) -> None:
        if frame.opcode is Opcode.CLOSE:
            self.current_size = None
        super().recv_frame(frame)


class _Handshake(_ClosedAmid, ServerProtocol):
    """Starts with the upgrade request."""


def _subprotocol(_: ServerProtocol, offered: Any) -> Subprotocol | None:
    return RPC if RPC in offered else None


class RpcCodec(WebSocketCodec):
    """Messages as calls.

    Args:
        method: called by changes: ``change``, or ``alert``, which omits messages without a matching row.
        reply: whether calls of changes expect an answer.
        bits: see :class:`~serve.core.messages.WebSocketCodec`.
    """

    def __init__(self, method: str, reply: bool, bits: int) -> None:
        super().__init__(f"rpc {method}{' reply' if reply else ''}", bits)
        self._method = method
        self._reply = reply

    def text(self, message: Message) -> bytes:
        change = message.kind == "change"
        if self._method == "alert" and (message.kind == "snapshot" or (change and not message.rows)):
            return b""
        call: dict[str, Any] = {"jsonrpc": "2.0", "method": self._method if change else message.kind}
        if change and self._reply:
            call["id"] = message.head["position"]
        return orjson.dumps(call | {"params": orjson.Fragment(message.body)})


# The same object each time: a wire form is shared by all who want it.
rpc_codec = lru_cache(None)(RpcCodec)
websocket_codec = lru_cache(None)(WebSocketCodec)
WEBSOCKET = websocket_codec()


class SubscriberWebSocket(SubscriberConnection):
    """One WebSocket connection, constructed by uvicorn; see :class:`~serve.push.base.SubscriberConnection`."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(server_state, app_state, WEBSOCKET)
        self._parser: Protocol | None = _Handshake(
            max_size=MAX_INCOMING_BYTES, logger=log, extensions=[_DEFLATE], select_subprotocol=_subprotocol
        )
        self._extensions: Sequence[Extension] = ()  # agreed on
        self._closing: asyncio.TimerHandle | None = None
        self._rpc: RpcSession | None = None
        self._parts: list[bytes] | None = None  # of a message in several frames; together at most MAX_INCOMING_BYTES
        self._opcode = Opcode.TEXT  # of that message

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._closing is not None:
            self._closing.cancel()

    def data_received(self, data: bytes) -> None:
        if self._parser is None and len(data) == _PONG_BYTES and data.startswith(_PONG_START):
            self._answered()
            return
        if self.buffered() > _MAX_UNREAD_BYTES:
            self.transport.abort()  # it sends requests and does not read the answers
            return
        self._wire.receive_data(data)
        self._react()
        if self.open and isinstance(self._parser, ServerProtocol) and data.find(_HEAD_END) == len(data) - 4:
            self._parser = None  # it was the request and nothing else

    def eof_received(self) -> None:
        self._wire.receive_eof()
        self._react()

    # Link

    def close(self, code: int, reason: str) -> None:
        """Start the close handshake; abort if it is not answered."""
        self.unsubscribe()
        self.shut()
        if self.lost or self._closing is not None:
            return
        try:
            self._wire.send_close(code, reason.encode()[:_MAX_REASON].decode(errors="ignore"))
        except InvalidState:
            self.transport.close()
        self._flush()
        self._closing = self.loop.call_later(_CLOSE_S, self.transport.abort)

    # Protocol of the wire

    @property
    def _wire(self) -> Protocol:
        """The parser; dropped between frames, when it has no other state, and made again when needed."""
        if self._parser is None:
            self._parser = _ClosedAmid(Side.SERVER, state=State.OPEN, max_size=MAX_INCOMING_BYTES, logger=log)
            self._parser.extensions = list(self._extensions)
        return self._parser

    def _react(self) -> None:
        for event in self._wire.events_received():
            if isinstance(event, Request):
                self._accept(event)
            elif isinstance(event, Frame):
                self._frame_received(event)
        self._flush()
        if self.open and self._wire.state is not State.OPEN:
            self.shut()
        if self._wire.close_expected() and self._closing is None:
            self.unsubscribe()
            self._closing = self.loop.call_later(_CLOSE_S, self.transport.abort)

    def _flush(self) -> None:
        """Write what the sans-I/O protocol wants sent; an empty part means the end."""
        for data in self._wire.data_to_send():
            if data:
                self.transport.write(data)
            else:
                self.transport.close()

    def _accept(self, request: Request) -> None:
        headers = {name.lower(): value for name, value in request.headers.raw_items()}
        address = urlsplit(request.path)
        refusal: RequestError | None = None
        server = self._wire
        assert isinstance(server, ServerProtocol)
        response = server.accept(request)
        if response.status_code == http.HTTPStatus.SWITCHING_PROTOCOLS:
            if address.path != PATH:
                response = server.reject(http.HTTPStatus.NOT_FOUND, f"WebSockets are served at {PATH}\n")
            else:
                try:
                    self.admit(headers, address.query)
                except RequestError as error:
                    refusal = error
                    if error.close == RequestError.FORBIDDEN:
                        response = server.reject(http.HTTPStatus.FORBIDDEN, f"{error}\n")
        server.send_response(response)
        self._flush()
        if server.state is not State.OPEN:
            return
        self.opened()
        self._extensions = server.extensions
        if refusal is not None:
            self.refuse(refusal)
            return
        agreed = [each for each in self._extensions if isinstance(each, PerMessageDeflate)]
        bits = agreed[0].local_max_window_bits if agreed else 0
        if server.subprotocol == RPC:
            self.subscribers = []
            self._rpc = RpcSession(self, bits)
        else:
            self._begin(address.query, bits)

    def _begin(self, query: str, bits: int) -> None:
        [subscriber] = self.subscribers
        subscriber.principal = self.principal
        if bits:
            subscriber.codec = websocket_codec(bits=bits)
        try:
            self.subscribe(subscription_of(query_of(query), self.hub.seal))
        except RequestError as error:
            self.refuse(error)

    def _frame_received(self, frame: Frame) -> None:
        if frame.opcode is Opcode.PONG:
            self._answered()
        elif frame.opcode in (Opcode.TEXT, Opcode.BINARY, Opcode.CONT):
            self._parts = self._parts or []
            self._parts.append(bytes(frame.data))
            if frame.opcode is not Opcode.CONT:
                self._opcode = frame.opcode
            if frame.fin:
                message, self._parts = b"".join(self._parts), None
                if self._opcode is Opcode.TEXT and not is_utf8(message):
                    self._wire.fail(CloseCode.INVALID_DATA, "text that is not UTF-8")
                elif self._wire.state is State.OPEN:  # whatever follows a close is ignored
                    self._flush()  # pongs for earlier pings
                    self._message(message)

    def _answered(self) -> None:
        """A pong: the other side has read as far as our ping."""
        now = clock_ms()
        were_silent = [self.hub.heard_from(subscriber, now) for subscriber in self.subscribers]
        if any(were_silent):
            self.pump()

    def _message(self, message: bytes) -> None:
        if self._rpc is not None:
            self._rpc.received(message)
        else:
            self._heed(message)

    def _heed(self, text: bytes) -> None:
        """Handle an acknowledgement or a new filter."""
        [subscriber] = self.subscribers
        try:
            try:
                content = orjson.loads(text)
                kind = content["type"]
            except (orjson.JSONDecodeError, KeyError, TypeError):
                raise invalid("bad_message", "a message is an object with a type") from None
            if kind == "ack" and isinstance(content.get("position"), str):
                if self.hub.acknowledged(subscriber, self.hub.seal.parse(content["position"])):
                    self.pump()
            elif kind == "filter":
                self._refilter(texts_of(content))
            else:
                raise invalid("bad_message", "a client sends acks of positions, and filters")
        except RequestError as error:
            self.refuse(error)

    def _refilter(self, wanted: dict[str, str]) -> None:
        [subscriber] = self.subscribers
        if subscriber.stream is None:
            raise invalid("bad_message", "a filter is changed after the first message has come")
        del wanted["type"]
        wanted["table"] = subscriber.stream.channel.name
        if "from" in wanted or "conflate" in wanted or "window" in wanted:
            raise invalid("bad_message", "a filter has where, columns and select")
        try:
            self.hub.refiltered(subscriber, subscription_of(wanted, self.hub.seal), clock_ms())
        except RequestError as error:
            if error.code not in ("bad_filter", "full"):
                raise
            self.write(subscriber.codec.frame(messages.error(error.code, error.detail)))  # the old one stays
            return
        self.pump()

    def refuse(self, error: RequestError) -> None:
        codec = self.subscribers[0].codec if self.subscribers else WEBSOCKET
        self.write(codec.frame(messages.error(error.code, error.detail)))
        self.close(error.close, error.detail)


@dataclass(slots=True)
class _Subscription:
    """One table of a connection."""

    subscriber: Subscriber  # of the hub
    ident: Any  # id of the call to be answered; None: answered, or no answer wanted
    joining: asyncio.Task[None] | None = None  # the task that joins the table; None before it starts


class RpcSession:
    """The subscriptions of one connection, which owns the subscribers."""

    def __init__(self, connection: SubscriberConnection, bits: int) -> None:
        self._connection = connection
        self._bits = bits  # of the compression's window; 0: none
        self._by_table: dict[str, _Subscription] = {}
        self._methods = {"subscribe": self._subscribe, "unsubscribe": self._unsubscribe}

    def received(self, text: bytes) -> None:
        """Handle a call by the client, or its answer to one of ours."""
        try:
            content = orjson.loads(text)
        except orjson.JSONDecodeError:
            self._failed(None, _PARSE_ERROR, "not JSON")
            return
        if not isinstance(content, dict) or content.get("jsonrpc") != "2.0":
            self._failed(None, _INVALID_REQUEST, "send a JSON-RPC 2.0 object; batches are not taken")
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
        if request.window and not reply:
            raise invalid("bad_request", "window takes reply, which acknowledges")
        if request.table in self._by_table:
            raise invalid("bad_request", f"{request.table} is subscribed to already")
        if len(self._by_table) >= MAX_SUBSCRIPTIONS:
            raise invalid("bad_request", f"a connection has at most {MAX_SUBSCRIPTIONS} subscriptions")
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

    def _acknowledged(self, token: str) -> None:
        hub = self._connection.hub
        position = hub.seal.parse(token)
        for subscriber in self._connection.subscribers:
            same = subscriber.stream is not None and subscriber.stream.head.table_id == position.table_id
            if same and hub.acknowledged(subscriber, position):
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

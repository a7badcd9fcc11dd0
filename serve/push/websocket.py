"""WebSocket subscribers: an asyncio protocol that uvicorn installs after the upgrade request.

The sans-I/O protocol of websockets does the handshake and control frames. Data frames are made once for each view and
go straight to the transport. Most subscribers only answer pings, and a pong is known by its shape. A parser is made
when
anything else comes: it takes most of a subscriber's memory. With the subprotocol ``millrace.rpc`` the connection is
handed to :mod:`serve.push.rpc`.
"""

from __future__ import annotations

import asyncio
import http
import logging
from collections.abc import Sequence
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

from lakehouse.contract.text import is_utf8
from serve.core import messages
from serve.core.codec import CODECS, PING, WEBSOCKET, websocket_codec
from serve.core.model import SubscribeRequest
from serve.errors import RequestError
from serve.push.base import SubscriberConnection
from serve.push.request import credentials, invalid, position_of, query_of, subscription_of, texts_of
from serve.push.rpc import RpcSession
from serve.tables.tables import clock_ms

if TYPE_CHECKING:
    from uvicorn import Config
    from uvicorn.server import ServerState

log = logging.getLogger(__name__)

PATHS = ("/v1/subscribe", "/v1/rpc")
RPC = Subprotocol("millrace.rpc")
MAX_INCOMING_BYTES = 16_384
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


class WebSocketConnection(SubscriberConnection):
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
        refusal: RequestError | None = None
        server = self._wire
        assert isinstance(server, ServerProtocol)
        response = server.accept(request)
        if response.status_code == http.HTTPStatus.SWITCHING_PROTOCOLS:
            if urlsplit(request.path).path not in PATHS:
                response = server.reject(http.HTTPStatus.NOT_FOUND, f"WebSockets are served at {PATHS[0]}\n")
            else:
                try:
                    self.admit(credentials(headers, request.path, self.peer))
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
            self._refuse(refusal)
        elif server.subprotocol == RPC:
            self.subscribers = []
            self._rpc = RpcSession(self, self._bits)
        else:
            self._begin(request.path)

    def _begin(self, path: str) -> None:
        [subscriber] = self.subscribers
        subscriber.principal = self.principal
        try:
            query = query_of(urlsplit(path).query)
            name = query.pop("codec", "json")
            if name not in CODECS:
                raise invalid("bad_request", f"codec is one of {', '.join(CODECS)}")
            subscriber.codec = websocket_codec(name, self._bits)
            request = subscription_of(query, self.hub.seal)
        except RequestError as error:
            self._refuse(error)
            return
        self.run(self._subscribe(request))

    @property
    def _bits(self) -> int:
        """Window bits of the agreed compression; 0 without."""
        agreed = [each for each in self._extensions if isinstance(each, PerMessageDeflate)]
        return agreed[0].local_max_window_bits if agreed else 0

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
                if self.hub.acknowledged(subscriber, position_of(content["position"], self.hub.seal)):
                    self.pump()
            elif kind == "filter":
                self._refilter(texts_of(content))
            else:
                raise invalid("bad_message", "a client sends acks of positions, and filters")
        except RequestError as error:
            self._refuse(error)

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

    async def _subscribe(self, request: SubscribeRequest) -> None:
        try:
            await self.tables.join(self.subscribers[0], request)
        except RequestError as error:
            self._refuse(error)

    def _refuse(self, error: RequestError) -> None:
        codec = self.subscribers[0].codec if self.subscribers else WEBSOCKET
        self.write(codec.frame(messages.error(error.code, error.detail)))
        self.close(error.close, error.detail)

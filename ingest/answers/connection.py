"""A server-side WebSocket connection beneath uvicorn: handshake, frames, pings and close, without a task of its own.

``websockets``' sans-I/O protocol does the handshake and the control frames.
"""

from __future__ import annotations

import asyncio
import http
import logging
import socket
from typing import Any

from websockets.exceptions import InvalidState
from websockets.frames import CloseCode, Frame, Opcode
from websockets.http11 import Request
from websockets.protocol import State
from websockets.server import ServerProtocol

from lakehouse.contract.text import is_utf8

logger = logging.getLogger(__name__)

_CLOSE_S = 2.0


class _LenientServerProtocol(ServerProtocol):
    """Accepts a close between the frames of a message, as any control frame (RFC 6455, 5.4); that message is lost."""

    def recv_frame(self, frame: Frame) -> None:
        if frame.opcode is Opcode.CLOSE:
            self.current_size = None
        super().recv_frame(frame)


class WebSocketConnection(asyncio.Protocol):
    """One connection; subclasses define :meth:`_refusal`, :meth:`_opened` and :meth:`_take`.

    Args:
        server: uvicorn's set of connections.
        max_bytes: largest message; a larger one ends the connection.
        buffer_bytes: unsent bytes above which ``_paused`` is set.
    """

    def __init__(self, server: set[Any], max_bytes: int, buffer_bytes: int) -> None:
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._wire = _LenientServerProtocol(max_size=max_bytes, logger=logger)
        self._buffer_bytes = buffer_bytes
        self._transport: asyncio.Transport = None  # type: ignore[assignment]
        self._open = False
        self._closing: asyncio.TimerHandle | None = None
        self._paused = False  # the peer does not read
        self._holding = False  # earlier messages wait
        self._silent = 0
        self._parts: list[bytes] = []  # of a message in several frames
        self._opcode = Opcode.TEXT  # of that message

    def _refusal(self, request: Request) -> tuple[http.HTTPStatus, str] | None:
        """Why the upgrade is refused, or None."""
        raise NotImplementedError

    def _opened(self) -> None:
        """The handshake is complete."""
        raise NotImplementedError

    def _take(self, message: bytes) -> None:
        """A complete message was received."""
        raise NotImplementedError

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        self._transport.set_write_buffer_limits(high=self._buffer_bytes)
        raw: socket.socket | None = transport.get_extra_info("socket")
        if raw is not None and hasattr(socket, "TCP_NOTSENT_LOWAT") and raw.family != socket.AF_UNIX:
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, self._buffer_bytes)
        self._server.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._open = False
        self._server.discard(self)
        if self._closing is not None:
            self._closing.cancel()

    def data_received(self, data: bytes) -> None:
        self._wire.receive_data(data)
        self._react()

    def eof_received(self) -> None:
        self._wire.receive_eof()
        self._react()

    def pause_writing(self) -> None:
        """Read nothing while the peer does not read, so that answers stay bounded."""
        self._paused = True
        self._balance()

    def resume_writing(self) -> None:
        self._paused = False
        self._balance()

    def ping(self) -> None:
        """Send a ping; cut the connection if the two before it were not answered."""
        if not self._holding:  # while holding, the pong would not be read
            self._silent += 1
        if self._silent > 2:
            self._transport.abort()
        elif self._wire.state is State.OPEN:
            self._wire.send_ping(b"")
            self._flush()

    def shutdown(self) -> None:
        self._close(CloseCode.GOING_AWAY, "the node stops; connect again")

    def _send(self, body: bytes) -> None:
        if self._open and self._wire.state is State.OPEN:
            self._transport.write(Frame(Opcode.TEXT, body).serialize(mask=False))

    def _hold(self, holding: bool) -> None:
        """Stop or resume reading while earlier messages wait."""
        self._holding = holding
        self._balance()

    def _balance(self) -> None:
        if self._transport.is_closing():
            return
        if self._paused or self._holding:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def _close(self, code: int, reason: str) -> None:
        self._open = False
        if self._closing is not None or self._transport.is_closing():
            return
        try:
            self._wire.send_close(code, reason)
        except InvalidState:
            self._transport.close()
        self._flush()
        self._closing = self._loop.call_later(_CLOSE_S, self._transport.abort)

    def _react(self) -> None:
        for event in self._wire.events_received():
            self._silent = 0
            if isinstance(event, Request):
                self._accept(event)
            elif isinstance(event, Frame) and event.opcode in (Opcode.TEXT, Opcode.BINARY, Opcode.CONT):
                self._frame_received(event)
        self._flush()
        over = self._wire.close_expected() or self._wire.state is State.CLOSED  # CLOSED: without a close frame
        if over and self._closing is None:
            self._open = False
            self._closing = self._loop.call_later(_CLOSE_S, self._transport.abort)

    def _accept(self, request: Request) -> None:
        response = self._wire.accept(request)
        if response.status_code == http.HTTPStatus.SWITCHING_PROTOCOLS:
            refusal = self._refusal(request)
            if refusal is not None:
                response = self._wire.reject(*refusal)
        self._wire.send_response(response)
        self._flush()
        if self._wire.state is State.OPEN:
            self._open = True
            self._opened()

    def _frame_received(self, frame: Frame) -> None:
        if frame.opcode is not Opcode.CONT:
            self._opcode = frame.opcode
        self._parts.append(bytes(frame.data))
        if not frame.fin:
            return
        message, self._parts = b"".join(self._parts), []
        if self._opcode is Opcode.TEXT and not is_utf8(message):
            self._open = False
            self._wire.fail(CloseCode.INVALID_DATA, "text that is not UTF-8")
        elif self._open:  # data after a close is ignored
            self._flush()  # pongs of earlier pings
            self._take(message)

    def _flush(self) -> None:
        for data in self._wire.data_to_send():
            if data:
                self._transport.write(data)
            else:
                self._transport.close()

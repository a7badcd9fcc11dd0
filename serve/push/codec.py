"""Codecs: how a message looks on a wire. Bytes are made once a channel, not once a subscriber."""

from __future__ import annotations

import struct
from typing import Protocol

from serve.messages import Message


class Codec(Protocol):
    """A wire form of messages."""

    @property
    def name(self) -> str:
        """Unique among codecs."""

    @property
    def answers(self) -> bool:
        """Whether subscribers answer a heartbeat by themselves, which shows that they read."""

    def frame(self, message: Message) -> bytes:
        """The message's bytes, the same for every subscriber."""

    def heartbeat(self, message: Message) -> bytes:
        """A heartbeat's bytes, with what makes the subscriber answer."""


class WebSocketCodec:
    """RFC 6455 text frames, final and unmasked, as a server sends them."""

    name = "websocket"
    answers = True

    def frame(self, message: Message) -> bytes:
        """Header and payload."""
        return header(0x81, len(message.body)) + message.body

    def heartbeat(self, message: Message) -> bytes:
        """The frame and a ping: every WebSocket client answers it, browsers too."""
        return self.frame(message) + PING


def header(first: int, length: int) -> bytes:
    """Frame header of an unmasked frame: first byte (FIN and opcode), then the payload's length."""
    if length < 126:
        return bytes((first, length))
    if length < 65_536:
        return struct.pack(">BBH", first, 126, length)
    return struct.pack(">BBQ", first, 127, length)


PING = header(0x89, 4) + b"mill"
WEBSOCKET = WebSocketCodec()

"""Codecs: how a message looks on a wire. Bytes are made once for each view and wire form, not once a subscriber."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from typing import Protocol

from serve.messages import Message
from serve.push import encoding

LEAST_COMPRESSED = 256  # bytes; below that deflate saves less than a packet's header
_LEVEL = 1  # level 6 takes three times as long for a tenth less
_EMPTY_BLOCK = b"\x00\x00\xff\xff"


class Codec(Protocol):
    """A wire form of messages."""

    @property
    def name(self) -> str:
        """Unique among codecs."""

    @property
    def answers(self) -> bool:
        """Whether subscribers answer a heartbeat by themselves, which shows that they read."""

    def frame(self, message: Message) -> bytes:
        """The message's bytes, the same for every subscriber; empty: this wire form does without it."""

    def heartbeat(self, message: Message) -> bytes:
        """A heartbeat's bytes, with what makes the subscriber answer."""


class WebSocketCodec:
    """RFC 6455 frames, final and unmasked, as a server sends them.

    With ``bits`` they are compressed as RFC 7692 has it, *without context takeover*: each message is deflated for
    itself, so its bytes are the same for everybody who negotiated the same window.

    Args:
        name: the encoding's name.
        encode: gives a message's payload and whether it is text.
        bits: base-two logarithm of the LZ77 window; 0: nothing is compressed.
    """

    answers = True

    def __init__(self, name: str, encode: Callable[[Message], tuple[bytes, bool]], bits: int = 0) -> None:
        self.name = f"websocket {name}" + (f" deflate{bits}" if bits else "")
        self._encode = encode
        self._bits = bits

    def frame(self, message: Message) -> bytes:
        """Header and payload."""
        payload, text = self._encode(message)
        first = 0x81 if text else 0x82
        if self._bits and len(payload) >= LEAST_COMPRESSED:
            payload = _deflated(payload, self._bits)
            first |= 0x40  # RSV1: this message is compressed
        return header(first, len(payload)) + payload

    def heartbeat(self, message: Message) -> bytes:
        """The frame and a ping: every WebSocket client answers it, browsers too."""
        return self.frame(message) + PING


def header(first: int, length: int) -> bytes:
    """Frame header of an unmasked frame: first byte (FIN, RSV1 and opcode), then the payload's length."""
    if length < 126:
        return bytes((first, length))
    if length < 65_536:
        return struct.pack(">BBH", first, 126, length)
    return struct.pack(">BBQ", first, 127, length)


def _deflated(payload: bytes, bits: int) -> bytes:
    """RFC 7692, section 7.2.1: deflate, flush, take the last four bytes away."""
    deflater = zlib.compressobj(_LEVEL, wbits=-bits)
    return (deflater.compress(payload) + deflater.flush(zlib.Z_SYNC_FLUSH)).removesuffix(_EMPTY_BLOCK)


PING = header(0x89, 4) + b"mill"
WEBSOCKET = WebSocketCodec("json", encoding.as_json)
_ENCODINGS = {"json": encoding.as_json, "msgpack": encoding.as_msgpack, "arrow": encoding.as_arrow}
CODECS = tuple(_ENCODINGS)
"""Names that ``codec=`` takes on a WebSocket."""

_BY_BITS: dict[tuple[str, int], WebSocketCodec] = {("json", 0): WEBSOCKET}


def websocket_codec(name: str, bits: int) -> WebSocketCodec:
    """The codec of an encoding; the same object each time. Arrow's buffers are left as they are."""
    bits = 0 if name == "arrow" else bits
    codec = _BY_BITS.get((name, bits))
    if codec is None:
        codec = _BY_BITS[name, bits] = WebSocketCodec(name, _ENCODINGS[name], bits)
    return codec

"""How a message looks on a wire: its payload in each encoding, and WebSocket frames around it.

Bytes are made once for each view and wire form, not once for each subscriber. JSON defines how a value looks; the other
encodings follow it.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Sequence
from datetime import date, datetime, time
from typing import Any, Protocol

import msgpack
import pyarrow as pa

from lakehouse.contract.rows import Row
from serve.core.messages import Message
from serve.core.values import to_json

HEAD = b"millrace"
"""Key in an Arrow message's schema metadata: the rest of the message, as JSON."""

CHANGE_COLUMN = "_change"


LEAST_COMPRESSED = 256  # bytes; below, deflate saves less than a packet's header
_LEVEL = 1  # level 6 takes three times as long and saves a tenth more
_EMPTY_BLOCK = b"\x00\x00\xff\xff"


def as_json(message: Message) -> tuple[bytes, bool]:
    return message.body, True


def as_msgpack(message: Message) -> tuple[bytes, bool]:
    """The same object as in JSON. Numbers that MessagePack lacks (decimals, integers beyond 64 bits) are text."""
    content: dict[str, Any] = dict(message.head)
    if message.table is not None:
        columns, key = message.table.columns, message.table.key
        rows = [dict(zip(columns, row, strict=True)) for row in message.rows]
        if message.kind == "snapshot":
            content["rows"] = rows
        else:
            content["upserts"] = rows
            content["deletes"] = [dict(zip(key, gone, strict=True)) for gone in message.deletes]
            if message.left:
                left = [gone for gone in message.deletes if gone in message.left]
                content["leaves"] = [dict(zip(key, gone, strict=True)) for gone in left]
    return msgpack.packb(content, default=_plain), False


def as_arrow(message: Message) -> tuple[bytes, bool]:
    """Rows as one Arrow IPC stream, the rest in its schema's metadata. Messages without rows stay JSON text.

    A change has a last column ``_change``: ``upsert``, ``delete`` or ``leave``. The last two have values only in key
    columns.
    """
    table = message.table
    if table is None:
        return message.body, True
    rows: list[Row] = list(message.rows)
    columns, types = list(table.columns), list(table.types) or [None] * len(table.columns)
    if message.kind == "change":
        at = [table.key.index(name) if name in table.key else None for name in columns]
        rows += [tuple(None if i is None else key[i] for i in at) for key in message.deletes]
    arrays = [_array([row[i] for row in rows], kind) for i, kind in enumerate(types)]
    if message.kind == "change":
        kinds = ["upsert"] * len(message.rows)
        kinds += ["leave" if key in message.left else "delete" for key in message.deletes]
        columns.append(CHANGE_COLUMN)
        arrays.append(pa.array(kinds, pa.string()))
    batch = pa.record_batch(arrays, names=columns).replace_schema_metadata({HEAD: to_json(message.head)})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return sink.getvalue().to_pybytes(), False


def _array(values: Sequence[Any], kind: pa.DataType | None) -> pa.Array:
    if kind is not None and pa.types.is_timestamp(kind):
        kind = pa.timestamp("us", kind.tz)
    try:
        return pa.array(values, kind)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):  # a sum beyond 64 bits, say
        return pa.array([None if value is None else _as_text(value) for value in values])


def _as_text(value: Any) -> str:
    """A value as in JSON, without quotes; integers of any size."""
    return str(value) if isinstance(value, int) else to_json(value).decode().strip('"')


def _plain(value: Any) -> Any:
    """JSON's form of a value that MessagePack has no form for."""
    if isinstance(value, (datetime, date, time)):
        return to_json(value)[1:-1].decode()
    if isinstance(value, (set, frozenset)):
        return list(value)
    text = _as_text(value)
    return None if text == "null" else text


class Codec(Protocol):
    @property
    def name(self) -> str:
        """Unique among codecs."""

    @property
    def answers(self) -> bool:
        """Whether subscribers answer heartbeats by themselves, which shows that they read."""

    def frame(self, message: Message) -> bytes:
        """The message's bytes, the same for every subscriber; empty if this wire form omits the message."""

    def heartbeat(self, message: Message) -> bytes:
        """A heartbeat's bytes, including what makes the subscriber answer."""


class WebSocketCodec:
    """RFC 6455 frames, final and unmasked, as a server sends them.

    With ``bits`` they are compressed by RFC 7692 *without context takeover*: each message is deflated by itself, so its
    bytes are the same for everybody who negotiated the same window.

    Args:
        name: the encoding's name.
        encode: returns a message's payload and whether it is text.
        bits: base-two logarithm of the LZ77 window; 0: no compression.
    """

    answers = True

    def __init__(self, name: str, encode: Callable[[Message], tuple[bytes, bool]], bits: int = 0) -> None:
        self.name = f"websocket {name}" + (f" deflate{bits}" if bits else "")
        self._encode = encode
        self._bits = bits

    def frame(self, message: Message) -> bytes:
        payload, text = self._encode(message)
        first = 0x81 if text else 0x82
        if self._bits and len(payload) >= LEAST_COMPRESSED:
            payload = _deflated(payload, self._bits)
            first |= 0x40  # RSV1: this message is compressed
        return header(first, len(payload)) + payload

    def heartbeat(self, message: Message) -> bytes:
        """The frame and a ping, which every WebSocket client answers, browsers too."""
        return self.frame(message) + PING


def header(first: int, length: int) -> bytes:
    """Header of an unmasked frame. ``first`` holds FIN, RSV1 and opcode."""
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
WEBSOCKET = WebSocketCodec("json", as_json)
_ENCODINGS = {"json": as_json, "msgpack": as_msgpack, "arrow": as_arrow}
CODECS = tuple(_ENCODINGS)
"""Names that ``codec=`` takes on a WebSocket."""

_BY_BITS: dict[tuple[str, int], WebSocketCodec] = {("json", 0): WEBSOCKET}


def websocket_codec(name: str, bits: int) -> WebSocketCodec:
    """The codec of an encoding, the same object each time. Arrow is never compressed."""
    bits = 0 if name == "arrow" else bits
    codec = _BY_BITS.get((name, bits))
    if codec is None:
        codec = _BY_BITS[name, bits] = WebSocketCodec(name, _ENCODINGS[name], bits)
    return codec

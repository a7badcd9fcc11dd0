"""The server's messages (docs/reference/protocol.md), each with the position that it leads to; WebSocket frames.

A message's bytes are made once for each view and wire form, not once for each subscriber: a :class:`Codec` makes them.

Here is also the one definition of how a value looks to a subscriber. Timestamps are ISO 8601 in UTC with ``Z``, with
microseconds if there are any. Numbers are numbers, whatever their size; NaN and infinity, which JSON lacks, are null.
Binary within structures is base64.
"""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Protocol

import orjson
import pyarrow as pa
import pyarrow.compute as pc

from lakehouse.contract.lake import CommitFacts
from lakehouse.contract.rows import Key, Row
from serve.core.model import TableChange, TableInfo
from serve.core.position import Position, Seal

PART_BYTES = 262_144  # rows of one message; positions depend on it: all server processes must split alike
LEAST_COMPRESSED = 256  # bytes; below, deflate saves less than a packet's header
_OPTIONS = orjson.OPT_UTC_Z | orjson.OPT_NAIVE_UTC
_INT64 = range(-(2**63), 2**63)
_LEVEL = 1  # level 6 takes three times as long and saves a tenth more
_EMPTY_BLOCK = b"\x00\x00\xff\xff"


@dataclass(frozen=True, slots=True)
class Message:
    """One message, ready to be framed."""

    kind: str  # its `type`
    body: bytes  # the JSON text
    head: Mapping[str, Any]  # its content without rows
    position: Position | None = None  # where it brings the subscriber; None: the position stays
    after: Position | None = None  # the position that a change starts from
    table: TableInfo | None = None  # whose rows it has; None if it has none
    rows: Sequence[Row] = ()  # upserts of a change, rows of a snapshot
    deletes: Sequence[Key] = ()  # keys of a change
    left: frozenset[Key] = frozenset()  # those of `deletes` that only left the subscriber's view


def change_messages(change: TableChange, seal: Seal, view: bytes) -> list[Message]:
    """The change, as a view shows it, in one or more messages. The last has ``last: true`` and the commit's version."""
    table = change.table
    upserts = encode_rows(table.columns, change.upserts)
    deletes = encode_rows(table.key, change.deletes)
    start = Position(table.table_id, change.version - 1, 0, view)
    facts = _facts(change.facts) | _events(change.facts)
    messages = []
    parts = list(_parts(list(map(len, upserts)), list(map(len, deletes))))
    for number, (up, down) in enumerate(parts, 1):
        last = number == len(parts)
        position = start.at(change.version) if last else start.at(change.version - 1, number)
        after = start.at(change.version - 1, number - 1)
        head = _change_head(table, seal, position, after, last) | facts
        rows, gone = change.upserts[up], change.deletes[down]
        left = change.left and change.left.intersection(gone)
        body = _change_body(head, upserts[up], gone, deletes[down], left)
        messages.append(Message("change", body, head, position, after, table, rows, gone, left))
    return messages


def merged(messages: Sequence[Message], seal: Seal) -> Message:
    """Consecutive changes as one, for a subscriber that lags and wants the latest row of each key only.

    There are at least two, of one view and one description of the table. The result goes from the first ``after`` to
    the last position; ``merged`` is their number; events are summed over the commits that end within.
    """
    first, final = messages[0], messages[-1]
    table = final.table
    assert table is not None and first.after is not None and final.position is not None
    key_at = [table.columns.index(name) for name in table.key]
    now: dict[Key, Row | None] = {}
    left: set[Key] = set()
    for message in messages:
        for row in message.rows:
            now[tuple([row[i] for i in key_at])] = row
        for key in message.deletes:
            now[key] = None
            (left.add if key in message.left else left.discard)(key)
    rows = [row for row in now.values() if row is not None]
    deletes = [key for key, row in now.items() if row is None]
    ends = [message.head for message in messages if message.head["last"]]
    facts = {name: final.head[name] for name in ("through", "committed_at")}
    facts["events"] = sum(end["events"] for end in ends)
    for name, pick in (("oldest_at", min), ("newest_at", max)):
        times = [end[name] for end in ends if name in end]
        facts |= {name: pick(times)} if times else {}
    head = _change_head(table, seal, final.position, first.after, final.head["last"]) | facts
    head["merged"] = len(messages)
    still = frozenset(left.intersection(deletes))
    body = _change_body(head, encode_rows(table.columns, rows), deletes, encode_rows(table.key, deletes), still)
    return Message("change", body, head, final.position, first.after, table, rows, deletes, still)


def snapshot_messages(
    table: TableInfo,
    position: Position,
    facts: CommitFacts,
    rows: Sequence[tuple[Row, bytes]],
    seal: Seal,
    extra: Mapping[str, Any],
) -> Iterator[Message]:
    """A state as one or more messages of one position, made as they are consumed.

    Args:
        facts: of the last commit.
        rows: in key order, each with its JSON.
        extra: further members: the view, and how long positions live.
    """
    parts = [up for up, _ in _parts([len(text) for _, text in rows], [])]
    base = {"type": "snapshot", **_table_head(table, position, seal), **extra}
    for number, part in enumerate(parts, 1):
        last = number == len(parts)
        head = base | {"first": number == 1, "last": last} | _facts(facts)
        part_rows = rows[part]
        body = to_json(head | {"rows": [orjson.Fragment(text) for _, text in part_rows]})
        at = position if last else None
        yield Message("snapshot", body, head, at, None, table, [row for row, _ in part_rows])


def resumed(table: TableInfo, position: Position, seal: Seal, extra: Mapping[str, Any]) -> Message:
    """The position is accepted; the changes after it follow."""
    return _message({"type": "resumed", **_table_head(table, position, seal), **extra}, position)


def heartbeat(table: str, token: str, behind: int, newest_at: int | None, now_ms: int) -> Message:
    """The server is alive; how far the subscriber and the table are behind."""
    lag = None if newest_at is None else max(0, now_ms - newest_at)
    content = {"table": table, "position": token, "behind": behind, "lag_ms": lag, "at": now_ms}
    return _message({"type": "heartbeat", **content})


def slow(table: str, behind: int, behind_ms: int, cut_in_ms: int) -> Message:
    return _message({"type": "slow", "table": table, "behind": behind, "behind_ms": behind_ms, "cut_in_ms": cut_in_ms})


def expired(table: str, reason: str, detail: str) -> Message:
    """What the subscriber had is void; a snapshot follows."""
    return _message({"type": "expired", "table": table, "reason": reason, "detail": detail})


def error(code: str, detail: str) -> Message:
    """The request is wrong. The connection is closed, unless it was a filter to replace another."""
    return _message({"type": "error", "code": code, "detail": detail})


def closed(code: int, detail: str) -> Message:
    """The end and its reason, for transports without close codes."""
    return _message({"type": "close", "code": code, "detail": detail})


def _message(content: Mapping[str, Any], position: Position | None = None) -> Message:
    return Message(content["type"], to_json(content), content, position)


def _change_body(
    head: Mapping[str, Any], upserts: list[bytes], deletes: Sequence[Key], texts: list[bytes], left: frozenset[Key]
) -> bytes:
    """The JSON text of a change. ``upserts`` and ``texts``, which are ``deletes``, are encoded already."""
    content = dict(head)
    content["upserts"] = [orjson.Fragment(row) for row in upserts]
    content["deletes"] = gone = [orjson.Fragment(key) for key in texts]
    if left:
        content["leaves"] = [text for key, text in zip(deletes, gone, strict=True) if key in left]
    return to_json(content)


def _change_head(table: TableInfo, seal: Seal, position: Position, after: Position, last: bool) -> dict[str, Any]:
    tokens = {"position": seal.token(position), "after": seal.token(after)}
    return {"type": "change", "table": table.name, **tokens, "last": last}


def _table_head(table: TableInfo, position: Position, seal: Seal) -> dict[str, Any]:
    return {
        "table": table.name,
        "key": table.key,
        "columns": table.columns,
        "position": seal.token(position),
        "position_lives_ms": table.retention_ms,
    }


def _parts(upserts: Sequence[int], deletes: Sequence[int]) -> Iterator[tuple[slice, slice]]:
    """Cut rows, given by their sizes, into parts of about :data:`PART_BYTES`, upserts first; at least one part."""
    starts, size = [0, 0], 0
    ends = [0, 0]
    for kind, sizes in enumerate((upserts, deletes)):
        for row in sizes:
            if size and size + row > PART_BYTES:
                yield slice(starts[0], ends[0]), slice(starts[1], ends[1])
                starts, size = list(ends), 0
            ends[kind] += 1
            size += row
    yield slice(starts[0], ends[0]), slice(starts[1], ends[1])


def _facts(facts: CommitFacts) -> dict[str, Any]:
    return {"through": facts.through, "committed_at": facts.committed_at}


def _events(facts: CommitFacts) -> dict[str, Any]:
    times = {"oldest_at": facts.oldest_at, "newest_at": facts.newest_at}
    return {"events": facts.events} | {name: at for name, at in times.items() if at is not None}


class Codec(Protocol):
    """A wire form. ``name`` is unique; with ``answers`` subscribers answer heartbeats, which shows that they read."""

    @property
    def name(self) -> str: ...

    @property
    def answers(self) -> bool: ...

    def frame(self, message: Message) -> bytes:
        """The message's bytes, the same for every subscriber; empty if this wire form omits the message."""

    def heartbeat(self, message: Message) -> bytes:
        """A heartbeat's bytes, including what makes the subscriber answer."""


class WebSocketCodec:
    """RFC 6455 text frames, final and unmasked, as a server sends them.

    With ``bits``, the base-two logarithm of the LZ77 window, they are compressed by RFC 7692 *without context
    takeover*: each message is deflated by itself, so its bytes are the same for all who negotiated the same window.
    """

    answers = True

    def __init__(self, name: str = "websocket", bits: int = 0) -> None:
        self.name = name + (f" deflate{bits}" if bits else "")
        self._bits = bits

    def text(self, message: Message) -> bytes:
        """What a frame holds; empty: no frame."""
        return message.body

    def frame(self, message: Message) -> bytes:
        text = self.text(message)
        if self._bits and len(text) >= LEAST_COMPRESSED:
            text = _deflated(text, self._bits)
            return header(0xC1, len(text)) + text  # RSV1: this message is compressed
        return header(0x81, len(text)) + text if text else b""

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


def _deflated(text: bytes, bits: int) -> bytes:
    """RFC 7692, section 7.2.1: deflate, flush, take the last four bytes away."""
    deflater = zlib.compressobj(_LEVEL, wbits=-bits)
    return (deflater.compress(text) + deflater.flush(zlib.Z_SYNC_FLUSH)).removesuffix(_EMPTY_BLOCK)


PING = header(0x89, 4) + b"mill"


def is_binary(kind: pa.DataType) -> bool:
    """Whether a column of this type is not pushed."""
    return bool(
        pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
        or pa.types.is_fixed_size_binary(kind)
        or pa.types.is_binary_view(kind)
    )


def rows_of(table: pa.Table) -> list[Row]:
    """The table's rows, columns in order. Times are in UTC without a zone: they hash and compare faster."""
    columns = [_plain(column).to_pylist() for column in table.columns]
    if not columns:
        return [() for _ in range(table.num_rows)]
    return list(zip(*columns, strict=True))


def _plain(column: pa.ChunkedArray) -> pa.ChunkedArray:
    kind = column.type
    if pa.types.is_timestamp(kind):
        return column.cast(pa.timestamp("us"), safe=False)
    if pa.types.is_floating(kind):
        return pc.if_else(pc.is_finite(column), column, pa.scalar(None, kind))
    return column


def to_json(value: Any) -> bytes:
    return orjson.dumps(value, default=_other, option=_OPTIONS)


def encode_rows(columns: Sequence[str], rows: Iterable[Row]) -> list[bytes]:
    """One JSON object a row."""
    rows = list(rows)  # iterated twice if there are large integers
    try:
        return [orjson.dumps(dict(zip(columns, row, strict=True)), default=_other, option=_OPTIONS) for row in rows]
    except TypeError as error:  # orjson neither accepts integers beyond 64 bits nor calls `default` for them
        if "64-bit" not in str(error):
            raise
        return [to_json({name: _wide(value) for name, value in zip(columns, row, strict=True)}) for row in rows]


def _other(value: Any) -> Any:
    if isinstance(value, Decimal):
        return orjson.Fragment(format(value, "f")) if value.is_finite() else None
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, memoryview):
        return base64.b64encode(bytes(value)).decode()
    return str(value)


def _wide(value: Any) -> Any:
    return orjson.Fragment(str(value)) if isinstance(value, int) and value not in _INT64 else value

"""The server's messages as docs/protocol.md has them: JSON, with the position that each brings a subscriber to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from serve.model import Change, CommitFacts
from serve.position import Position
from serve.rows import encode_rows, to_json
from serve.state import TableState

PART_BYTES = 262_144  # rows of one message; part of what positions mean: all server processes must split alike


@dataclass(frozen=True, slots=True)
class Message:
    """One message, ready to be framed.

    Attributes:
        kind: its ``type``.
        body: the JSON text.
        position: where it brings the subscriber; None: it leaves the position as it is.
    """

    kind: str
    body: bytes
    position: Position | None = None


def change_messages(change: Change) -> list[Message]:
    """The change as one or more messages, the last of them with ``last: true`` and the commit's version as position."""
    table = change.table
    upserts = encode_rows(table.columns, change.upserts)
    deletes = encode_rows(table.key, change.deletes)
    parts = list(_parts(upserts, deletes))
    facts = _facts(change.facts) | _events(change.facts)
    messages = []
    for number, (up, down) in enumerate(parts, 1):
        last = number == len(parts)
        ordinal = 0 if last else number
        position = Position(table.table_id, change.version if last else change.version - 1, ordinal)
        content = {"table": table.name, "position": position.token(), "upserts": up, "deletes": down, "last": last}
        messages.append(_message("change", content | facts, position))
    return messages


def snapshot_messages(state: TableState, rows: Sequence[bytes]) -> list[Message]:
    """The state as one or more messages of one position.

    Args:
        state: at the version that the snapshot stands for.
        rows: its rows, encoded.
    """
    table = state.table
    position = Position(table.table_id, state.version)
    parts = [up for up, _ in _parts(rows, ())]
    base = {"table": table.name, "key": table.key, "columns": table.columns, "position": position.token()}
    return [
        _message(
            "snapshot",
            base | {"first": number == 1, "last": number == len(parts), "rows": part} | _facts(state.facts),
            position if number == len(parts) else None,
        )
        for number, part in enumerate(parts, 1)
    ]


def resumed(state: TableState, position: Position) -> Message:
    """The position is served: the changes after it follow."""
    table = state.table
    content = {"table": table.name, "key": table.key, "columns": table.columns, "position": position.token()}
    return _message("resumed", content, position)


def heartbeat(position: Position, behind: int, newest_at: int | None, now_ms: int) -> Message:
    """Alive, and how far the subscriber and the table are behind."""
    lag = None if newest_at is None else max(0, now_ms - newest_at)
    content = {"position": position.token(), "behind": behind, "lag_ms": lag, "at": now_ms}
    return _message("heartbeat", content)


def slow(behind: int, behind_ms: int, cut_in_ms: int) -> Message:
    """The subscriber lags."""
    return _message("slow", {"behind": behind, "behind_ms": behind_ms, "cut_in_ms": cut_in_ms})


def expired(reason: str, detail: str) -> Message:
    """What the subscriber had is void; a snapshot follows."""
    return _message("expired", {"reason": reason, "detail": detail})


def error(code: str, detail: str) -> Message:
    """The request is wrong; the connection is closed."""
    return _message("error", {"code": code, "detail": detail})


def _message(kind: str, content: Mapping[str, Any], position: Position | None = None) -> Message:
    return Message(kind, to_json({"type": kind, **content}), position)


def _parts(upserts: Sequence[bytes], deletes: Sequence[bytes]) -> Iterator[tuple[list[Any], list[Any]]]:
    """Rows cut into parts of about :data:`PART_BYTES`, upserts first; at least one part."""
    up: list[Any] = []
    down: list[Any] = []
    size = 0
    for part, rows in ((up, upserts), (down, deletes)):
        for row in rows:
            if size and size + len(row) > PART_BYTES:
                yield list(up), list(down)
                up.clear()
                down.clear()
                size = 0
            part.append(orjson.Fragment(row))
            size += len(row)
    yield up, down


def _facts(facts: CommitFacts) -> dict[str, Any]:
    return {"through": facts.through, "committed_at": facts.committed_at}


def _events(facts: CommitFacts) -> dict[str, Any]:
    times = {"oldest_at": facts.oldest_at, "newest_at": facts.newest_at}
    return {"events": facts.events} | {name: at for name, at in times.items() if at is not None}

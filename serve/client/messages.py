"""What a subscription yields, how it is put together from the parts on the wire, and a table's rows kept from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import orjson

from lakehouse.contract.errors import MillraceError

JsonRow: TypeAlias = Mapping[str, Any]


class ClientError(MillraceError):
    """Base of the client library's errors."""


class Refused(ClientError):
    """The server refuses this request; asking again does not help.

    Attributes:
        code: machine-readable, e.g. ``no_such_table``; or the close code as text.
        detail: why.
    """

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(code, detail)
        self.code = code
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.code}: {self.detail}"


class BadMessage(ClientError):
    """A message that is not of the protocol.

    Attributes:
        problem: what is wrong with it.
    """

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.problem = problem


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All rows at a position. It replaces whatever was held.

    Attributes:
        table: name of the table.
        key: key columns.
        position: everything up to here is in it.
        rows: whole rows.
        through: next offset by ``topic/partition``: every event before it is in it.
        committed_at: ms since the epoch.
        reason: why it comes although there was a position (``log`` or ``lagged``); empty for a first one.
    """

    table: str
    key: tuple[str, ...]
    position: str
    rows: Sequence[JsonRow]
    through: Mapping[str, int] | None
    committed_at: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Change:
    """What one commit changed.

    Attributes:
        table: name of the table.
        key: key columns.
        position: everything up to here is applied after it.
        upserts: whole rows, new or changed.
        deletes: keys that are gone.
        through, committed_at: as in a snapshot.
        events: events that the commit added.
        oldest_at, newest_at: when a collector had the oldest and newest of them, ms since the epoch.
    """

    table: str
    key: tuple[str, ...]
    position: str
    upserts: Sequence[JsonRow]
    deletes: Sequence[JsonRow]
    through: Mapping[str, int] | None
    committed_at: int
    events: int
    oldest_at: int | None
    newest_at: int | None


Message: TypeAlias = Snapshot | Change


class Assembler:
    """Puts snapshots and changes together from their parts. Use one for each connection."""

    def __init__(self) -> None:
        self.key: tuple[str, ...] = ()
        self._rows: list[JsonRow] = []
        self._upserts: list[JsonRow] = []
        self._deletes: list[JsonRow] = []
        self._reason = ""

    def received(self, text: str | bytes) -> tuple[Mapping[str, Any], Message | None]:
        """Content of one text message, and the snapshot or change that it completes. Raises BadMessage."""
        try:
            content = orjson.loads(text)
            kind = content["type"]
            if kind == "snapshot":
                return content, self._snapshot(content)
            if kind == "change":
                return content, self._change(content)
            if kind == "resumed":
                self.key = tuple(content["key"])
            elif kind == "expired":
                self._reason = content["reason"]
        except (orjson.JSONDecodeError, KeyError, TypeError) as error:
            raise BadMessage(f"{error!r} in {text[:80]!r}") from None
        return content, None

    def _snapshot(self, content: Mapping[str, Any]) -> Snapshot | None:
        if content["first"]:
            self._rows, self._upserts, self._deletes = [], [], []
            self.key = tuple(content["key"])
        self._rows.extend(content["rows"])
        if not content["last"]:
            return None
        rows, self._rows = self._rows, []
        reason, self._reason = self._reason, ""
        return Snapshot(
            content["table"], self.key, content["position"], rows, content["through"], content["committed_at"], reason
        )

    def _change(self, content: Mapping[str, Any]) -> Change | None:
        self._upserts.extend(content["upserts"])
        self._deletes.extend(content["deletes"])
        if not content["last"]:
            return None
        upserts, self._upserts = self._upserts, []
        deletes, self._deletes = self._deletes, []
        return Change(
            content["table"],
            self.key,
            content["position"],
            upserts,
            deletes,
            content["through"],
            content["committed_at"],
            content["events"],
            content.get("oldest_at"),
            content.get("newest_at"),
        )


class TableView:
    """The table as of the last message applied.

    Attributes:
        position: of that message; empty before the first.
        rows: by the values of the key columns.
    """

    def __init__(self) -> None:
        self.position = ""
        self.rows: dict[tuple[Any, ...], JsonRow] = {}

    def apply(self, message: Message) -> None:
        if isinstance(message, Snapshot):
            self.rows = {tuple(row[name] for name in message.key): row for row in message.rows}
        else:
            for gone in message.deletes:
                self.rows.pop(tuple(gone[name] for name in message.key), None)
            for row in message.upserts:
                self.rows[tuple(row[name] for name in message.key)] = row
        self.position = message.position

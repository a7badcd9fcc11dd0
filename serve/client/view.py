"""A table's rows held by a subscriber: snapshots and changes applied to a dictionary."""

from __future__ import annotations

from typing import Any

from serve.client.messages import JsonRow, Message, Snapshot


class TableView:
    """The table as of the last message applied.

    Attributes:
        position: of that message; empty before the first.
        rows: current row by the values of its key columns.
    """

    def __init__(self) -> None:
        self.position = ""
        self.rows: dict[tuple[Any, ...], JsonRow] = {}

    def apply(self, message: Message) -> None:
        """Bring the rows to the message's position."""
        if isinstance(message, Snapshot):
            self.rows = {tuple(row[name] for name in message.key): row for row in message.rows}
        else:
            for gone in message.deletes:
                self.rows.pop(tuple(gone[name] for name in message.key), None)
            for row in message.upserts:
                self.rows[tuple(row[name] for name in message.key)] = row
        self.position = message.position

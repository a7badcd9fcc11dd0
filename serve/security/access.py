"""Who asks, and what it may see: the one border between subscribers and data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from serve.errors import RequestError


@dataclass(frozen=True, slots=True)
class Principal:
    """A caller and its rights.

    Attributes:
        name: for logs; never a secret.
        tenant: empty if none.
        tables: that it may read; None: all.
        rows: SQL conditions by table (``*``: every other one) that its rows must fulfil, whatever else it asks for.
        key: id of the key that it showed; empty if none was required.
        queries: may add and remove continuous queries.
    """

    name: str = "anyone"
    tenant: str = ""
    tables: frozenset[str] | None = None
    rows: Mapping[str, str] = field(default_factory=dict)
    key: str = ""
    queries: bool = False

    def may_read(self, table: str) -> bool:
        """Whether the table exists for it."""
        return self.tables is None or table in self.tables

    def check_table(self, table: str) -> None:
        """Raises RequestError as for a missing table: what it may not read does not exist for it."""
        if not self.may_read(table):
            raise no_such_table(table)

    def condition(self, table: str) -> str:
        """Condition on the table's rows; empty if none."""
        return self.rows.get(table, self.rows.get("*", ""))

    @property
    def unlimited(self) -> bool:
        """Whether it may see everything, as a monitoring system must."""
        return self.tables is None and not self.rows


def no_such_table(table: str) -> RequestError:
    """The refusal for tables that are missing or hidden."""
    return RequestError(RequestError.NOT_FOUND, "no_such_table", f"no table {table!r} is served here")


OPEN = Principal(queries=True)
"""Everything: for a server that only this machine reaches."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """What a connection shows before it gets anything.

    Attributes:
        headers: of the request, names in lower case.
        query: the query string.
        peer: the other side's address.
    """

    headers: Mapping[str, str]
    query: str = ""
    peer: str = ""


class Closing(Protocol):
    """An open connection of a principal."""

    @property
    def principal(self) -> Principal:
        """Whose it is."""

    def close(self, code: int, reason: str) -> None:
        """End it, with a code of docs/protocol.md."""


class Access(Protocol):
    """Decides who comes in: :class:`serve.security.gate.ReaderGate`, or :class:`OpenAccess`."""

    def admit(self, credentials: Credentials) -> Principal:
        """The principal. Raises RequestError: no admission (4401, 4403), or too often (4429)."""

    def enter(self, principal: Principal, holder: Closing) -> None:
        """A stream or a poll begins. Raises RequestError if it is one too many (1013)."""

    def leave(self, principal: Principal, holder: Closing) -> None:
        """It has ended."""

    def principal_of(self, key_id: str) -> Principal | None:
        """Current rights of a key; None if it is gone."""

    def allowed_origin(self, headers: Mapping[str, str]) -> str | None:
        """Origin of a foreign page that is allowed; None for any other."""


class OpenAccess:
    """Everyone may see everything."""

    def admit(self, credentials: Credentials) -> Principal:
        return OPEN

    def enter(self, principal: Principal, holder: Closing) -> None:
        """As many as want to."""

    def leave(self, principal: Principal, holder: Closing) -> None:
        """Nothing is counted."""

    def principal_of(self, key_id: str) -> Principal | None:
        return OPEN

    def allowed_origin(self, headers: Mapping[str, str]) -> str | None:
        return None

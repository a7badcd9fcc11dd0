"""A webhook and its deliveries. Data only."""

from __future__ import annotations

from dataclasses import dataclass

DELIVERED, DEAD, FAILING = "delivered", "dead", "failing"


@dataclass(frozen=True, slots=True)
class Webhook:
    """What somebody asked to be called for.

    Attributes:
        id: public.
        key: id of the key that made it; empty: there were no keys then.
        table, where, columns, select, conflate: as in a subscription.
        url: that is called.
        secret: of the signature, ``whsec_`` and base64 of 32 bytes; shown once.
        created: ms since the epoch.
    """

    id: str
    key: str
    table: str
    url: str
    secret: str
    where: str = ""
    columns: tuple[str, ...] = ()
    conflate: bool = False
    created: int = 0
    select: str = ""

    def __repr__(self) -> str:
        return f"Webhook({self.id}, {self.table})"


@dataclass(frozen=True, slots=True)
class Delivery:
    """One message on its way to a webhook.

    Attributes:
        id: the same on every attempt: what a receiver tells repeats by.
        webhook: its id.
        kind: the message's type.
        position: that it brings the receiver to; empty: none.
        body: the JSON text; empty once it was taken.
        state: :data:`DELIVERED`, :data:`FAILING` or :data:`DEAD`.
        attempts: so far.
        status: of the last answer; 0: there was none.
        error: of the last attempt; empty: it was taken.
        at: of the last attempt, ms since the epoch.
    """

    id: str
    webhook: str
    kind: str
    position: str
    body: bytes
    state: str = FAILING
    attempts: int = 0
    status: int = 0
    error: str = ""
    at: int = 0

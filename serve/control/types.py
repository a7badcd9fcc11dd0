"""Bodies and answers of the control plane's REST. Its OpenAPI document is made from these types."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Generic, Literal, TypeVar

from msgspec import Meta, Struct

from lakehouse.contract.sql.filters import MAX_LENGTH

MAX_BODY = 262_144
MAX_PAGE = 1_000
MAX_GRACE_S = 30 * 86_400

Name = Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9_.-]{0,62}(?!\n)$", max_length=63)]
"""Of a tenant or an app."""
OwnerName = Annotated[str, Meta(pattern=r"^([a-z0-9][a-z0-9_.-]{0,62})?(?!\n)$", max_length=63)]
"""The same; empty: none."""
Table = Annotated[str, Meta(pattern=r"^[a-z][a-z0-9_]{0,62}(?!\n)$", max_length=63)]
"""Of a table or a source."""
Title = Annotated[str, Meta(pattern=r"^[^\u0000-\u001f]*$", max_length=200)]
Condition = Annotated[str, Meta(pattern=r"^[^\u0000]*$", max_length=MAX_LENGTH)]
"""In SQL, as in ``where=``."""
Count = Annotated[int, Meta(ge=0, le=1_000_000_000)]
Moment = Annotated[datetime, Meta(tz=True)]
Action = Literal["read", "send", "queries", "manage", "state"]
"""What a key may do: ``read`` products, ``send`` events, change continuous ``queries`` (and read), ``manage`` what is
here, see the ``state`` as our own processes must."""

Names = Annotated[tuple[Table, ...], Meta(max_length=1_000)]
Rows = Annotated[
    dict[Annotated[str, Meta(pattern=r"^(\*|[a-z][a-z0-9_]{0,62})(?!\n)$")], Condition], Meta(max_length=1_000)
]


class NewTenant(Struct, forbid_unknown_fields=True):
    name: Name
    title: Title = ""


class TenantEntry(Struct):
    name: str
    title: str
    created: datetime


class NewApp(Struct, forbid_unknown_fields=True):
    name: Name
    title: Title = ""
    ends: Moment | None = None


class ChangedApp(Struct, forbid_unknown_fields=True):
    """``ends``: end of life; null: none."""

    ends: Moment | None


class AppEntry(Struct):
    tenant: str
    name: str
    title: str
    created: datetime
    ends: datetime | None


class NewKey(Struct, forbid_unknown_fields=True):
    """Empty ``tables`` or ``sources``: all. ``rows``: SQL conditions by table, ``*`` for every other one."""

    actions: Annotated[tuple[Action, ...], Meta(min_length=1, max_length=5)]
    name: Title = ""
    tenant: OwnerName = ""
    app: OwnerName = ""
    tables: Names = ()
    rows: Rows = {}
    sources: Names = ()
    rate: Count = 0
    connections: Count = 0
    max_event_bytes: Count = 0
    until: Moment | None = None


class HashedKey(NewKey, kw_only=True):
    """A key that is known by its hash, from a key file."""

    id: Annotated[str, Meta(pattern=r"^[0-9a-f]{12}(?!\n)$")]
    hash: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}(?!\n)$")]


class KeyImport(Struct, forbid_unknown_fields=True):
    """A key whose id is here already is taken for the same one and passed over."""

    keys: Annotated[tuple[HashedKey, ...], Meta(max_length=1_000)]


class Imported(Struct):
    added: int
    known: int


class KeyEntry(Struct):
    """A key without its secret. ``until``: the end of its own life or of its app's."""

    id: str
    name: str
    tenant: str
    app: str
    actions: list[str]
    tables: list[str]
    rows: dict[str, str]
    sources: list[str]
    rate: int
    connections: int
    max_event_bytes: int
    created: datetime
    until: datetime | None


class MadeKey(KeyEntry):
    """``key`` is shown in this answer only."""

    key: str


class Rotation(Struct, forbid_unknown_fields=True):
    """``grace_s``: how long the old key stays good; 0: it ends at once."""

    grace_s: Annotated[int, Meta(ge=0, le=MAX_GRACE_S)] = 0


class SourceEntry(Struct):
    name: str
    declaration: dict[str, Any]
    created: datetime


class NewSubscription(Struct, forbid_unknown_fields=True):
    """``where`` is held by the key: it cannot be taken off by whoever subscribes."""

    tenant: Name
    app: Name
    table: Table
    where: Condition = ""
    columns: Annotated[
        tuple[Annotated[str, Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,62}(?!\n)$")], ...], Meta(max_length=100)
    ] = ()
    rate: Count = 0
    connections: Count = 0


class Channels(Struct):
    """The same rows over each transport, and the state by a plain GET."""

    websocket: str
    events: str
    poll: str
    rows: str


class SubscriptionEntry(Struct):
    """``key_id``: of the newest key that was made for it."""

    id: str
    tenant: str
    app: str
    table: str
    where: str
    columns: list[str]
    channels: Channels
    key_id: str
    created: datetime


class MadeSubscription(SubscriptionEntry):
    """``key`` is shown in this answer only."""

    key: str


class AuditEntry(Struct):
    """``key``: id of the key that was shown; ``who``: its name; ``act``: such as ``key.revoke``."""

    id: int
    at: datetime
    key: str
    who: str
    tenant: str
    act: str
    subject: str
    detail: dict[str, Any]


T = TypeVar("T")


class Page(Struct, Generic[T]):
    """``next``: what to give as ``after`` for the following page; null: this is the last."""

    items: list[T]
    next: str | None


class SharedState(Struct):
    """Entries by name; in a ``whole`` state all of them, else those that have changed, null for those that are gone."""

    whole: bool
    tenants: dict[str, dict[str, Any] | None]
    apps: dict[str, dict[str, Any] | None]
    keys: dict[str, dict[str, Any] | None]
    sources: dict[str, dict[str, Any] | None]


class Health(Struct):
    status: str


class Problem(Struct):
    """RFC 9457."""

    title: str
    status: int
    type: str = "about:blank"
    detail: str = ""
    code: str = ""
    remedy: str = ""

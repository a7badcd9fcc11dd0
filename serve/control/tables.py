"""The database of the control plane. ``migrations`` makes and changes these tables; a test compares the two.

Each row that other processes must know has the revision of its last change. A row that is gone leaves its name and the
revision in ``gone``, so that "what has changed since" is one query a table. Times are milliseconds since the epoch.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import JSON, BigInteger, ForeignKeyConstraint, Index, MetaData, String
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

NAMING = {
    "ix": "ix_%(table_name)s_%(column_0_name)s",
    "fk": "fk_%(table_name)s_%(referred_table_name)s",
    "pk": "pk_%(table_name)s",
}


class ControlBase(DeclarativeBase):
    metadata = MetaData(naming_convention=NAMING)
    type_annotation_map = {dict[str, Any]: JSON, list[str]: JSON, dict[str, str]: JSON}  # noqa: RUF012 - SQLAlchemy's


class RevisionRow(ControlBase):
    """One row: the revision of the newest change. A change locks it first, so that changes are in one order."""

    __tablename__ = "revision"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    revision: Mapped[int] = mapped_column(BigInteger)


class TenantRow(ControlBase):
    __tablename__ = "tenants"
    name: Mapped[str] = mapped_column(String(63), primary_key=True)
    title: Mapped[str] = mapped_column(String(200))
    created: Mapped[int] = mapped_column(BigInteger)
    revision: Mapped[int] = mapped_column(BigInteger, index=True)


class AppRow(ControlBase):
    """``ends``: end of life, after which no key of the app is good."""

    __tablename__ = "apps"
    __table_args__ = (ForeignKeyConstraint(["tenant"], ["tenants.name"]),)
    tenant: Mapped[str] = mapped_column(String(63), primary_key=True)
    name: Mapped[str] = mapped_column(String(63), primary_key=True)
    title: Mapped[str] = mapped_column(String(200))
    ends: Mapped[int | None] = mapped_column(BigInteger)
    created: Mapped[int] = mapped_column(BigInteger)
    revision: Mapped[int] = mapped_column(BigInteger, index=True)


class KeyRow(ControlBase):
    """``tenant`` and ``app`` are empty for a key of the operator's own."""

    __tablename__ = "keys"
    __table_args__ = (Index("ix_keys_owner", "tenant", "app"),)
    id: Mapped[str] = mapped_column(String(63), primary_key=True)
    hash: Mapped[str] = mapped_column(String(64))
    name: Mapped[str] = mapped_column(String(200))
    tenant: Mapped[str] = mapped_column(String(63))
    app: Mapped[str] = mapped_column(String(63))
    actions: Mapped[list[str]]
    tables: Mapped[list[str]]
    rows: Mapped[dict[str, str]]
    sources: Mapped[list[str]]
    rate: Mapped[int]
    connections: Mapped[int]
    max_event_bytes: Mapped[int]
    until: Mapped[int | None] = mapped_column(BigInteger, index=True)
    created: Mapped[int] = mapped_column(BigInteger)
    revision: Mapped[int] = mapped_column(BigInteger, index=True)


class SourceRow(ControlBase):
    __tablename__ = "sources"
    name: Mapped[str] = mapped_column(String(63), primary_key=True)
    declaration: Mapped[dict[str, Any]]
    created: Mapped[int] = mapped_column(BigInteger)
    revision: Mapped[int] = mapped_column(BigInteger, index=True)


class SubscriptionRow(ControlBase):
    """``key``: id of the newest key that was made for it."""

    __tablename__ = "subscriptions"
    __table_args__ = (
        ForeignKeyConstraint(["tenant", "app"], ["apps.tenant", "apps.name"]),
        Index("ix_subscriptions_owner", "tenant", "app"),
    )
    id: Mapped[str] = mapped_column(String(63), primary_key=True)
    tenant: Mapped[str] = mapped_column(String(63))
    app: Mapped[str] = mapped_column(String(63))
    table: Mapped[str] = mapped_column(String(63))
    where: Mapped[str]
    columns: Mapped[list[str]]
    key: Mapped[str] = mapped_column(String(63), index=True)
    created: Mapped[int] = mapped_column(BigInteger)
    revision: Mapped[int] = mapped_column(BigInteger)


class GoneRow(ControlBase):
    """``kind``: a table's name; ``name``: of the row that was in it."""

    __tablename__ = "gone"
    kind: Mapped[str] = mapped_column(String(16), primary_key=True)
    name: Mapped[str] = mapped_column(String(127), primary_key=True)
    revision: Mapped[int] = mapped_column(BigInteger, index=True)


class AuditRow(ControlBase):
    """Who did what. The database itself refuses to change or delete a row."""

    __tablename__ = "audit"
    id: Mapped[int] = mapped_column(primary_key=True)
    at: Mapped[int] = mapped_column(BigInteger)
    key: Mapped[str] = mapped_column(String(63))
    who: Mapped[str] = mapped_column(String(200))
    tenant: Mapped[str] = mapped_column(String(63), index=True)
    act: Mapped[str] = mapped_column(String(32))
    subject: Mapped[str] = mapped_column(String(200))
    detail: Mapped[dict[str, Any]]

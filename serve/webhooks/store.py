"""Webhooks, their positions and deliveries in SQLite: ``LAKE/_millrace/webhooks/webhooks.db``, its owner's only.

A position and the outcome of a delivery change in one transaction. A crash of the machine may forget the last of them
(``synchronous=NORMAL``): then a message is delivered again with the same position, by which its receiver drops it.
Blocking, tens of microseconds each; one connection, guarded by a lock.
"""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from pathlib import Path

from lakehouse.contract.errors import EnvironmentProblem

DELIVERED, DEAD, FAILING = "delivered", "dead", "failing"
_SCHEMA = """
CREATE TABLE IF NOT EXISTS webhooks (
  id TEXT PRIMARY KEY, key TEXT NOT NULL, tbl TEXT NOT NULL, url TEXT NOT NULL,
  cond TEXT NOT NULL, cols TEXT NOT NULL, conflate INTEGER NOT NULL, created INTEGER NOT NULL,
  position TEXT NOT NULL DEFAULT '', state TEXT NOT NULL DEFAULT 'active', detail TEXT NOT NULL DEFAULT '',
  sent TEXT NOT NULL DEFAULT '', sel TEXT NOT NULL DEFAULT '', ce INTEGER NOT NULL DEFAULT 0);
CREATE TABLE IF NOT EXISTS deliveries (
  seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, webhook TEXT NOT NULL, kind TEXT NOT NULL,
  position TEXT NOT NULL, body BLOB NOT NULL, state TEXT NOT NULL, attempts INTEGER NOT NULL, status INTEGER NOT NULL,
  error TEXT NOT NULL, at INTEGER NOT NULL);
CREATE INDEX IF NOT EXISTS by_webhook ON deliveries (webhook, state, seq);
"""
# Columns in the order of the fields of Webhook and WebhookDelivery
_WEBHOOK = "id, key, tbl, url, cond, cols, conflate, created, sel, ce"
_DELIVERY = "id, webhook, kind, position, body, state, attempts, status, error, at"


@dataclass(frozen=True, slots=True)
class Webhook:
    """A registered webhook: a subscription, and the URL that is called.

    Attributes:
        key: id of the key that made it; empty if there were no keys then.
        created: ms since the epoch.
        cloudevents: whether each message is sent as a CloudEvent.
    """

    id: str
    key: str
    table: str
    url: str
    where: str = ""
    columns: tuple[str, ...] = ()
    conflate: bool = False
    created: int = 0
    select: str = ""
    cloudevents: bool = False


@dataclass(frozen=True, slots=True)
class WebhookDelivery:
    """One message on its way to a webhook.

    Attributes:
        id: the same on every attempt, so that receivers recognize repeats.
        position: that it brings the receiver to; empty if none.
        body: the JSON text; empty once it was taken.
        state: :data:`DELIVERED`, :data:`FAILING` or :data:`DEAD`.
        status: of the last answer; 0 without an answer.
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


@dataclass(frozen=True, slots=True)
class WebhookProgress:
    """How far a webhook is.

    Attributes:
        position: that it resumes from.
        sent: of the last message, delivered or dead; changes that had nothing for it may have come since.
        state: ``active``, ``failing``, ``stopped`` or ``gone``.
    """

    position: str
    sent: str
    state: str
    detail: str


class WebhookStore:
    """See the module.

    Args:
        kept: deliveries, and as many dead ones, of each webhook.

    Raises:
        EnvironmentProblem: the file cannot be used.
    """

    def __init__(self, folder: Path, kept: int) -> None:
        self._kept = kept
        self._lock = threading.Lock()
        path = folder / "webhooks.db"
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            path.touch(mode=0o600)
            self._db = sqlite3.connect(path, timeout=30, isolation_level=None, check_same_thread=False)
            self._db.executescript(f"PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL; {_SCHEMA}")
        except (OSError, sqlite3.Error) as error:
            problem = f"webhooks cannot be kept in {path}: {error}"
            raise EnvironmentProblem(problem, "Let the server write there") from None

    def close(self) -> None:
        with self._lock:
            self._db.close()

    # Webhooks

    def add(self, webhook: Webhook, position: str, most: int) -> bool:
        """Add a webhook; False if there are ``most`` already."""
        with self._changing() as db:
            if db.execute("SELECT count(*) FROM webhooks").fetchone()[0] >= most:
                return False
            fields = [",".join(each) if isinstance(each, tuple) else each for each in astuple(webhook)]
            db.execute(
                f"INSERT INTO webhooks ({_WEBHOOK}, position, sent) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",  # noqa: S608
                [*fields, position, position],
            )
            return True

    def all(self) -> dict[str, Webhook]:
        """Webhooks by id, oldest first."""
        with self._lock:
            rows = self._db.execute(f"SELECT {_WEBHOOK} FROM webhooks ORDER BY created, id").fetchall()  # noqa: S608
        hooks = {}
        for ident, key, table, url, where, columns, conflate, created, select, cloudevents in rows:
            names = tuple(filter(None, columns.split(",")))
            hooks[ident] = Webhook(
                ident, key, table, url, where, names, bool(conflate), created, select, bool(cloudevents)
            )
        return hooks

    def progress(self, webhook: str) -> WebhookProgress:
        with self._lock:
            found = "SELECT position, sent, state, detail FROM webhooks WHERE id = ?"
            row = self._db.execute(found, (webhook,)).fetchone()
        return WebhookProgress(*row) if row is not None else WebhookProgress("", "", "gone", "")

    def remove(self, webhook: str) -> bool:
        """Remove a webhook and its deliveries."""
        with self._changing() as db:
            db.execute("DELETE FROM deliveries WHERE webhook = ?", (webhook,))
            return db.execute("DELETE FROM webhooks WHERE id = ?", (webhook,)).rowcount > 0

    def set_state(self, webhook: str, state: str, detail: str) -> None:
        with self._changing() as db:
            db.execute("UPDATE webhooks SET state = ?, detail = ? WHERE id = ?", (state, detail, webhook))

    def record_position(self, webhook: str, position: str) -> None:
        """Store a position up to which nothing had to be delivered."""
        with self._changing() as db:
            db.execute("UPDATE webhooks SET position = ? WHERE id = ?", (position, webhook))

    # Deliveries

    def record(self, delivery: WebhookDelivery, position: str | None = None) -> None:
        """Store a delivery's state, and the webhook's position if given. The oldest deliveries are dropped."""
        with self._changing() as db:
            db.execute(
                f"INSERT INTO deliveries ({_DELIVERY}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"  # noqa: S608 - names
                " ON CONFLICT (id) DO UPDATE SET body = excluded.body, state = excluded.state,"
                " attempts = excluded.attempts, status = excluded.status, error = excluded.error, at = excluded.at",
                astuple(delivery),
            )
            if position is not None:
                db.execute("UPDATE webhooks SET position = ?1, sent = ?1 WHERE id = ?2", (position, delivery.webhook))
            same = "=" if delivery.state == DEAD else "<>"
            db.execute(
                f"DELETE FROM deliveries WHERE webhook = ?1 AND state {same} '{DEAD}' AND seq <= (SELECT seq FROM"  # noqa: S608
                f" deliveries WHERE webhook = ?1 AND state {same} '{DEAD}' ORDER BY seq DESC LIMIT 1 OFFSET ?2)",
                (delivery.webhook, self._kept),
            )

    def deliveries(
        self, webhook: str, *, dead: bool, limit: int, before: int | None = None
    ) -> list[tuple[int, WebhookDelivery]]:
        """Deliveries with their numbers, newest first, older than ``before``."""
        state = "state = ?" if dead else "? <> ''"
        with self._lock:
            rows = self._db.execute(
                f"SELECT seq, {_DELIVERY} FROM deliveries WHERE webhook = ? AND {state} AND seq < ?"  # noqa: S608
                " ORDER BY seq DESC LIMIT ?",
                (webhook, DEAD, 2**62 if before is None else before, limit),
            ).fetchall()
        return [(row[0], WebhookDelivery(*row[1:])) for row in rows]

    @contextlib.contextmanager
    def _changing(self) -> Iterator[sqlite3.Connection]:
        with self._lock, self._db as db:
            db.execute("BEGIN IMMEDIATE")
            yield db

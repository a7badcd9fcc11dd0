"""One alert over the versions of its product."""

from __future__ import annotations

import hashlib
import json
from datetime import datetime, timedelta
from typing import Any

from sqlglot import exp

from lakehouse.alerts.book import EPOCH, AlertBook, Progress
from lakehouse.alerts.machine import Machine, Seen, joined
from lakehouse.contract.alerts import Alert
from lakehouse.contract.errors import QueryRefused
from lakehouse.contract.sql.spark import parse_condition
from lakehouse.queries.engine import Engine
from lakehouse.queries.errors import QueryError
from lakehouse.queries.follow import Follower

MAX_KEYS = 10_000  # of one alert, raised or about to be
SILENT_VERSIONS = 200  # after so many versions without a word the progress is committed all the same


class Watcher:
    """One alert over the versions of its product.

    Args:
        alert: its declaration.
        book: the table.

    Raises:
        QueryError: a condition is not one.
    """

    def __init__(self, alert: Alert, book: AlertBook) -> None:
        self.alert = alert
        self._book = book
        try:
            self._when, self._clear, self._value = (
                parse_condition(text) if text else None for text in (alert.when, alert.clear, alert.value)
            )
        except QueryRefused as refused:
            raise QueryError(alert.name, refused.problem, refused.remedy) from None
        to_raise, to_clear = alert.patience
        self.machine = Machine(to_raise, to_clear)
        declared = json.dumps([alert.product, alert.when, alert.clear, alert.by, str(alert.patience), alert.time])
        self._declared = hashlib.blake2b(declared.encode(), digest_size=8).hexdigest()
        self._clock = 0
        self._silent = SILENT_VERSIONS  # the first look is noted: from there on no version may be passed over
        self.version = -1
        self.table_id = ""
        self._resume()

    def _resume(self) -> None:
        progress = self._book.progress.get(self.alert.name, Progress())
        self.machine.raised = self._book.raised(self.alert.name)
        if progress.declared == self._declared:
            self.version, self.table_id = progress.version, progress.table
            self._clock, self._silent = progress.clock, 0
            self.machine.streaks = dict(progress.streaks)

    def look(self, product: Follower, engine: Engine) -> None:
        """Look at the version at which the product stands, and say what there is to say.

        A version that was looked at is passed over.

        Raises:
            QueryError: a condition fails, or too many keys are alerted.
        """
        if product.table_id == self.table_id and product.version <= self.version:
            return
        self.version, self.table_id = product.version, product.table_id
        found = self._found(product, engine)
        self._clock = max(self._clock, self._time(product, engine))
        turns = self.machine.look(found, self._clock)
        if len(self.machine.raised) + len(self.machine.streaks) > MAX_KEYS:
            raise QueryError(self.alert.name, f"it is raised for more than {MAX_KEYS:,} keys", "Alert on fewer keys")
        self._silent += 1
        if turns or self._silent >= SILENT_VERSIONS:
            progress = Progress(self._declared, self.table_id, self.version, self._clock, dict(self.machine.streaks))
            self._book.say(self.alert, turns, progress)
            self._silent = 0

    def _found(self, product: Follower, engine: Engine) -> dict[str, Seen]:
        by = self.alert.by or product.key
        if not by:
            raise QueryError(self.alert.name, "its product has no key", 'Add by = ["…"]')
        when = exp.Coalesce(this=self._when.copy(), expressions=[exp.false()])  # type: ignore[union-attr]
        clear = (
            exp.Coalesce(this=self._clear.copy(), expressions=[exp.false()]) if self._clear else exp.not_(when.copy())
        )
        value = exp.cast(self._value.copy(), "double") if self._value else exp.cast(exp.Null(), "double")
        inner = exp.select(*(exp.column(name, quoted=True) for name in by)).select(
            exp.alias_(when, "_when"), exp.alias_(clear, "_clear"), exp.alias_(value, "_value")
        )
        # What meets nothing, and would end what stands, says no more than a row that is not there.
        spoken = exp.or_(exp.column("_when"), exp.not_(exp.column("_clear")))
        tree = exp.select("*").from_(inner.from_(exp.to_table("rows_")).subquery("judged")).where(spoken)
        rows = engine.query(self.alert.name, tree, "rows_", product.rows())
        found: dict[str, Seen] = {}
        for row in rows.to_pylist():
            key = json.dumps({name: _plain(row[name]) for name in by}, ensure_ascii=False)
            found[key] = joined(found.get(key), Seen(row["_when"], row["_clear"], row["_value"]))
        return found

    def _time(self, product: Follower, engine: Engine) -> int:
        if not self.alert.time:
            return product.facts.newest
        newest = exp.alias_(exp.Max(this=exp.column(self.alert.time, quoted=True)), "newest")
        rows = engine.query(self.alert.name, exp.select(newest).from_("rows_"), "rows_", product.rows())
        found = rows["newest"][0].as_py()
        if found is not None and not isinstance(found, datetime):
            raise QueryError(self.alert.name, f"column {self.alert.time!r} is no timestamp", "Name one, or none")
        return int((found - EPOCH) / timedelta(milliseconds=1)) if found else 0


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)

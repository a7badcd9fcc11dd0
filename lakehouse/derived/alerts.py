"""Alerts: a condition over a product, said once when it comes about and once when it ends.

Each version of the product is looked at, in order. What an alert knows stands in table ``alerts``: a row for each key
that was ever raised, and in each commit's metadata the product version it reaches and the streaks that do not count
yet. So one commit holds what is said and how far was looked: after a crash the versions behind it are looked at again
and give the same; no alert is repeated and none forgotten.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake
from sqlglot import exp

from lakehouse.contract import lake as names
from lakehouse.contract.deltalog import DeltaLog
from lakehouse.contract.errors import QueryRefused, crash_point
from lakehouse.contract.lake import Lake
from lakehouse.contract.pipeline.folder import Alert, Patience
from lakehouse.contract.pipeline.tenants import TenantBorder
from lakehouse.contract.sql.spark import parse_condition
from lakehouse.derived.views import KEPT, Follower, ViewEngine
from lakehouse.errors import QueryError


@dataclass(frozen=True, slots=True)
class KeyVerdict:
    """What one version says of one key."""

    when: bool  # any of its rows meets the condition
    clear: bool  # all of them meet the condition that clears
    value: float | None = None


GONE = KeyVerdict(when=False, clear=True)


@dataclass(frozen=True, slots=True)
class Streak:
    """A condition that holds and does not count yet."""

    versions: int  # in a row
    since: int  # ms since the epoch by the product's clock


@dataclass(frozen=True, slots=True)
class AlertTurn:
    """A key whose alert was raised or cleared at a version."""

    key: str
    raised: bool
    since: int
    value: float | None


@dataclass
class AlertMachine:
    """One alert's memory; no I/O.

    Attributes:
        raised: keys whose alert stands.
        streaks: keys on their way to the other state.
        spent: keys that were cleared while ``when`` held; it must end before it raises them again.
    """

    to_raise: Patience
    to_clear: Patience
    raised: set[str] = field(default_factory=set)
    streaks: dict[str, Streak] = field(default_factory=dict)
    spent: set[str] = field(default_factory=set)

    def look(self, found: Mapping[str, KeyVerdict], clock: int) -> list[AlertTurn]:
        """Take in a version; returns what there is to say, in order of the keys.

        Args:
            found: every key that the version has; of a key that is not in it any more all rows are gone.
            clock: ms since the epoch by the product's clock.
        """
        turns = []
        for key in sorted(found.keys() | self.raised | self.streaks.keys() | self.spent):
            seen = found.get(key, GONE)
            up = key not in self.raised
            if not seen.when:
                self.spent.discard(key)
            if not (seen.when and key not in self.spent if up else seen.clear):
                self.streaks.pop(key, None)
                continue
            before = self.streaks.get(key)
            streak = Streak(before.versions + 1, before.since) if before else Streak(1, clock)
            patience = self.to_raise if up else self.to_clear
            if not patience.over(streak.versions, clock - streak.since):
                self.streaks[key] = streak
                continue
            self.streaks.pop(key, None)
            (self.raised.add if up else self.raised.discard)(key)
            if seen.when and not up:
                self.spent.add(key)
            turns.append(AlertTurn(key, up, streak.since, seen.value))
        return turns


def joined(one: KeyVerdict | None, other: KeyVerdict) -> KeyVerdict:
    """What several rows of one key say together: raised by any, cleared by all."""
    if one is None:
        return other
    if one.when != other.when:
        value = one.value if one.when else other.value
    else:
        value = max((v for v in (one.value, other.value) if v is not None), default=None)
    return KeyVerdict(one.when or other.when, one.clear and other.clear, value)


COMMIT_ALERTS = "millrace.alerts"  # JSON in the table's commitInfo: {alert: AlertProgress}
RAISED, CLEARED = "raised", "cleared"
CLEARED_KEPT = 1_000  # cleared rows of an alert that stay; the oldest go
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

COLUMNS = pa.schema(
    [
        ("alert", pa.string()),
        ("key", pa.string()),  # JSON object of the columns that tell one from another
        ("product", pa.string()),
        ("state", pa.string()),
        ("value", pa.float64()),
        ("since", pa.timestamp("us", "UTC")),  # when, by the product's clock, the condition began to hold
        ("raised_at", pa.timestamp("us", "UTC")),
        ("cleared_at", pa.timestamp("us", "UTC")),
        ("raised_version", pa.int64()),
        ("cleared_version", pa.int64()),
        ("tenant", pa.string()),  # of the key, where it names one; else the default tenant
    ]
)


@dataclass(frozen=True, slots=True)
class AlertProgress:
    """How far an alert has looked, with what the next start needs to go on."""

    declared: str = ""  # hash of its declaration; what was seen under another is not gone on with
    table: str = ""  # id of the product's table
    version: int = -1
    clock: int = 0
    streaks: Mapping[str, Streak] = field(default_factory=dict)  # keys on their way to the other state
    spent: Sequence[str] = ()

    @classmethod
    def read(cls, found: Mapping[str, Any]) -> AlertProgress:
        """From the table's commitInfo."""
        return cls(**{**found, "streaks": {key: Streak(**streak) for key, streak in found["streaks"].items()}})


class AlertBook:
    """Table ``alerts``; this process is its one writer."""

    def __init__(self, lake: Lake, border: TenantBorder) -> None:
        self._border = border
        self.progress: dict[str, AlertProgress] = {}
        self._rows: dict[tuple[str, str], dict[str, Any]] = {}
        table = lake.table("gold", names.ALERTS)
        properties = {names.PROPERTY_KEY: "alert,key", **KEPT}
        table.create(COLUMNS, properties, "Conditions over products: raised and cleared")
        self.delta = DeltaTable(str(table.path))
        if found := DeltaLog(table.path).newest_info(COMMIT_ALERTS, within=None):
            self.progress = {name: AlertProgress.read(progress) for name, progress in json.loads(found).items()}
        for row in self.delta.to_pyarrow_table().to_pylist():
            self._rows[row["alert"], row["key"]] = row | {"tenant": self._tenant(row["product"], row["key"])}

    def raised(self, alert: str) -> set[str]:
        """Keys for which the alert stands."""
        return {key for (name, key), row in self._rows.items() if name == alert and row["state"] == RAISED}

    def say(self, alert: Alert, turns: Sequence[AlertTurn], progress: AlertProgress) -> None:
        """Commit what an alert has to say, and how far it has looked, in one."""
        name, at = alert.name, EPOCH + timedelta(milliseconds=progress.clock)
        for turn in turns:
            row = self._rows.setdefault((name, turn.key), dict.fromkeys(COLUMNS.names))
            tenant = self._tenant(alert.product, turn.key)
            row |= {"alert": name, "key": turn.key, "product": alert.product, "tenant": tenant}
            if turn.raised:
                since = EPOCH + timedelta(milliseconds=turn.since)
                row |= {"state": RAISED, "value": turn.value, "since": since, "raised_at": at, "cleared_at": None}
                row |= {"raised_version": progress.version, "cleared_version": None}
            else:
                row |= {"state": CLEARED, "cleared_at": at, "cleared_version": progress.version}
        self.progress[name] = progress
        if turns:
            self._prune(name)
        self._commit(bool(turns), Transaction(f"alert-{name}-{progress.table}", progress.version))

    def keep_only(self, alerts: Iterable[str]) -> None:
        """Forget alerts that are declared no more, with their rows."""
        kept = set(alerts)
        gone = [at for at in self._rows if at[0] not in kept]
        self.progress = {name: found for name, found in self.progress.items() if name in kept}
        for at in gone:
            del self._rows[at]
        if gone:
            self._commit(True)

    def _tenant(self, product: str, key: str) -> str:
        return str(json.loads(key).get(self._border.columns.get(product, "")) or self._border.home)

    def _prune(self, name: str) -> None:
        cleared = [at for at, row in self._rows.items() if at[0] == name and row["state"] == CLEARED]
        cleared.sort(key=lambda at: (self._rows[at]["cleared_at"], at[1]))
        for at in cleared[: max(0, len(cleared) - CLEARED_KEPT)]:
            del self._rows[at]

    def _commit(self, changed: bool, *transactions: Transaction) -> None:
        rows = pa.Table.from_pylist(list(self._rows.values()) if changed else [], schema=COLUMNS)
        progress = {name: dataclasses.asdict(found) for name, found in self.progress.items()}
        crash_point("alerts.before_commit")
        write_deltalake(
            self.delta,
            rows,
            mode="overwrite" if changed else "append",
            commit_properties=CommitProperties(
                custom_metadata={COMMIT_ALERTS: json.dumps(progress, separators=(",", ":"))},
                app_transactions=list(transactions),
                max_commit_retries=0,
            ),
        )
        crash_point("alerts.after_commit")


MAX_KEYS = 10_000  # of one alert, raised or about to be
SILENT_VERSIONS = 200  # after so many versions without a word the progress is committed all the same


class Watcher:
    """One alert over the versions of its product. Raises QueryError: a condition is not one."""

    def __init__(self, alert: Alert, book: AlertBook) -> None:
        self.alert = alert
        self._book = book
        try:
            when = _certain(parse_condition(alert.when))
            clear = _certain(parse_condition(alert.clear)) if alert.clear else exp.not_(when)
            value = parse_condition(alert.value) if alert.value else exp.Null()
        except QueryRefused as refused:
            raise QueryError(alert.name, refused.problem, refused.remedy) from None
        verdict = {"_when": when, "_clear": clear, "_value": exp.cast(value, "double")}
        self._verdict = [exp.alias_(found, name) for name, found in verdict.items()]
        to_raise, to_clear = alert.patience
        self.machine = AlertMachine(to_raise, to_clear)
        declared = json.dumps([alert.product, alert.when, alert.clear, alert.by, str(alert.patience), alert.time])
        self._declared = hashlib.blake2b(declared.encode(), digest_size=8).hexdigest()
        self._clock = 0
        self._silent = SILENT_VERSIONS  # the first look is noted: from there on no version may be passed over
        self.version = -1
        self.table_id = ""
        progress = book.progress.get(alert.name, AlertProgress())
        self.machine.raised = book.raised(alert.name)
        if progress.declared == self._declared:
            self.version, self.table_id = progress.version, progress.table
            self._clock, self._silent = progress.clock, 0
            self.machine.streaks, self.machine.spent = dict(progress.streaks), set(progress.spent)

    def look(self, product: Follower, engine: ViewEngine) -> None:
        """Look at the version at which the product stands, unless that was done, and say what there is to say.

        Raises:
            QueryError: a condition fails, or too many keys are alerted.
        """
        if product.table_id == self.table_id and product.version <= self.version:
            return
        self.version, self.table_id = product.version, product.table_id
        found = self._found(product, engine)
        self._clock = max(self._clock, self._time(product, engine))
        turns = self.machine.look(found, self._clock)
        machine = self.machine
        if len(machine.raised) + len(machine.streaks) + len(machine.spent) > MAX_KEYS:
            raise QueryError(self.alert.name, f"it is raised for more than {MAX_KEYS:,} keys", "Alert on fewer keys")
        self._silent += 1
        if turns or self._silent >= SILENT_VERSIONS:
            known = dict(machine.streaks), sorted(machine.spent)
            progress = AlertProgress(self._declared, self.table_id, self.version, self._clock, *known)
            self._book.say(self.alert, turns, progress)
            self._silent = 0

    def _found(self, product: Follower, engine: ViewEngine) -> dict[str, KeyVerdict]:
        by = self.alert.by or product.key
        if not by:
            raise QueryError(self.alert.name, "its product has no key", 'Add by = ["…"]')
        inner = exp.select(*(exp.column(name, quoted=True) for name in by), *(part.copy() for part in self._verdict))
        # What meets nothing, and would end what stands, says no more than a row that is not there.
        spoken = exp.or_(exp.column("_when"), exp.not_(exp.column("_clear")))
        tree = exp.select("*").from_(inner.from_("rows_").subquery("judged")).where(spoken)
        rows = engine.query(self.alert.name, tree, "rows_", product.rows())
        found: dict[str, KeyVerdict] = {}
        for row in rows.to_pylist():
            key = json.dumps({name: _plain(row[name]) for name in by}, ensure_ascii=False)
            found[key] = joined(found.get(key), KeyVerdict(row["_when"], row["_clear"], row["_value"]))
        return found

    def _time(self, product: Follower, engine: ViewEngine) -> int:
        if not self.alert.time:
            return product.facts.newest_at or 0
        newest = exp.alias_(exp.Max(this=exp.column(self.alert.time, quoted=True)), "newest")
        rows = engine.query(self.alert.name, exp.select(newest).from_("rows_"), "rows_", product.rows())
        found = rows["newest"][0].as_py()
        if found is not None and not isinstance(found, datetime):
            raise QueryError(self.alert.name, f"column {self.alert.time!r} is no timestamp", "Name one, or none")
        return int((found - EPOCH) / timedelta(milliseconds=1)) if found else 0


def _certain(condition: exp.Expr) -> exp.Expr:
    """The condition, false where it is null."""
    return exp.Coalesce(this=condition, expressions=[exp.false()])


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)

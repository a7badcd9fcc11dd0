"""Table ``alerts``: what stands, and how far each alert has looked."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake

from lakehouse.alerts.machine import Streak, Turn
from lakehouse.contract import lake as names
from lakehouse.contract.alerts import Alert
from lakehouse.contract.deltalog import DeltaLog
from lakehouse.contract.faults import crash_point
from lakehouse.contract.lake import Lake
from lakehouse.queries.view import KEPT, sweep

COMMIT_ALERTS = "millrace.alerts"  # JSON in the table's commitInfo: {alert: Progress}
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
    ]
)


@dataclass(frozen=True, slots=True)
class Progress:
    """How far an alert has looked, with what the next start needs to go on.

    Attributes:
        declared: hash of its declaration; what was seen under another is not gone on with.
        table: id of the product's table.
        version: of the product.
        clock: ms since the epoch by the product's clock.
        streaks: keys on their way to the other state.
    """

    declared: str = ""
    table: str = ""
    version: int = -1
    clock: int = 0
    streaks: Mapping[str, Streak] = field(default_factory=dict)

    @classmethod
    def read(cls, found: Mapping[str, Any]) -> Progress:
        """From the table's commitInfo."""
        return cls(**{**found, "streaks": {key: Streak(**streak) for key, streak in found["streaks"].items()}})


class AlertBook:
    """Table ``alerts``; this process is its one writer."""

    def __init__(self, lake: Lake) -> None:
        self.table = lake.table("gold", names.ALERTS)
        self.progress: dict[str, Progress] = {}
        self._rows: dict[tuple[str, str], dict[str, Any]] = {}
        self._create()
        self._delta = DeltaTable(str(self.table.path))
        if found := DeltaLog(self.table.path).newest_info(COMMIT_ALERTS, within=None):
            self.progress = {name: Progress.read(progress) for name, progress in json.loads(found).items()}
        for row in self._delta.to_pyarrow_table().to_pylist():
            self._rows[row["alert"], row["key"]] = row

    def _create(self) -> None:
        if self.table.exists():
            return
        self.table.path.mkdir(parents=True, exist_ok=True)
        DeltaTable.create(
            str(self.table.path),
            schema=COLUMNS,
            mode="ignore",
            name=self.table.name,
            description="Conditions over products: raised and cleared",
            configuration={
                names.PROPERTY_KEY: "alert,key",
                **KEPT,
            },
            raise_if_key_not_exists=False,
        )

    def sweep(self) -> None:
        """Delete files that no position needs; between two commits, by their own thread."""
        sweep(self._delta)

    def raised(self, alert: str) -> set[str]:
        """Keys for which the alert stands."""
        return {key for (name, key), row in self._rows.items() if name == alert and row["state"] == RAISED}

    def say(self, alert: Alert, turns: Iterable[Turn], progress: Progress) -> None:
        """Commit what an alert has to say, and how far it has looked, in one."""
        name, at = alert.name, EPOCH + timedelta(milliseconds=progress.clock)
        changed = False
        for turn in turns:
            changed = True
            row = self._rows.setdefault((name, turn.key), dict.fromkeys(COLUMNS.names))
            row |= {"alert": name, "key": turn.key, "product": alert.product}
            if turn.raised:
                since = EPOCH + timedelta(milliseconds=turn.since)
                row |= {"state": RAISED, "value": turn.value, "since": since, "raised_at": at, "cleared_at": None}
                row |= {"raised_version": progress.version, "cleared_version": None}
            else:
                row |= {"state": CLEARED, "cleared_at": at, "cleared_version": progress.version}
        self.progress[name] = progress
        if changed:
            self._prune(name)
        self._commit(changed, Transaction(f"alert-{name}-{progress.table}", progress.version))

    def keep_only(self, alerts: Iterable[str]) -> None:
        """Forget alerts that are declared no more, with their rows."""
        kept = set(alerts)
        gone = [at for at in self._rows if at[0] not in kept]
        self.progress = {name: found for name, found in self.progress.items() if name in kept}
        for at in gone:
            del self._rows[at]
        if gone:
            self._commit(True)

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
            self._delta,
            rows,
            mode="overwrite" if changed else "append",
            commit_properties=CommitProperties(
                custom_metadata={COMMIT_ALERTS: json.dumps(progress, separators=(",", ":"))},
                app_transactions=list(transactions),
                max_commit_retries=0,
            ),
        )
        crash_point("alerts.after_commit")

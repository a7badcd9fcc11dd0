"""Small products written by delta-rs, as a driver writes them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, write_deltalake

from lakehouse.contract import lake as names
from lakehouse.contract.lake import Lake
from lakehouse.contract.pipeline import Pipeline, Source, View
from lakehouse.contract.pipeline.folder import Alert
from lakehouse.contract.settings import QuerySettings, Settings
from lakehouse.contract.storage import LakePath
from lakehouse.derived.derivations import Derivations
from lakehouse.derived.views import ViewEngine

T0 = datetime(2026, 1, 1, 12, tzinfo=UTC)
SCHEMA = pa.schema([("city", pa.string()), ("at", pa.timestamp("us", "UTC")), ("n", pa.int64()), ("kw", pa.float64())])


def at(minutes: float) -> datetime:
    """So long after the beginning."""
    return T0 + timedelta(minutes=minutes)


def ms(moment: datetime) -> int:
    """Since the epoch."""
    return int(moment.timestamp() * 1000)


class Product:
    """A product's table.

    Args:
        fold: of a table whose rows are partials.
    """

    def __init__(
        self,
        lake: Lake,
        name: str = "loads",
        fold: dict[str, str] | None = None,
        properties: dict[str, str] | None = None,
    ) -> None:
        self.ref = lake.table("gold", name)
        self.path = self.ref.path
        self._fold = fold
        configuration = {names.PROPERTY_KEY: "city,at", "delta.checkpointInterval": "1000000", **(properties or {})}
        if fold:
            configuration[names.PROPERTY_FOLD] = json.dumps(fold)
        self.path.mkdir(parents=True)
        DeltaTable.create(
            str(self.path), schema=SCHEMA, configuration=configuration, raise_if_key_not_exists=False, name=name
        )
        self._batch = 0

    def put(self, *rows: Sequence[Any], newest: datetime = T0) -> int:
        """Commit these rows, in place of all there are (or as further partials); returns the version."""
        self._batch += 1
        told = {
            names.COMMIT_THROUGH: json.dumps({"t/0": self._batch}),
            names.COMMIT_EVENTS: str(len(rows)),
            names.COMMIT_BATCH: f"q/{self._batch}",
            names.COMMIT_BRONZE: "{}",
            names.COMMIT_OLDEST: str(ms(newest)),
            names.COMMIT_NEWEST: str(ms(newest)),
        }
        made = pa.Table.from_pylist([dict(zip(SCHEMA.names, row, strict=True)) for row in rows], schema=SCHEMA)
        write_deltalake(
            str(self.path),
            made,
            mode="append" if self._fold else "overwrite",
            commit_properties=CommitProperties(custom_metadata=told),
        )
        return DeltaTable(str(self.path)).version()


def a_pipeline(views: Sequence[View] = (), alerts: Sequence[Alert] = ()) -> Pipeline:
    """A pipeline whose views and alerts may name any table."""
    pipeline = Pipeline({"s": Source(name="s", topic="t", schema="a INT", event_time="received_at")}, name="p")
    object.__setattr__(pipeline, "views", {view.name: view for view in views})
    object.__setattr__(pipeline, "alerts", {alert.name: alert for alert in alerts})
    return pipeline


class Driver:
    """A driver's views and alerts, without its thread: one turn after another."""

    def __init__(self, lake: Lake, pipeline: Pipeline, **limits: int) -> None:
        settings = Settings(lake=lake.root, queries=QuerySettings(**limits))
        self.derivations = Derivations(settings, pipeline, ("silver", "gold"))
        for view in pipeline.views.values():
            self.derivations.add(view)
        self._engine = ViewEngine()

    def turn(self) -> None:
        """Look at what is declared, then at everything."""
        self.derivations.scan()
        self.derivations.turn(self._engine)


def rows_of(lake: Lake, name: str, layer: str = "gold") -> list[dict[str, Any]]:
    """A table's rows."""
    return DeltaTable(str(lake.table(layer, name).path)).to_pyarrow_table().to_pylist()  # type: ignore[no-any-return]


def versions(path: LakePath) -> int:
    """The newest version."""
    return DeltaTable(str(path)).version()

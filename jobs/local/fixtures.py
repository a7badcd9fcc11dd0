"""Fixtures of a pipeline, run through Spark: events in, expected rows of products out.

``tests/NAME/input.jsonl`` beside ``pipeline.toml`` holds events, one JSON object a line; with several sources
``input.SOURCE.jsonl``. ``tests/NAME/PRODUCT.jsonl`` holds the rows that the product, view or ``quarantine`` must then
have: all of them, with the columns that are to be compared. They are built as a replay builds them
(:mod:`lakehouse.batch`), in a lake of their own. Each event arrives at its event time.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable, write_deltalake
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from lakehouse.batch import build, clock_of, rejected_rows, run_partial
from lakehouse.bronze.table import COLUMNS, create
from lakehouse.contract.envelope import fingerprint
from lakehouse.contract.errors import ConfigError, did_you_mean
from lakehouse.contract.lake import QUARANTINE, Lake, TableRef
from lakehouse.contract.pipeline import Pipeline, Product, Source, View
from lakehouse.derived.views import Follower, ViewEngine, ViewKeeper
from lakehouse.gold.mark import BatchMark
from lakehouse.gold.state_store import StateStore, store_of
from lakehouse.silver.conform import conform
from lakehouse.stateful.live_join import JoinedSources

INPUT = "input"
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_CLOSE = 1e-6  # relative difference of two numbers that are taken for the same


@dataclass(frozen=True, slots=True)
class Fixture:
    """One folder below ``tests``.

    Attributes:
        events: payloads by source.
        expected: rows by product, view or ``quarantine``.
    """

    folder: Path
    events: dict[str, list[bytes]]
    expected: dict[str, list[dict[str, Any]]]


@dataclass(frozen=True, slots=True)
class Difference:
    """Where a table is not as expected.

    Attributes:
        problem: ``missing`` (expected, and not there), ``unexpected`` or ``different``.
        row: as expected; of an unexpected row as it is, with the columns that are compared.
        cells: of a different row: column to its expected and its actual value.
    """

    problem: str
    row: dict[str, Any]
    cells: dict[str, tuple[Any, Any]]


@dataclass(frozen=True, slots=True)
class FixtureResult:
    """What became of one table of a fixture.

    Attributes:
        table: the product, view or ``quarantine``.
        rows: that it has.
        differences: none: it is as expected.
    """

    fixture: str
    table: str
    rows: int
    differences: tuple[Difference, ...]


def read_fixtures(pipeline: Pipeline) -> list[Fixture]:
    """The pipeline's fixtures, by name. Raises ConfigError: there is none, or a file is not what it has to be."""
    folder = pipeline.path.parent / "tests"
    found = [_read(path, pipeline) for path in sorted(folder.glob("*/")) if any(path.glob("*.jsonl"))]
    if not found:
        remedy = "Write NAME/input.jsonl there, and NAME/PRODUCT.jsonl with the rows that you expect"
        raise ConfigError("there are no fixtures", file=folder, remedy=remedy)
    return found


def _read(folder: Path, pipeline: Pipeline) -> Fixture:
    events: dict[str, list[bytes]] = {}
    expected: dict[str, list[dict[str, Any]]] = {}
    tables = [*pipeline.products, *pipeline.views, QUARANTINE]
    for file in sorted(folder.glob("*.jsonl")):
        name = file.name.removesuffix(".jsonl")
        stem, _, source = name.partition(".")
        if stem == INPUT:
            source = source or (next(iter(pipeline.sources)) if len(pipeline.sources) == 1 else "")
            if source not in pipeline.sources:
                remedy = f"Call it {INPUT}.SOURCE.jsonl: {', '.join(pipeline.sources)}"
                raise ConfigError("whose events are they?", file=file, remedy=remedy)
            events[source] = [line for line in file.read_bytes().split(b"\n") if line.strip()]
        elif name in tables:
            expected[name] = list(_rows(file))
        else:
            raise ConfigError(f"there is no product {name!r}", file=file, remedy=did_you_mean(name, tables))
    if not events or not expected:
        problem = f"no {INPUT}.jsonl" if not events else "nothing is expected"
        raise ConfigError(problem, file=folder, remedy=f"Write {INPUT}.jsonl, and PRODUCT.jsonl for a product")
    return Fixture(folder, events, expected)


def _rows(file: Path) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"not JSON: {error}", file=file, line=number) from None
        if not isinstance(row, dict):
            raise ConfigError("not a JSON object", file=file, line=number, remedy="Write one row a line")
        yield row


def run_fixture(spark: SparkSession, pipeline: Pipeline, fixture: Fixture) -> Iterator[FixtureResult]:
    """Build what the fixture expects something of, and compare it, table by table."""
    with tempfile.TemporaryDirectory(prefix="millrace-test-") as folder:
        tables = _Tables(spark, pipeline, Lake(Path(folder)), fixture)
        for name, expected in fixture.expected.items():
            actual = tables.rows_of(name)
            found = tuple(compare_rows(expected, actual.to_pylist(), tables.key_of(name)))
            yield FixtureResult(fixture.folder.name, name, actual.num_rows, found)


class _Tables:
    """The tables of a fixture, each built when it is first asked for."""

    def __init__(self, spark: SparkSession, pipeline: Pipeline, lake: Lake, fixture: Fixture) -> None:
        self._spark, self._pipeline, self._lake = spark, pipeline, lake
        self._events: dict[str, DataFrame] = {}
        self._keys: dict[str, tuple[str, ...]] = {QUARANTINE: ()}
        for source in pipeline.sources.values():
            self._record(source, fixture.events.get(source.name, []))

    def key_of(self, name: str) -> tuple[str, ...]:
        """Columns that name a row of a table that was built."""
        return self._keys[name]

    def rows_of(self, name: str) -> pa.Table:
        """The result rows of a product, view or of quarantine."""
        if name == QUARANTINE:
            sources = [self._pipeline.sources[source] for source in self._events]
            return pa.concat_tables([rejected_rows(self._events[source.name], source) for source in sources])
        if name in self._pipeline.products:
            return self._product(self._pipeline.products[name])
        if not self._table(self._pipeline.views[name].base).exists():
            self.rows_of(self._pipeline.views[name].base)
        return self._view(name)

    def _record(self, source: Source, payloads: Sequence[bytes]) -> None:
        """Write the events into bronze, each as if it had arrived at its event time."""
        table = self._lake.bronze(source.name)
        create(table)
        rows = [
            {
                "event_id": f"@fixture/{number}",  # conform makes it from the payload, where the source says how
                **dict.fromkeys(("received_at", "broker_time", "bronze_at"), _EPOCH),
                "source": source.name,
                "tenant": "default",
                "collector": "fixture",
                "topic": source.topic,
                "partition": 0,
                "offset": number,
                "origin": "stream",
                "suspect": False,
                "headers": [],
                "payload": payload,
                "fingerprint": fingerprint(payload),
                "date": _EPOCH.date(),
            }
            for number, payload in enumerate(payloads)
        ]
        made = pa.Table.from_pylist(rows, schema=COLUMNS)
        if rows:
            events = conform(self._spark.createDataFrame(made), source).select("offset", "event_time").toArrow()
            times = dict(zip(events["offset"].to_pylist(), events["event_time"].to_pylist(), strict=True))
            arrived = pa.array([times[row["offset"]] or _EPOCH for row in rows], COLUMNS.field("received_at").type)
            made = made.set_column(COLUMNS.get_field_index("received_at"), "received_at", arrived)
            write_deltalake(str(table.path), made, mode="append")
            self._events[source.name] = build(self._spark, table.path, source, 1).persist()

    def _table(self, name: str) -> TableRef:
        tables: dict[str, Product | View] = {**self._pipeline.products, **self._pipeline.views}
        one = tables[name]
        return self._lake.table(one.layer, name)

    def _product(self, product: Product) -> pa.Table:
        store = store_of(product, self._table(product.name), self._pipeline.name)
        self._keys[product.name] = store.operator.key
        if product.operator == "join":
            sides = [self._lake.bronze(name) for name in (product.source, product.right)]
            versions = [DeltaTable(str(side.path)).version() for side in sides]
            joined = JoinedSources(self._spark, self._pipeline, product)
            partial, clock = joined.build([side.path for side in sides], versions)
        else:
            events = self._events.get(product.source)
            if events is None:
                source = self._pipeline.sources[product.source]
                events = build(self._spark, self._lake.bronze(source.name).path, source, 0)
            valid = events.where(F.col("reason").isNull())
            partial, clock = run_partial(valid, product.source, store.operator), clock_of(valid)
        if isinstance(store, StateStore):
            store.now = lambda: clock or 0  # time stands still at the newest event
        store.replace(partial, BatchMark("fixture", (1,), clock=clock))
        rows = DeltaTable(str(store.table.path)).to_pyarrow_table()
        return store.results(rows, partial, clock)[0]

    def _view(self, name: str) -> pa.Table:
        view, engine = self._pipeline.views[name], ViewEngine()
        keeper = ViewKeeper(view, self._table(name), self._pipeline.name, max_rows=10**9, max_columns=10**4)
        self._keys[name] = keeper.key
        with closing(engine), closing(Follower(self._table(view.base), max_rows=10**9)) as base:
            base.open()
            keeper.refresh(base, engine)
        return DeltaTable(str(keeper.table.path)).to_pyarrow_table()


def compare_rows(
    expected: Sequence[dict[str, Any]], actual: Sequence[dict[str, Any]], key: Sequence[str]
) -> Iterator[Difference]:
    """Differences between two sets of rows, in the columns that the expected rows name.

    Rows that are equal are taken away first. Of the others, two that agree in the key are one row with different cells.
    """
    columns = list(dict.fromkeys(name for row in expected for name in row))
    named = [name for name in key if name in columns]
    left = [{name: _plain(row.get(name)) for name in columns} for row in actual] if columns else list(actual)
    missing = []
    for row in expected:
        wanted = {name: row.get(name) for name in columns}
        same = next((n for n, other in enumerate(left) if all(_same(wanted[c], other[c]) for c in columns)), None)
        if same is None:
            missing.append(wanted)
        else:
            del left[same]
    for wanted in missing:
        alike = (n for n, other in enumerate(left) if named and all(_same(wanted[c], other[c]) for c in named))
        near = next(alike, None)
        if near is None:
            yield Difference("missing", wanted, {})
            continue
        other = left.pop(near)
        cells = {c: (wanted[c], other[c]) for c in columns if not _same(wanted[c], other[c])}
        yield Difference("different", wanted, cells)
    for other in left:
        yield Difference("unexpected", {name: _plain(value) for name, value in other.items()}, {})


def _same(wanted: Any, found: Any) -> bool:
    if isinstance(wanted, bool) or isinstance(found, bool):
        return wanted is found
    if isinstance(wanted, int | float) and isinstance(found, int | float):
        return math.isclose(wanted, found, rel_tol=_CLOSE)
    if isinstance(wanted, str) and isinstance(found, str) and wanted != found:
        return _instant(wanted) is not None and _instant(wanted) == _instant(found)
    return bool(wanted == found)


def _instant(text: str) -> datetime | None:
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        return None
    return found.replace(tzinfo=UTC) if found.tzinfo is None else found


def _plain(value: Any) -> Any:
    """As JSON has it."""
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat().replace("+00:00", "Z")
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, bytes):
        return f"{len(value)} bytes"
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)

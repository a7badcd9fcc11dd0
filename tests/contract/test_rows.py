"""One contract for everybody who folds partial rows: Arrow, DuckDB's SQL, the server's snapshot and tail, the
collector's look-up. Each is given the same rows in the same commits and must answer the same."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from hypothesis import given, settings
from hypothesis import strategies as st

from ingest.answers.tables import ProductRows, TenantRows
from lakehouse.contract import rows as contract
from lakehouse.contract.deltalog import DeltaLog
from lakehouse.contract.lake import PROPERTY_FOLD, PROPERTY_KEY, PROPERTY_ORDER, Lake
from lakehouse.contract.rows import Fold, KeyedRows, UnknownColumn
from serve.core.messages import rows_of
from serve.sql.statement import run_sql
from serve.tables.state import TableReader, TableState

OFFERS = pa.schema([("sku", pa.string()), ("price", pa.int64()), ("at", pa.int64()), ("tie", pa.int64())])
LATEST = Fold(("sku",), {"price": "latest", "at": "latest", "tie": "latest"}, ("at", "tie"))
SUMS = pa.schema(
    [
        ("city", pa.string()),
        ("zone", pa.int32()),
        ("visits", pa.int32()),
        ("spent", pa.decimal128(12, 2)),
        ("first", pa.timestamp("us", "UTC")),
        ("last", pa.string()),
    ]
)
SUMMED = Fold(("city", "zone"), {"visits": "sum", "spent": "sum", "first": "min", "last": "max"})

Commits = Sequence[Sequence[Mapping[str, Any]]]
Rows = dict[tuple[Any, ...], tuple[Any, ...]]
"""Row by key."""


class Table:
    """A table of partials on disk, with one commit for each list of rows."""

    def __init__(self, root: Path, fold: Fold, schema: pa.Schema, commits: Commits) -> None:
        self.lake = Lake(root)
        self.ref = self.lake.table("gold", "folded")
        self.fold, self.schema = fold, schema
        self.parts = [pa.Table.from_pylist(list(rows), schema=schema) for rows in commits]
        self.ref.path.parent.mkdir(parents=True)
        properties = {PROPERTY_KEY: ",".join(fold.key), PROPERTY_FOLD: json.dumps(dict(fold.how))}
        properties |= {PROPERTY_ORDER: ",".join(fold.order)} if fold.order else {}
        delta = DeltaTable.create(self.ref.path, schema, configuration=properties, raise_if_key_not_exists=False)
        for part in self.parts:
            write_deltalake(delta, part, mode="append")

    def keyed(self, rows: pa.Table) -> Rows:
        """In the form in which readers are compared: that of the server."""
        assert rows.schema.names == self.schema.names
        key_at = [self.schema.names.index(name) for name in self.fold.key]
        found = [(tuple(row[i] for i in key_at), row) for row in rows_of(rows.cast(self.schema))]
        assert len(dict(found)) == len(found), "a key comes once"
        return dict(found)


def by_arrow(table: Table) -> Rows:
    return table.keyed(table.fold.arrow(pa.concat_tables([table.schema.empty_table(), *table.parts])))


def by_arrow_in_steps(table: Table) -> Rows:
    """Folding is associative: partials on top of what was folded before."""
    folded = table.schema.empty_table()
    for part in table.parts:
        folded = table.fold.arrow(pa.concat_tables([folded, part]))
    return table.keyed(folded)


def by_duckdb(table: Table) -> Rows:
    partials = pa.concat_tables([table.schema.empty_table(), *table.parts])
    with duckdb.connect() as connection:
        connection.execute("SET TimeZone = 'UTC'")
        connection.register("partials", partials)
        types = dict(zip(table.schema.names, map(str, connection.table("partials").types), strict=True))
        return table.keyed(connection.sql(table.fold.sql("partials", table.schema.names, types)).to_arrow_table())


def by_sql_over_the_lake(table: Table) -> Rows:
    return table.keyed(pa.table(run_sql(table.lake, "SELECT * FROM folded")))


def by_snapshot(table: Table) -> Rows:
    return TableReader(table.ref.path).load().rows


def by_tail(table: Table) -> Rows:
    reader, log = TableReader(table.ref.path), DeltaLog(table.ref.path)
    state: TableState = reader.load(0)
    for version in log.versions()[1:]:
        reader.advance(state, log.read(version))
    return state.rows


def by_look_up(table: Table) -> Rows:
    """Key by key, as the collector answers."""
    products = ProductRows(table.lake)
    found: Rows = {}
    for part in table.parts:
        for row in part.select(list(table.fold.key)).to_pylist():
            if None not in row.values():  # a key is asked for as text: there is none for NULL
                rows = products.by_key(TenantRows("folded"), [str(value) for value in row.values()]).rows
                found |= table.keyed(pa.Table.from_pylist(rows, schema=table.schema))
    return found


READERS: Sequence[Callable[[Table], Rows]] = [
    by_arrow,
    by_arrow_in_steps,
    by_duckdb,
    by_sql_over_the_lake,
    by_snapshot,
    by_tail,
    by_look_up,
]


def offer(price: int | None, at: int | None, tie: int = 0) -> dict[str, Any]:
    return {"sku": "a", "price": price, "at": at, "tie": tie}


@pytest.mark.parametrize("one_commit", [True, False])
@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize(
    ("rows", "counts"),
    [
        ([offer(10, 1), offer(None, 2)], offer(None, 2)),
        ([offer(None, 1), offer(10, 2)], offer(10, 2)),
        ([offer(10, 1), offer(20, None)], offer(10, 1)),
        ([offer(10, None, 1), offer(20, None, 2)], offer(20, None, 2)),
        ([offer(10, 2, 1), offer(20, 2, 3), offer(30, 2, 2)], offer(20, 2, 3)),
        ([offer(10, -5, 9), offer(20, -4, 1)], offer(20, -4, 1)),
    ],
    ids=["null value", "value after null", "null order", "only null orders", "second column", "negative"],
)
@pytest.mark.parametrize("reader", READERS)
def test_latest_takes_the_whole_row_with_the_greatest_order(
    reader: Callable[[Table], Rows],
    rows: list[dict[str, Any]],
    counts: dict[str, Any],
    backwards: bool,
    one_commit: bool,
    tmp_path: Path,
) -> None:
    ordered = rows[::-1] if backwards else rows
    commits = [ordered] if one_commit else [[row] for row in ordered]
    assert reader(Table(tmp_path, LATEST, OFFERS, commits)) == {("a",): tuple(counts.values())}


@pytest.mark.parametrize("reader", READERS)
def test_sums_pass_over_nulls(reader: Callable[[Table], Rows], tmp_path: Path) -> None:
    row: dict[str, Any] = {"city": "Ulm", "zone": 1, "visits": None, "spent": None, "first": None, "last": None}
    commits = [[row], [row | {"visits": 2, "last": "b"}, row | {"visits": 3, "last": "a"}]]
    assert reader(Table(tmp_path, SUMMED, SUMS, commits)) == {("Ulm", 1): ("Ulm", 1, 5, None, None, "b")}


@st.composite
def offers(draw: st.DrawFn) -> Commits:
    """Commits of offers; the second order column tells all rows apart, as the operator's tie does."""
    times = draw(st.lists(st.one_of(st.none(), st.integers(-3, 3)), min_size=1, max_size=12))
    ties = draw(st.permutations(range(len(times))))
    rows = [
        {
            "sku": draw(st.sampled_from("ab")),
            "price": draw(st.one_of(st.none(), st.integers(0, 9))),
            "at": at,
            "tie": tie,
        }
        for at, tie in zip(times, ties, strict=True)
    ]
    cut = draw(st.integers(0, len(rows)))
    return [rows[:cut], rows[cut:]]


def partials() -> st.SearchStrategy[Commits]:
    row = st.fixed_dictionaries(
        {
            "city": st.sampled_from(["Bonn", "Ulm"]),
            "zone": st.integers(0, 1),
            "visits": st.one_of(st.none(), st.integers(-1_000, 1_000)),
            "spent": st.one_of(st.none(), st.decimals(-100, 100, places=2)),
            "first": st.one_of(st.none(), st.datetimes(timezones=st.just(UTC))),
            "last": st.one_of(st.none(), st.text("abc", max_size=3)),
        }
    )
    return st.lists(st.lists(row, max_size=5), max_size=3)


@settings(max_examples=25, deadline=None)
@given(offers())
def test_every_reader_chooses_the_same_latest_rows(commits: Commits) -> None:
    _all_agree(LATEST, OFFERS, commits)


@settings(max_examples=25, deadline=None)
@given(partials())
def test_every_reader_sums_alike(commits: Commits) -> None:
    _all_agree(SUMMED, SUMS, commits)


def _all_agree(fold: Fold, schema: pa.Schema, commits: Commits) -> None:
    with tempfile.TemporaryDirectory() as folder:
        table = Table(Path(folder), fold, schema, commits)
        wanted, *others = [(reader.__name__, reader(table)) for reader in READERS]
    for name, found in others:
        assert found == wanted[1], name


@pytest.mark.parametrize("in_memory", [True, False])
def test_a_look_up_by_another_column_asks_what_the_rows_fold_to(
    in_memory: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contract, "IN_MEMORY_ROWS", 100 if in_memory else 0)
    table = Table(tmp_path, LATEST, OFFERS, [[offer(10, 1)], [offer(20, 2)]])
    rows = KeyedRows(table.ref.path)
    assert rows.find({"price": ["10"]})[1].num_rows == 0, "no row has this price any more"
    assert rows.find({"price": ["20"]})[1].to_pylist() == [offer(20, 2)]
    assert rows.find({"sku": ["a", "b"], "at": ["2"]})[0] == 2
    with pytest.raises(UnknownColumn, match="no column 'nobody'"):
        rows.find({"nobody": ["1"]})


@pytest.mark.parametrize(
    ("properties", "problem"),
    [
        ({PROPERTY_FOLD: "no json"}, "is not JSON"),
        ({PROPERTY_FOLD: '{"n": "median"}'}, "is not an object of sum, min, max, latest"),
        ({PROPERTY_FOLD: '{"n": "latest"}'}, "its metadata has no millrace.order"),
    ],
)
def test_properties_that_describe_no_fold(properties: dict[str, str], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        Fold.from_properties(properties)


def test_a_table_without_the_property_has_no_partials() -> None:
    assert Fold.from_properties({PROPERTY_KEY: "a", PROPERTY_FOLD: ""}) is None

"""Product tables: each batch once, merged with what the table holds, and which files are read and written anew."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections import Counter
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession

from lakehouse.contract import lake as names
from lakehouse.contract.deltalog import AddedFile, DeltaLog, TableGone
from lakehouse.contract.lake import Lake
from lakehouse.contract.pipeline import Product
from lakehouse.errors import TableBusy
from lakehouse.gold.mark import BatchMark
from lakehouse.gold.store import DataFiles, ProductStore, stats_of
from tests.lakehouse.operators.test_top_n import exact, partial, shown

START = datetime(2026, 1, 1, tzinfo=UTC)
TIMES = pa.timestamp("us", "UTC")
COUNTS = "SELECT window.start AS window_start, city, count(*) AS n FROM r GROUP BY window(t, '1 minute'), city"
WINDOWED = Product("gold", "r", COUNTS, name="counts")
PARTIALS = Product("silver", "r", COUNTS, storage="append", name="partials")
PLAIN = Product("gold", "r", "SELECT city, count(*) AS n FROM r GROUP BY city", name="plain")
TOP = Product("gold", "r", "SELECT t, i FROM r", operator="top_n", item="i", time="t", n=3, name="top")


def store(root: Path, product: Product = WINDOWED) -> ProductStore:
    return ProductStore(product, Lake(root).table(product.layer, product.name), "test")


def counts(*rows: tuple[int, str, int]) -> pa.Table:
    """Partial rows: minute, city, events. Times without a zone, as Spark gives them."""
    made = [{"window_start": START + timedelta(minutes=m), "city": city, "n": n} for m, city, n in rows]
    schema = [("window_start", pa.timestamp("us", "UTC")), ("city", pa.string()), ("n", pa.int64())]
    return pa.Table.from_pylist(made, schema=pa.schema(schema))


def mark(batch: int, query: str = "q", **options: Any) -> BatchMark:
    return BatchMark(query, (batch,), **options)


def held(made: ProductStore) -> list[tuple[int, str, int]]:
    rows = DeltaTable(str(made.table.path)).to_pyarrow_table().to_pylist()
    return sorted(((row["window_start"] - START) // timedelta(minutes=1), row["city"], row["n"]) for row in rows)


def test_a_repeated_batch_is_skipped(tmp_path: Path) -> None:
    first = store(tmp_path)
    version = first.apply(counts((0, "a", 1), (0, "b", 2)), mark(0))
    assert first.apply(counts((0, "a", 1), (0, "b", 2)), mark(0)) == version
    again = store(tmp_path)
    assert again.holds(mark(0))
    assert not again.holds(mark(1))
    assert not again.holds(mark(0, "other"))
    assert again.apply(counts((0, "a", 1)), mark(0)) == version
    assert again.apply(counts((0, "a", 10)), mark(1)) == version + 1
    assert held(again) == [(0, "a", 11), (0, "b", 2)]


def test_an_old_window_is_read_back_from_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = store(tmp_path)
    monkeypatch.setattr("lakehouse.gold.store._HOT_BYTES", 100)
    for batch in range(20):
        made.apply(counts((batch, "a", 1)), mark(batch))
    made.apply(counts((0, "a", 5), (0, "b", 1), (9, "a", 1)), mark(1_000))  # forgotten by memory
    again = store(tmp_path)
    again.apply(counts((1, "a", 5)), mark(1_001))
    found = {(minute, city): n for minute, city, n in held(again)}
    assert (found[0, "a"], found[0, "b"], found[1, "a"], found[9, "a"]) == (6, 1, 6, 2)
    assert sum(found.values()) == 20 + 12


def test_a_window_of_long_ago(tmp_path: Path) -> None:
    made = store(tmp_path)
    year = timedelta(days=-365 * 2000) // timedelta(minutes=1)
    made.apply(counts((year, "a", 1), (0, "a", 1)), mark(0))
    store(tmp_path).apply(counts((year, "a", 2)), mark(1))
    assert held(made) == [(year, "a", 3), (0, "a", 1)]


def test_a_product_of_partials_is_folded_on_read(tmp_path: Path) -> None:
    made = store(tmp_path, PARTIALS)
    for batch in range(3):
        made.apply(counts((0, "a", 1), (batch, "b", 2)), mark(batch))
        made.apply(counts((0, "a", 1), (batch, "b", 2)), mark(batch))
    assert made.folded
    rows = DeltaTable(str(made.table.path)).to_pyarrow_table()
    assert rows.num_rows == 6
    made.operator.describe(rows.schema)
    folded = made.operator.merge(None, rows).to_pylist()
    assert sorted((row["city"], row["n"]) for row in folded) == [("a", 3), ("b", 2), ("b", 2), ("b", 2)]
    properties = DeltaTable(str(made.table.path)).metadata().configuration
    assert properties[names.PROPERTY_FOLD] == '{"n": "sum"}'
    assert properties[names.PROPERTY_KEY] == "window_start,city"
    assert properties[names.PROPERTY_PIPELINE] == "test"


def test_a_product_without_windows_is_one_piece(tmp_path: Path) -> None:
    made = store(tmp_path, PLAIN)
    schema = pa.schema([("city", pa.string()), ("n", pa.int64())])
    for batch, row in enumerate([("a", 1), ("b", 1), ("a", 2)]):
        made.apply(pa.table([[row[0]], [row[1]]], schema=schema), mark(batch))
    rows = DeltaTable(str(made.table.path)).to_pyarrow_table().to_pylist()
    assert sorted((row["city"], row["n"]) for row in rows) == [("a", 3), ("b", 1)]


@pytest.mark.parametrize("kind", [pa.timestamp("us", "UTC"), pa.date32(), pa.string()])
def test_a_window_start_may_be_anything(tmp_path: Path, kind: pa.DataType) -> None:
    """Not only ``window.start``: a truncated time, a date, a text, and nothing."""
    product = Product("gold", "r", "SELECT x AS window_start, count(*) AS n FROM r GROUP BY x", name="any")
    made = store(tmp_path, product)
    starts = pa.array([START, None, START + timedelta(days=1)], pa.timestamp("us", "UTC"))
    partial = pa.table({"window_start": starts.cast(kind), "n": [1, 2, 3]})
    made.apply(partial, mark(0))
    made.apply(partial.slice(1, 1), mark(1))
    store(tmp_path, product).apply(partial, mark(2))
    rows = DeltaTable(str(made.table.path)).to_pyarrow_table().to_pylist()
    assert sorted(row["n"] for row in rows) == [2, 6, 6]
    assert sum(row["n"] for row in rows if row["window_start"] is None) == 6


def test_many_windows_are_one_read_and_one_commit(tmp_path: Path) -> None:
    sliding = COUNTS.replace("'1 minute'", "'6 hours', '1 minute'")
    made = store(tmp_path, Product("gold", "r", sliding, name="sliding"))
    version = made.apply(counts((0, "a", 1), (0, "b", 1)), mark(0))
    assert len(held(made)) == 2 * 360
    made = store(tmp_path, made.product)
    assert made.apply(counts((1, "a", 1), (2, "a", 1)), mark(1)) == version + 1
    found = held(made)
    assert Counter(n for _, city, n in found if city == "a") == {3: 358, 2: 2, 1: 2}
    assert DeltaTable(str(made.table.path)).to_pyarrow_table().num_rows == 2 * 360 + 2


def test_a_batch_without_rows_moves_the_position_on(tmp_path: Path) -> None:
    made = store(tmp_path)
    made.apply(counts((0, "a", 1)), mark(0))
    version = made.apply(counts(), mark(1, through={"t/0": 9}))
    assert version == 2
    assert held(made) == [(0, "a", 1)]
    found = store(tmp_path).mark()
    assert found is not None
    assert (found.transaction, found.through) == (1, {"t/0": 9})
    assert store(tmp_path).holds(mark(1))


def test_the_mark_is_read_back(tmp_path: Path) -> None:
    made = store(tmp_path)
    assert made.mark() is None
    written = mark(7, "a/b", through={"t/0": 5, "t/1": 0}, events=3, oldest=1_000, newest=2_000)
    made.apply(counts((0, "a", 1)), written)
    DeltaTable(str(made.table.path)).optimize.compact()
    found = store(tmp_path).mark()
    assert found == BatchMark("a/b", (7,), {"t/0": 5, "t/1": 0}, 3)  # times are for subscribers
    info = DeltaTable(str(made.table.path)).history()
    commit = next(entry for entry in info if names.COMMIT_BATCH in entry)
    assert (commit[names.COMMIT_OLDEST], commit[names.COMMIT_NEWEST]) == ("1000", "2000")


def test_replace_puts_a_build_in_place_of_everything(tmp_path: Path) -> None:
    made = store(tmp_path)
    made.apply(counts((0, "a", 1), (1, "a", 1)), mark(0))
    made.replace(counts((0, "a", 40), (0, "a", 2), (2, "b", 1)), mark(5, "build"))
    assert held(made) == [(0, "a", 42), (2, "b", 1)]
    assert made.holds(mark(5, "build"))
    made.apply(counts((0, "a", 1)), mark(1))  # not merged with rows from before
    assert held(made) == [(0, "a", 43), (2, "b", 1)]
    made.replace(counts(), mark(6, "build"))
    assert held(made) == []


def test_a_second_writer_is_heard(tmp_path: Path) -> None:
    one, other = store(tmp_path), store(tmp_path)
    one.apply(counts((0, "a", 1)), mark(0))
    other.apply(counts((0, "a", 1)), mark(1))
    with pytest.raises(TableBusy, match="counts"):
        one.apply(counts((0, "a", 1)), mark(2))
    assert held(store(tmp_path)) == [(0, "a", 2)]


@settings(deadline=None, max_examples=12)
@given(
    st.lists(st.lists(st.tuples(st.integers(0, 3), st.sampled_from("abcd")), max_size=8), min_size=1, max_size=5),
    st.data(),
)
def test_any_repetition_and_restart_gives_the_same_rows(
    batches: list[list[tuple[int, str]]], data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        made = store(Path(folder), TOP)
        for number, batch in enumerate(batches):
            for _ in range(data.draw(st.integers(1, 2))):
                if data.draw(st.booleans()):
                    made = store(Path(folder), TOP)
                made.apply(partial(batch), mark(number))
        rows = DeltaTable(str(made.table.path)).to_pyarrow_table()
        assert shown(rows) == exact([event for batch in batches for event in batch], 3)


@pytest.mark.spark
def test_spark_reads_what_was_written(tmp_path: Path, spark: SparkSession) -> None:
    made = store(tmp_path, TOP)
    made.apply(partial([(0, "a"), (0, "a"), (1, "b")]), mark(0))
    made.apply(partial([(0, "b"), (0, "a")]), mark(1))
    rows = spark.read.format("delta").load(str(made.table.path)).toArrow()
    assert shown(rows) == exact([(0, "a"), (0, "a"), (1, "b"), (0, "b"), (0, "a")], 3)


def test_a_table_that_was_dropped_is_said_to_be_gone(tmp_path: Path) -> None:
    made = store(tmp_path)
    made.apply(counts((0, "a", 1)), mark(0))
    shutil.rmtree(DeltaLog(made.table.path).folder)
    with pytest.raises(TableGone, match="counts: the log has no version 1"):
        made.apply(counts((0, "a", 1)), mark(1))


def units(*minutes: int | None) -> pa.Array:
    return pa.array([None if m is None else START + timedelta(minutes=m) for m in minutes], TIMES)


def rows(*minutes: int | None) -> pa.Table:
    return pa.table({"window_start": units(*minutes), "n": list(range(len(minutes)))})


class Disk:
    """Files, and which of them were read."""

    def __init__(self) -> None:
        self.tables: dict[str, pa.Table] = {}
        self.read: list[str] = []
        self.known = DataFiles(self._rows)

    def put(self, name: str, table: pa.Table, *old: str) -> None:
        self.tables[name] = table
        self.known.replace([AddedFile(each, {}, True) for each in old], [(AddedFile(name, {}, True), table)])

    def _rows(self, file: AddedFile) -> pa.Table:
        self.read.append(file.path)
        return self.tables[file.path]

    def holding(self, wanted: pa.Array | None) -> dict[str, tuple[list[int], list[int]]]:
        found = self.known.holding(wanted)
        return {file.path: (held["n"].to_pylist(), rest["n"].to_pylist()) for file, held, rest in found}


def test_the_rows_of_a_window_and_the_others_of_its_file() -> None:
    disk = Disk()
    disk.put("a", rows(0, 0, 5))
    disk.put("b", rows(9, None))
    assert disk.holding(units(0)) == {"a": ([0, 1], [2])}
    assert disk.holding(units(3)) == {}  # between the windows of a file
    assert disk.holding(units(5, 9)) == {"a": ([2], [0, 1]), "b": ([0], [1])}
    assert disk.holding(units(None)) == {"b": ([1], [0])}
    assert disk.holding(None) == {"a": ([0, 1, 2], []), "b": ([0, 1], [])}
    disk.put("c", rows(0), "a")
    assert disk.holding(units(0, 5)) == {"c": ([0], [])}
    assert disk.read == []


def test_rows_in_memory_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lakehouse.gold.store._HOT_BYTES", 5 * rows(0).nbytes)
    disk = Disk()
    for minute in range(10):
        disk.put(str(minute), rows(minute))
    assert disk.holding(units(9)) == {"9": ([0], [])}
    assert disk.read == []
    assert disk.holding(units(0)) == {"0": ([0], [])}
    assert disk.read == ["0"]
    disk.put("large", rows(*range(20, 120)))  # itself more than the bound
    assert list(disk.holding(units(20))) == ["large"]
    assert disk.read == ["0", "large"]


def test_the_logs_bounds_hold_every_value() -> None:
    at = START + timedelta(microseconds=1_001)
    table = pa.table(
        {
            "at": pa.array([at, None], TIMES),
            "day": [date(2026, 1, 1), date(2026, 1, 3)],
            "n": [2**62, -1],
            "short": ["b", "a"],
            "long": ["b", "z" * 100],
            "absent": pa.nulls(2, pa.int64()),
            "far": pa.array([0, 2**62], pa.int64()).cast(TIMES),  # a year that Python does not have
            "share": [0.5, float("nan")],
            "sketch": [b"a", b"b"],
        }
    )
    assert json.loads(stats_of(table)) == {
        "numRecords": 2,
        "minValues": {"at": "2026-01-01T00:00:00.001Z", "day": "2026-01-01", "n": -1, "short": "a"},
        "maxValues": {"at": "2026-01-01T00:00:00.002Z", "day": "2026-01-03", "n": 2**62, "short": "b"},
        "nullCount": {"at": 1, "day": 0, "n": 0, "short": 0, "long": 0, "absent": 2, "far": 0},
    }

"""Care of tables: nothing that was promised is cut, and no writer is disturbed."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import CommitProperties, DeltaTable, write_deltalake

from lakehouse.bronze.readers import note_reader, reader_file, readers_of, unread_since
from lakehouse.bronze.table import Progress, create, progress
from lakehouse.contract.deltalog import DeltaLog, kept_ms
from lakehouse.contract.lake import LOADS, PROPERTY_POSITIONS, Lake, TableRef
from lakehouse.contract.pipeline import Product, Source
from lakehouse.contract.storage import LakePath, StorePath, write_whole
from lakehouse.declaration import DedupeDeclaration, product_declaration, source_declaration
from lakehouse.errors import TableBusy
from lakehouse.gold.mark import BatchMark
from lakehouse.gold.store import ProductStore
from lakehouse.load.loader import Deadline, append_reports
from lakehouse.load.worker import FileReport
from lakehouse.lock import WriterLocks
from lakehouse.maintain import care as maintenance_care
from lakehouse.maintain.care import (
    CHECKPOINT_EVERY,
    MANY_FILES,
    SWEEP_EVERY_S,
    TIDY_EVERY_S,
    Caretaker,
    Maintenance,
    checkpoint_log,
    compact_bronze,
    compact_product,
    end_retention,
    fold,
    leading,
    may_clean,
    vacuum_product,
    vacuum_table,
)
from lakehouse.maintain.report import RETENTION_SHARE, WATCH_EVERY_S, Backlog
from tests.crash_points import CARE_CRASH_POINTS
from tests.lakehouse.lakes import T0, bronze_rows, pipeline_in
from tests.s3 import S3Server

PER_CITY = Product(
    layer="silver",
    source="clicks",
    storage="append",
    sql="SELECT window.start AS window_start, city, count(*) AS n FROM clicks GROUP BY window(event_time, '1 minute'), "
    "city",
    name="per_city",
)
TOTALS = Product(
    layer="gold",
    source="clicks",
    sql="SELECT window.start AS window_start, count(*) AS n FROM clicks GROUP BY window(event_time, '1 minute')",
    name="totals",
    positions="30 minutes",
)

BROKEN = dataclasses.replace(TOTALS, name="broken")
THEN = T0.date()


def partial(batch: int, product: Product) -> pa.Table:
    start = [T0 + timedelta(minutes=batch % 3)]
    columns = {"window_start": pa.array(start, pa.timestamp("us", "UTC")), "n": pa.array([1], pa.int64())}
    if product is PER_CITY:
        columns["city"] = pa.array(["Ulm"])
    return pa.table(columns).select([c for c in ("window_start", "city", "n") if c in columns])


def store_with(lake: Lake, product: Product, batches: int) -> ProductStore:
    store = ProductStore(product, lake.table(product.layer, product.name), "p")
    for batch in range(batches):
        store.apply(partial(batch, product), BatchMark("q", (batch,), {"t/0": batch}, 1))
    return store


def counts(store: ProductStore) -> list[int]:
    rows = DeltaTable(str(store.table.path)).to_pyarrow_table()
    return sorted(store.operator.merge(None, rows)["n"].to_pylist())


def test_partials_are_folded_by_their_writer_and_it_goes_on(lake: Lake) -> None:
    store = store_with(lake, PER_CITY, 12)
    before, mark = counts(store), store.mark()
    assert compact_product(store, many=100) == ""
    assert compact_product(store, many=10) == "folded"
    assert DeltaTable(str(store.table.path)).to_pyarrow_table().num_rows == 3
    assert counts(store) == before == [4, 4, 4]
    after = ProductStore(PER_CITY, store.table, "p").mark()
    assert mark is not None
    assert after is not None
    assert (after.application, after.transaction) == (mark.application, mark.transaction)
    assert (after.through, after.events) == (mark.through, 0)
    store.apply(partial(0, PER_CITY), BatchMark("q", (12,), {}, 1))
    store.apply(partial(0, PER_CITY), BatchMark("q", (11,), {}, 1))  # known from before the fold
    assert counts(store) == [4, 4, 5]
    assert not fold(store)  # not worth while
    assert not fold(store_with(dataclasses.replace(lake, root=lake.root / "other"), PER_CITY, 3), most=2)


def test_a_product_is_put_together_by_its_writer_and_it_goes_on(lake: Lake) -> None:
    store = store_with(lake, TOTALS, 6)
    assert compact_product(store, many=2) == "compacted"
    assert len(DeltaTable(str(store.table.path)).file_uris()) == 1
    store.apply(partial(0, TOTALS), BatchMark("q", (6,), {}, 1))
    assert counts(store) == [2, 2, 3]
    assert compact_product(ProductStore(TOTALS, lake.table("gold", "absent"), "p")) == ""


CARE = """
import sys
from lakehouse.contract.lake import Lake
from lakehouse.contract.storage import lake_path
from lakehouse.maintain.care import compact_product
from tests.lakehouse.test_maintain import PER_CITY, TOTALS, ProductStore
product = {"per_city": PER_CITY, "totals": TOTALS}[sys.argv[2]]
compact_product(ProductStore(product, Lake(lake_path(sys.argv[1])).table(product.layer, product.name), "p"), many=2)
"""


@pytest.mark.parametrize("point", CARE_CRASH_POINTS)
@pytest.mark.parametrize("product", [PER_CITY, TOTALS], ids=["folded", "compacted"])
def test_a_writer_that_is_killed_in_its_care_goes_on(lake: Lake, point: str, product: Product) -> None:
    store = store_with(lake, product, 12)
    before, mark, version = counts(store), store.mark(), store.delta().version()
    done = subprocess.run(
        [sys.executable, "-c", CARE, str(lake.root), product.name],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "MILLRACE_CRASH_AT": point},
        timeout=300,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL
    after = ProductStore(product, store.table, "p")  # of the next driver
    assert after.delta().version() == version + (point == "care.after_commit")
    found = after.mark()
    assert found is not None
    assert mark is not None
    assert (found.application, found.transaction, found.through) == (mark.application, mark.transaction, mark.through)
    assert counts(after) == before
    after.apply(partial(0, product), BatchMark("q", (11,), {}, 1))  # the batch in hand, once more
    assert counts(after) == before
    assert bool(compact_product(after, many=2)) == (point == "care.before_commit")
    after.apply(partial(0, product), BatchMark("q", (12,), {}, 1))
    assert sum(counts(after)) == sum(before) + 1


def test_a_product_says_how_long_a_position_lives_and_keeps_it(lake: Lake) -> None:
    store = store_with(lake, TOTALS, 4)
    delta = DeltaTable(str(store.table.path))
    properties = delta.metadata().configuration
    assert properties[PROPERTY_POSITIONS] == "1800000"
    for what in ("logRetentionDuration", "deletedFileRetentionDuration"):
        assert kept_ms(properties, what) == 1_800_000
    version = delta.version()
    assert vacuum_product(store) == 0  # all of it is promised
    assert DeltaTable(str(store.table.path)).version() == version  # and no commit was made for nothing
    delta = DeltaTable(str(store.table.path))
    delta.alter.set_table_properties({"delta.deletedFileRetentionDuration": "interval 0 seconds"})
    fresh = ProductStore(TOTALS, store.table, "p")
    assert vacuum_product(fresh) > 0
    fresh.apply(partial(0, TOTALS), BatchMark("q", (4,), {}, 1))  # its own commits do not stand in its way
    assert counts(fresh) == [1, 1, 3]


def bronze(lake: Lake, commits: int, day: date = THEN, first: int = 0) -> TableRef:
    table = lake.bronze("clicks")
    create(table)
    delta = DeltaTable(str(table.path))
    for number in range(first, first + commits):
        rows = bronze_rows([b"{}", b"x"], offset=[2 * number, 2 * number + 1], date=[day, day])
        said = {"userMetadata": Progress({"clicks/0": 2 * number + 2}, number + 1).to_metadata()}

        write_deltalake(delta, rows, mode="append", commit_properties=CommitProperties(custom_metadata=said))
    return table


def reading(lake: Lake, table: TableRef, next_version: int, name: str = "live-clicks") -> LakePath:
    """The note of a set of products that has read everything before a version."""
    note_reader(lake, name, str(DeltaTable(str(table.path)).metadata().id), next_version)
    return reader_file(lake, name)


def test_small_files_of_bronze_are_put_together_and_rows_and_progress_stay(lake: Lake) -> None:
    table = bronze(lake, 8)
    before = DeltaTable(str(table.path)).to_pyarrow_table().sort_by("offset")
    assert compact_bronze(lake, table) == 0  # not many
    size = max(DeltaTable(str(table.path)).get_add_actions(flatten=True).column("size_bytes").to_pylist())
    assert compact_bronze(lake, table, many=4, target=3 * size) == 0  # not small
    assert compact_bronze(lake, table, many=4) == 7
    delta = DeltaTable(str(table.path))
    assert delta.to_pyarrow_table().sort_by("offset").equals(before)
    commit = (table.path / "_delta_log" / f"{delta.version():020d}.json").read_text()
    actions = [json.loads(line) for line in commit.splitlines()]
    assert all(not next(iter(a.values()))["dataChange"] for a in actions if "add" in a or "remove" in a)
    assert progress(table).offsets == {"clicks/0": 16}


def test_writers_of_bronze_go_on_while_its_files_are_put_together(lake: Lake) -> None:
    """A loader's handle that knows nothing of the compaction appends after it; nothing is lost or doubled."""
    table = bronze(lake, 8)
    stop = threading.Event()

    def care() -> None:
        while not stop.is_set():
            compact_bronze(lake, table, many=3)

    thread = threading.Thread(target=care)
    thread.start()
    try:
        bronze(lake, 30, first=8)
    finally:
        stop.set()
        thread.join()
    offsets = DeltaTable(str(table.path)).to_pyarrow_table(columns=["offset"])["offset"].to_pylist()
    assert sorted(offsets) == list(range(76))


@pytest.fixture
def aged(s3_server: S3Server) -> Callable[[LakePath, float], None]:
    """Sets when a file or an object was written."""

    def age(path: LakePath, at: float) -> None:
        os.utime(s3_server.file(path) if isinstance(path, StorePath) else path, (at, at))

    return age


def test_old_versions_and_files_go_and_the_writer_goes_on(lake: Lake, aged: Callable[[LakePath, float], None]) -> None:
    table = bronze(lake, 8)
    log = DeltaLog(table.path)
    reading(lake, table, 9)
    assert compact_bronze(lake, table, many=2) == 7
    assert vacuum_table(lake, table) == 0
    assert checkpoint_log(lake, table, every=1) == "log checkpoint"
    assert log.oldest() == 0
    now = {f"delta.{name}": "interval 0 seconds" for name in ("deletedFileRetentionDuration", "logRetentionDuration")}
    DeltaTable(str(table.path)).alter.set_table_properties(now)
    reading(lake, table, log.newest() + 1)
    assert vacuum_table(lake, table) == 8
    reading(lake, table, log.newest() + 1)
    for version in log.versions()[:-1]:
        aged(log.commit_file(version), T0.timestamp())
    assert checkpoint_log(lake, table, every=1) == "log checkpoint"
    assert log.oldest() > 8
    rows = DeltaTable(str(table.path)).to_pyarrow_table()
    assert sorted(rows["offset"].to_pylist()) == list(range(16))
    assert progress(table).offsets == {"clicks/0": 16}
    bronze(lake, 1, first=8)
    assert progress(table).offsets == {"clicks/0": 18}


def test_what_a_query_has_to_read_stays(lake: Lake, aged: Callable[[LakePath, float], None]) -> None:
    table = bronze(lake, 4)
    assert readers_of(lake, table) == []
    assert may_clean(lake, table, 3600)
    file, other = reading(lake, table, 3), reading(lake, table, 9, "join-pairs-clicks")
    join, reader = readers_of(lake, table)
    assert (reader.query, reader.next_version, reader.place) == ("live-clicks", 3, file)
    assert (join.query, join.next_version, join.place) == ("join-pairs-clicks", 9, other)
    waiting = unread_since(table, reader)
    assert waiting is not None
    assert waiting < 600
    assert may_clean(lake, table, 7200)
    old = time.time() - 5000
    aged(DeltaLog(table.path).commit_file(3), old)
    assert not may_clean(lake, table, 7200)
    reading(lake, table, 5)  # it has read all
    assert all(unread_since(table, one) is None for one in readers_of(lake, table))
    assert may_clean(lake, table, 1)


def test_days_past_their_retention_go_once_they_were_read(
    lake: Lake, aged: Callable[[LakePath, float], None], caplog: pytest.LogCaptureFixture
) -> None:
    table = bronze(lake, 2)
    today = datetime.now(UTC).date()
    bronze(lake, 2, day=today, first=2)
    reading(lake, table, 1)
    year = 365 * 86_400_000
    assert end_retention(lake, table, 100 * year) == []
    month = 30 * 86_400_000
    aged(DeltaLog(table.path).commit_file(1), T0.timestamp())  # the query has not read the old days yet
    assert end_retention(lake, table, month) == []
    assert "stay until live-clicks has read them" in caplog.text
    reading(lake, table, 5)
    assert end_retention(lake, table, month) == [T0.date()]
    rows = DeltaTable(str(table.path)).to_pyarrow_table()
    assert set(rows["date"].to_pylist()) == {today}
    assert progress(table).offsets == {"clicks/0": 8}
    bronze(lake, 1, day=today, first=4)


def test_a_driver_looks_after_logs_bronze_and_its_products(tmp_path: Path, lake: Lake) -> None:
    store = store_with(lake, PER_CITY, CHECKPOINT_EVERY + 1)
    table = bronze(lake, 70)
    now = [0.0]
    care = Maintenance(now=lambda: now[0])
    care.after_batch([store])
    caretaker = Caretaker(lake, pipeline_in(tmp_path / "p", "t"), now=lambda: now[0])

    def looked() -> bool:
        caretaker.turn()
        kept = (store.table.path / "_delta_log" / "_last_checkpoint").is_file()
        return kept and len(DeltaTable(str(table.path)).file_uris()) == 1

    with leading(lake) as first:
        assert first
        assert not looked()  # another process does it
    assert looked()
    now[0] += max(TIDY_EVERY_S, SWEEP_EVERY_S)
    care.after_batch([store])
    assert DeltaTable(str(store.table.path)).to_pyarrow_table().num_rows == 3
    assert DeltaLog(store.table.path).oldest() == 0  # nothing that is promised was cut
    assert DeltaLog(store.table.path).newest() > CHECKPOINT_EVERY


def test_a_driver_looks_after_what_none_of_its_queries_keeps(
    tmp_path: Path, lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a single batch: bronze, a product whose stage does not run, and the loader's reports."""
    pipeline = pipeline_in(tmp_path / "clicks", "t")
    pipeline = dataclasses.replace(pipeline, products={"per_city": PER_CITY, "totals": TOTALS, "broken": BROKEN})
    store_with(lake, BROKEN, 1)
    write_whole(lake.table("gold", "broken").path / "_delta_log" / f"{0:020d}.json", b"{")
    store = store_with(lake, PER_CITY, MANY_FILES)
    taken = store_with(lake, TOTALS, 3)
    table = bronze(lake, 64)
    monkeypatch.setattr(maintenance_care, "MANY_FILES", 5)  # of the shared tables
    for number in range(5):
        append_reports(lake, str(number), "clicks", [report(number)], Deadline(0.0, None, 1))
    now = [0.0]
    care = Caretaker(lake, pipeline, now=lambda: now[0])
    with WriterLocks(lake, ["totals"]):
        assert care.turn() == [], "no sweep is due"
        assert len(DeltaTable(str(table.path)).file_uris()) == 1
        now[0] += SWEEP_EVERY_S
        said = care.turn()
    assert len(DeltaTable(str(lake.table("silver", LOADS).path)).file_uris()) == 1
    assert [text for text in said if text.startswith("per_city: folded")]
    assert DeltaTable(str(store.table.path)).to_pyarrow_table().num_rows == 3
    assert counts(taken) == [1, 1, 1]
    assert not [text for text in said if text.startswith("totals")], "its writer runs, and looks after it itself"
    assert [text for text in said if text.startswith("broken: failed")], "one that cannot be read stops no other"


def test_what_comes_near_a_topics_retention_alarms_by_itself(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lake, pipeline = Lake(tmp_path / "lake"), pipeline_in(tmp_path / "p", "clicks")
    table = bronze(lake, 3)
    asked: list[Progress] = []
    found: list[Backlog | None] = [
        Backlog(5, 10.0, 0, 100.0),
        Backlog(5, 50.0, 0, 100.0),
        Backlog(5, 80.0, 0, 100.0),
        None,
    ]

    def ask(_: Source, done: Progress) -> Backlog | None:
        asked.append(done)
        return found[len(asked) - 1]

    said: list[tuple[list[str], list[float]]] = []
    now = [0.0]
    care = Caretaker(lake, pipeline, ask, now=lambda: now[0])
    for _ in found:
        caplog.clear()
        care.turn()
        care.turn()  # nothing is due
        shares = [sample.value for sample in next(iter(RETENTION_SHARE.collect())).samples]
        said.append(([record.levelname for record in caplog.records if record.name.endswith(".report")], shares))
        now[0] += WATCH_EVERY_S
    assert asked == [progress(table)] * 4
    assert said == [([], [0.1]), (["WARNING"], [0.5]), (["ERROR"], [0.8]), ([], [])]


def report(number: int) -> FileReport:
    return FileReport(f"{number}.csv", f"f{number}", "csv", 1, 1, 0, 0, 0.1, "loaded", "", 1, 1, 2)


def test_a_driver_that_starts_waits_for_care_to_end(lake: Lake) -> None:
    with WriterLocks(lake, ["totals"]) as held:
        with pytest.raises(TableBusy), WriterLocks(lake, ["totals"]):
            pytest.fail("it has the lock")
        threading.Timer(0.1, lambda: held.__exit__(None, None, None)).start()
        with WriterLocks(lake, ["totals"], patience_s=60):
            pass


def test_trouble_never_stops_the_writer(lake: Lake) -> None:
    broken = ProductStore(TOTALS, lake.table("gold", "broken"), "p")
    write_whole(broken.table.path / "_delta_log" / "nothing", b"")
    now = [0.0]
    care = Maintenance(now=lambda: now[0])
    for _ in range(3):
        now[0] += SWEEP_EVERY_S
        care.after_batch([broken])


def test_a_declaration_is_known_by_what_makes_its_rows(tmp_path: Path) -> None:
    pipeline = pipeline_in(tmp_path, "t")
    source, product = pipeline.sources["clicks"], pipeline.products["totals"]
    replace = dataclasses.replace
    same = product_declaration(product, source)
    assert product_declaration(replace(product, sql=f"-- counts\n  {product.sql}", channel=False), source) == same
    assert product_declaration(replace(product, positions="1 hour"), source) == same
    assert product_declaration(replace(product, sql=product.sql.replace("1 minute", "2 minutes")), source) != same
    wider = replace(source, schema=source.schema.replace("price BIGINT", "price DOUBLE"))
    assert product_declaration(product, wider) != same
    assert source_declaration(wider) != source_declaration(source)
    assert source_declaration(replace(source, partitions=9, retention="1 day")) == source_declaration(source)


def test_a_machine_knows_by_which_declaration_another_one_built(tmp_path: Path) -> None:
    first, other = Lake(tmp_path, tmp_path / "first"), Lake(tmp_path, tmp_path / "other")
    source = pipeline_in(tmp_path / "clicks", "t").sources["clicks"]
    changed = dataclasses.replace(source, required=("id",))
    assert not DedupeDeclaration(other, "live-clicks", changed).is_stale()
    DedupeDeclaration(first, "live-clicks", source).note()
    assert not DedupeDeclaration(other, "live-clicks", source).is_stale()
    rebuild = DedupeDeclaration(other, "live-clicks", changed)
    assert rebuild.is_stale()
    rebuild.begin()
    assert DedupeDeclaration(first, "live-clicks", source).is_stale(), "the tables are between the two"
    rebuild.note()
    assert not DedupeDeclaration(other, "live-clicks", changed).is_stale()
    assert DedupeDeclaration(first, "live-clicks", changed).is_stale(), "its index is of before"


def test_a_product_is_built_again_when_it_is_declared_otherwise(lake: Lake) -> None:
    table = lake.table("gold", "totals")
    mark = BatchMark("q", (0,))
    first = ProductStore(TOTALS, table, "p", "one")
    first.apply(partial(0, TOTALS), mark)
    assert first.outdated() == ""
    assert ProductStore(TOTALS, table, "p").outdated() == ""  # a reader
    other = ProductStore(TOTALS, table, "p", "two")
    assert "has changed" in other.outdated()
    rows = partial(0, TOTALS)
    wider = rows.set_column(1, "n", rows["n"].cast(pa.float64())).append_column("most", pa.array([9]))
    declared = dataclasses.replace(TOTALS, sql=TOTALS.sql.replace("count(*) AS n", "sum(x) AS n, max(y) AS most"))
    other = ProductStore(declared, table, "p", "two")
    identity = DeltaTable(str(table.path)).metadata().id
    other.replace(wider, mark)
    delta = DeltaTable(str(table.path))
    assert other.outdated() == ""
    assert delta.metadata().id == identity  # positions in it go on
    assert delta.to_pyarrow_table().to_pylist() == [{"window_start": T0, "n": 1.0, "most": 9}]
    other.apply(wider, BatchMark("q", (1,)))
    keyed = dataclasses.replace(PER_CITY, storage="upsert", name="totals", layer="gold")
    ProductStore(keyed, table, "p", "three").replace(partial(0, PER_CITY), mark)
    assert DeltaTable(str(table.path)).metadata().id != identity  # another key: another table

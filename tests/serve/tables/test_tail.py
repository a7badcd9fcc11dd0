from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lakehouse.contract.deltalog import TableUnreadable
from lakehouse.contract.lake import PROPERTY_FOLD, PROPERTY_KEY, Lake
from lakehouse.contract.rows import Key, Row
from serve.core.aggregate import AggregateView, aggregate_view
from serve.core.channel import live_view
from serve.core.messages import change_messages
from serve.core.model import TableChange, TableInfo
from serve.core.position import WHOLE, Position, Seal
from serve.core.view import SubscriberView, rows_view
from serve.errors import PositionExpired
from serve.sql import statement as query
from serve.tables.state import TableReader
from serve.tables.tables import Opened, Replay, Tail, to_next_beat
from tests.serve.lakes import TOPICS, Product, city, rsvps_by_city, top_topics, topics, window

SEAL = Seal(b"of the test")
QUICK = settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))


@contextlib.asynccontextmanager
async def following(folder: Path, *, warm: int = 0) -> AsyncIterator[AsyncIterator[Opened | TableChange]]:
    events = Tail(TableReader(folder), poll_ms=1, warm=warm).follow()
    try:
        yield events
    finally:
        await events.aclose()  # type: ignore[attr-defined]


async def after(events: AsyncIterator[Opened | TableChange]) -> Any:
    async with asyncio.timeout(60):
        return await anext(events)


def content(folder: Path, version: int | None = None) -> dict[Key, Row]:
    """What the table holds, by the other reader: DuckDB."""
    del version
    name = folder.name
    rows = json.loads(query.rows_as_json(query.run_sql(Lake(folder.parents[1]), f"SELECT * FROM {name}")))
    for row in rows:
        row.pop("sketch", None)
    return {tuple(row.values()): () for row in rows}


def held(rows: dict[Key, Row], columns: tuple[str, ...]) -> dict[Key, Row]:
    data = json.loads(
        query.rows_as_json(pa.Table.from_pylist([dict(zip(columns, r, strict=True)) for r in rows.values()]))
    )
    return {tuple(row.values()): () for row in data}


async def test_overwrites_give_upserts_and_deletes(root: Path) -> None:
    product = top_topics(root)
    product.overwrite(topics(0, [3, 2, 1]), [window(0)])
    async with following(product.folder) as events:
        opened = await after(events)
        assert len(opened.state.rows) == 3
        assert opened.state.table.columns == tuple(name for name in TOPICS.names if name != "sketch")
        product.overwrite(topics(0, [3, 5]), [window(0)])
        change = await after(events)
        assert [(row[2], row[4]) for row in change.upserts] == [(2, 5)]
        assert [key[1] for key in change.deletes] == [3]
        assert (change.version, change.facts.through, change.facts.events) == (2, {"rsvps/0": 20}, 10)
        product.overwrite(topics(0, [3, 5]), [window(0)])
        unchanged = await after(events)
        assert (unchanged.version, unchanged.upserts, unchanged.deletes) == (3, (), ())
        product.overwrite([], [window(0)])
        assert len((await after(events)).deletes) == 2


async def test_maintenance_changes_nothing_for_subscribers(root: Path) -> None:
    product = top_topics(root)
    for number in range(4):
        product.append(topics(number, [number]))
    async with following(product.folder) as events:
        opened = await after(events)
        product.compact()
        compacted = await after(events)
        assert (compacted.version, compacted.upserts, compacted.deletes) == (5, (), ())
        assert compacted.facts.through == {"rsvps/0": 40}
        product.table.vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)
        for _ in range(2):  # vacuum writes its own start and end into the log
            assert not (await after(events)).upserts
        product.overwrite(topics(2, [7]), [window(2)])
        change = await after(events)
        assert [row[4] for row in change.upserts] == [7]
        assert len(opened.state.rows) == 4


async def test_a_restore_takes_rows_back(root: Path) -> None:
    product = top_topics(root)
    product.overwrite(topics(0, [1]), [window(0)])
    product.overwrite(topics(0, [2, 2]), [window(0)])
    async with following(product.folder) as events:
        await after(events)
        product.table.restore(1)
        change = await after(events)
        assert [row[4] for row in change.upserts] == [1]
        assert [key[1] for key in change.deletes] == [2]


async def test_partials_are_folded_and_a_maintenance_fold_is_not_seen(root: Path) -> None:
    product = rsvps_by_city(root)
    product.append([city(0, "Bonn", 1), city(0, "Ulm", 1)])
    product.append([city(0, "Bonn", 2, 1, 4)])
    async with following(product.folder) as events:
        opened = await after(events)
        assert sorted(row[2:] for row in opened.state.rows.values()) == [
            ("Bonn", "de", 3, 1, 4),
            ("Ulm", "de", 1, 0, 0),
        ]
        product.append([city(0, "Bonn", 1), city(1, "Bonn", 1)])
        change = await after(events)
        assert [row[2:] for row in change.upserts] == [("Bonn", "de", 4, 1, 4), ("Bonn", "de", 1, 0, 0)]
        product.overwrite([city(0, "Bonn", 4, 1, 4), city(0, "Ulm", 1)], [window(0)])
        folded = await after(events)
        assert (folded.version, folded.upserts, folded.deletes) == (4, (), ())
        product.append([city(0, "Ulm", 1)])
        assert [row[2:] for row in (await after(events)).upserts] == [("Ulm", "de", 2, 0, 0)]
        product.overwrite([], [window(1)])
        assert [key[1] for key in (await after(events)).deletes] == ["Bonn"]


async def test_a_table_that_comes_later_is_waited_for(root: Path) -> None:
    async with following(root / "gold" / "top_topics") as events:
        waiting = asyncio.ensure_future(after(events))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        top_topics(root)
        opened = await waiting
        assert (opened.state.version, opened.state.rows, opened.detail) == (0, {}, "")


@pytest.mark.parametrize("how", ["dropped", "moved", "overwritten"])
async def test_a_replaced_table_starts_over(root: Path, how: str) -> None:
    product = top_topics(root)
    product.overwrite(topics(0, [1]), [window(0)])
    async with following(product.folder) as events:
        first = await after(events)
        if how == "overwritten":
            configuration = {PROPERTY_KEY: "window_start,rank"}
            DeltaTable.create(
                product.folder, TOPICS, mode="overwrite", configuration=configuration, raise_if_key_not_exists=False
            )
        else:
            other = top_topics(root / "new")
            other.overwrite(topics(0, [9]), [window(0)])
            other.overwrite(topics(0, [9, 8]), [window(0)])
            if how == "dropped":
                shutil.rmtree(product.folder)
            else:
                product.folder.rename(root / "old")
            other.folder.rename(product.folder)
        again = await after(events)
        assert isinstance(again, Opened)
        assert again.detail
        assert again.state.table.table_id != first.state.table.table_id
        assert len(again.state.rows) == (0 if how == "overwritten" else 2)


async def test_a_log_that_was_cleaned_up_under_the_tail_starts_over(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serve.tables.tables._GAP_CHECK_S", 0.05)
    product = top_topics(root)
    product.overwrite(topics(0, [1]), [window(0)])
    async with following(product.folder) as events:
        await after(events)
        hidden = root / "hidden"
        hidden.mkdir()
        writer = DeltaTable(product.folder)
        for count in (2, 3, 4):  # what comes while the tail does not look
            product.overwrite(topics(0, [count]), [window(0)])
        writer = DeltaTable(product.folder)
        writer.create_checkpoint()
        (product.folder / "_delta_log" / f"{2:020d}.json").unlink()
        again = await after(events)
        assert isinstance(again, Opened)
        assert "without version 2" in again.detail
        assert [row[4] for row in again.state.rows.values()] == [4]


async def test_a_new_column_sends_every_row(root: Path) -> None:
    product = top_topics(root)
    product.overwrite(topics(0, [1, 2]), [window(0)])
    async with following(product.folder) as events:
        await after(events)
        wider = pa.Table.from_pylist(
            [topics(1, [5])[0] | {"note": "new"}], schema=TOPICS.append(pa.field("note", pa.string()))
        )
        write_deltalake(product.folder, wider, mode="append", schema_mode="merge")
        change = await after(events)
        assert change.table.columns[-1] == "note"
        assert [(row[4], row[-1]) for row in change.upserts] == [(1, None), (2, None), (5, "new")]


async def test_partitioned_tables(root: Path) -> None:
    folder = root / "gold" / "days"
    schema = pa.schema([("day", pa.date32()), ("at", pa.timestamp("us", "UTC")), ("k", pa.string()), ("v", pa.int64())])
    DeltaTable.create(
        folder, schema, partition_by=["day", "at"], configuration={PROPERTY_KEY: "day,k"}, raise_if_key_not_exists=False
    )
    rows = [
        {"day": window(0).date(), "at": window(0), "k": "a b/ü%", "v": 1},
        {"day": None, "at": None, "k": "x", "v": 2},
    ]
    data = pa.Table.from_pylist(rows, schema=schema)
    write_deltalake(folder, data, mode="append")
    async with following(folder) as events:
        opened = await after(events)
        at = window(0).replace(tzinfo=None)
        expected = {(at.date(), "a b/ü%"): (at.date(), at, "a b/ü%", 1), (None, "x"): (None, None, "x", 2)}
        assert opened.state.rows == expected
        DeltaTable(folder).optimize.compact()
        write_deltalake(folder, data, mode="append")
        while not isinstance(change := await after(events), TableChange) or change.version < 2:
            pass
        assert opened.state.rows == expected


@pytest.mark.parametrize(
    ("configuration", "problem"),
    [
        ({}, "no millrace.key"),
        ({PROPERTY_KEY: "nope"}, "columns that it lacks: nope"),
        ({PROPERTY_KEY: "rank", PROPERTY_FOLD: "{"}, "not JSON"),
        ({PROPERTY_KEY: "rank", PROPERTY_FOLD: '{"count": "avg"}'}, "not an object of sum, min, max"),
        ({PROPERTY_KEY: "rank", PROPERTY_FOLD: '{"count": "sum"}'}, "says nothing of: window_start"),
    ],
)
async def test_tables_that_are_not_served_say_why(root: Path, configuration: dict[str, str], problem: str) -> None:
    product = Product(root / "gold" / "top_topics", TOPICS, configuration)
    async with following(product.folder) as events:
        with pytest.raises(TableUnreadable, match=problem):
            await after(events)


# Any history: what the tail holds is what the table holds, and any position gives exactly what is left

Operation = tuple[str, int, list[int]]
OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["overwrite", "overwrite", "overwrite", "append", "compact", "restore", "checkpoint"]),
        st.integers(0, 2),
        st.lists(st.integers(0, 3), max_size=3),
    ),
    min_size=1,
    max_size=7,
)


def upsert_history(product: Product, operations: list[Operation]) -> None:
    for what, number, counts in operations:
        if what == "overwrite":
            product.overwrite(topics(number, counts), [window(number)])
        elif what == "append":  # to a window of its own: a table of upserts has one row a key
            product.append(topics(10 + product.version, counts))
        else:
            maintain(product, what, number)


def fold_history(product: Product, operations: list[Operation]) -> None:
    for what, number, counts in operations:
        rows = [
            city(number, name, count, guests=1) for name, count in zip(("Bonn", "Ulm", "Bonn"), counts, strict=False)
        ]
        if what == "overwrite":
            product.append(rows)
        elif what == "append":
            product.overwrite(rows, [window(number)])
        else:
            maintain(product, what, number)


def maintain(product: Product, what: str, number: int) -> None:
    product.table.update_incremental()
    if what == "compact":
        product.compact()
    elif what == "restore":
        if product.version > number:
            product.table.restore(number)
    else:
        product.table.create_checkpoint()


def fold_view(table: TableInfo) -> SubscriberView:
    return aggregate_view(table, "SELECT city, sum(yes) AS yes, max(guests) AS most, count(*) GROUP BY city", "", "")


@QUICK
@given(OPERATIONS, st.booleans())
async def test_every_prefix_and_every_resume(
    tmp_path_factory: pytest.TempPathFactory, operations: list[Operation], folded: bool
) -> None:
    root = tmp_path_factory.mktemp("lake")
    product = rsvps_by_city(root) if folded else top_topics(root)
    async with following(product.folder) as events:
        opened = await after(events)
        tokens, bodies, states = [Position(opened.state.table.table_id, 0)], [b""], [dict(opened.state.rows)]
        view = (
            fold_view(opened.state.table)
            if folded
            else rows_view(opened.state.table, "count > 1", ["item"], "rank < 3")
        )
        live, seen = live_view(view, opened.state.table), [b""]
        if isinstance(live, AggregateView):
            assert not list(live.opening(opened.state.rows.values()))
        for operation in operations:
            (fold_history if folded else upsert_history)(product, [operation])
            while opened.state.version < product.version:
                change = await after(events)
                [message] = change_messages(change, SEAL, WHOLE)
                seen += [each.body for each in change_messages(live.advance(change), SEAL, view.id)]
                assert message.position is not None
                tokens.append(message.position)
                bodies.append(message.body)
                states.append(dict(opened.state.rows))
            assert held(opened.state.rows, opened.state.table.columns) == content(product.folder)
    for index, position in enumerate(tokens):
        chunk = Replay(TableReader(product.folder), position, SubscriberView(), SEAL).next_chunk(product.version)
        assert [message.body for message in chunk] == bodies[index + 1 :]
        viewed = Replay(TableReader(product.folder), replace(position, view=view.id), view, SEAL).next_chunk(
            product.version
        )
        assert [message.body for message in viewed] == seen[index + 1 :], "a view is resumed as it was live"
    assert len(tokens) == product.version + 1
    rows = dict(states[0])
    for number, body in enumerate(bodies[1:], 1):  # a subscriber that applies the messages holds the same keys
        message = json.loads(body)
        columns, key = opened.state.table.columns, opened.state.table.key
        for gone in message["deletes"]:
            del rows[tuple(gone[name] for name in key)]
        rows.update(
            {tuple(row[name] for name in key): tuple(row[name] for name in columns) for row in message["upserts"]}
        )
        assert len(rows) == len(states[number])


def test_a_position_inside_of_a_commit_is_resumed_with_the_rest_of_it(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serve.core.messages.PART_BYTES", 300)
    product = top_topics(root)
    product.overwrite(topics(0, [1] * 10), [window(0)])
    product.overwrite(topics(0, [2] * 10), [window(0)])
    start = Position(str(product.table.metadata().id), 1)
    whole = Replay(TableReader(product.folder), start, SubscriberView(), SEAL).next_chunk(2)
    assert len(whole) > 3
    assert [message.position.ordinal for message in whole if message.position] == [*range(1, len(whole)), 0]
    assert whole[1].position is not None
    rest = Replay(TableReader(product.folder), whole[1].position, SubscriberView(), SEAL).next_chunk(2)
    assert [message.body for message in rest] == [message.body for message in whole[2:]]


@pytest.mark.parametrize("lost", ["data", "log", "table"])
def test_a_position_that_the_log_does_not_reach(root: Path, lost: str) -> None:
    product = top_topics(root)
    for count in range(4):
        product.overwrite(topics(0, [count]), [window(0)])
    table_id = str(product.table.metadata().id)
    if lost == "data":
        product.table.vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)
    elif lost == "log":
        DeltaTable(product.folder).create_checkpoint()
        for version in range(3):
            (product.folder / "_delta_log" / f"{version:020d}.json").unlink()
    else:
        table_id = "7538c0f5-cab9-44b3-aba7-6aa825adf763"
    with pytest.raises(PositionExpired):
        Replay(TableReader(product.folder), Position(table_id, 1), SubscriberView(), SEAL).next_chunk(product.version)


async def test_a_warm_start_has_the_last_changes(root: Path) -> None:
    product = top_topics(root)
    for count in range(6):
        product.overwrite(topics(0, [count]), [window(0)])
    async with following(product.folder, warm=3) as events:
        opened = await after(events)
        assert opened.state.version == 3
        assert [(await after(events)).version for _ in range(3)] == [4, 5, 6]


@given(st.floats(0, 1e9), st.sampled_from([0.001, 0.005, 0.015, 1.0]))
def test_all_tails_look_at_the_same_moments(now: float, pause: float) -> None:
    left = to_next_beat(now, pause)
    assert 0.2 * pause < left <= 1.2 * pause + 1e-6
    assert abs((now + left) / pause - round((now + left) / pause)) * pause < 1e-6

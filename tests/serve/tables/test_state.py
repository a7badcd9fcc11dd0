from __future__ import annotations

import pytest

from lakehouse.contract.deltalog import AddedFile, Commit, RemovedFile
from lakehouse.contract.lake import CommitFacts
from lakehouse.contract.rows import Row
from serve.core.model import TableInfo
from serve.tables.state import StateStep, TableState, compare, step_of

UPSERT = TableInfo("t", "id", ("k", "v"), ("k",))
FOLDED = TableInfo("t", "id", ("k", "sum", "least", "most"), ("k",), {"sum": "sum", "least": "min", "most": "max"})


def commit(added: tuple[str, ...] = (), removed: tuple[str, ...] = (), *, data_change: bool = True) -> Commit:
    return Commit(
        2,
        tuple(AddedFile(path, {}, data_change) for path in added),
        tuple(RemovedFile(path, data_change) for path in removed),
        {"timestamp": 200},
    )


def taken(step: StateStep | None) -> StateStep:
    assert step is not None
    return step


def step(state: TableState, the: Commit, **files: list[Row]) -> tuple[list[Row], list[tuple[object, ...]]]:
    change = state.apply(taken(step_of(state, the, lambda file: files[file.path])))
    assert state.version == change.version == 2
    return list(change.upserts), list(change.deletes)


def upsert_state() -> TableState:
    rows: dict[tuple[object, ...], Row] = {(1,): (1, "a"), (2,): (2, "b")}
    return TableState(UPSERT, 1, CommitFacts(100, {"t/0": 5}), rows, {"f": frozenset(rows)})


def test_a_rewritten_file_gives_only_what_differs() -> None:
    state = upsert_state()
    assert step(state, commit(("g",), ("f",)), g=[(3, "c"), (1, "a")]) == ([(3, "c")], [(2,)])
    assert state.rows == {(1,): (1, "a"), (3,): (3, "c")}
    assert state.files == {"g": frozenset({(1,), (3,)})}


def test_facts_are_carried_over_commits_that_say_nothing() -> None:
    state = upsert_state()
    change = state.apply(taken(step_of(state, commit(), lambda file: [])))
    assert (change.facts.through, change.facts.events, change.facts.committed_at) == ({"t/0": 5}, 0, 200)


@pytest.mark.parametrize("into", [("g",), ("g", "h")])
def test_compaction_changes_nothing_and_files_are_known_after_it(into: tuple[str, ...]) -> None:
    state = upsert_state()
    files: dict[str, list[Row]] = {"g": [(1, "a")], "h": [(2, "b")]}
    if len(into) == 1:
        files = {}  # one file that holds what was there need not be read
    assert step(state, commit(into, ("f",), data_change=False), **files) == ([], [])
    assert frozenset().union(*state.files.values()) == {(1,), (2,)}


def test_a_file_that_nobody_knows_asks_for_a_load() -> None:
    assert step_of(upsert_state(), commit((), ("other",)), lambda file: []) is None


def test_a_key_in_two_files_asks_for_a_load() -> None:
    state = upsert_state()
    state.files["g"] = frozenset({(2,)})
    assert step_of(state, commit((), ("f",)), lambda file: []) is None


def test_partials_are_folded() -> None:
    state = TableState(FOLDED, 1, CommitFacts(100), {("a",): ("a", 5, 1, 9)})
    partials: list[Row] = [("a", 2, 0, 3), ("a", 1, None, 10), ("b", None, 4, None)]
    upserts, deletes = step(state, commit(("f",)), f=partials)
    assert upserts == [("a", 8, 0, 10), ("b", None, 4, None)]
    assert deletes == []


def test_partials_that_change_no_total_are_not_sent() -> None:
    state = TableState(FOLDED, 1, CommitFacts(100), {("a",): ("a", 5, 1, 9)})
    assert step(state, commit(("f",)), f=[("a", 0, 5, 5)]) == ([], [])


def test_files_removed_from_a_folded_table_ask_for_a_load() -> None:
    state = TableState(FOLDED, 1, CommitFacts(100), {})
    assert step_of(state, commit(("g",), ("f",)), lambda file: []) is None


def test_totals_summed_in_another_order_are_the_same() -> None:
    state = TableState(FOLDED, 1, CommitFacts(100), {("a",): ("a", 0.1 + 0.2 + 0.3, 1, 9)})
    loaded = TableState(FOLDED, 2, CommitFacts(200), {("a",): ("a", 0.3 + 0.2 + 0.1, 1, 9)})
    assert state.rows != loaded.rows
    assert not compare(state, loaded, CommitFacts(200)).upserts


def test_another_schema_sends_every_row() -> None:
    wider = TableInfo("t", "id", ("k", "v", "w"), ("k",))
    loaded = TableState(wider, 2, CommitFacts(200), {(1,): (1, "a", None)}, {"g": frozenset({(1,)})})
    state = upsert_state()
    change = state.apply(compare(state, loaded, CommitFacts(200)))
    assert (change.upserts, change.deletes) == (((1, "a", None),), ((2,),))
    assert (state.table, state.rows, state.files) == (wider, loaded.rows, loaded.files)


def test_rows_come_in_the_order_of_their_keys_with_nulls_last() -> None:
    state = TableState(UPSERT, 1, CommitFacts(100), {})
    upserts, _ = step(state, commit(("f",)), f=[(None, "z"), (2, "b"), (1, "a")])
    assert upserts == [(1, "a"), (2, "b"), (None, "z")]

"""Notes of what subscribers want, in a folder and in an object store, with a clock of their own."""

from __future__ import annotations

import os
import uuid
from dataclasses import replace
from pathlib import Path

import pytest

from lakehouse.contract.lake import ALERTS, QUARANTINE, Lake
from lakehouse.contract.pipeline.demand import LEASE_S, MOST_VALUES, DemandBoard, DemandNote, Want, sources_of
from lakehouse.contract.pipeline.folder import Alert, Pipeline, Staging, View
from lakehouse.contract.pipeline.product import Product
from lakehouse.contract.pipeline.source import Source
from lakehouse.contract.storage import StorePath, files_in

RIDES, ROADS = Want("acme", "rides"), Want("", "roads", "road", "A1")


class Clock:
    now = 1_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=["folder", pytest.param("store", marks=pytest.mark.broker)])
def lake(request: pytest.FixtureRequest, tmp_path: Path) -> Lake:
    if request.param == "folder":
        return Lake(tmp_path)
    return Lake(StorePath(f"{request.getfixturevalue('s3')}/{uuid.uuid4().hex}"), tmp_path)


def test_a_demand_is_seen_and_ends_a_moment_after_its_last_subscriber(lake: Lake, clock: Clock) -> None:
    note, board = DemandNote(lake, clock), DemandBoard(lake, clock)
    assert board.read() == frozenset()
    note.tell(frozenset({RIDES, ROADS}))
    assert board.read() == {RIDES, ROADS}
    note.tell(frozenset({ROADS}))
    assert board.read() == {RIDES, ROADS}, "a poll that returns stops nothing"
    clock.now += 1.1
    note.tell(frozenset({ROADS}))
    assert board.read() == {ROADS}
    note.tell(frozenset())
    clock.now += 1.1
    note.tell(frozenset())
    assert board.read() == frozenset()
    assert not files_in(lake.shared / "demand", "*.json")


def test_a_note_counts_as_long_as_its_lease(lake: Lake, clock: Clock) -> None:
    note, board = DemandNote(lake, clock), DemandBoard(lake, clock)
    wants = frozenset({RIDES})
    note.tell(wants)
    for _ in range(3 * int(LEASE_S)):  # renewed
        clock.now += 1
        note.tell(wants)
        assert board.read() == wants
    clock.now += LEASE_S - 4  # the process was killed
    assert board.read() == wants
    clock.now += 4
    assert board.read() == frozenset()
    other = DemandNote(lake, clock)  # in another process
    other.tell(frozenset({ROADS}))
    assert board.read() == {ROADS}


def test_a_process_that_starts_again_within_the_lease_changes_nothing(lake: Lake, clock: Clock) -> None:
    board, wants = DemandBoard(lake, clock), frozenset({RIDES})
    DemandNote(lake, clock).tell(wants)
    assert board.read() == wants
    clock.now += LEASE_S / 2
    note = DemandNote(lake, clock)
    note.tell(wants)
    clock.now += LEASE_S / 2 - 1
    assert board.read() == wants
    clock.now += 2
    assert board.read() == wants, "the second process's note"


def test_notes_of_dead_processes_are_removed(tmp_path: Path, clock: Clock) -> None:
    lake = Lake(tmp_path)
    DemandNote(lake, clock).tell(frozenset({RIDES}))
    [old] = (tmp_path / "_millrace" / "demand").glob("*.json")
    os.utime(old, (1_000_000, 1_000_000))
    DemandNote(lake, clock).tell(frozenset({ROADS}))
    assert not old.exists()
    assert DemandBoard(lake, clock).read() == {ROADS}


def test_a_note_of_another_kind_is_passed_over(tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    lake = Lake(tmp_path)
    DemandNote(lake, clock).tell(frozenset({RIDES}))
    for name, text in (("a", "not JSON"), ("b", '{"wants": [1]}'), ("c", "{}")):
        (tmp_path / "_millrace" / "demand" / f"{name}.json").write_text(text)
    board = DemandBoard(lake, clock)
    assert board.read() == board.read() == {RIDES}
    assert len(caplog.records) == 3, "each is told once"


def test_too_many_values_are_every_value(tmp_path: Path, clock: Clock) -> None:
    lake = Lake(tmp_path)
    many = frozenset(Want("acme", "rides", "car", str(n)) for n in range(MOST_VALUES + 1))
    DemandNote(lake, clock).tell(many | {ROADS})
    assert DemandBoard(lake, clock).read() == {RIDES, ROADS}


def test_an_unreadable_folder_is_an_error(tmp_path: Path) -> None:
    """For then it is not known what is wanted."""
    lake = Lake(tmp_path)
    (tmp_path / "_millrace" / "demand" / "x.json").mkdir(parents=True)
    with pytest.raises(OSError, match=r"x\.json"):
        DemandBoard(lake).read()


def test_sources_of_tables() -> None:
    source = Source(topic="t", schema="id BIGINT", event_time="received_at", name="rides")
    product = Product("gold", "rides", "SELECT who, count(*) AS n FROM rides GROUP BY who", name="counts")
    pipeline = Pipeline(
        {"rides": source, "stops": replace(source, name="stops")},
        {"counts": product, "both": replace(product, name="both", right="stops")},
        {"few": View("counts", "SELECT * FROM counts"), "fewer": View("few", "SELECT * FROM few")},
        {"many": Alert("fewer", "n > 3")},
        {"copy": Staging("few")},
    )
    found = {
        "rides": {"rides"},
        "counts": {"rides"},
        "both": {"rides", "stops"},
        "fewer": {"rides"},
        "copy": {"rides"},
        "asked": {"stops"},
        "again": {"stops"},
        "circle": set(),
        ALERTS: {"rides", "stops"},
        QUARANTINE: set(),
        "unknown": set(),
    }
    reads = {"asked": ["stops"], "again": {"asked"}, ALERTS: {"asked"}, "circle": {"back"}, "back": {"circle"}}
    assert {table: sources_of(table, pipeline, reads) for table in found} == found

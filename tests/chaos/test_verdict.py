"""The checker of ``make chaos`` finds what is planted: a proof by a checker that cannot fail is none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import write_deltalake

from tests.chaos.agent import records
from tests.chaos.subscribers import Mirror
from tests.chaos.verdict import Inputs, judge
from tests.ingest.conftest import event

KEPT = range(20)
HOUR = datetime(2026, 1, 2, 3, tzinfo=UTC)
BEGAN, TENTH = HOUR + timedelta(minutes=59, seconds=30), timedelta(seconds=0.1)
BROKEN = b'{"id": broken'


def bronze_row(number: int, offset: int, **changed: Any) -> dict[str, Any]:
    """Numbers are dealt to two partitions by their key."""
    key = f"k{number % 7}".encode()
    row = {"event_id": str(number), "key": key, "payload": event(number), "topic": "clicks", "reject": None}
    row |= {"received_at": BEGAN + number * TENTH, "bronze_at": BEGAN + offset * TENTH}
    return row | {"partition": number % 7 % 2, "offset": offset, "suspect": False} | changed


def good_rows() -> list[dict[str, Any]]:
    """Twenty events by Kafka, and a file with a copy and a line that is none."""
    offsets: Counter[int] = Counter()
    rows = []
    for number in KEPT:
        rows.append(bronze_row(number, offsets[number % 7 % 2]))
        offsets[number % 7 % 2] += 1
    of_file = {"topic": "file:1", "partition": 0, "suspect": True}
    rows.append(bronze_row(3, 0, **of_file))
    rows.append(bronze_row(0, 1, **of_file, reject="no JSON") | {"event_id": "file:1:1", "payload": BROKEN})
    return rows


def product() -> list[dict[str, Any]]:
    counts = Counter(f"k{number % 7}" for number in KEPT)
    return [
        {"who": who, "n": n, "total": sum(number for number in KEPT if f"k{number % 7}" == who), "window_start": HOUR}
        for who, n in counts.items()
    ]


def visits() -> list[dict[str, Any]]:
    """One of each sender, which begins with its first event."""
    return [row | {"session_start": BEGAN + number * TENTH} for number, row in enumerate(product())]


class Case:
    """A lake, what went into it, and a subscriber: all in order, until a test changes something."""

    def __init__(self, folder: Path) -> None:
        self.lake = folder
        self.bronze = good_rows()
        self.products = {"per_who": product(), "visits": visits()}
        self.quarantine = [{"payload": BROKEN.decode()}]
        self.inputs = Inputs(set(KEPT), Counter(KEPT), Counter([3]), [BROKEN])
        self.mirror = Mirror("websocket", "n")
        self.say("snapshot", rows=product(), key=["who"], first=True, last=True, position="p1")

    def say(self, kind: str, **fields: Any) -> None:
        self.mirror.take({"type": kind, **fields})

    def change(self, after: str, position: str, upserts: list[dict[str, Any]]) -> None:
        self.say("change", after=after, position=position, upserts=upserts, deletes=[])

    def found(self) -> dict[str, int]:
        """What the checker finds, by kind."""
        tables = {"bronze/clicks": self.bronze, "silver/quarantine": self.quarantine}
        tables |= {f"gold/{name}": rows for name, rows in self.products.items()}
        for name, rows in tables.items():
            write_deltalake(self.lake / name, pa.Table.from_pylist(rows))
        verdict = judge(self.lake, self.inputs, [self.mirror], {0: 11, 1: 9})
        kinds = ("lost", "twice", "out_of_order")
        return {kind: getattr(verdict, kind) for kind in kinds if getattr(verdict, kind)}


def test_a_run_in_order_has_no_findings(tmp_path: Path) -> None:
    case = Case(tmp_path)
    assert Counter(row["partition"] for row in case.bronze if row["topic"] == "clicks") == {0: 11, 1: 9}
    assert case.found() == {}


def swap_offsets(case: Case) -> None:
    case.bronze[0]["offset"], case.bronze[7]["offset"] = case.bronze[7]["offset"], case.bronze[0]["offset"]


def swap_bytes(case: Case) -> None:
    case.bronze[0]["payload"] = event(1)


def forget_in_product(case: Case) -> None:
    case.products["visits"][0]["n"] -= 1


def count_twice(case: Case) -> None:
    case.products["visits"][0]["n"] += 1


def wrong_sum(case: Case) -> None:
    case.products["visits"][0]["total"] += 1


def end_too_early(case: Case) -> None:
    first = case.products["visits"][0]
    first |= {"n": 2, "total": 7}
    case.products["visits"].append(first | {"n": 1, "total": 14, "session_start": BEGAN + 14 * TENTH})


def another_window(case: Case) -> None:
    case.products["per_who"][0]["window_start"] = HOUR + timedelta(hours=1)


@pytest.mark.parametrize(
    ("plant", "found"),
    [
        pytest.param(lambda case: case.inputs.acknowledged.add(20), {"lost": 1}, id="an-event-is-missing"),
        pytest.param(lambda case: case.inputs.sent.pop(4), {"twice": 2}, id="an-event-that-nobody-sent"),
        pytest.param(
            lambda case: case.bronze.append(bronze_row(20, 12)), {"lost": 3, "twice": 2}, id="a-gap-before-a-record"
        ),
        pytest.param(lambda case: case.bronze.append(case.bronze[5]), {"twice": 2}, id="a-record-twice"),
        pytest.param(swap_offsets, {"out_of_order": 1}, id="order-within-a-key"),
        pytest.param(swap_bytes, {"lost": 1}, id="other-bytes"),
        pytest.param(lambda case: case.quarantine.append(case.quarantine[0]), {"twice": 1}, id="quarantined-twice"),
        pytest.param(forget_in_product, {"lost": 1}, id="an-event-is-not-in-a-product"),
        pytest.param(count_twice, {"twice": 1}, id="counted-twice"),
        pytest.param(end_too_early, {"lost": 1, "twice": 1}, id="a-session-in-two"),
        pytest.param(another_window, {"lost": 3, "twice": 3}, id="another-window"),
        pytest.param(
            lambda case: case.products["visits"].append(case.products["visits"][0]), {"twice": 3}, id="a-row-twice"
        ),
        pytest.param(wrong_sum, {"twice": 1}, id="another-event-was-counted"),
        pytest.param(
            lambda case: case.change("p1", "p2", [{"who": "k0", "n": 1, "total": 0}]),
            {"lost": 2, "out_of_order": 1},
            id="a-counter-falls",
        ),
        pytest.param(lambda case: case.change("p7", "p8", []), {"lost": 1}, id="a-gap-between-changes"),
        pytest.param(
            lambda case: case.change("p1", "p2", [{"who": "k9", "n": 1, "total": 0}]), {"twice": 1}, id="a-row-too-many"
        ),
    ],
)
def test_what_is_planted_is_found(tmp_path: Path, plant: Callable[[Case], None], found: dict[str, int]) -> None:
    case = Case(tmp_path)
    plant(case)
    assert case.found() == found


def test_an_event_whose_record_was_destroyed_may_be_missing(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.inputs.acknowledged.add(20)
    case.inputs.damaged = {20}
    assert case.found() == {}


def test_a_message_that_comes_again_is_applied_once(tmp_path: Path) -> None:
    case = Case(tmp_path)
    rows = [row | {"n": row["n"] + 1} for row in product()]
    case.change("p1", "p2", rows)
    case.change("p1", "p2", product())
    assert list(case.mirror.rows.values()) == rows
    assert not case.mirror.faults


@pytest.mark.parametrize(
    ("start", "end", "found"), [(9, 10, b"one"), (17, 18, b"two"), (13, 16, b"onetwo"), (0, 1, b"")]
)
def test_records_with_a_byte_in_a_range(start: int, end: int, found: bytes) -> None:
    frame = b"\xa7MR\x9e"
    log = b"HEAD" + frame + b"....one" + frame + b"two" + frame + b"three"
    assert records(log, start, end).replace(frame, b"").replace(b".", b"").replace(b"HEAD", b"") == found

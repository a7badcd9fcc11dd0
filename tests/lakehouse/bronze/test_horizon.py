"""The dedupe horizon: any batches, repeated or not, judge as bronze alone does."""

from __future__ import annotations

import tempfile
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from lakehouse.bronze.horizon import HorizonIndex, seen_index
from lakehouse.bronze.seen import RunIndex
from lakehouse.contract.pipeline.source import Source

START = datetime(2026, 1, 1, tzinfo=UTC)
HORIZON = 10  # seconds
Row = tuple[int, int]  # id, second of bronze_at


def table(rows: list[tuple[int, Row]]) -> pa.Table:
    return pa.table(
        {
            "dedupe_key": pa.array([bytes([key]) * 16 for _, (key, _) in rows], pa.binary()),
            "topic": pa.array(["t"] * len(rows), pa.string()),
            "partition": pa.array([0] * len(rows), pa.int32()),
            "offset": pa.array([offset for offset, _ in rows], pa.int64()),
            "bronze_at": pa.array([START + timedelta(seconds=at) for _, (_, at) in rows], pa.timestamp("us", "UTC")),
        }
    )


def counting(rows: list[Row]) -> list[bool]:
    """In plain Python: no copy in the horizon before it."""
    last: dict[int, int] = {}
    found = []
    for key, at in rows:
        found.append(key not in last or at - last[key] > HORIZON)
        last[key] = at
    return found


steps = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), min_size=1, max_size=40)


@settings(max_examples=30)
@given(steps, st.lists(st.integers(0, 40), max_size=6), st.data())
def test_any_batches_judge_as_bronze_does(found: list[tuple[int, int]], cuts: list[int], data: st.DataObject) -> None:
    at, rows = 0, []
    for key, step in found:
        at += step
        rows.append((key, at))
    wanted = counting(rows)
    numbered = list(enumerate(rows))
    places = sorted({0, len(rows), *(min(cut, len(rows)) for cut in cuts)})
    with tempfile.TemporaryDirectory() as folder:
        index = HorizonIndex(Path(folder), HORIZON * 1_000_000)
        for a, b in zip(places, [*places[1:], len(rows)], strict=True):
            for _ in range(data.draw(st.integers(1, 3))):
                batch = data.draw(st.permutations(numbered[a:b]))
                counts = index.judge(table(batch), f"p{b}/{a}")
                assert list(counts) == [wanted[offset] for offset, _ in batch]
        recent = {key for key, seen in rows if at - seen <= HORIZON}
        assert len(index) == len(recent)
        index.close()
        again = HorizonIndex(Path(folder) / "again", HORIZON * 1_000_000)
        assert list(again.judge(table(numbered), "all")) == wanted
        again.close()


def test_a_source_asks_for_its_index(tmp_path: Path) -> None:
    source = Source("t", "id BIGINT", "now()")
    plain, bounded = (
        seen_index(tmp_path / "a", source),
        seen_index(tmp_path / "b", Source("t", "id BIGINT", "now()", dedupe_horizon="1 day")),
    )
    assert type(plain) is RunIndex
    assert isinstance(bounded, HorizonIndex)
    plain.close()
    bounded.close()

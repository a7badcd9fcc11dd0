"""Following products by version, on real Delta logs."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from ingest.answers.tables import Coordinates, LakeState, ProductWatch
from lakehouse.contract.lake import Lake
from tests.ingest.lakes import commit


class Counting(LakeState):
    """Counts looks."""

    looks = 0

    def progress(self, name: str) -> tuple[int, dict[str, int]]:
        self.looks += 1
        return super().progress(name)


async def test_everybody_is_told_when_their_event_is_held(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    state = Counting(lake)
    watch = ProductWatch(state, 0.005)
    early = [asyncio.create_task(watch.holds("tops", Coordinates("t", 0, 4))) for _ in range(50)]
    late = asyncio.create_task(watch.holds("tops", Coordinates("t", 1, 0)))
    newer = asyncio.create_task(watch.newer("tops", 0))
    await asyncio.sleep(0.05)
    assert not any(task.done() for task in (*early, late, newer)), "the product does not exist yet"
    await asyncio.to_thread(commit, lake, "tops", [{"n": 1}], key="n", through={"t/0": 4})
    await asyncio.to_thread(commit, lake, "tops", [{"n": 2}], key="n", through={"t/0": 5})
    async with asyncio.timeout(60):
        assert {await task for task in early} <= {2, 3}
        assert await newer >= 1
        assert not late.done()
        late.cancel()
        await asyncio.gather(late, return_exceptions=True)
        assert await watch.holds("tops", Coordinates("t", 0, 4)) == 2, "held already"
    looks = state.looks
    await asyncio.sleep(0.1)
    assert state.looks <= looks + 1, "nobody waits, so nobody looks"
    waiting = asyncio.create_task(watch.newer("tops", 99))
    await asyncio.sleep(0.02)
    watch.close()
    with pytest.raises(asyncio.CancelledError):
        await waiting

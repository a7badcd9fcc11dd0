"""A short round of ``make chaos``; CHAOS_SEED=N repeats it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.__main__ import play
from tests.chaos.agent import dice

pytestmark = [pytest.mark.spark, pytest.mark.broker]


async def test_nothing_is_lost_counted_twice_out_of_order_or_left_behind(tmp_path: Path) -> None:
    found = await play(dice("round").randrange(1 << 31), 0.25, tmp_path / "all", None)
    assert found.verdict.findings == [], [(harm.kind, harm.target) for harm in found.harms]
    assert found.summary()["rounds"] > 0

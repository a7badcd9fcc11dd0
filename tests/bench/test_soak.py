"""What `make soak` takes for a flat line."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench.plot import plot_lines
from tests.bench.soak import TOLERANCE, quarters, resident_mb, size_of


def line(panel: str, values: list[float]) -> list[dict[str, object]]:
    return [{"panel": panel, "line": "one", "minutes": at / 10, "value": value} for at, value in enumerate(values)]


@pytest.mark.parametrize("panel", TOLERANCE)
def test_a_line_that_rises_beyond_its_tolerance_is_not_flat(panel: str) -> None:
    factor, more = TOLERANCE[panel]
    top = 1_000 * factor + more
    assert quarters(line(panel, [1_000.0] * 100))[panel]["one"]["flat"]
    assert quarters(line(panel, [1_000.0] * 60 + [top] * 40))[panel]["one"]["flat"]
    assert not quarters(line(panel, [1_000.0] * 60 + [top + 1] * 40))[panel]["one"]["flat"]
    assert quarters(line(panel, [5_000.0] * 20 + [1_000.0] * 80))[panel]["one"]["flat"], "warm-up does not count"


def test_it_plots_and_measures(tmp_path: Path) -> None:
    (tmp_path / "table").mkdir()
    (tmp_path / "table" / "part").write_bytes(b"four")
    assert size_of(tmp_path) == 4
    assert resident_mb(1) >= 0
    plot_lines(tmp_path / "lines.svg", list(TOLERANCE), line("files", [1.0, 2.0]))
    assert "files" in (tmp_path / "lines.svg").read_text()

"""Every code of a refusal is told in the documentation."""

from __future__ import annotations

import re
from pathlib import Path

from ingest.errors import CODES

ROOT = Path(__file__).resolve().parents[2]


def test_every_code_is_documented() -> None:
    codes = set(CODES.values())
    for path in (ROOT / "ingest").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        codes |= set(re.findall(r'code="([a-z-]+)"', text))
        codes |= set(re.findall(r'Refusal\(.*\d{3}, "([a-z-]+)"\)', text))
    codes |= {"log-full", "log-unavailable", "not-ready"}
    table = (ROOT / "docs/guide/collecting.md").read_text(encoding="utf-8").partition("| code | status |")[2]
    told = set(re.findall(r"`([a-z-]+)`", table.partition("\n\n")[0]))
    assert len(codes) > 25
    assert codes - told == set()

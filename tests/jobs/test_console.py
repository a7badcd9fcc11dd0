"""What a process writes to standard error."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest

CODE = """
import logging
from jobs.console import log_to_stderr
from lakehouse.contract.settings import load_settings
from lakehouse.contract.envelope import about
load_settings()
log_to_stderr()
logging.getLogger("one").info('with "quotes" and\\nlines %d', 7)
logging.getLogger("kafka.x").info("chatter")
for number in range(100):
    logging.getLogger(f"kafka.{number % 3}").warning("the broker is away")
logging.getLogger("one").info("gone", extra=about("~1", "clicks", "t"))
try:
    1 / 0
except ZeroDivisionError:
    logging.getLogger("two").exception("failed")
"""


def said(kind: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", CODE], cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=300,
        env={"PATH": "", "MILLRACE_LOG": kind}, check=False,
    )  # fmt: skip


def test_json_a_line() -> None:
    first, away, about, second = map(json.loads, said("json").stderr.splitlines())
    assert away["message"] == "the broker is away", "once, not a hundred times"
    assert datetime.fromisoformat(first.pop("at")).tzinfo is not None
    assert first.pop("process") > 0
    assert first == {"level": "INFO", "logger": "one", "message": 'with "quotes" and\nlines 7'}
    assert (about["message"], about["event_id"], about["source"], about["tenant"]) == ("gone", "~1", "clicks", "t")
    assert (second["message"], second["level"]) == ("failed", "ERROR")
    assert "ZeroDivisionError" in second["error"]


@pytest.mark.parametrize(("kind", "text"), [("text", "INFO one: with"), ("xml", "Use text or json")])
def test_text_and_what_is_unknown(kind: str, text: str) -> None:
    assert text in said(kind).stderr

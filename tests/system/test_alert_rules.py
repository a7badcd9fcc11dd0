"""The files for Prometheus and Grafana: checked by promtool. Against real processes: test_worked_case."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from lakehouse.contract.settings import conf_dir
from tests.system.prometheus import RULES, panels, require_tool

CASES = Path(__file__).with_name("alerts_test.yml")


def test_promtool_accepts_rules_and_their_unit_tests() -> None:
    promtool = require_tool("promtool")
    example = conf_dir() / "deploy" / "prometheus" / "prometheus.yml"
    for command in (["check", "config", str(example)], ["test", "rules", str(CASES)]):
        done = subprocess.run([promtool, *command], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_each_alert_has_a_unit_test_and_a_place_in_the_docs() -> None:
    named = set(re.findall(r"- alert: (\w+)", RULES.read_text(encoding="utf-8")))
    page = Path(__file__).parents[2] / "docs" / "operations" / "monitoring.md"
    assert named == set(re.findall(r"        alertname: (\w+)", CASES.read_text(encoding="utf-8")))
    assert named == set(re.findall(r"`(Millrace[A-Z]\w+)`", page.read_text(encoding="utf-8")))


def test_each_panel_has_a_query_of_ours() -> None:
    assert [name for name, query in panels().items() if not re.search(r"millrace|process_", query)] == []

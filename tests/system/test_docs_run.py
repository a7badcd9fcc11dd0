"""Code in the docs that is run as it stands: fences whose info line has a mark, e.g. ``python {.test}``."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lakehouse.contract.jvm import jar_paths
from tests.system.installed import ROOT, millrace, user_environment
from tests.system.test_meetup_page import Tables

GUIDE = ROOT / "docs" / "guide"


def blocks(page: Path, mark: str) -> list[tuple[str, str]]:
    """Title and text of each fence with the mark."""
    fence = rf"^```\w+ \{{\.{mark}(?: title=(\S+))?\}}\n(.*?)^```$"
    return re.findall(fence, page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    """A folder whose ``lake`` has the tables of the example."""
    tables = Tables(tmp_path / "lake")
    tables.commit()
    return tmp_path


def test_other_engines_read_the_tables(lake: Path) -> None:
    found = [code for _, code in blocks(GUIDE / "reading.md", "test")]
    assert len(found) == 2
    for code in found:
        done = subprocess.run([sys.executable, "-c", code], cwd=lake, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert "Topic" in done.stdout


@pytest.mark.spark
@pytest.mark.soak
def test_spark_reads_the_tables(lake: Path) -> None:
    ((_, code),) = blocks(GUIDE / "reading.md", "spark")
    (lake / "read.py").write_text(code)
    binaries = Path(sys.executable).parent
    environment = os.environ | {"PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}"}
    jars = ",".join(map(str, jar_paths("spark")))
    command = [binaries / "spark-submit", "--master", "local[1]", "--jars", jars, "read.py"]
    done = subprocess.run(command, cwd=lake, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Topic" in done.stdout


def test_pipeline_of_the_nested_page_passes_the_check(tmp_path: Path) -> None:
    for name, text in blocks(GUIDE / "nested.md", "pipeline"):
        (tmp_path / (name or "pipeline.toml")).write_text(text)
    assert len(list(tmp_path.iterdir())) == 3
    command = [str(millrace()), "check", str(tmp_path), "--json", "--set", "serve.port=0", "--set", "collect.port=0"]
    done = subprocess.run(command, cwd=tmp_path, env=user_environment(), capture_output=True, text=True, check=False)
    assert json.loads(done.stdout) == [], done.stdout

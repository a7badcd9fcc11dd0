"""The dbt project of the examples, over a lake, in an environment of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.serve.lakes import top_topics, topics, window

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "dbt"


@pytest.mark.soak
def test_dbt_builds_and_tests_its_models_over_gold(tmp_path: Path) -> None:
    product = top_topics(tmp_path / "lake")
    product.overwrite([*topics(0, [5, 4]), *topics(1, [9])], [window(0), window(1)])
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    requirements = EXAMPLE / "requirements.txt"
    subprocess.run([python, "-m", "pip", "install", "--quiet", "-r", requirements], check=True)
    project = tmp_path / "dbt"
    shutil.copytree(EXAMPLE, project)
    environ = {**os.environ, "LAKE": str(tmp_path / "lake"), "DO_NOT_TRACK": "1"}
    built = subprocess.run(
        [python.with_name("dbt"), "build", "--profiles-dir", "."],
        cwd=project,
        env=environ,
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stdout
    assert "PASS=4 WARN=0 ERROR=0" in built.stdout
    asked = (
        "import duckdb; print(duckdb.connect('analysis.duckdb').sql(\"FROM topics_by_day ORDER BY topic\").fetchall())"
    )
    found = subprocess.run([python, "-c", asked], cwd=project, check=True, capture_output=True, text=True).stdout
    assert "'topic 1', 2, 14," in found and "'topic 2', 1, 4," in found

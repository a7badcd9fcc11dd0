"""In a process of its own: a limit that was lowered stays so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import logging, resource, sys
from serve.app import allow_files
logging.basicConfig(format="%(message)s", stream=sys.stdout)
resource.setrlimit(resource.RLIMIT_NOFILE, (200, 400))
print(allow_files(int(sys.argv[1])), resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize(("subscribers", "warned"), [(144, False), (145, True)])
def test_the_soft_limit_becomes_the_hard_one_and_too_few_are_told(subscribers: int, warned: bool) -> None:
    run = [sys.executable, "-c", SCRIPT, str(subscribers)]
    told = subprocess.run(run, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2]).stdout
    assert "400 (400, 400)" in told
    assert ("serve.max_subscribers asks for 401" in told) == warned

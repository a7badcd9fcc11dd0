"""The tutorial, followed word by word with the installed wheel in an empty folder, and how long each step took."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from jobs.local.machine import is_free
from jobs.local.stack import free_port
from tests.system.installed import ROOT, millrace, user_environment

pytestmark = [pytest.mark.spark, pytest.mark.broker, pytest.mark.soak]  # two minutes: more than `make test` has

PAGE = ROOT / "docs" / "tutorial.md"
PORTS = {"8400": "MILLRACE_SERVE_PORT", "8401": "MILLRACE_COLLECT_PORT"}
LONGEST_S = 600.0


class Reader:
    """Somebody who types what the page says."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.text = PAGE.read_text(encoding="utf-8")
        self.environment = user_environment() | {"PATH": f"{millrace().parent}:{os.environ['PATH']}"}
        for port, variable in PORTS.items():
            if not is_free("127.0.0.1", int(port)):  # another test on this machine has it
                other = str(free_port())
                self.text = self.text.replace(port, other)
                self.environment[variable] = other
        blocks = re.findall(r"^## (\d)|^```sh \{\.(step|up)\}\n(.*?)^```$", self.text, re.MULTILINE | re.DOTALL)
        self.steps: list[tuple[str, str, str]] = []
        chapter = ""
        for number, kind, code in blocks:
            chapter = number or chapter
            if kind:
                self.steps.append((chapter, kind, code))
        self.took: list[tuple[str, float]] = []

    def step(self, chapter: str, expected: Callable[[str], bool] = bool, *, retry_s: float = 0.0) -> str:
        """Run the next block, which belongs to the chapter; again while its output is not as expected yet."""
        found, kind, code = self.steps.pop(0)
        assert (found, kind) == (chapter, "step")
        began = time.monotonic()
        while True:
            done = subprocess.run(
                ["bash", "-euc", code],
                cwd=self.folder,
                env=self.environment,
                capture_output=True,
                text=True,
                check=False,
            )
            said = done.stdout + done.stderr
            if done.returncode == 0 and expected(said):
                break
            assert time.monotonic() - began < retry_s, f"{code}\n{said}"
            time.sleep(0.5)
        self._note(chapter, code, began)
        return said

    @contextmanager
    def up(self, chapter: str) -> Iterator[None]:
        """The next block in a terminal of its own, until Ctrl-C."""
        found, kind, code = self.steps.pop(0)
        assert (found, kind) == (chapter, "up")
        began = time.monotonic()
        log = self.folder / f"up-{chapter}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                ["bash", "-euc", f"exec {code}"],
                cwd=self.folder,
                env=self.environment,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        try:
            while "ready" not in log.read_text():
                assert process.poll() is None, log.read_text()
                assert time.monotonic() - began < LONGEST_S, log.read_text()
                time.sleep(0.2)
            self._note(chapter, code, began)
            yield
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(120)

    def _note(self, chapter: str, code: str, began: float) -> None:
        self.took.append((f"{chapter}. {code.splitlines()[0][:60]}", time.monotonic() - began))


def shows(pattern: str) -> Callable[[str], bool]:
    """Whether the output has what the page says of it."""
    return lambda said: re.search(pattern, said, re.DOTALL) is not None


def test_the_tutorial(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reader = Reader(tmp_path)
    reader.step("1", shows("^$"))
    reader.step("2", shows("orders_by_city.*top_product"))
    reader.step("3")
    with reader.up("4"):
        assert len(json.loads(reader.step("5"))["tokens"]) == 8
        reader.step("6", shows(r"Bonn\W+3\W.*Oslo\W+2\W.*Rome\W+2\W.*Lima\W+1\W"), retry_s=60)
        reader.step("6", shows(r"1\W+coffee\W+5\W"), retry_s=60)
        snapshot = json.loads(reader.step("7").splitlines()[0])
        assert (snapshot["type"], snapshot["rows"][0]["item"]) == ("snapshot", "coffee")
    reader.step("8")
    with reader.up("8"):
        reader.step("8", shows(r"Bonn\W+4\.5\W.*Lima\W+3\.5\W.*Oslo\W+5\.0\W.*Rome\W+2\.5\W"), retry_s=60)
    reader.step("9", shows("top_product"))
    assert reader.steps == []
    with capsys.disabled():
        print()
        for name, seconds in [*reader.took, ("all of it", sum(seconds for _, seconds in reader.took))]:
            print(f"  {seconds:6.1f} s  {name}")
    assert sum(seconds for _, seconds in reader.took) < LONGEST_S

"""Children kept running, and none left behind: real processes of the ``millrace`` command."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from jobs.local.supervise import BACKOFF_S, HEALTHY_S, Child, PartRefused, Supervisor
from lakehouse.contract.errors import EnvironmentProblem

ROOT = Path(__file__).parents[3]
RUNS = ("simulate", "--port", "0", "--rate", "0.1")  # until it is stopped
ENDS = ("tables", "--lake", "nowhere")  # at once
GRANDCHILD = """
import os, pathlib, subprocess
pids = pathlib.Path(os.environ["PIDS"])
with pids.open("a") as file:
    file.write(f"{subprocess.Popen(['sleep', '1000']).pid}\\n")
"""
SUPERVISOR = """
import sys, time
from pathlib import Path
from jobs.local.supervise import Child, Supervisor
supervisor = Supervisor()
supervisor.start(Child("player", sys.argv[2:], Path(sys.argv[1])))
print(supervisor.pid("player"), flush=True)
while True:
    supervisor.tend()
    time.sleep(0.05)
"""


def alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def eventually(check: Callable[[], object], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not check():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.02)


class Clock:
    """Time that moves when told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def supervisor(clock: Clock) -> Iterator[Supervisor]:
    made = Supervisor(now=clock)
    yield made
    made.stop()


def started(child: Child) -> bool:
    """Whether the player has said that it plays: by then it knows its parent and its signals."""
    return child.log.is_file() and b"playing at" in child.log.read_bytes()


def test_a_child_that_ends_is_started_again_with_back_off(supervisor: Supervisor, clock: Clock, tmp_path: Path) -> None:
    supervisor.start(Child("a", ENDS, tmp_path / "logs" / "a.log"))
    for number, pause in enumerate(BACKOFF_S[:3], 1):
        eventually(lambda: supervisor.pid("a") is None)
        supervisor.tend()  # notices
        clock.now += pause - 0.01
        supervisor.tend()
        assert (supervisor.pid("a"), supervisor.restarts["a"]) == (None, number - 1)
        clock.now += 0.02
        supervisor.tend()
        assert supervisor.restarts["a"] == number
    # One that ran for long starts its back-off anew.
    eventually(lambda: supervisor.pid("a") is None)
    clock.now += HEALTHY_S
    supervisor.tend()
    clock.now += BACKOFF_S[0] + 0.01
    supervisor.tend()
    assert supervisor.restarts["a"] == 4


def test_a_child_that_refuses_its_configuration_is_not_started_again(supervisor: Supervisor, tmp_path: Path) -> None:
    supervisor.start(Child("a", ("simulate", "--pipeline", "nothing"), tmp_path / "a.log"))
    eventually(lambda: supervisor.pid("a") is None)
    with pytest.raises(PartRefused, match=r"^configuration: pipeline: there is no pipeline 'nothing'\. Known: .*path$"):
        supervisor.tend()
    assert supervisor.restarts["a"] == 0


def test_what_the_machine_lacks_stops_a_part_that_never_worked(
    supervisor: Supervisor, clock: Clock, tmp_path: Path
) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        command = ("simulate", "--port", str(port))
        supervisor.start(Child("a", command, tmp_path / "a.log"))
        eventually(lambda: supervisor.pid("a") is None)
        with pytest.raises(EnvironmentProblem, match=rf"^port {port} is taken\. Stop .* choose another port$"):
            supervisor.tend()
        assert supervisor.restarts["a"] == 0
        # One that worked before is started again: the trouble may pass.
        supervisor.start(Child("b", command, tmp_path / "b.log"))
        eventually(lambda: supervisor.pid("b") is None)
        clock.now += HEALTHY_S
        supervisor.tend()
        clock.now += BACKOFF_S[0] + 0.01
        supervisor.tend()
        assert supervisor.restarts["b"] == 1


def test_the_pause_has_an_upper_bound(supervisor: Supervisor, clock: Clock, tmp_path: Path) -> None:
    supervisor.start(Child("a", ENDS, tmp_path / "a.log"))
    supervisor._failures["a"] = 1_000
    eventually(lambda: supervisor.pid("a") is None)
    supervisor.tend()
    clock.now += BACKOFF_S[-1] + 0.01
    supervisor.tend()
    assert supervisor.restarts["a"] == 1


def test_a_killed_child_is_started_again_after_its_group_is_gone(
    supervisor: Supervisor, clock: Clock, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(GRANDCHILD)
    pids = tmp_path / "pids"
    child = Child("a", RUNS, tmp_path / "a.log", {"PYTHONPATH": f"{tmp_path}:{ROOT}", "PIDS": str(pids)})
    supervisor.start(child)
    eventually(lambda: started(child))
    first = supervisor.pid("a")
    assert first is not None
    (grandchild,) = map(int, pids.read_text().split())
    assert alive(grandchild)
    os.kill(first, signal.SIGKILL)
    eventually(lambda: supervisor.pid("a") is None)
    supervisor.tend()
    assert not alive(grandchild)
    clock.now += 1.0
    supervisor.tend()
    second = supervisor.pid("a")
    assert second not in (None, first)
    eventually(lambda: len(pids.read_text().split()) == 2)
    supervisor.stop()
    assert second is not None
    assert not any(alive(pid) for pid in (second, *map(int, pids.read_text().split())))


def test_stop_leaves_nothing_and_ends_children_cleanly(supervisor: Supervisor, tmp_path: Path) -> None:
    children = [Child(name, RUNS, tmp_path / f"{name}.log") for name in "abc"]
    for child in children:
        supervisor.start(child)
    eventually(lambda: all(map(started, children)))
    pids = {child.name: supervisor.pid(child.name) or 0 for child in children}
    supervisor.stop("b")
    assert [alive(pids[name]) for name in "abc"] == [True, False, True]
    supervisor.tend()
    assert supervisor.pid("b") is None  # a stopped child stays stopped
    supervisor.stop()
    assert not any(map(alive, pids.values()))
    assert supervisor.restarts == {"a": 0, "b": 0, "c": 0}


def test_last_words(supervisor: Supervisor, tmp_path: Path) -> None:
    child = Child("a", ["sql", "SELECT * FROM nothing", "--lake", str(tmp_path)], tmp_path / "a.log")
    assert supervisor.last_words("a") == ""
    supervisor.start(child)
    eventually(lambda: supervisor.pid("a") is None)
    assert "nothing" in child.log.read_text()
    assert supervisor.last_words("a") == child.log.read_text().rstrip().splitlines()[-1]


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG")
def test_a_child_imports_nothing_from_the_users_folder(
    supervisor: Supervisor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "__init__.py").write_text("raise RuntimeError('a package of the user')")
    monkeypatch.chdir(tmp_path)
    supervisor.start(Child("child", ["--help"], tmp_path / "child.log"))
    eventually(lambda: "Usage:" in (tmp_path / "child.log").read_text())


def test_children_end_when_the_supervisor_is_killed(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    command = [sys.executable, "-c", SUPERVISOR, str(log), *RUNS]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            pid = int(process.stdout.readline())
            eventually(lambda: started(Child("a", RUNS, log)))
            assert alive(pid)
        finally:
            process.kill()
    eventually(lambda: not alive(pid))

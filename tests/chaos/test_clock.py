"""Processes under a moved clock see the moved time, and their waits last as long as asked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from datetime import datetime

import pytest

from lakehouse.contract.jvm import find_java
from tests.chaos.clock import WallClock

WAIT_S = 0.3
WAITS = f"""
import asyncio, ctypes, json, queue, threading, time
from confluent_kafka import Consumer
libc = ctypes.CDLL(None)
def semaphore():
    place, until = ctypes.create_string_buffer(64), time.time() + {WAIT_S}
    libc.sem_init(place, 0, 0)
    libc.sem_timedwait(place, (ctypes.c_long * 2)(int(until), int(until % 1 * 1e9)))
held = threading.Lock()
held.acquire()
consumer = Consumer({{"bootstrap.servers": "127.0.0.1:1", "group.id": "g", "log_level": 0}})
consumer.subscribe(["t"])
waits = {{
    "sleep": lambda: time.sleep({WAIT_S}),
    "event": lambda: threading.Event().wait({WAIT_S}),
    "lock": lambda: held.acquire(timeout={WAIT_S}),
    "asyncio": lambda: asyncio.run(asyncio.sleep({WAIT_S})),
    "poll": lambda: consumer.poll({WAIT_S}),
    "semaphore": semaphore,
}}
found = {{"now": time.time()}}
for name, wait in waits.items():
    began = time.monotonic()
    wait()
    found[name] = time.monotonic() - began
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def clock(tmp_path_factory: pytest.TempPathFactory) -> WallClock:
    clock = WallClock(tmp_path_factory.mktemp("machine") / "clock")
    if clock.missing:
        pytest.skip(clock.missing)
    return clock


def output_of(clock: WallClock, *command: str) -> str:
    environment = os.environ | clock.environment
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize("seconds", [-60.0, 60.25])
def test_python_sees_the_moved_clock_and_waits_as_long_as_asked(clock: WallClock, seconds: float) -> None:
    clock.move(seconds)
    found = json.loads(output_of(clock, sys.executable, "-c", WAITS))
    assert abs(found.pop("now") - seconds - time.time()) < 20
    for name, took_s in found.items():
        assert WAIT_S * 0.95 <= took_s < 20, name


def test_java_sees_the_moved_clock(clock: WallClock) -> None:
    clock.move(-3_600)
    log = output_of(clock, str(find_java().path), "-Xlog:gc+init=info:stdout:time", "-version")
    shown = datetime.strptime(log[1 : log.index("]")], "%Y-%m-%dT%H:%M:%S.%f%z").timestamp()
    assert abs(shown + 3_600 - time.time()) < 20


def test_running_process_sees_each_move(clock: WallClock) -> None:
    clock.move(0)
    code = "import sys, time\nfor _ in sys.stdin: print(time.time(), flush=True)"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], env=clock.environment, text=True, **pipes) as process:
        assert process.stdin and process.stdout
        for seconds in (0.0, 30.5, -30.5, 0.0):
            clock.move(seconds)
            process.stdin.write("now\n")
            process.stdin.flush()
            assert abs(float(process.stdout.readline()) - seconds - time.time()) < 10
        process.stdin.close()
        process.wait(60)

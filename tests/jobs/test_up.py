"""The supervisor of the stack: it goes on looking after its parts while the embedded broker is started again."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from ingest.broker import EmbeddedBroker
from jobs.up import Stack
from lakehouse.contract.settings import load_settings


@pytest.mark.broker
def test_tending_does_not_wait_for_the_broker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stack = Stack(load_settings({}, lake=tmp_path / "lake", kafka__heap_mb=256))
    (tmp_path / "lake" / "_millrace" / "run").mkdir(parents=True)
    start, held = EmbeddedBroker.start, threading.Event()

    def slowly(broker: EmbeddedBroker, timeout_s: float = 60.0) -> str:
        assert held.wait(60)
        return start(broker, timeout_s)

    held.set()
    monkeypatch.setattr(EmbeddedBroker, "start", slowly)
    stack._start_broker()
    broker = stack._broker
    assert broker is not None
    try:
        _until(lambda: broker.running() and not stack._is_starting())
        held.clear()
        broker.kill()
        for _ in range(5):
            stack.tend()  # returns although the broker is not back
        assert stack.restarts_of_broker == 1, "and it is started once"
        assert not broker.running()
        held.set()
        _until(broker.running)
        stack.tend()
        assert stack.restarts_of_broker == 1
    finally:
        held.set()
        stack.stop()
    assert not broker.running()


def _until(check: object) -> None:
    deadline = time.monotonic() + 60
    while not check():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.02)

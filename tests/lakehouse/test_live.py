"""Threads of a driver: what they end with, and how they close. Its queries and products run in test_stream.py."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.sql import SparkSession

from lakehouse.contract.lake import Lake
from lakehouse.live import BronzeFollower, side_by_side
from lakehouse.stream import SourceWriter
from tests.lakehouse.lakes import eventually


@pytest.mark.spark
def test_all_tasks_end_before_the_first_error_is_raised(spark: SparkSession) -> None:
    done: list[int] = []

    def fails() -> None:
        raise ValueError("one of them")

    assert spark.sparkContext is not None  # the threads carry its properties
    with pytest.raises(ValueError, match="one of them"):
        side_by_side([fails, lambda: done.append(1), lambda: done.append(2)])
    assert sorted(done) == [1, 2]


class Slow(SourceWriter):
    """Notes what it has taken."""

    def __init__(self) -> None:
        nothing: Any = None
        super().__init__(nothing, "", nothing, Path(), None)
        query: Any = SimpleNamespace(stop=lambda: None)
        self.query = query
        self.noted: list[str] = []
        self.begun, self.may_end = threading.Event(), threading.Event()

    def _take(self, _events: object, batch: int) -> None:
        self.begun.set()
        assert self.may_end.wait(60)
        self.noted.append(f"batch {batch}")


def test_stopping_waits_for_the_batch_in_hand() -> None:
    writer = Slow()
    taking = threading.Thread(target=writer, args=(None, 4))
    taking.start()
    assert writer.begun.wait(60)
    stopping = threading.Thread(target=lambda: (writer.stop(), writer.noted.append("stopped")))
    stopping.start()
    writer.may_end.set()
    taking.join()
    stopping.join()
    assert writer.noted == ["batch 4", "stopped"]


class Noting(BronzeFollower):
    """Notes the order in which things happen; fails when told to."""

    def __init__(self, fails: str = "") -> None:
        super().__init__(Lake(Path("lake")), "noting", 0)
        self.noted: list[str] = []
        self.begun, self.may_end = threading.Event(), threading.Event()
        self._fails = fails

    def _catch_up(self) -> None:
        self.noted.append("caught up")
        if self._fails == "catch up":
            raise ValueError("bronze is gone")

    def _follow(self) -> None:
        self.begun.set()
        assert self.may_end.wait(60)
        if self._fails == "follow":
            raise ValueError("bronze is gone")
        self.noted = [*self.noted[:1], "followed"]

    def _close(self) -> None:
        self.noted.append("closed")


def test_files_are_closed_after_the_step_in_hand() -> None:
    follower = Noting()
    follower.start()
    assert follower.begun.wait(60)
    stopping = threading.Thread(target=follower.stop)
    stopping.start()
    assert follower.is_active
    follower.may_end.set()
    stopping.join()
    assert follower.noted == ["caught up", "followed", "closed"]


def test_an_error_ends_it_and_is_told() -> None:
    follower = Noting("follow")
    follower.may_end.set()
    follower.start()
    eventually(lambda: not follower.is_active, 60)
    assert str(follower.error) == "bronze is gone"
    follower.stop()
    assert follower.noted[-1] == "closed"


def test_files_are_closed_when_it_cannot_start() -> None:
    follower = Noting("catch up")
    with pytest.raises(ValueError, match="bronze is gone"):
        follower.start()
    assert follower.noted == ["caught up", "closed"]

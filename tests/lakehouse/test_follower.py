"""Threads that follow bronze: what they end with, and in which order they close."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from lakehouse.contract.lake import Lake
from lakehouse.follower import BronzeFollower
from tests.lakehouse.lakes import eventually


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

"""Threads of a driver. Its queries and products run in test_stream.py."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from lakehouse.live import side_by_side
from lakehouse.stream import SourceWriter


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
        self.noted: list[str] = []
        self.begun, self.may_end = threading.Event(), threading.Event()

    def _take(self, _events: object, batch: int) -> None:
        self.begun.set()
        assert self.may_end.wait(60)
        self.noted.append(f"batch {batch}")


def test_closing_waits_for_the_batch_in_hand() -> None:
    writer = Slow()
    taking = threading.Thread(target=writer, args=(None, 4))
    taking.start()
    assert writer.begun.wait(60)
    closing = threading.Thread(target=lambda: (writer.close(), writer.noted.append("closed")))
    closing.start()
    writer.may_end.set()
    taking.join()
    closing.join()
    assert writer.noted == ["batch 4", "closed"]

"""What an index of seen events promises."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

JUDGED = ("dedupe_key", "topic", "partition", "offset", "bronze_at")
"""Columns of conformed events that the index looks at."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the index says of a batch.

    Attributes:
        first: for each row, whether it is the copy that counts.
    """

    first: npt.NDArray[np.bool_]
    duplicates: int


class SeenIndex(ABC):
    """First occurrences of one source's events. One thread enters; others may :meth:`copy` meanwhile.

    Args:
        folder: where its files lie; created where absent.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder

    @abstractmethod
    def position(self) -> str:
        """What was given to the last :meth:`judge`: how far in bronze the index is complete; empty for a new one."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def judge(self, rows: pa.Table, position: str) -> Verdict:
        """Enter a batch and tell which rows count.

        Args:
            rows: columns ``dedupe_key`` (16 bytes), ``topic``, ``partition``, ``offset``, ``bronze_at``.
            position: how far in bronze this batch reaches; durable together with the entries.
        """

    @abstractmethod
    def counted(self, rows: pa.Table) -> npt.NDArray[np.bool_]:
        """Which of these rows, all of which were judged, are the copies that count; nothing is entered."""

    @abstractmethod
    def copy(self, folder: Path) -> str:
        """Copy the index as it is at a moment, while it may be written; returns the copy's position.

        Entries may be in the copy that its position does not cover yet: judged again they give the same answer.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the files."""

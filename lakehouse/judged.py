"""What goes with an index of seen events: by which declaration it was made, and events less the copies it found."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from lakehouse.contract.expectations import WARN
from lakehouse.contract.pipeline import Source
from lakehouse.declaration import source_declaration

_FEW = 500  # duplicates named one by one in a filter; more are joined


class Judged:
    """By which declaration of its source an index of seen events was made: which copy counts depends on it."""

    def __init__(self, folder: Path, source: Source) -> None:
        self.folder = folder
        self._file = folder / "declaration"
        self._declaration = source_declaration(source)
        self._warned = json.dumps(source.expected(WARN), sort_keys=True)

    def otherwise(self) -> bool:
        """Whether it was made by another one; an index that says nothing was just made, or is absent."""
        return self._noted()[0] not in ("", self._declaration)

    def warned_otherwise(self) -> bool:
        """Whether other events were noted as warnings until now than would be."""
        return self._noted()[-1] != self._warned

    def note(self) -> None:
        """The index now follows the declaration."""
        self._file.write_text(f"{self._declaration}\n{self._warned}", encoding="utf-8")

    def _noted(self) -> list[str]:
        return self._file.read_text(encoding="utf-8").split("\n") if self._file.is_file() else ["", "{}"]


def without(events: DataFrame, copies: pa.Table) -> DataFrame:
    """Events less those at the coordinates of ``copies``."""
    places = copies.select(["topic", "partition", "offset"])
    if places.num_rows > _FEW:
        other = events.sparkSession.createDataFrame(places)
        return events.join(F.broadcast(other), ["topic", "partition", "offset"], "left_anti")
    condition = F.lit(False)
    for (topic, partition), offsets in _grouped(places).items():
        here = (F.col("topic") == topic) & (F.col("partition") == partition)
        condition = condition | (here & F.col("offset").isin(offsets))
    return events.where(~condition)


def _grouped(places: pa.Table) -> dict[tuple[str, int], list[int]]:
    grouped: dict[tuple[str, int], list[int]] = {}
    for row in places.to_pylist():
        grouped.setdefault((row["topic"], row["partition"]), []).append(row["offset"])
    return grouped

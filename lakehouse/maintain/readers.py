"""Who reads a bronze table, and how far: from the checkpoints of the streaming queries themselves."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deltalake import DeltaTable

from lakehouse.contract.lake import Lake, TableRef


@dataclass(frozen=True, slots=True)
class Reader:
    """A streaming query that reads a bronze table.

    Attributes:
        query: name of the query, which is that of its checkpoint.
        checkpoint: its folder.
        next_version: the bronze version that it has to read next, whole or in part.
        table_id: of the bronze table that it read.
    """

    query: str
    checkpoint: Path
    next_version: int
    table_id: str


def readers(lake: Lake) -> Iterator[Reader]:
    """All streaming queries of the lake that read Delta tables; one entry for each table that a query reads."""
    folder = lake.state / "checkpoints"
    for checkpoint in sorted(folder.iterdir()) if folder.is_dir() else ():
        for offset in last_offsets(checkpoint):
            if isinstance(offset, dict) and "reservoirId" in offset:
                version = int(offset["reservoirVersion"])
                yield Reader(checkpoint.name, checkpoint, version, str(offset["reservoirId"]))


def last_offsets(checkpoint: Path) -> list[Any]:
    """What each source of a query had been read to when its last finished batch ended; empty for none."""
    done = [int(path.name) for path in (checkpoint / "commits").glob("[0-9]*") if path.name.isdigit()]
    if not done:
        return []
    try:
        lines = (checkpoint / "offsets" / str(max(done))).read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines[2:] if line != "-"]
    except (OSError, ValueError):
        return []


def readers_of(lake: Lake, table: TableRef) -> list[Reader]:
    """The queries that read this table as it is now."""
    table_id = str(DeltaTable(str(table.path)).metadata().id)
    return [reader for reader in readers(lake) if reader.table_id == table_id]


def unread_since(table: TableRef, reader: Reader, now: Callable[[], float] = time.time) -> float | None:
    """For how many seconds the oldest commit that the reader has not read has been there; None where it read all."""
    log = table.path / "_delta_log"
    path = log / f"{reader.next_version:020d}.json"
    try:
        return max(0.0, now() - path.stat().st_mtime)
    except FileNotFoundError:
        later = [p for p in log.glob("[0-9]*.json") if int(p.stem) > reader.next_version]
        return max(0.0, now() - min(p.stat().st_mtime for p in later)) if later else None

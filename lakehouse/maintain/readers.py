"""Who reads a bronze table, and how far: from what sets of products note, and from the checkpoints of joins."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deltalake import DeltaTable

from lakehouse.contract.deltalog import DeltaLog
from lakehouse.contract.lake import Lake, TableRef


@dataclass(frozen=True, slots=True)
class Reader:
    """Reads a bronze table.

    Attributes:
        query: name of the set of products, or of the streaming query.
        place: file or folder that says how far it is.
        next_version: the bronze version that it has to read next, whole or in part.
        table_id: of the bronze table that it read.
    """

    query: str
    place: Path
    next_version: int
    table_id: str


def note_reader(lake: Lake, name: str, table_id: str, next_version: int) -> None:
    """Note how far a set of products has read a bronze table."""
    file = reader_file(lake, name)
    file.parent.mkdir(parents=True, exist_ok=True)
    fresh = file.with_suffix(".new")
    fresh.write_text(json.dumps({"table": table_id, "next": next_version}), encoding="utf-8")
    fresh.replace(file)


def noted_reader(lake: Lake, name: str) -> Reader | None:
    """What a set of products noted last; None for a new one."""
    file = reader_file(lake, name)
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        return Reader(name, file, int(found["next"]), str(found["table"]))
    except (OSError, ValueError, KeyError):
        return None


def reader_file(lake: Lake, name: str) -> Path:
    """Where a set of products notes how far it has read."""
    return lake.state / "readers" / f"{name}.json"


def readers(lake: Lake) -> Iterator[Reader]:
    """All readers of the lake's bronze tables; a join has an entry for each table that it reads."""
    for file in sorted((lake.state / "readers").glob("*.json")):
        reader = noted_reader(lake, file.stem)
        if reader is not None:
            yield reader
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
    """For how many seconds the oldest commit that the reader has not read has been there; None if it read all."""
    log = DeltaLog(table.path)
    written = log.written_at(reader.next_version)
    if written is None:
        later = [log.written_at(version) for version in log.versions() if version > reader.next_version]
        written = min((at for at in later if at is not None), default=None)
    return None if written is None else max(0.0, now() - written)

"""What the checkpoint folder of a streaming query over bronze says."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """How far a streaming query is.

    Attributes:
        query: its id; empty for a query that never ran.
        batch: the last batch that is done, -1 for none.
        bronze: the Delta source's offset behind that batch (JSON); empty for none.
    """

    query: str
    batch: int
    bronze: str

    @classmethod
    def read(cls, folder: Path) -> Checkpoint:
        """The state of the checkpoint in ``folder``."""
        try:
            query = json.loads((folder / "metadata").read_text(encoding="utf-8"))["id"]
        except (OSError, ValueError, KeyError):
            return cls("", -1, "")
        done = [int(p.name) for p in (folder / "commits").glob("[0-9]*") if p.name.isdigit()]
        if not done:
            return cls(query, -1, "")
        return cls(query, max(done), offset_of(folder, max(done)))


def offset_of(checkpoint: Path, batch: int) -> str:
    """The only source's offset behind a batch (JSON), from the query's write-ahead log."""
    return (checkpoint / "offsets" / str(batch)).read_text(encoding="utf-8").splitlines()[-1]


def version_of(position: str) -> int | None:
    """The bronze version that a position ends with, or None inside a version.

    Args:
        position: a version, or the Delta source's offset (JSON).
    """
    found = json.loads(position)
    if isinstance(found, int):
        return found
    return int(found["reservoirVersion"]) - 1 if int(found["index"]) < 0 else None


def offset_behind(version: int) -> str:
    """The offset (JSON) that ends with a bronze version."""
    return json.dumps({"reservoirVersion": version + 1, "index": -1})


def forget(folder: Path) -> None:
    """Remove a checkpoint, or an index beside it, that is given up; one that is not there is no error."""
    shutil.rmtree(folder, ignore_errors=True)

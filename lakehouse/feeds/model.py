"""What the parts of the loader tell each other: a job, and what became of each file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lakehouse.contract.lake import Lake
from lakehouse.contract.pipeline import Source
from lakehouse.feeds.files import Mark

STATES = ("loaded", "already", "failed", "refused", "would load")
"""What becomes of a file: its rows are in; they were in; it cannot be read to its end; too many bad rows; a trial."""


@dataclass(frozen=True, slots=True)
class Job:
    """What is to be done with every file.

    Attributes:
        lake: where the rows go.
        source: whose rows they are.
        tenant: whose events they are.
        node: id of the loader, the rows' ``collector``.
        kind: format; ``auto``: each by its name or first bytes.
        encoding: of CSV and JSON lines.
        delimiter: of CSV.
        max_rejects: share of refused rows (0 to 1) above which a file is not taken any further.
        gate: ask the source's expectations of each batch of rows read (some 4 MB) before it is committed.
        chunk_rows: rows of a commit, about; 32 MiB of payloads end a chunk too.
        trial: read and count, and write nothing.
    """

    lake: Lake
    source: Source
    tenant: str = "default"
    node: str = "loader-1"
    kind: str = "auto"
    encoding: str = "utf-8"
    delimiter: str = ","
    max_rejects: float = 1.0
    gate: bool = False
    chunk_rows: int = 100_000
    trial: bool = False


@dataclass(frozen=True, slots=True)
class FileReport:
    """What became of one file.

    Attributes:
        name: path, as found.
        file: fingerprint of its content; empty where it could not be read at all.
        format: ``csv``, ``tsv``, ``jsonl`` or ``parquet``; empty where it could not be told.
        bytes: its size.
        rows: of it that are in bronze, of this and earlier runs.
        rejects: of those, the ones refused.
        from_row: where this run began to read; not 0 for a file that was gone on with.
        seconds: from its opening to its last commit.
        state: one of :data:`STATES`.
        reason: why it failed or was refused.
        bronze_version: bronze version that holds its last row of this run; -1 for none.
        started_at, finished_at: microseconds since the epoch.
        mark: of the file that was read, which another may have replaced since; None where it could not be opened.
    """

    name: str
    file: str
    format: str
    bytes: int
    rows: int
    rejects: int
    from_row: int
    seconds: float
    state: str
    reason: str = ""
    bronze_version: int = -1
    started_at: int = 0
    finished_at: int = 0
    mark: Mark | None = None

    @property
    def ok(self) -> bool:
        """Whether all of the file is in."""
        return self.state in ("loaded", "already", "would load")


@dataclass(frozen=True, slots=True)
class Step:
    """How far one file is being read.

    Attributes:
        name: path.
        size: bytes of the file.
        read: of those, read.
        rows: rows read in this run.
    """

    name: str
    size: int
    read: int
    rows: int


Tell = Callable[[Step | FileReport], None]

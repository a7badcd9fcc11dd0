"""A source of offers, files of them, and what bronze holds after a load."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable

from ingest.simulate.scenes import offer
from lakehouse.contract.lake import Lake
from lakehouse.contract.pipeline import Source
from lakehouse.load.files import find
from lakehouse.load.worker import FileReport, LoadJob, load_files

SOURCE = Source(
    topic="offers",
    schema="merchant STRING, offer STRING, version BIGINT, title STRING, price DOUBLE, available BOOLEAN",
    event_time="timestamp_millis(updated_at)",
    event_id="{merchant}:{offer}:{version}",
    key="{merchant}",
    name="offers",
)
START_MS = 1_790_000_000_000


def offers(count: int, *, merchant: int = 1, version: int = 1) -> list[dict[str, Any]]:
    """So many offers of one merchant."""
    return [offer(7, merchant, number, version, START_MS) for number in range(count)]


def write_jsonl(path: Path, rows: Iterable[dict[str, Any]], *, packed: bool = False) -> Path:
    """The rows as JSON lines."""
    text = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text, 1) if packed else text)
    return path


def job(place: Path | Lake, **options: Any) -> LoadJob:
    """A job on a lake, or on the one below a folder."""
    lake = place if isinstance(place, Lake) else Lake(place / "lake")
    return LoadJob(lake, options.pop("source", SOURCE), **options)


def run(made: LoadJob, *paths: Path | str, workers: int = 1) -> dict[str, FileReport]:
    """Load, and the reports by the files' names."""
    reports = load_files(made, find(paths), workers=workers)
    return {Path(report.name).name: report for report in reports}


def bronze(made: LoadJob, columns: Sequence[str] | None = None) -> pa.Table:
    """All rows of the job's bronze table."""
    path = made.lake.bronze(made.source.name).path
    return DeltaTable(str(path)).to_pyarrow_table(columns=list(columns) if columns else None)


def payloads(made: LoadJob) -> list[bytes]:
    """Payloads in bronze, sorted."""
    return sorted(bronze(made, ["payload"])["payload"].to_pylist())


def ids(rows: Iterable[dict[str, Any]]) -> list[str]:
    """Event ids that the rows must have, sorted."""
    return sorted(f"{row['merchant']}:{row['offer']}:{row['version']}" for row in rows)

"""Fields that payloads have and the schema has not. Nothing is lost, bronze keeps the payload; somebody should know.

A sample of the newest events is looked at, so it costs the stream nothing.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from deltalake import DeltaTable

from lakehouse.contract.lake import Lake, TableRef
from lakehouse.contract.pipeline import Source
from lakehouse.contract.sql.ddl import Field, parse_ddl

SAMPLE = 200  # events
_MOST = 100  # paths that are told


def unknown_fields(payloads: Iterable[bytes | None], source: Source) -> Counter[str]:
    """Paths of fields that the source's schema does not have, with the number of payloads that have them."""
    known = parse_ddl(source.schema)
    found: Counter[str] = Counter()
    for payload in payloads:
        try:
            event = json.loads(payload or b"")
        except (ValueError, RecursionError):
            continue
        if isinstance(event, dict):
            found.update(set(_paths(event, known)))
    return Counter(dict(found.most_common(_MOST)))


def sample(table: TableRef, rows: int = SAMPLE) -> list[bytes | None]:
    """Payloads of the newest data files of a bronze table."""
    adds = DeltaTable(str(table.path)).get_add_actions(flatten=True)
    times = adds.column("modification_time").to_pylist()
    paths = [path for _, path in sorted(zip(times, adds.column("path").to_pylist(), strict=True), reverse=True)]
    found: list[bytes | None] = []
    for path in paths[:8]:
        if len(found) >= rows:
            break
        for batch in pq.ParquetFile(table.path / path).iter_batches(batch_size=rows, columns=["payload"]):
            found += batch.column(0).to_pylist()
            break
    return found[:rows]


def note(lake: Lake, source: Source) -> list[str]:
    """Look at a sample of the source's newest events; returns paths that were not known before, and keeps them all."""
    table = lake.bronze(source.name)
    if not table.exists():
        return []
    found = unknown_fields(sample(table), source)
    before = noted(lake, source.name)
    schema = parse_ddl(source.schema)
    kept = {path for path in before if not _has(schema, path)}  # those that have been declared since are known now
    fresh = sorted(found.keys() - kept)
    if fresh or kept != set(before):
        path = _file(lake, source.name)
        path.parent.mkdir(parents=True, exist_ok=True)
        changed = path.with_suffix(".new")
        changed.write_text(json.dumps(sorted({*kept, *fresh})[: 10 * _MOST]), encoding="utf-8")
        changed.replace(path)
    return fresh


def noted(lake: Lake, source: str) -> list[str]:
    """Unknown fields that were found until now."""
    try:
        return [str(path) for path in json.loads(_file(lake, source).read_text(encoding="utf-8"))]
    except (FileNotFoundError, ValueError):
        return []


def _file(lake: Lake, source: str) -> Path:
    return lake.state / "unknown" / f"{source}.json"


def _has(fields: Mapping[str, Field], path: str) -> bool:
    head, _, rest = path.partition(".")
    if head not in fields:
        return False
    return not rest or _has(fields[head].below, rest)


def _paths(event: Mapping[str, Any], known: Mapping[str, Field], at: str = "") -> Iterator[str]:
    for name, value in event.items():
        path = f"{at}{name}"
        if name not in known:
            yield path
            continue
        below = known[name].below
        for item in value if isinstance(value, list) else [value]:
            if below and isinstance(item, dict):
                yield from _paths(item, below, f"{path}.")

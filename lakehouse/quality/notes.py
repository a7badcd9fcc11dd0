"""What is noted about a source's events: accepted ones, and fields that its schema lacks.

Accepted events count although they fail an expectation whose action is ``halt``. If that list is lost, the query halts
at the same event again; nothing is counted by mistake. Unknown fields are found in a sample of the newest events, which
costs the stream nothing; bronze keeps the payloads, so none is lost. Both lists are JSON files in the lake.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

from deltalake import DeltaTable

from lakehouse.contract.lake import Lake, TableRef
from lakehouse.contract.pipeline import Source
from lakehouse.contract.sql.ddl import Field, parse_ddl
from lakehouse.contract.storage import LakePath, parquet_file, write_whole
from lakehouse.errors import QualityProblem

_SAMPLE = 200  # events
_MOST = 100  # reported paths


def accepted(lake: Lake, source: str) -> frozenset[str]:
    """Ids of the accepted events of a source. Raises QualityProblem: the file is damaged."""
    path = _file(lake, "accepted", source)
    try:
        return frozenset(str(name) for name in json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return frozenset()
    except (ValueError, TypeError):
        raise QualityProblem(source, f"{path} is damaged", "Remove it; accept again what the query asks for") from None


def accept(lake: Lake, source: str, event: str) -> None:
    """Let an event count, from the next start of the query."""
    _write(_file(lake, "accepted", source), {*accepted(lake, source), event})


def unknown_fields(payloads: Iterable[bytes | None], source: Source) -> Counter[str]:
    """Paths of fields that the source's schema lacks, with the number of payloads that have them."""
    known = parse_ddl(source.schema)
    found: Counter[str] = Counter()
    for payload in payloads:
        try:
            event = source.fields_in(json.loads(payload or b""))
        except (ValueError, RecursionError):
            continue
        if isinstance(event, dict):
            found.update(set(_paths(event, known)))
    return Counter(dict(found.most_common(_MOST)))


def sample(table: TableRef) -> list[bytes | None]:
    """Payloads of the newest data files of a bronze table, at most :data:`_SAMPLE`."""
    adds = DeltaTable(str(table.path)).get_add_actions(flatten=True)
    times = adds.column("modification_time").to_pylist()
    paths = [path for _, path in sorted(zip(times, adds.column("path").to_pylist(), strict=True), reverse=True)]
    found: list[bytes | None] = []
    for path in paths[:8]:
        if len(found) >= _SAMPLE:
            break
        batches = parquet_file(table.path / path).iter_batches(batch_size=_SAMPLE, columns=["payload"])
        for first in islice(batches, 1):
            found += first.column(0).to_pylist()
    return found[:_SAMPLE]


def note_unknown_fields(lake: Lake, source: Source) -> list[str]:
    """Check a sample of the source's newest events; returns paths that were not noted before, and notes them."""
    table = lake.bronze(source.name)
    if not table.exists():
        return []
    found = unknown_fields(sample(table), source)
    before = noted_unknown_fields(lake, source.name)
    schema = parse_ddl(source.schema)
    kept = {path for path in before if not _has(schema, path)}  # without those that have been declared since
    fresh = sorted(found.keys() - kept)
    if fresh or kept != set(before):
        _write(_file(lake, "unknown", source.name), sorted({*kept, *fresh})[: 10 * _MOST])
    return fresh


def noted_unknown_fields(lake: Lake, source: str) -> list[str]:
    """The unknown fields noted up to now."""
    try:
        return [str(path) for path in json.loads(_file(lake, "unknown", source).read_text(encoding="utf-8"))]
    except (FileNotFoundError, ValueError):
        return []


def _file(lake: Lake, folder: str, source: str) -> LakePath:
    return lake.shared / folder / f"{source}.json"


def _write(path: LakePath, names: Iterable[str]) -> None:
    write_whole(path, json.dumps(sorted(names)).encode())


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

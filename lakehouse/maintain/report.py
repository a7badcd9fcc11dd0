"""The report of ``millrace tables``: facts of each table from its log alone, and its problems."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from lakehouse.bronze.readers import readers_of, too_late, unread_since
from lakehouse.bronze.table import progress
from lakehouse.contract import lake as names
from lakehouse.contract.deltalog import DeltaLog, kept_ms
from lakehouse.contract.lake import Lake, TableRef
from lakehouse.contract.pipeline import Pipeline, Product, Source
from lakehouse.gold.mark import versions_of
from lakehouse.maintain.backlog import ALARM, OK, WARN, Ask, health_of, span, worst
from lakehouse.quality.notes import noted_unknown_fields

SMALL = 8 << 20  # bytes; while the pipeline runs, larger files are left alone
MANY_SMALL = 1_000
LATE_S = 60.0  # a product this far behind bronze is not kept up now


@dataclass(frozen=True, slots=True)
class TableFacts:
    """One table.

    Attributes:
        version, oldest: the newest version, and the oldest with a log entry.
        rows: None if the log does not tell (bronze is written without statistics).
        files, small, bytes: of the newest version; small files have less than 8 MiB.
        log_s: retention of versions, seconds: the life of a position in a product.
        keeps: declared retention of rows; empty: unlimited.
        committed: time of the newest commit, seconds since the epoch.
        behind: of a product, bronze versions that it has not taken; of bronze, records of the topic; None: unknown.
        behind_s: age of the oldest of those, seconds.
        too_late: of bronze, events that arrived too late, by lateness.
        remarks: problems with their remedies.
    """

    layer: str
    name: str
    version: int = -1
    oldest: int = -1
    rows: int | None = None
    files: int = 0
    small: int = 0
    bytes: int = 0
    log_s: float = 0.0
    keeps: str = ""
    committed: float = 0.0
    behind: int | None = None
    behind_s: float | None = None
    too_late: Mapping[str, int] = field(default_factory=dict)
    health: str = OK
    remarks: tuple[str, ...] = ()


def table_facts(lake: Lake, pipeline: Pipeline, backlog: Ask = lambda *_: None) -> list[TableFacts]:
    """Facts of all tables that exist.

    Args:
        backlog: asks the broker about a source.
    """
    return [_facts(lake, pipeline, table, backlog) for table in lake.tables()]


def _facts(lake: Lake, pipeline: Pipeline, table: TableRef, backlog: Ask) -> TableFacts:
    try:
        delta = DeltaTable(str(table.path))
        adds = delta.get_add_actions(flatten=True)
        sizes = adds.column("size_bytes").to_pylist()
        counts = adds.column("num_records").to_pylist() if "num_records" in adds.schema.names else [None]
    except (DeltaError, OSError, ValueError) as error:  # an unreadable table is reported too
        remark = f"cannot be read: {str(error).splitlines()[0]}"
        return TableFacts(table.layer, table.name, health=ALARM, remarks=(remark,))
    log = DeltaLog(table.path)
    source = pipeline.sources.get(table.name) if table.layer == "bronze" else None
    log_s = kept_ms(delta.metadata().configuration, "logRetentionDuration") / 1000
    small = sum(size < SMALL for size in sizes)
    remarks = []
    if small > MANY_SMALL:
        remarks.append((WARN, f"{small} small files: run the pipeline, or millrace maintain --once"))
    if source is not None:
        behind, behind_s, others = _bronze_lag(lake, table, source, log_s, backlog)
    else:
        behind, behind_s, others = _product_lag(lake, table, pipeline.products.get(table.name))
    remarks += others
    return TableFacts(
        table.layer,
        table.name,
        delta.version(),
        log.oldest(),
        rows=None if any(count is None for count in counts) else sum(counts),
        files=len(sizes),
        small=small,
        bytes=sum(sizes),
        log_s=log_s,
        keeps=source.bronze_retention if source else "",
        committed=log.written_at(delta.version()) or 0.0,
        behind=behind,
        behind_s=behind_s,
        too_late=too_late(lake, table) if source else {},
        health=worst(remarks),
        remarks=tuple(remark for _, remark in remarks),
    )


_Lag = tuple[int | None, float | None, list[tuple[str, str]]]
"""What a table has not taken, the age of the oldest of it in seconds, and remarks."""


def _bronze_lag(lake: Lake, table: TableRef, source: Source, log_s: float, backlog: Ask) -> _Lag:
    remarks = []
    for reader in readers_of(lake, table):
        waiting = unread_since(table, reader)
        if waiting is not None and (health := health_of(waiting, log_s)) != OK:
            remark = f"query {reader.query} has not read for {span(waiting)} what its log keeps for {span(log_s)}"
            remarks.append((health, f"{remark}: start it; if it is gone for good, remove {reader.place}"))
    if unknown := noted_unknown_fields(lake, source.name):
        remarks.append((WARN, f"payloads have fields that the schema lacks: {', '.join(unknown[:10])}"))
    found = backlog(source, progress(table))
    if found is None:
        return None, None, remarks
    return found.records, found.oldest_s if found.records else 0.0, [*remarks, *found.remarks()]


def _product_lag(lake: Lake, table: TableRef, product: Product | None) -> _Lag:
    if product is None or not lake.bronze(product.source).exists():
        return None, None, []
    reached = DeltaLog(table.path).newest_info(names.COMMIT_BRONZE)
    if reached is None:
        return None, None, [(WARN, "it does not say how far it is")]
    held = versions_of(str(reached))[0]
    log = DeltaLog(lake.bronze(product.source).path)
    behind = max(0, log.newest() - held)
    if not behind:
        return 0, 0.0, []
    written = log.written_at(held + 1)
    if written is None:
        return behind, None, [(ALARM, "bronze's log no longer reaches back to where it is: it will be built again")]
    since = max(0.0, time.time() - written)
    late = (WARN, f"it is {span(since)} behind bronze: is the pipeline running?")
    return behind, since, [late] if since > LATE_S else []

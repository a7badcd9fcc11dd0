"""The report of ``millrace tables``: facts of each table from its log alone, and its problems."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from lakehouse.bronze.readers import readers_of, too_late, unread_since
from lakehouse.bronze.table import progress
from lakehouse.contract import lake as names
from lakehouse.contract.deltalog import DeltaLog, kept_ms
from lakehouse.contract.lake import Lake, TableRef
from lakehouse.contract.pipeline import Pipeline, Source
from lakehouse.gold.mark import versions_of
from lakehouse.maintain.backlog import ALARM, OK, WARN, Ask, health_of, span
from lakehouse.maintain.care import SMALL
from lakehouse.quality.notes import noted_unknown_fields

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
    remarks: tuple[str, ...] = field(default=())


def table_facts(lake: Lake, pipeline: Pipeline, backlog: Ask = lambda *_: None) -> list[TableFacts]:
    """Facts of all tables that exist.

    Args:
        backlog: asks the broker about a source.
    """
    return [_Report(lake, pipeline, table, backlog).facts() for table in lake.tables()]


class _Report:
    """Collects the facts and remarks of one table."""

    def __init__(self, lake: Lake, pipeline: Pipeline, table: TableRef, backlog: Ask) -> None:
        self._lake = lake
        self._pipeline = pipeline
        self._table = table
        self._backlog = backlog
        self._health = OK
        self._remarks: list[str] = []

    def facts(self) -> TableFacts:
        table = self._table
        try:
            delta = DeltaTable(str(table.path))
            adds = delta.get_add_actions(flatten=True)
            sizes = adds.column("size_bytes").to_pylist()
            counts = adds.column("num_records").to_pylist() if "num_records" in adds.schema.names else [None]
        except (DeltaError, OSError, ValueError) as error:  # an unreadable table is reported too
            self._add(ALARM, f"cannot be read: {str(error).splitlines()[0]}")
            return TableFacts(table.layer, table.name, health=self._health, remarks=tuple(self._remarks))
        log = DeltaLog(table.path)
        source = self._pipeline.sources.get(table.name) if table.layer == "bronze" else None
        found = TableFacts(
            table.layer,
            table.name,
            delta.version(),
            log.oldest(),
            rows=None if any(count is None for count in counts) else sum(counts),
            files=len(sizes),
            small=sum(size < SMALL for size in sizes),
            bytes=sum(sizes),
            log_s=kept_ms(delta.metadata().configuration, "logRetentionDuration") / 1000,
            keeps=source.bronze_retention if source else "",
            committed=log.written_at(delta.version()) or 0.0,
            too_late=too_late(self._lake, table) if source else {},
        )
        if found.small > MANY_SMALL:
            self._add(WARN, f"{found.small} small files: run the pipeline, or millrace maintain --once")
        behind, behind_s = self._bronze_lag(source, found.log_s) if source is not None else self._product_lag()
        return replace(found, behind=behind, behind_s=behind_s, health=self._health, remarks=tuple(self._remarks))

    def _add(self, health: str, remark: str) -> None:
        self._remarks.append(remark)
        self._health = ALARM if ALARM in (health, self._health) else health

    def _bronze_lag(self, source: Source, log_s: float) -> tuple[int | None, float | None]:
        for reader in readers_of(self._lake, self._table):
            waiting = unread_since(self._table, reader)
            if waiting is not None and (health := health_of(waiting, log_s)) != OK:
                remark = f"query {reader.query} has not read for {span(waiting)} what its log keeps for {span(log_s)}"
                self._add(health, f"{remark}: start it; if it is gone for good, remove {reader.place}")
        if unknown := noted_unknown_fields(self._lake, source.name):
            self._add(WARN, f"payloads have fields that the schema lacks: {', '.join(unknown[:10])}")
        found = self._backlog(source, progress(self._table))
        if found is None:
            return None, None
        for health, remark in found.remarks():
            self._add(health, remark)
        return found.records, found.oldest_s if found.records else 0.0

    def _product_lag(self) -> tuple[int | None, float | None]:
        product = self._pipeline.products.get(self._table.name)
        if product is None or not self._lake.bronze(product.source).exists():
            return None, None
        reached = DeltaLog(self._table.path).newest_info(names.COMMIT_BRONZE)
        held = versions_of(str(reached))[0] if reached is not None else None
        if held is None:
            self._add(WARN, "it does not say how far it is")
            return None, None
        log = DeltaLog(self._lake.bronze(product.source).path)
        behind = max(0, log.newest() - held)
        if not behind:
            return 0, 0.0
        written = log.written_at(held + 1)
        if written is None:
            self._add(ALARM, "bronze's log no longer reaches back to where it is: it will be built again")
            return behind, None
        since = max(0.0, time.time() - written)
        if since > LATE_S:
            self._add(WARN, f"it is {span(since)} behind bronze: is the pipeline running?")
        return behind, since

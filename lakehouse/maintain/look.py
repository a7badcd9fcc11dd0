"""What `millrace tables` shows: facts of each table from its log alone, and what is not as it should be."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from lakehouse.bronze.table import progress
from lakehouse.checkpoint import version_of
from lakehouse.contract import lake as names
from lakehouse.contract.deltalog import DeltaLog
from lakehouse.contract.lake import Lake, TableRef
from lakehouse.contract.pipeline import Pipeline, Source
from lakehouse.maintain.backlog import ALARM, OK, WARN, Ask, health_of, span
from lakehouse.maintain.bronze import SMALL
from lakehouse.maintain.logs import kept_ms
from lakehouse.maintain.readers import readers_of, unread_since
from lakehouse.quality.unknown import noted

MANY_SMALL = 1_000
LATE_S = 60.0  # a product this far behind bronze is not kept up at this moment


@dataclass(frozen=True, slots=True)
class TableFacts:
    """One table.

    Attributes:
        layer, name: which.
        version: the newest; ``oldest`` is the oldest whose log entry is there.
        rows: where the log tells; None otherwise (bronze is written without statistics).
        files, small, bytes: of the newest version; small ones are below 8 MiB.
        log_s: how long versions are kept, seconds: the life of a position in a product.
        keeps: how long rows are kept, as declared; empty: for ever.
        committed: time of the newest commit, seconds since the epoch.
        behind: of a product, bronze versions that it has not taken; of bronze, records of the topic; None: not known.
        behind_s: for how long the oldest of those has waited, seconds.
        health: :data:`OK`, :data:`WARN` or :data:`ALARM`.
        remarks: what is not as it should be, with the remedy.
    """

    layer: str
    name: str
    version: int
    oldest: int
    rows: int | None
    files: int
    small: int
    bytes: int
    log_s: float
    keeps: str
    committed: float
    behind: int | None = None
    behind_s: float | None = None
    health: str = OK
    remarks: tuple[str, ...] = field(default=())


def look(
    lake: Lake,
    pipeline: Pipeline,
    backlog: Ask = lambda *_: None,
    *,
    now: Callable[[], float] = time.time,
) -> list[TableFacts]:
    """Facts of all tables that exist.

    Args:
        backlog: asked of each source.
    """
    return [_facts(lake, pipeline, table, backlog, now) for table in lake.tables()]


def _facts(
    lake: Lake,
    pipeline: Pipeline,
    table: TableRef,
    backlog: Ask,
    now: Callable[[], float],
) -> TableFacts:
    try:
        delta = DeltaTable(str(table.path))
        adds = delta.get_add_actions(flatten=True)
        sizes = adds.column("size_bytes").to_pylist()
        counts = adds.column("num_records").to_pylist() if "num_records" in adds.schema.names else [None]
    except (DeltaError, OSError, ValueError) as error:  # that it cannot be read is a fact too
        remark = f"cannot be read: {str(error).splitlines()[0]}"
        return TableFacts(table.layer, table.name, -1, -1, None, 0, 0, 0, 0.0, "", 0.0, health=ALARM, remarks=(remark,))
    log = DeltaLog(table.path)
    source = pipeline.sources.get(table.name) if table.layer == "bronze" else None
    facts = {
        "rows": None if any(count is None for count in counts) else sum(counts),
        "small": sum(size < SMALL for size in sizes),
        "keeps": source.bronze_retention if source else "",
        "committed": log.written_at(delta.version()) or 0.0,
        "log_s": kept_ms(delta, "logRetentionDuration") / 1000,
    }
    told = _Told()
    if facts["small"] > MANY_SMALL:
        told.add(WARN, f"{facts['small']} small files: run the pipeline, or millrace maintain --once")
    if source is not None:
        behind, behind_s = _bronze(lake, table, source, backlog, told, facts["log_s"], now)
    else:
        behind, behind_s = _product(lake, pipeline, table, told, now)
    return TableFacts(
        table.layer,
        table.name,
        delta.version(),
        log.oldest(),
        files=len(sizes),
        bytes=sum(sizes),
        behind=behind,
        behind_s=behind_s,
        health=told.worst,
        remarks=tuple(told.remarks),
        **facts,
    )


class _Told:
    """Remarks, and the worst of them."""

    def __init__(self) -> None:
        self.worst = OK
        self.remarks: list[str] = []

    def add(self, health: str, remark: str) -> None:
        self.remarks.append(remark)
        self.worst = ALARM if ALARM in (health, self.worst) else health

    def share(self, age_s: float, retention_s: float, remark: str) -> None:
        """Say it where an age comes near a retention."""
        if (health := health_of(age_s, retention_s)) != OK:
            self.add(health, remark)


def _bronze(
    lake: Lake,
    table: TableRef,
    source: Source,
    backlog: Ask,
    told: _Told,
    log_s: float,
    now: Callable[[], float],
) -> tuple[int | None, float | None]:
    for reader in readers_of(lake, table):
        waiting = unread_since(table, reader, now)
        if waiting is not None:
            remark = f"query {reader.query} has not read for {span(waiting)} what its log keeps for {span(log_s)}"
            told.share(waiting, log_s, f"{remark}: start it; if it is gone for good, remove {reader.place}")
    if unknown := noted(lake, source.name):
        told.add(WARN, f"payloads have fields that the schema has not: {', '.join(unknown[:10])}")
    found = backlog(source, progress(table))
    if found is None:
        return None, None
    for health, remark in found.remarks():
        told.add(health, remark)
    return found.records, found.oldest_s if found.records else 0.0


def _product(
    lake: Lake, pipeline: Pipeline, table: TableRef, told: _Told, now: Callable[[], float]
) -> tuple[int | None, float | None]:
    product = pipeline.products.get(table.name)
    if product is None or not lake.bronze(product.source).exists():
        return None, None
    bronze = lake.bronze(product.source)
    reached = DeltaLog(table.path).newest_info(names.COMMIT_BRONZE)
    held = version_of(str(reached)) if reached is not None else None
    if held is None:
        told.add(WARN, "it does not say how far it is")
        return None, None
    log = DeltaLog(bronze.path)
    behind = max(0, log.newest() - held)
    since = None
    if behind:
        written = log.written_at(held + 1)
        if written is None:
            told.add(ALARM, "bronze's log no longer reaches back to where it is: it will be built again")
        else:
            since = max(0.0, now() - written)
    if since is not None and since > LATE_S:
        told.add(WARN, f"it is {span(since)} behind bronze: is the pipeline running?")
    return behind, since if behind else 0.0

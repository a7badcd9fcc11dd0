"""What to know of tables and topics: facts of each table from its log alone, records that wait in topics, problems.

``millrace tables`` shows them. A driver watches the records of its topics by itself (:class:`RetentionWatch`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from deltalake import DeltaTable
from deltalake.exceptions import DeltaError
from prometheus_client import Gauge

from lakehouse.bronze.readers import readers_of, too_late, unread_since
from lakehouse.bronze.table import Progress, progress
from lakehouse.contract import lake as names
from lakehouse.contract.deltalog import DeltaLog, kept_ms
from lakehouse.contract.lake import Lake, TableRef
from lakehouse.contract.pipeline import Pipeline, Product, Source
from lakehouse.gold.mark import versions_of
from lakehouse.quality.notes import noted_unknown_fields

log = logging.getLogger(__name__)

SMALL = 8 << 20  # bytes; while the pipeline runs, larger files are left alone
MANY_SMALL = 1_000
LATE_S = 60.0  # a product this far behind bronze is not kept up now
OK, WARN, ALARM = "ok", "warn", "alarm"
# Shares of a retention from which on it is reported, before records are lost.
WARN_SHARE, ALARM_SHARE = 0.5, 0.8
WATCH_EVERY_S = 600.0

RETENTION_SHARE = Gauge(
    "millrace_lakehouse_retention_share",
    "Age of the oldest record that bronze has not taken, as a share of its topic's retention",
    ["source"],
    registry=None,
)


def span(seconds: float) -> str:
    """A length of time for people."""
    for unit, size in (("days", 86_400), ("hours", 3_600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def health_of(age_s: float, retention_s: float) -> str:
    """Health of an age against a retention, which is unlimited if it is not positive."""
    share = age_s / retention_s if retention_s > 0 else 0.0
    return ALARM if share >= ALARM_SHARE else WARN if share >= WARN_SHARE else OK


def worst(remarks: Iterable[tuple[str, str]]) -> str:
    """The worst health of some remarks."""
    found = [health for health, _ in remarks]
    return ALARM if ALARM in found else WARN if found else OK


@dataclass(frozen=True, slots=True)
class Backlog:
    """Records of a topic that bronze has not taken.

    Attributes:
        oldest_s: age of the oldest, seconds.
        lost: records that the topic no longer holds and bronze never took.
        retention_s: retention of the topic, seconds.
        anew: the topic began anew, so bronze's offsets do not apply to it: all of its records wait.
    """

    records: int
    oldest_s: float
    lost: int
    retention_s: float
    anew: bool = False

    @property
    def share(self) -> float:
        """Age of the oldest record as a share of the retention; 0 if the retention is unlimited."""
        return self.oldest_s / self.retention_s if self.retention_s > 0 else 0.0

    @property
    def health(self) -> str:
        return worst(self.remarks())

    def remarks(self) -> Iterator[tuple[str, str]]:
        """Problems: how bad each is, and what to do."""
        if self.lost:
            yield ALARM, f"the topic no longer holds {self.lost} records that bronze never took"
        if self.anew:
            yield ALARM, "the topic began anew, and bronze has taken another: the pipeline will not start; it says why"
        if (health := health_of(self.oldest_s, self.retention_s)) != OK:
            kept = span(self.retention_s)
            waited = f"records have waited {span(self.oldest_s)} in the topic, which keeps them for {kept}"
            yield health, f"{waited}: run the pipeline"


Ask = Callable[[Source, Progress], Backlog | None]
"""The backlog of a source whose bronze table has this progress; None if no broker answers."""


class RetentionWatch:
    """Reports the backlog of each source to the log and to Prometheus, every ten minutes.

    Args:
        now: monotonic seconds.

    Attributes:
        sources: by name; others may be set at any time.
    """

    def __init__(self, lake: Lake, ask: Ask, now: Callable[[], float] = time.monotonic) -> None:
        self.sources: Mapping[str, Source] = {}
        self._lake = lake
        self._ask = ask
        self._now = now
        self._looked: float | None = None

    def turn(self) -> None:
        """Look, if ten minutes have passed."""
        if self._looked is not None and self._now() - self._looked < WATCH_EVERY_S:
            return
        self._looked = self._now()
        found = {s.name: self._ask(s, progress(self._lake.bronze(s.name))) for s in self.sources.values()}
        RETENTION_SHARE.clear()  # a source without an answer has no value
        for name, backlog in found.items():
            if backlog is None:
                continue
            RETENTION_SHARE.labels(name).set(backlog.share)
            for health, remark in backlog.remarks():
                level = logging.ERROR if health == ALARM else logging.WARNING
                log.log(level, "%s: source %s: %s", health, name, remark)


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

"""The way of events as the tables record it, hop by hop, without Spark and without a broker.

The hops of an event are *received* (at the collector) → *broker* (Kafka's time) → *bronze* (the commit that holds it) →
each *product* (the first commit whose ``millrace.through`` covers its offset). Its id is the same on all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from deltalake import DeltaTable

from ingest.answers.tables import end_offsets
from lakehouse.contract.deltalog import DeltaLog
from lakehouse.contract.lake import COMMIT_THROUGH, Lake, TableRef, offsets_behind
from lakehouse.contract.pipeline import Pipeline, Source

Seconds = npt.NDArray[np.float64]

_COLUMNS = ("event_id", "fingerprint", "collector", "topic", "partition", "offset")
_TIMES = ("received_at", "broker_time", "bronze_at")
_RECENT = timedelta(minutes=5)  # what decides who is slow now; thresholds are learnt from the rest
_LEAST_EVENTS = 100  # to learn a threshold from
_LEAST_LEARNT_S = 1.0
_DEFAULT_S = 5.0  # threshold for fewer events
_TIMES_WORSE = 3.0


@dataclass(frozen=True, slots=True)
class Hop:
    """Times of one hop in seconds. They compare clocks of several machines, so the minimum may be negative.

    Attributes:
        name: ``received to broker``, ``broker to bronze`` or ``bronze to PRODUCT``.
        count: events that completed the hop.
        min_s, avg_s, max_s: of these events; 0 if none.
    """

    name: str
    count: int
    min_s: float
    avg_s: float
    max_s: float


@dataclass(frozen=True, slots=True)
class Slow:
    """A producer or consumer that is slow now.

    Attributes:
        kind: ``producer`` or ``consumer``.
        name: the collecting node, ``bronze`` or the product.
        avg_s: of its newest events.
        learnt: the limit was learnt from earlier events, not declared.
    """

    kind: str
    name: str
    avg_s: float
    threshold_s: float
    learnt: bool


@dataclass(frozen=True, slots=True)
class Duplicates:
    """Rows of bronze beyond the first of their kind.

    Attributes:
        by_coordinates: same topic, partition and offset: bronze took a record twice.
        sent_again: same event id, other coordinates: the event was sent twice.
        same_payload: same fingerprint, other id: the source repeated itself.
    """

    by_coordinates: int
    sent_again: int
    same_payload: int


@dataclass(frozen=True, slots=True)
class SourceAudit:
    """The audit of one source.

    Attributes:
        rows: number of bronze rows read.
        offsets: next offset that bronze lacks, by ``TOPIC/PARTITION``.
    """

    source: str
    topic: str
    rows: int
    hops: tuple[Hop, ...]
    duplicates: Duplicates
    slow: tuple[Slow, ...]
    offsets: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class TraceStep:
    """One event at one hop.

    Attributes:
        hop: ``received``, ``broker``, ``bronze`` or the product's name.
        at: microseconds since the epoch.
        where: collecting node, ``TOPIC/PARTITION/OFFSET``, or table and version.
    """

    hop: str
    at: int
    where: str


@dataclass(frozen=True, slots=True)
class AuditPeriod:
    """What to audit.

    Attributes:
        producer_s: threshold from received to broker; None: learnt.
        consumer_s: threshold of each later hop; None: learnt.
        end: of the period; None: now.
    """

    since: timedelta
    producer_s: float | None = None
    consumer_s: float | None = None
    end: datetime | None = None


def audit_source(lake: Lake, pipeline: Pipeline, source: Source, period: AuditPeriod) -> SourceAudit:
    """Audit the newest events of a source in bronze, and in the pipeline's products."""
    end = period.end or datetime.now(UTC)
    rows = _rows(lake.bronze(source.name), period.since, end)
    times = {name: _seconds(rows[name]) for name in _TIMES}
    is_recent = times["bronze_at"] >= (end - _RECENT).timestamp()
    waits = {
        "received to broker": times["broker_time"] - times["received_at"],
        "broker to bronze": times["bronze_at"] - times["broker_time"],
    }
    consumers = {"bronze": waits["broker to bronze"]}
    for product in pipeline.products_of(source.name):
        at = _in_product(lake.table(product.layer, product.name), rows)
        waits[f"bronze to {product.name}"] = consumers[product.name] = at - times["bronze_at"]
    slow: list[Slow] = []
    nodes = np.array(rows["collector"].to_pylist(), dtype=object)
    for node in sorted(set(nodes.tolist())):
        mine = nodes == node
        wait = waits["received to broker"]
        slow += _slow("producer", node, wait[mine & is_recent], wait[mine & ~is_recent], period.producer_s)
    for name, wait in consumers.items():
        slow += _slow("consumer", name, wait[is_recent], wait[~is_recent], period.consumer_s)
    return SourceAudit(
        source.name,
        source.topic,
        rows.num_rows,
        tuple(_hop(name, wait) for name, wait in waits.items()),
        _duplicates(rows),
        tuple(slow),
        offsets_behind(rows),
    )


def trace(lake: Lake, pipeline: Pipeline, event_id: str) -> list[TraceStep]:
    """The way of one event and its copies, in order of time; empty if bronze lacks it."""
    steps: list[TraceStep] = []
    for source in pipeline.sources.values():
        table = lake.bronze(source.name)
        if not table.exists():
            continue
        data = DeltaTable(str(table.path)).to_pyarrow_dataset()
        rows = data.to_table(columns=[*_COLUMNS, *_TIMES], filter=ds.field("event_id") == event_id)
        for row in rows.to_pylist():
            place = f"{row['topic']}/{row['partition']}/{row['offset']}"
            at = {name: round(row[name].timestamp() * 1e6) for name in _TIMES}
            steps.append(TraceStep("received", at["received_at"], row["collector"]))
            steps.append(TraceStep("broker", at["broker_time"], place))
            steps.append(TraceStep("bronze", at["bronze_at"], table.name))
        for product in pipeline.products_of(source.name) if rows.num_rows else ():
            ref = lake.table(product.layer, product.name)
            commits = list(_commits(ref))
            for row in rows.to_pylist():
                key = f"{row['topic']}/{row['partition']}"
                covering = next((commit for commit in commits if commit.through.get(key, 0) > row["offset"]), None)
                if covering is not None:
                    known = covering is not commits[0] or DeltaLog(ref.path).has(0)
                    where = f"version {covering.version}" if known else f"version {covering.version} or before"
                    steps.append(TraceStep(product.name, covering.at_us, where))
    return sorted(set(steps), key=lambda step: step.at)


@dataclass(frozen=True, slots=True)
class _Commit:
    version: int
    at_us: int
    through: Mapping[str, int]


def _commits(table: TableRef) -> Iterator[_Commit]:
    """Commits of a product with offsets, oldest first, as far back as the log is kept."""
    for version, info in DeltaLog(table.path).infos():
        if info.get(COMMIT_THROUGH) is not None:
            yield _Commit(version, int(info["timestamp"]) * 1000, end_offsets(info))


def _rows(table: TableRef, since: timedelta, end: datetime) -> pa.Table:
    columns = [*_COLUMNS, *_TIMES]
    if not table.exists():
        text = dict.fromkeys(_COLUMNS, pa.string()) | {"partition": pa.int32(), "offset": pa.int64()}
        return pa.schema([*text.items(), *((name, pa.timestamp("us", "UTC")) for name in _TIMES)]).empty_table()
    data = DeltaTable(str(table.path)).to_pyarrow_dataset()
    start = end - since
    wanted = (ds.field("date") >= start.date()) & (
        ds.field("bronze_at") >= pa.scalar(start, data.schema.field("bronze_at").type)
    )
    return data.to_table(columns=columns, filter=wanted & (ds.field("origin") == "stream"))


def _seconds(column: pa.ChunkedArray) -> Seconds:
    micros = pc.cast(pc.cast(column, pa.timestamp("us", "UTC")), pa.int64())
    found: Seconds = micros.to_numpy().astype(np.float64) / 1e6
    return found


def _in_product(table: TableRef, rows: pa.Table) -> Seconds:
    """When the product first held each row, seconds since the epoch; NaN if not, or unknown.

    If the log does not reach back to version 0, the oldest commit is left out: an earlier one may cover its rows.
    """
    found = np.full(rows.num_rows, np.nan)
    commits = list(_commits(table)) if table.exists() else []
    if not commits:
        return found
    whole = DeltaLog(table.path).has(0)
    at = np.array([commit.at_us / 1e6 for commit in commits])
    topics = rows["topic"].to_pylist()
    places = np.array(
        [f"{topic}/{number}" for topic, number in zip(topics, rows["partition"].to_pylist(), strict=True)], dtype=object
    )
    offsets = rows["offset"].to_numpy()
    for place in set(places.tolist()):
        ends = np.maximum.accumulate(np.array([commit.through.get(place, 0) for commit in commits], dtype=np.int64))
        mine = places == place
        index = np.searchsorted(ends, offsets[mine], side="right")
        known = ((index > 0) | whole) & (index < len(at))
        found[mine] = np.where(known, at[np.minimum(index, len(at) - 1)], np.nan)
    return found


def _hop(name: str, wait: Seconds) -> Hop:
    made = wait[~np.isnan(wait)]
    if not len(made):
        return Hop(name, 0, 0.0, 0.0, 0.0)
    return Hop(name, len(made), *(round(float(value), 6) for value in (made.min(), made.mean(), made.max())))


def _slow(kind: str, name: str, recent: Seconds, before: Seconds, declared_s: float | None) -> list[Slow]:
    recent, before = recent[~np.isnan(recent)], before[~np.isnan(before)]
    if not len(recent):
        return []
    threshold = declared_s
    if threshold is None:
        enough = len(before) >= _LEAST_EVENTS
        threshold = max(_LEAST_LEARNT_S, _TIMES_WORSE * float(np.percentile(before, 99))) if enough else _DEFAULT_S
    average = float(recent.mean())
    found = Slow(kind, name, round(average, 6), round(threshold, 6), declared_s is None)
    return [found] if average > threshold else []


def _duplicates(rows: pa.Table) -> Duplicates:
    """Each row counts as a duplicate of one kind at most."""
    records = rows.group_by(["topic", "partition", "offset"]).aggregate([("event_id", "min"), ("fingerprint", "min")])
    events = records.group_by(["event_id_min"]).aggregate([("fingerprint_min", "min")])
    payloads = pc.count_distinct(events["fingerprint_min_min"]).as_py()
    return Duplicates(rows.num_rows - records.num_rows, records.num_rows - events.num_rows, events.num_rows - payloads)

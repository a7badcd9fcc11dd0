"""What became of the events of a run: counted from the tables themselves, not from what the parts say.

Every event that a source sent ends in exactly one of three places: it is held by the products, it is a repeated copy
of one that is, or it stands in quarantine. What ends in none is lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable

from lakehouse.contract.lake import Lake
from lakehouse.contract.pipeline import Pipeline, Product, Source
from lakehouse.contract.settings import PLAINTEXT, ClientSecurity

_BRONZE = ("event_id", "fingerprint", "topic", "partition", "offset", "bronze_at", "suspect")


@dataclass(frozen=True, slots=True)
class Push:
    """One message that a subscriber got.

    Attributes:
        at_ms: when, milliseconds since the epoch.
        through: ``TOPIC/PARTITION`` to next offset: what the message's result contains.
    """

    at_ms: float
    through: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Account:
    """Figures of one run.

    Attributes:
        in_bronze: rows of the record, of this and earlier runs.
        in_gold: distinct events that the products hold, of this and earlier runs; None: no product counts them.
        quarantined: rows of the quarantine table of this source.
        duplicates: events of this run that are repeated copies, and so count once.
        resent: rows that bronze holds because a collector sent them again after a crash.
        lost: events of this run that are neither in the products, nor copies, nor in quarantine.
        counted_twice: events that the products hold beyond those that bronze has.
        latency_ms: for each event of this run that counts, source socket to subscriber socket.
        sent_ms: when each of those was sent, milliseconds since the epoch.
    """

    in_bronze: int
    in_gold: int | None
    quarantined: int
    duplicates: int
    resent: int
    lost: int
    counted_twice: int
    latency_ms: npt.NDArray[np.float64]
    sent_ms: npt.NDArray[np.float64]


def take_account(
    lake: Lake,
    pipeline: Pipeline,
    source: Source,
    sent: Sequence[str | None],
    sent_at_ms: Sequence[float],
    pushes: Sequence[Push],
    *,
    since_us: int,
) -> Account:
    """Account for a run.

    Args:
        sent: event id of each event in the order sent; None for a malformed one.
        sent_at_ms: when each was sent, milliseconds since the epoch.
        pushes: what the subscriber got, in order.
        since_us: when the run began, microseconds since the epoch.
    """
    bronze = _read(lake, "bronze", source.name, _BRONZE)
    rejected = _read(lake, "silver", "quarantine", ("event_id", "fingerprint", "source"))
    rejected = rejected.filter(pc.equal(rejected["source"], source.name))
    refused = set(zip(rejected["event_id"].to_pylist(), rejected["fingerprint"].to_pylist(), strict=True))
    is_new = pc.greater_equal(pc.cast(bronze["bronze_at"], pa.int64()), since_us)
    columns = (bronze["event_id"], bronze["fingerprint"], is_new)
    held, held_before, earlier = set[str](), set[str](), set[str]()
    nameless_in = 0
    for event_id, mark, new in zip(*(column.to_pylist() for column in columns), strict=True):
        if not new:
            earlier.add(event_id)
        elif event_id.startswith("~"):
            nameless_in += 1
        if (event_id, mark) not in refused:
            held.add(event_id)
            if not new:
                held_before.add(event_id)
    in_gold = events_held(lake, pipeline, source)
    named = [event_id for event_id in sent if event_id is not None]
    counted = held.intersection(named)
    # An event with an id may be refused all the same (a field of another type): then it is in quarantine by that id.
    refused_ids = {event_id for event_id, _ in refused}
    missing = set(named) - held - refused_ids
    refused_now = (set(named) - held - earlier) & refused_ids
    measured = latencies(sent, sent_at_ms, bronze, pushes, since_us=since_us)
    nameless_lost = max(0, len(sent) - len(named) - nameless_in)
    return Account(
        in_bronze=bronze.num_rows,
        in_gold=in_gold,
        quarantined=rejected.num_rows,
        duplicates=len(named) - len(missing) - len(refused_now) - len(counted - held_before),
        resent=int(pc.sum(bronze["suspect"]).as_py() or 0),
        lost=len(missing) + nameless_lost + (0 if in_gold is None else max(0, len(held) - in_gold)),
        counted_twice=0 if in_gold is None else max(0, in_gold - len(held)),
        latency_ms=measured[:, 1],
        sent_ms=measured[:, 0],
    )


def events_held(lake: Lake, pipeline: Pipeline, source: Source) -> int | None:
    """Distinct events that the source's products hold, by the product that counts events; 0 before it exists.

    None: there is no such product (one of ``distinct``, over every event).
    """
    for product in pipeline.products_of(source.name):
        if product.slide or product.lateness:  # it holds events several times, or not all
            continue
        if product.operator == "distinct" and " where " not in f" {product.sql.lower()} ".replace("\n", " "):
            table = lake.table(product.layer, product.name)
            if not table.exists():
                return 0
            rows = DeltaTable(str(table.path)).to_pyarrow_table(columns=[source.name])
            return int(pc.sum(rows[source.name]).as_py() or 0)
    return None


def latencies(
    sent: Sequence[str | None],
    sent_at_ms: Sequence[float],
    bronze: pa.Table,
    pushes: Sequence[Push],
    *,
    since_us: int,
) -> npt.NDArray[np.float64]:
    """From the first sending of each event to the first push whose result contains it.

    Returns:
        A row an event: when it was sent (milliseconds since the epoch), and milliseconds until the push.

    Args:
        bronze: columns ``event_id, topic, partition, offset, bronze_at``.
    """
    rows = bronze.filter(pc.greater_equal(pc.cast(bronze["bronze_at"], pa.int64()), since_us))
    columns = (rows[name].to_pylist() for name in ("event_id", "topic", "partition", "offset"))
    first: dict[str, tuple[str, int]] = {}
    for event_id, topic, partition, offset in zip(*columns, strict=True):
        place = f"{topic}/{partition}"
        if event_id not in first or offset < first[event_id][1]:
            first[event_id] = (place, offset)
    at = np.array([push.at_ms for push in pushes])
    reached = {
        place: np.maximum.accumulate(np.array([push.through.get(place, 0) for push in pushes], dtype=np.int64))
        for place in {place for place, _ in first.values()}
    }
    found: list[tuple[float, float]] = []
    for event_id, sent_ms in zip(sent, sent_at_ms, strict=False):
        if event_id is None or event_id not in first:
            continue
        place, offset = first.pop(event_id)  # only the first sending counts
        index = int(np.searchsorted(reached[place], offset, side="right"))
        if index < len(at):
            found.append((sent_ms, float(at[index]) - sent_ms))
    return np.array(found, dtype=float).reshape(-1, 2)


def _read(lake: Lake, layer: str, name: str, columns: Sequence[str]) -> pa.Table:
    table = lake.table(layer, name)
    return DeltaTable(str(table.path)).to_pyarrow_table(columns=list(columns))


def followed(pipeline: Pipeline) -> dict[str, Product]:
    """The product whose pushes are timed, by source: a ``top_n`` if there is one, else the first with a channel."""
    found: dict[str, Product] = {}
    for name in pipeline.sources:
        mine = [p for p in pipeline.products.values() if p.channel and name in (p.source, p.right)]
        mine.sort(key=lambda product: (product.operator != "top_n", product.layer != "gold"))
        if mine:
            found[name] = mine[0]
    return found


def end_offsets(bootstrap: str, topics: Iterable[str], security: ClientSecurity = PLAINTEXT) -> dict[str, int] | None:
    """``TOPIC/PARTITION`` to the offset behind the last event; None while the broker is away."""
    from kafka import KafkaConsumer, TopicPartition
    from kafka.errors import KafkaError

    try:
        consumer = KafkaConsumer(bootstrap_servers=bootstrap, enable_auto_commit=False, **security.for_kafka_python())
        try:
            partitions = [
                TopicPartition(topic, number)
                for topic in topics
                for number in consumer.partitions_for_topic(topic) or ()
            ]
            return {f"{p.topic}/{p.partition}": end for p, end in consumer.end_offsets(partitions).items() if end}
        finally:
            consumer.close()
    except (KafkaError, OSError):
        return None


def tables_through(lake: Lake, pipeline: Pipeline, ends: Mapping[str, int]) -> bool:
    """Whether every product holds everything before these offsets, as far as it is of its sources."""
    from lakehouse.gold.store import ProductStore

    for product in pipeline.products.values():
        mark = ProductStore(product, lake.table(product.layer, product.name), pipeline.name).mark()
        topics = {pipeline.sources[name].topic for name in (product.source, product.right) if name in pipeline.sources}
        wanted = {place: end for place, end in ends.items() if place.rpartition("/")[0] in topics}
        if wanted and (mark is None or not covers(mark.through, wanted)):
            return False
    return True


def covers(through: Mapping[str, int], ends: Mapping[str, int]) -> bool:
    """Whether ``through`` reaches all of these offsets."""
    return all(through.get(place, 0) >= end for place, end in ends.items())


WARM_S = 20.0  # events sent later than this after the first count as "after warm-up"


def percentiles(values: Any) -> dict[str, float | None]:
    """p50, p90 and p99, rounded; None each where there are no values."""
    if not len(values):
        return {"p50": None, "p90": None, "p99": None}
    return {f"p{p}": round(float(np.percentile(values, p)), 1) for p in (50, 90, 99)}

"""What a chaos test leaves in Kafka, taken into bronze and a product by the real job, and read back without Spark.

Invariant 2 says what may be: an event may stand in Kafka and bronze more than once, and counts once in every product.
So of a run in which senders noted how often they sent each event, and which they were told is safe, it is asserted:

1. bronze has each of Kafka's records once, by its coordinates, and all of them;
2. every acknowledged event is in bronze, with its own payload, and nothing that nobody sent;
3. an event that stands there more often than its sender sent it is marked *suspect* in every further copy;
4. within a key, and so a partition, events appear for the first time in the order they were sent;
5. the product counts every event once, by its id: its counts and sums are those of the distinct events.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import duckdb
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from lakehouse.contract.lake import Lake
from lakehouse.contract.pipeline import load_pipeline
from lakehouse.contract.settings import load_settings
from tests.chaos.rig import PIPELINE
from tests.ingest.conftest import event
from tests.lakehouse.lakes import Site, ends, result


@dataclass(frozen=True, slots=True)
class Seen:
    """What was found.

    Attributes:
        rows: of bronze.
        events: different ones among them.
        suspect: rows that are marked.
        copies: rows beyond the first of their event.
    """

    rows: int
    events: int
    suspect: int
    copies: int


def check_bronze(
    spark: SparkSession,
    folder: Path,
    bootstrap: str,
    topic: str,
    acknowledged: Collection[int],
    sent: Mapping[int, int],
) -> Seen:
    """Run the bronze and the live job over the topic until both have all of it, and check what they made.

    Args:
        spark: to run them in.
        folder: for the lake; it must not be there.
        bootstrap: of the broker.
        topic: that the collector filled.
        acknowledged: numbers of the events whose senders were told that they are safe.
        sent: how often each event was sent.
    """
    (folder / "pipeline").mkdir(parents=True)
    (folder / "pipeline" / "pipeline.toml").write_text(PIPELINE.replace("TOPIC", topic), encoding="utf-8")
    pipeline = load_pipeline(folder / "pipeline")
    settings = load_settings({}, lake=folder / "lake", pipeline=str(folder / "pipeline"), kafka__bootstrap=bootstrap)
    Site(settings, pipeline, bootstrap, []).run_until_arrived(spark)
    lake = Lake(settings.lake)
    seen = _check_rows(lake, ends(bootstrap, topic), acknowledged, sent)
    counted = duckdb.connect()
    rows = result(lake, pipeline, "per_who")
    counted.register("product", rows)
    total = counted.execute("SELECT sum(n), sum(total) FROM product").fetchone()
    bronze = DeltaTable(str(lake.bronze("clicks").path)).to_pyarrow_table(columns=["event_id"])
    ids = {int(text) for text in bronze["event_id"].to_pylist()}
    assert total == (len(ids), sum(ids)), "the product counts every event once"
    by_who = dict(counted.execute("SELECT who, sum(n) FROM product GROUP BY who").fetchall())
    assert by_who == Counter(f"k{number % 7}" for number in ids), "and under its own key"
    return seen


def _check_rows(lake: Lake, ends: Mapping[str, int], acknowledged: Collection[int], sent: Mapping[int, int]) -> Seen:
    columns = ["event_id", "key", "payload", "partition", "offset", "suspect", "reject"]
    rows = DeltaTable(str(lake.bronze("clicks").path)).to_pyarrow_table(columns=columns)
    database = duckdb.connect()
    database.register("bronze", rows)
    places = database.execute(
        'SELECT partition, count(*), count(DISTINCT "offset"), max("offset") + 1 FROM bronze GROUP BY partition'
    ).fetchall()
    by_end = {int(place.rpartition("/")[2]): end for place, end in ends.items()}
    assert {partition: end for partition, _, _, end in places} == by_end, "bronze has all of the topic"
    assert all(count == different for _, count, different, _ in places), "each record once"
    copies: dict[int, list[bool]] = defaultdict(list)
    order: dict[bytes, list[int]] = defaultdict(list)
    ordered = database.execute(
        'SELECT event_id, key, payload, suspect, reject FROM bronze ORDER BY partition, "offset"'
    )
    for event_id, key, payload, suspect, reject in ordered.fetchall():
        number = int(event_id)
        assert payload == event(number) and reject is None
        if number not in copies:
            order[key].append(number)
        copies[number].append(suspect)
    assert set(acknowledged) <= set(copies), "acknowledged and lost"
    assert set(copies) <= set(sent), "nobody sent it"
    for number, marks in copies.items():
        assert marks.count(False) <= sent[number], f"event {number} came back unmarked"
    for key, numbers in order.items():
        assert numbers == sorted(numbers), f"order within {key!r}"
    return Seen(
        rows.num_rows,
        len(copies),
        sum(sum(marks) for marks in copies.values()),
        sum(len(marks) - 1 for marks in copies.values()),
    )

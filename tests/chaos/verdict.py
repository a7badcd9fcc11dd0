"""Compares what went in with bronze, products, quarantine and what each subscriber was told.

No code of the product: the tables are read by delta-rs and compared in DuckDB, the rest is plain Python.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import duckdb
from deltalake import DeltaTable
from kafka import KafkaConsumer, TopicPartition

from tests.chaos.subscribers import Mirror

PRODUCTS = {
    "per_who": (
        "window_start",
        """
        SELECT who, date_trunc('hour', happened) AS window_start, count(*) AS n, sum(id) AS total
        FROM events GROUP BY ALL""",
    ),
    "visits": (
        "session_start",
        """
        SELECT who, min(happened) AS session_start, count(*) AS n, sum(id) AS total
        FROM (SELECT *, count(*) FILTER (begins) OVER (PARTITION BY who ORDER BY happened, id) AS visit
              FROM (SELECT *, happened >= lag(happened) OVER in_order + INTERVAL 1 SECOND AS begins
                    FROM events WINDOW in_order AS (PARTITION BY who ORDER BY happened, id)))
        GROUP BY who, visit""",
    ),
}
"""What each product is, of the first copies of all events; its key is ``who`` and the named column."""
COLUMNS = [
    "event_id",
    "received_at",
    "bronze_at",
    "key",
    "payload",
    "topic",
    "partition",
    "offset",
    "suspect",
    "reject",
]


@dataclass
class Inputs:
    """What went in.

    Attributes:
        acknowledged: numbers of the events whose senders were told that they are safe.
        sent: how often each was sent.
        rows: how often each number stands in a file that was given to the loader.
        broken: lines of those files that are no events.
        damaged: numbers that may be missing, since their only copy was destroyed.
    """

    acknowledged: set[int] = field(default_factory=set)
    sent: Counter[int] = field(default_factory=Counter)
    rows: Counter[int] = field(default_factory=Counter)
    broken: list[bytes] = field(default_factory=list)
    damaged: set[int] = field(default_factory=set)


@dataclass
class Verdict:
    """What was found.

    Attributes:
        lost: events that went in and are missing somewhere; gaps that a subscriber was told.
        twice: events that count more than once somewhere.
        out_of_order: places where an event, or a subscriber's counter, came before an earlier one.
        leaks: processes that are left after the end.
        findings: the same in words.
        counts: for the report.
    """

    lost: int = 0
    twice: int = 0
    out_of_order: int = 0
    leaks: int = 0
    findings: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)

    def find(self, kind: str, count: int, text: str) -> None:
        """Note so many of a kind, if there are any."""
        if count:
            setattr(self, kind, getattr(self, kind) + count)
            self.findings.append(f"{kind.replace('_', ' ')}: {count} {text}")


def judge(lake: Path, inputs: Inputs, mirrors: Sequence[Mirror], ends: dict[int, int]) -> Verdict:
    """Compare everything.

    Args:
        lake: its root.
        inputs: of the collector and of the loader.
        mirrors: of the first table of :data:`PRODUCTS`.
        ends: offset behind the last record of each partition of the topic.
    """
    verdict = Verdict()
    with duckdb.connect() as database:
        database.execute("SET TimeZone = 'UTC'")
        database.register("bronze", DeltaTable(str(lake / "bronze" / "clicks")).to_pyarrow_table(columns=COLUMNS))
        for table in PRODUCTS:
            path = lake / "gold" / table
            database.register(table, DeltaTable(str(path)).to_pyarrow_table())
        quarantine = lake / "silver" / "quarantine"
        if DeltaTable.is_deltatable(str(quarantine)):
            database.register("quarantine", DeltaTable(str(quarantine)).to_pyarrow_table())
        _judge_places(database, ends, verdict)
        _judge_events(database, inputs, verdict)
        _judge_products(database, verdict)
        _judge_broken(database, inputs.broken, verdict)
        for mirror in mirrors:
            _judge_mirror(database, mirror, verdict)
    return verdict


def kafka_ends(bootstrap: str, topic: str) -> dict[int, int]:
    """Offset behind the last record, by partition."""
    consumer = KafkaConsumer(bootstrap_servers=bootstrap, metrics_enabled=False, request_timeout_ms=60_000)
    try:
        partitions = [TopicPartition(topic, number) for number in consumer.partitions_for_topic(topic) or ()]
        return {place.partition: end for place, end in consumer.end_offsets(partitions).items()}
    finally:
        consumer.close()


def _judge_places(database: duckdb.DuckDBPyConnection, ends: dict[int, int], verdict: Verdict) -> None:
    """Bronze has each record of Kafka once, and each row of a file."""
    places = database.execute(
        'SELECT topic, partition, count(*), count(DISTINCT "offset"), max("offset") + 1 FROM bronze GROUP BY ALL'
    ).fetchall()
    beyond = dict(ends)
    for topic, partition, rows, different, end in places:
        of_kafka = not topic.startswith("file:")
        end = max(end, beyond.pop(partition, 0)) if of_kafka else end
        verdict.find("twice", rows - different, f"records of {topic}/{partition} stand in bronze again")
        verdict.find("lost", end - different, f"records of {topic}/{partition} are not in bronze")
    for partition, end in beyond.items():
        verdict.find("lost", end, f"records of clicks/{partition} are not in bronze")


def _judge_events(database: duckdb.DuckDBPyConnection, inputs: Inputs, verdict: Verdict) -> None:
    """Every event is there with its own bytes, unmarked no more often than it was sent, in order within its key."""
    unmarked: Counter[int] = Counter()
    found: set[int] = set()
    order: dict[bytes, list[int]] = defaultdict(list)
    changed = 0
    rows = database.execute(
        "SELECT event_id, key, payload, topic, suspect FROM bronze WHERE reject IS NULL "
        'ORDER BY topic, partition, "offset"'
    ).fetchall()
    streamed: set[int] = set()
    for event_id, key, payload, topic, suspect in rows:
        number = int(event_id)
        found.add(number)
        content = json.loads(payload)
        changed += content["id"] != number or content["who"] != f"k{number % 7}"
        if topic == "clicks":
            unmarked[number] += not suspect
            if number not in streamed:
                streamed.add(number)
                order[key].append(number)
    wanted = inputs.acknowledged | set(inputs.rows)
    missing = wanted - found
    verdict.find("lost", len(missing - inputs.damaged), f"events are not in bronze: {_some(missing - inputs.damaged)}")
    verdict.find("lost", changed, "events in bronze are not what was sent")
    nobody = found - set(inputs.sent) - set(inputs.rows)
    verdict.find("twice", len(nobody), f"events that nobody sent: {_some(nobody)}")
    again = {number for number, times in unmarked.items() if times > inputs.sent[number]}
    verdict.find("twice", len(again), f"events came back unmarked: {_some(again)}")
    for key, numbers in order.items():
        turned = sum(later < earlier for earlier, later in itertools.pairwise(numbers))
        verdict.find("out_of_order", turned, f"places in key {key!r}")
    verdict.counts |= {"rows_of_bronze": len(rows), "events": len(found), "destroyed": len(missing & inputs.damaged)}


def _judge_products(database: duckdb.DuckDBPyConnection, verdict: Verdict) -> None:
    """Each product counts each event once, by the first copy in bronze: in the window or session of its key."""
    for table, (start, rows) in PRODUCTS.items():
        wrong = database.execute(f"""
            WITH events AS (
                SELECT DISTINCT ON (event_id) event_id::BIGINT AS id, 'k' || id % 7 AS who, received_at AS happened
                FROM bronze WHERE reject IS NULL ORDER BY event_id, bronze_at, topic, partition, "offset"),
            wanted AS ({rows}),
            counted AS (SELECT who, {start}, sum(n) AS n, sum(total) AS total FROM {table} GROUP BY ALL),
            differences AS (
                SELECT who, coalesce(w.n, 0) - coalesce(c.n, 0) AS missing
                FROM wanted w FULL JOIN counted c USING (who, {start})
                WHERE (w.n, w.total) IS DISTINCT FROM (c.n, c.total))
            SELECT who, sum(greatest(missing, 0)), sum(greatest(-missing, 0)), count_if(missing = 0)
            FROM differences GROUP BY who
        """).fetchall()
        for who, missing, beyond, other in wrong:
            verdict.find("lost", int(missing), f"events of {who} are not where they belong in {table}")
            verdict.find("twice", int(beyond), f"events of {who} too many in {table}")
            verdict.find("twice", other, f"sums of {who} in {table} differ")


def _judge_broken(database: duckdb.DuckDBPyConnection, broken: Iterable[bytes], verdict: Verdict) -> None:
    """Lines that are no events are in quarantine, once each."""
    wanted = Counter(broken)
    if not wanted:
        return
    kept = Counter(row[0].encode() for row in database.execute("SELECT payload FROM quarantine").fetchall())
    verdict.find("lost", (wanted - kept).total(), "broken lines are not in quarantine")
    verdict.find("twice", (kept - wanted).total(), "lines too many in quarantine")


def _judge_mirror(database: duckdb.DuckDBPyConnection, mirror: Mirror, verdict: Verdict) -> None:
    """What the subscriber holds is what the table holds."""
    for kind, count in mirror.faults.items():
        verdict.find(kind, count, f"changes, as {mirror.name} was told")
    table = next(iter(PRODUCTS))
    counts = database.execute(f"SELECT who, sum(n), sum(total) FROM {table} GROUP BY who").fetchall()
    held: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for row in mirror.rows.values():
        held[row["who"]][0] += row["n"]
        held[row["who"]][1] += row["total"]
    for who, n, total in counts:
        has = held.pop(who, [0, 0])
        verdict.find("lost", max(n - has[0], 0), f"events of {who} were not told to {mirror.name}")
        verdict.find("twice", max(has[0] - n, 0), f"events of {who} too many at {mirror.name}")
        verdict.find("twice", int(has[0] == n and has[1] != total), f"sum of {who} differs at {mirror.name}")
    verdict.find("twice", len(held), f"rows too many at {mirror.name}")


def _some(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(numbers)[:5]))

"""A small pipeline, events for it, what its products must be in plain Python, and running it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable
from kafka import KafkaConsumer, KafkaProducer, TopicPartition
from pyspark.sql import SparkSession

from jobs.local.broker import ensure_topics
from lakehouse.bronze.table import COLUMNS
from lakehouse.contract.envelope import Envelope, fingerprint
from lakehouse.contract.lake import ALERTS, Lake
from lakehouse.contract.pipeline import Pipeline, load_pipeline
from lakehouse.contract.pipeline.folder import PipelineFiles
from lakehouse.contract.settings import PLAINTEXT, ClientSecurity, Settings, load_settings
from lakehouse.gold.store import ProductStore
from lakehouse.lock import WriterLocks
from lakehouse.stages import Stages
from lakehouse.stream import KafkaAccess, PipelineChanges, run

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
T0 = datetime(2026, 1, 1, 12, tzinfo=UTC)
PIPELINE = """
[sources.clicks]
topic = "TOPIC"
schema = "id BIGINT, at BIGINT, who STRING, price BIGINT, tags ARRAY<STRING>, place STRUCT<city: STRING, lat: DOUBLE>"
event_id = "{id}"
event_time = "timestamp_millis(at)"
required = ["id", "at", "who", "place.city"]
partitions = 2
[sources.clicks.expectations]
price_not_negative = "price IS NULL OR price >= 0"

[products.per_city]
layer = "silver"
source = "clicks"
storage = "append"
sql = '''
SELECT window.start AS window_start, place.city AS city, count(*) AS n, sum(price) AS total, max(price) AS most
FROM clicks GROUP BY window(event_time, '1 minute'), place.city
'''

[products.totals]
layer = "gold"
source = "clicks"
sql = "SELECT window.start AS window_start, count(*) AS n FROM clicks GROUP BY window(event_time, '1 minute')"

[products.top_tags]
layer = "gold"
source = "clicks"
operator = "top_n"
time = "event_time"
item = "tag"
n = 3
sql = "SELECT event_time, explode(tags) AS tag FROM clicks"

[products.visitors]
layer = "gold"
source = "clicks"
operator = "distinct"
time = "event_time"
item = "who"
sql = "SELECT event_time, who FROM clicks"
"""


def pipeline_in(folder: Path, topic: str) -> Pipeline:
    """The pipeline above, on a topic of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pipeline.toml").write_text(PIPELINE.replace("TOPIC", topic), encoding="utf-8")
    return load_pipeline(folder)


@dataclass(frozen=True)
class Sent:
    """One Kafka record.

    Attributes:
        payload: its value.
        event_id: of its envelope; None: the record comes from another producer and has no envelope.
        reject: of its envelope.
    """

    payload: bytes | None
    event_id: str | None
    reject: str | None = None

    @property
    def partition(self) -> int:
        """Copies of an event go to one partition, as they do with a key."""
        return int(fingerprint((self.event_id or "").encode())[:2], 16) % 2

    def headers(self) -> list[tuple[str, bytes]]:
        """Kafka headers."""
        if self.event_id is None:
            return [("trace", b"\xff\x00")]
        received_at = int((T0 + timedelta(seconds=1)).timestamp() * 1e6)
        mark = fingerprint(self.payload or b"")
        return Envelope(self.event_id, "clicks", "default", received_at, "n1", mark, reject=self.reject).to_headers()


def click(number: int, **changed: Any) -> dict[str, Any]:
    """A valid event."""
    made = random.Random(number)
    return {
        "id": number,
        "at": int(T0.timestamp() * 1000) + made.randrange(180_000),
        "who": f"w{made.randrange(40)}",
        "price": made.choice([None, *range(10)]),
        "tags": [made.choice("abcdefg") for _ in range(made.randrange(4))],
        "place": {"city": made.choice(["Ulm", "Köln", "Ōsaka"]), "lat": 1.5},
        **changed,
    }


def sent(event: dict[str, Any], **options: Any) -> Sent:
    """An event as a collector sends it."""
    return Sent(json.dumps(event).encode(), str(event["id"]), **options)


def mixture(first: int, count: int) -> list[Sent]:
    """Events with repeated copies, other payloads under the same id, malformed ones and foreign records."""
    made = random.Random(first)
    records: list[Sent] = []
    for number in range(first, first + count):
        record = sent(click(number))
        records.append(record)
        kind = made.randrange(12)
        if kind == 0:
            records.append(record)
        elif kind == 1:
            records.append(sent(click(number, price=99, who="other")))
        elif kind == 2:
            records.insert(-1, sent(click(number, price=-1)))  # refused, then the valid one
        elif kind == 3:
            bad: list[bytes | None] = [b"{", b"[1]", b"\xff\xfe", b"", None, b'{"id":"x"}', b"null"]
            records.append(Sent(made.choice(bad), f"~{number}"))
        elif kind == 4:
            records.append(sent(click(number + 10**6), reject="too large"))
        elif kind == 5:
            records.append(dataclasses.replace(sent(click(-number)), event_id=None))
        elif kind == 6 and number > first + 5:
            records.append(records[made.randrange(len(records))])
    return records


def produce(bootstrap: str, topic: str, records: Iterable[Sent], security: ClientSecurity = PLAINTEXT) -> None:
    """Send and wait for the acknowledgements."""
    producer = KafkaProducer(bootstrap_servers=bootstrap, acks="all", linger_ms=5, **security.for_kafka_python())
    try:
        for record in records:
            producer.send(topic, record.payload, b"k", headers=record.headers(), partition=record.partition)
        producer.flush(60)
    finally:
        producer.close()


@dataclass
class Expected:
    """Rows that the products must have, in order of their columns, and rejections by reason."""

    per_city: list[tuple[Any, ...]]
    totals: list[tuple[Any, ...]]
    top_tags: list[tuple[Any, ...]]
    visitors: dict[datetime, int]
    rejected: int


def is_valid(record: Sent) -> bool:
    """The rules of the pipeline in plain Python."""
    if record.reject is not None or record.payload is None:
        return False
    try:
        event = json.loads(record.payload)
    except ValueError:
        return False
    if not isinstance(event, dict) or not isinstance(event.get("id"), int):
        return False
    return (event["price"] or 0) >= 0


def expected(records: Sequence[Sent]) -> Expected:
    """What any way through the lakehouse must give: the first valid copy of each id, in the order of its partition."""
    events: dict[str, dict[str, Any]] = {}
    rejected: set[tuple[str, bytes]] = set()
    for number, record in enumerate(records):
        payload = record.payload or b""
        if is_valid(record):
            event = json.loads(payload)
            events.setdefault(record.event_id or str(event["id"]), event)
        else:
            # Foreign records have no id to be one and the same by, unless the payload gives it.
            rejected.add((record.event_id or f"@{number}", payload))
    cities: dict[tuple[datetime, str], list[int | None]] = {}
    tags: dict[datetime, Counter[str]] = {}
    people: dict[datetime, set[str]] = {}
    for event in events.values():
        start = EPOCH + timedelta(milliseconds=event["at"] // 60_000 * 60_000)
        cities.setdefault((start, event["place"]["city"]), []).append(event["price"])
        tags.setdefault(start, Counter()).update(event["tags"])
        people.setdefault(start, set()).add(event["who"])
    per_city = []
    totals: Counter[datetime] = Counter()
    for (start, city), prices in cities.items():
        known = [price for price in prices if price is not None]
        per_city.append((start, city, len(prices), sum(known) if known else None, max(known, default=None)))
        totals[start] += len(prices)
    top = [
        (start, rank, tag, count, 0)
        for start, counts in tags.items()
        for rank, (tag, count) in enumerate(sorted(counts.items(), key=lambda f: (-f[1], f[0]))[:3], 1)
    ]
    return Expected(
        sorted(per_city, key=str),
        sorted(totals.items()),
        sorted(top),
        {start: len(names) for start, names in people.items()},
        len(rejected),
    )


def result(lake: Lake, pipeline: Pipeline, name: str) -> pa.Table:
    """A product's result rows, folded where the table holds partials."""
    product = pipeline.products[name]
    store = ProductStore(product, lake.table(product.layer, name), pipeline.name)
    rows = DeltaTable(str(store.table.path)).to_pyarrow_table()
    return store.operator.merge(None, rows) if store.folded else rows


def tuples(table: pa.Table, *columns: str) -> list[tuple[Any, ...]]:
    """Rows of these columns, in order."""
    return sorted((tuple(row[name] for name in columns) for row in table.to_pylist()), key=str)


def assert_exact(lake: Lake, pipeline: Pipeline, records: Sequence[Sent]) -> None:
    """Every product is what plain Python makes of the records."""
    wanted = expected(records)
    assert tuples(result(lake, pipeline, "totals"), "window_start", "n") == wanted.totals
    columns = ("window_start", "city", "n", "total", "most")
    assert tuples(result(lake, pipeline, "per_city"), *columns) == wanted.per_city
    columns = ("window_start", "rank", "item", "count", "error")
    assert tuples(result(lake, pipeline, "top_tags"), *columns) == sorted(wanted.top_tags, key=str)
    visitors = result(lake, pipeline, "visitors").to_pylist()
    assert {row["window_start"]: round(row["visitors"]) for row in visitors} == wanted.visitors
    assert {row["window_start"]: row["clicks"] for row in visitors} == dict(wanted.totals)
    assert DeltaTable(str(lake.quarantine().path)).to_pyarrow_table().num_rows == wanted.rejected


def ends(bootstrap: str, topic: str, security: ClientSecurity = PLAINTEXT) -> dict[str, int]:
    """``TOPIC/PARTITION`` to the offset behind the last record."""
    consumer = KafkaConsumer(bootstrap_servers=bootstrap, metrics_enabled=False, **security.for_kafka_python())
    try:
        partitions = [TopicPartition(topic, number) for number in consumer.partitions_for_topic(topic) or ()]
        return {f"{p.topic}/{p.partition}": end for p, end in consumer.end_offsets(partitions).items() if end}
    finally:
        consumer.close()


def through(lake: Lake, pipeline: Pipeline, targets: dict[str, int], *names: str) -> bool:
    """Whether the products have everything before these offsets."""
    for name in names or pipeline.products:
        product = pipeline.products[name]
        mark = ProductStore(product, lake.table(product.layer, name), pipeline.name).mark()
        if mark is None or any(mark.through.get(place, 0) < end for place, end in targets.items()):
            return False
    return True


def eventually(check: Callable[[], bool], timeout_s: float = 300.0, alive: Callable[[], bool] = lambda: True) -> None:
    """Wait until it holds."""
    deadline = time.monotonic() + timeout_s
    while not check():
        assert alive(), "it ended before that"
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.15)  # a look at the tables of a site costs some 20 ms of CPU


@contextlib.contextmanager
def driving(
    spark: SparkSession,
    settings: Settings,
    pipeline: Pipeline | None,
    stages: Stages,
    bootstrap: str,
    *,
    accept_loss: bool = False,
) -> Iterator[threading.Thread]:
    """A driver's queries in a thread of this process, once they run. What ended them is raised.

    Args:
        pipeline: another one than the files of the settings declare.
        bootstrap: unused without bronze.
    """
    stop, started = threading.Event(), threading.Event()
    errors: list[BaseException] = []
    files = PipelineFiles.of(settings)
    declared = files.load()

    def work() -> None:
        try:
            run(
                spark,
                settings,
                pipeline or declared,
                stages,
                KafkaAccess(bootstrap, accept_loss, lambda source: ensure_topics([source], bootstrap)),
                stop,
                changes=PipelineChanges(files),
                started=started.set,
            )
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)

    driver = threading.Thread(target=work)
    driver.start()
    try:
        eventually(started.is_set, alive=driver.is_alive)
        yield driver
    finally:
        stop.set()
        driver.join()
        if errors:
            raise errors[0]


@dataclass
class Site:
    """A lake, its pipeline and its topic.

    Attributes:
        records: all that was sent.
        sender: how the sender of records logs in to Kafka.
    """

    settings: Settings
    pipeline: Pipeline
    bootstrap: str
    records: list[Sent]
    sender: ClientSecurity = PLAINTEXT

    @property
    def lake(self) -> Lake:
        """The lake."""
        return Lake.of(self.settings)

    @property
    def folder(self) -> Path:
        """Where the pipeline's folder is, and logs of drivers go."""
        return Path(self.settings.pipeline).parent

    def moved(self, machine: str = "other") -> Site:
        """The site on another machine, which has nothing but the lake; a lake on this machine stays."""
        if not self.lake.remote:
            return self
        return dataclasses.replace(self, settings=dataclasses.replace(self.settings, work=str(self.folder / machine)))

    def wait_for_locks(self) -> None:
        """Wait until a killed driver's locks have run out; the system releases those of a lake on this machine."""
        if self.lake.remote:
            with WriterLocks(self.lake, [*self.pipeline.products, ALERTS], patience_s=60):
                pass

    @property
    def topic(self) -> str:
        """The topic of its source."""
        return self.pipeline.sources["clicks"].topic

    def send(self, records: Sequence[Sent]) -> None:
        """Produce and remember."""
        produce(self.bootstrap, self.topic, records, self.sender)
        self.records += records

    def arrived(self, *names: str) -> Callable[[], bool]:
        """Check that all sent so far is in the products."""
        targets = ends(self.bootstrap, self.topic, self.sender)
        return lambda: through(self.lake, self.pipeline, targets, *names)

    @contextlib.contextmanager
    def running(
        self, spark: SparkSession, stages: Stages | None = None, *, accept_loss: bool = False
    ) -> Iterator[Callable[[], bool]]:
        """The queries in this process, as its files say; yields a check that they run. What ended them is raised."""
        self.wait_for_locks()
        with driving(spark, self.settings, None, stages or Stages(), self.bootstrap, accept_loss=accept_loss) as driver:
            yield driver.is_alive

    def run_until_arrived(self, spark: SparkSession) -> None:
        """Run all stages in this process until everything sent is in every product."""
        with self.running(spark) as alive:
            eventually(self.arrived(), alive=alive)


def site(folder: Path, bootstrap: str, topic: str, lake: str = "") -> Site:
    """A new lake in ``folder``, or at ``lake``, with a topic of its own."""
    pipeline = pipeline_in(folder / "clicks", topic)
    ensure_topics(pipeline.sources.values(), bootstrap)
    places = {"lake": lake, "work": str(folder / "work")} if lake else {"lake": folder / "lake"}
    settings = load_settings(
        {}, **places, pipeline=str(folder / "clicks"), kafka__bootstrap=bootstrap, spark__rehearse=False
    )
    return Site(settings, pipeline, bootstrap, [])


def bronze_rows(payloads: Sequence[bytes | None], **columns: Sequence[Any]) -> pa.Table:
    """Bronze rows of a collector's events; ``columns`` replaces whole columns."""
    rows = [
        {
            "event_id": f"e{number}",
            "source": "clicks",
            "tenant": "default",
            "received_at": T0,
            "collector": "n1",
            "fingerprint": fingerprint(payload or b""),
            "suspect": False,
            "reject": None,
            "headers": [],
            "payload": payload,
            "topic": "clicks",
            "partition": 0,
            "offset": number,
            "broker_time": T0,
            "origin": "stream",
            "bronze_at": T0,
            "date": T0.date(),
            **{name: values[number] for name, values in columns.items()},
        }
        for number, payload in enumerate(payloads)
    ]
    return pa.Table.from_pylist(rows, schema=COLUMNS)

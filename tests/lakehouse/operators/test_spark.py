"""Every operator kept live on real Spark and Delta, against plain Python; sketches across languages."""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import datasketches
import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from pyspark.sql import SparkSession
from typer.testing import CliRunner

from jobs.cli import app
from lakehouse.bronze.table import create
from lakehouse.contract.lake import Lake
from lakehouse.contract.pipeline import Pipeline, load_pipeline
from lakehouse.contract.settings import Settings, load_settings
from lakehouse.live import LiveProducts
from lakehouse.operators.registry import operator_of
from lakehouse.replay import verify
from lakehouse.silver.conform import conform
from lakehouse.sketches.kinds import BloomFilter
from lakehouse.sketches.tables import SketchTable, is_in_bronze
from tests.lakehouse.lakes import bronze_rows, eventually
from tests.lakehouse.sketches.test_bloom import put

pytestmark = pytest.mark.spark
T0 = datetime(2026, 1, 1, 12, tzinfo=UTC)
MINUTE = timedelta(minutes=1)
LATENESS = timedelta(minutes=10)
PIPELINE = """
[sources.rides]
topic = "rides"
schema = "id BIGINT, at BIGINT, city STRING, who STRING, km BIGINT, speed DOUBLE"
event_id = "{id}"
event_time = "timestamp_millis(at)"
lateness = "10 minutes"

[sources.rides.enrich.towns]
key = "{city}"
file = "towns.csv"
column = "city"

[products.far]
layer = "gold"
source = "rides"
operator = "events"
newest = 100
sql = "SELECT id, km, towns.river AS river FROM rides WHERE km > 10"

[products.near]
layer = "gold"
source = "rides"
operator = "events"
sql = '''
-- every one
SELECT event_id, id FROM rides AS r WHERE r.km <= 10;
'''

[products.top]
layer = "gold"
source = "rides"
operator = "top_n"
time = "event_time"
window = "5 minutes"
by = ["city"]
item = "who"
n = 2
sql = "SELECT event_time, city, who FROM rides"

[products.people]
layer = "gold"
source = "rides"
operator = "distinct"
time = "event_time"
window = "10 minutes"
slide = "5 minutes"
item = "who"
sql = "SELECT event_time, who FROM rides"

[products.often]
layer = "gold"
source = "rides"
operator = "frequency"
time = "event_time"
window = "5 minutes"
by = ["city"]
item = "who"
sql = "SELECT event_time, city, who FROM rides"

[products.distances]
layer = "gold"
source = "rides"
operator = "frequency"
time = "event_time"
window = "5 minutes"
item = "km"
range_bits = 6
sql = "SELECT event_time, km FROM rides"

[products.seen]
layer = "gold"
source = "rides"
operator = "membership"
time = "event_time"
window = "5 minutes"
by = ["city"]
item = "who"
items = 50
confirm = "per_person.who"
sql = "SELECT event_time, city, who FROM rides"

[products.met]
layer = "gold"
source = "rides"
operator = "membership"
window = "1 hour"
item = "who"
items = 4
fpp = 0.5
sql = "SELECT received_at, who FROM rides"

[products.speeds]
layer = "gold"
source = "rides"
operator = "quantiles"
time = "event_time"
window = "5 minutes"
by = ["city"]
item = "speed"
k = 16
quantiles = [0.5, 0.995]
sql = "SELECT event_time, city, speed FROM rides"

[products.sample]
layer = "gold"
source = "rides"
operator = "reservoir"
time = "event_time"
window = "10 minutes"
slide = "5 minutes"
by = ["city"]
n = 4
seed = 7
sql = "SELECT event_time, city, event_id, km FROM rides"

[products.skew]
layer = "gold"
source = "rides"
operator = "skew"
window = "5 minutes"
sql = "SELECT event_time, received_at FROM rides"

[products.sliding]
layer = "gold"
source = "rides"
sql = '''
SELECT window.start AS window_start, window.end AS until, city, count(*) AS n, sum(km) AS km, max(speed) AS fastest
FROM rides GROUP BY window(event_time, '10 minutes', '2 minutes'), city
'''

[products.per_person]
layer = "silver"
source = "rides"
storage = "append"
sql = "SELECT city, who, count(*) AS n FROM rides GROUP BY city, who"
"""


@dataclass(frozen=True)
class Ride:
    """One event, and when it arrived."""

    id: int
    at: datetime
    city: str | None
    who: str
    km: int
    speed: float
    arrived: datetime

    def payload(self) -> bytes:
        """As JSON."""
        found = {**self.__dict__, "at": int(self.at.timestamp() * 1000)}
        del found["arrived"]
        return json.dumps(found).encode()


def made(count: int) -> list[Ride]:
    """Rides over twenty minutes; most arrive soon, some late, a few too late, one before its time."""
    random_ = random.Random(3)
    rides = []
    for number in range(count):
        at = T0 + timedelta(milliseconds=random_.randrange(20 * 60_000))
        delay = random_.choice([1, 1, 1, 20, 400, 700]) if number % 40 else -5
        rides.append(
            Ride(
                number,
                at,
                random_.choice(["Ulm", "Köln", None]),
                f"w{min(int(random_.paretovariate(0.8)), 60)}",
                random_.randrange(-1, 70),
                random_.randrange(0, 400) / 4,
                at + timedelta(seconds=delay),
            )
        )
    return rides


@dataclass(frozen=True)
class Place:
    """A lake that has run.

    Attributes:
        rides: that are in bronze, each once.
    """

    settings: Settings
    pipeline: Pipeline
    rides: list[Ride]

    @property
    def lake(self) -> Lake:
        """The lake."""
        return Lake(self.settings.lake)

    @property
    def in_time(self) -> list[Ride]:
        """Those that are not too late for a product."""
        return [ride for ride in self.rides if ride.arrived - ride.at <= LATENESS]

    def rows(self, name: str) -> list[dict[str, Any]]:
        """Rows of a product."""
        product = self.pipeline.products[name]
        found: list[dict[str, Any]] = (
            DeltaTable(str(self.lake.table(product.layer, name).path)).to_pyarrow_table().to_pylist()
        )
        return found


@pytest.fixture(scope="module")
def place(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """Three batches, with copies of earlier events in each."""
    folder = tmp_path_factory.mktemp("operators")
    (folder / "rides").mkdir()
    (folder / "rides" / "pipeline.toml").write_text(PIPELINE, encoding="utf-8")
    pipeline = load_pipeline(folder / "rides")
    settings = load_settings({}, lake=folder / "lake", pipeline=str(folder / "rides"))
    found = Place(settings, pipeline, made(900))
    table = found.lake.bronze("rides")
    create(table)
    source, offset = pipeline.sources["rides"], 0
    live = LiveProducts(spark, settings, pipeline, source, pipeline.products_of("rides"), "live-rides")
    live.start()
    try:
        for batch in range(3):
            rides = found.rides[batch::3] + found.rides[0 : 10 * batch]
            columns = {
                "event_id": [str(ride.id) for ride in rides],
                "source": ["rides"] * len(rides),
                "received_at": [ride.arrived for ride in rides],
                "topic": ["rides"] * len(rides),
                "offset": list(range(offset, offset + len(rides))),
                "headers": [[("towns", b'{"river": "Donau"}')] if ride.city == "Ulm" else [] for ride in rides],
                "bronze_at": [T0 + timedelta(hours=1, seconds=batch)] * len(rides),
            }
            offset += len(rides)
            write_deltalake(str(table.path), bronze_rows([ride.payload() for ride in rides], **columns), mode="append")
            eventually(lambda version=batch + 1: live.position == version, alive=lambda: live.is_active)
    finally:
        live.stop()
    yield found


def windows_of(at: datetime, length: int, slide: int | None = None) -> list[datetime]:
    """Starts of the windows that a time lies in; minutes."""
    slide = slide or length
    last = T0 + (at - T0) // timedelta(minutes=slide) * timedelta(minutes=slide)
    starts = [last - timedelta(minutes=slide * back) for back in range(length // slide)]
    return [start for start in starts if start + timedelta(minutes=length) > at]


def grouped(rides: list[Ride], length: int, slide: int | None = None) -> dict[tuple[datetime, str | None], list[Ride]]:
    """Rides by window and city."""
    found: dict[tuple[datetime, str | None], list[Ride]] = defaultdict(list)
    for ride in rides:
        for start in windows_of(ride.at, length, slide):
            found[start, ride.city].append(ride)
    return found


def by_window(rides: list[Ride], length: int, slide: int | None = None) -> dict[datetime, list[Ride]]:
    """Rides by window."""
    found: dict[datetime, list[Ride]] = defaultdict(list)
    for (start, _), some in grouped(rides, length, slide).items():
        found[start] += some
    return found


def test_too_late_events_are_in_bronze_and_in_skew_and_nowhere_else(place: Place) -> None:
    assert len(place.in_time) < len(place.rides)
    assert sum(row["n"] for row in place.rows("per_person")) == len(place.in_time)
    wanted: dict[datetime, Counter[str]] = defaultdict(Counter)
    skews: dict[datetime, list[float]] = defaultdict(list)
    for ride in place.rides:
        skew, (window,) = ride.arrived - ride.at, windows_of(ride.arrived, 5)
        over = windows_of(ride.at, 5)[0] + 5 * MINUTE <= ride.arrived
        wanted[window].update(rides=1, early=skew < timedelta(0), late=over, too_late=skew > LATENESS)
        skews[window].append(skew.total_seconds() * 1000)
    rows = place.rows("skew")
    assert {r["window_start"]: {k: r[k] for k in ("rides", "early", "late", "too_late")} for r in rows} == wanted
    assert {r["window_start"]: (r["min_ms"], r["max_ms"]) for r in rows} == {
        window: (min(found), max(found)) for window, found in skews.items()
    }
    assert sum(row["too_late"] for row in rows) == len(place.rides) - len(place.in_time)


def test_single_events_are_the_newest_of_those_that_count(place: Place) -> None:
    near = {(str(ride.id), ride.id) for ride in place.in_time if ride.km <= 10}
    rows = place.rows("near")
    assert sorted((row["event_id"], row["id"]) for row in rows) == sorted(near), "each once, whatever came twice"
    assert {row["tenant"] for row in rows} == {"default"}
    assert len({row["arrived_at"] for row in rows}) == 3
    last = {ride.id for ride in place.rides[2::3]} - {ride.id for ride in place.rides[:10]}  # which came before
    far = [ride for ride in place.in_time if ride.km > 10 and ride.id in last]
    rows = place.rows("far")
    assert 100 < len(far) == len(rows), "the commit that has the hundredth stays as a whole"
    assert {(row["id"], row["km"], row["river"]) for row in rows} == {
        (ride.id, ride.km, "Donau" if ride.city == "Ulm" else None) for ride in far
    }
    before = DeltaTable(str(place.lake.table("gold", "far").path), version=1)
    assert {row["id"] for row in before.to_pyarrow_table().to_pylist()} == {
        ride.id for ride in place.in_time if ride.km > 10 and ride.id % 3 == 0
    }, "each was in the table once"


def test_top_n_by_city(place: Place) -> None:
    wanted = {
        (start, city, rank): found
        for (start, city), rides in grouped(place.in_time, 5).items()
        for rank, found in enumerate(sorted(Counter(r.who for r in rides).items(), key=lambda f: (-f[1], f[0]))[:2], 1)
    }
    rows = place.rows("top")
    assert {(r["window_start"], r["city"], r["rank"]): (r["item"], r["count"]) for r in rows} == wanted
    assert {r["error"] for r in rows} == {0}


def test_distinct_over_sliding_windows(place: Place) -> None:
    wanted = {start: len({r.who for r in rides}) for start, rides in by_window(place.in_time, 10, 5).items()}
    assert {row["window_start"]: round(row["people"]) for row in place.rows("people")} == wanted


def test_frequency_by_city(place: Place) -> None:
    rides = grouped(place.in_time, 5)
    rows = place.rows("often")
    assert {(r["window_start"], r["city"]): r["rides"] for r in rows} == {k: len(v) for k, v in rides.items()}
    for row in rows:
        sketch = datasketches.count_min_sketch.deserialize(row["sketch"])
        for who, count in Counter(r.who for r in rides[row["window_start"], row["city"]]).items():
            assert count <= sketch.get_estimate(who)


def test_what_lies_outside_of_the_range_is_counted_as_such(place: Place) -> None:
    for row in place.rows("distances"):
        rides = by_window(place.in_time, 5)[row["window_start"]]
        outside = sum(not 0 <= ride.km < 64 for ride in rides)
        assert (row["rides"], row["outside"]) == (len(rides), outside)
        assert outside > 0


def test_no_member_is_missing(place: Place) -> None:
    rides = grouped(place.in_time, 5)
    rows = place.rows("seen")
    assert {(r["window_start"], r["city"]): r["rides"] for r in rows} == {k: len(v) for k, v in rides.items()}
    for row in rows:
        found, people = BloomFilter.deserialize(row["sketch"]), {r.who for r in rides[row["window_start"], row["city"]]}
        assert all(found.query(who) for who in people)
        assert row["seen"] == pytest.approx(len(people), rel=0.2, abs=2)


def test_quantiles_by_city(place: Place) -> None:
    rides = grouped(place.in_time, 5)
    rows = place.rows("speeds")
    assert {(r["window_start"], r["city"]): r["rides"] for r in rows} == {k: len(v) for k, v in rides.items()}
    for row in rows:
        speeds = sorted(ride.speed for ride in rides[row["window_start"], row["city"]])
        assert (row["min"], row["max"]) == (speeds[0], speeds[-1])
        below = sum(speed < row["p50"] for speed in speeds) / len(speeds)
        not_above = sum(speed <= row["p50"] for speed in speeds) / len(speeds)
        assert below - 0.3 <= 0.5 <= not_above + 0.3
        assert row["p50"] <= row["p99_5"]


def test_a_sample_is_drawn_from_all_events_of_its_window(place: Place) -> None:
    rides = grouped(place.in_time, 10, 5)
    found: dict[tuple[datetime, str | None], list[dict[str, Any]]] = defaultdict(list)
    for row in place.rows("sample"):
        found[row["window_start"], row["city"]].append(row)
    assert found.keys() == rides.keys()
    for key, rows in found.items():
        wanted = sorted((hashlib.sha256(f"7:{r.id}".encode()).hexdigest()[:32], str(r.id), r.km) for r in rides[key])[
            :4
        ]
        rows.sort(key=lambda row: row["priority"])
        assert [(row["priority"], row["event_id"], row["km"]) for row in rows] == wanted
        assert [row["seen"] for row in rows] == [len(rides[key])] + [None] * (len(rows) - 1)


def test_sliding_sql_is_what_spark_makes_of_it_without_panes(place: Place, spark: SparkSession) -> None:
    assert "120000 milliseconds" in operator_of(place.pipeline.products["sliding"]).partial_sql()
    rides = grouped(place.in_time, 10, 2)
    wanted = {key: (len(v), sum(r.km for r in v), max(r.speed for r in v)) for key, v in rides.items()}
    rows = place.rows("sliding")
    assert {(r["window_start"], r["city"]): (r["n"], r["km"], r["fastest"]) for r in rows} == wanted
    assert all(row["until"] - row["window_start"] == 10 * MINUTE for row in rows)
    bronze = spark.read.format("delta").load(str(place.lake.bronze("rides").path)).dropDuplicates(["event_id"])
    conform(bronze, place.pipeline.sources["rides"]).where(
        "unix_millis(received_at) - unix_millis(event_time) <= 600000"
    ).createOrReplaceTempView("rides")
    again = spark.sql(place.pipeline.products["sliding"].sql).toArrow().to_pylist()

    def in_order(found: list[dict[str, Any]]) -> list[str]:
        times = ("window_start", "until")
        return sorted(str({**row, **{name: row[name].timestamp() for name in times}}) for row in found)

    assert in_order(again) == in_order(rows)


def test_a_replay_gives_the_same_products(place: Place, spark: SparkSession) -> None:
    found = {item.table: item for item in verify(spark, place.settings, place.pipeline)}
    assert {name: item.equal for name, item in found.items()} == {
        **dict.fromkeys(place.pipeline.products, True),
        "quarantine": True,
    }
    assert found["speeds"].within_bounds  # k = 16: the sketches did draw at random


ALL = ("--window", "..")


def asked(place: Place, *arguments: str) -> dict[str, Any]:
    """What ``millrace state`` prints."""
    result = CliRunner().invoke(app, ["state", *arguments, "--lake", str(place.settings.lake), "--json"])
    assert result.exception is None, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_the_command_merges_windows_and_groups(place: Place) -> None:
    people = {ride.who for ride in place.in_time}
    found = asked(place, "people", *ALL)
    assert round(found["answers"][0]["estimate"]) == len(people)
    top = asked(place, "top", *ALL, "-n", "3")["answers"]
    assert [(a["what"], a["estimate"]) for a in top] == sorted(
        Counter(r.who for r in place.in_time).items(), key=lambda f: (-f[1], f[0])
    )[:3]
    often = asked(
        place,
        "often",
        "--window",
        "2026-01-01T12:05:00Z..2026-01-01T12:10:00",
        "--key",
        "city=Ulm",
        "--item",
        "w1",
    )
    truth = sum(r.who == "w1" for r in grouped(place.in_time, 5)[T0 + 5 * MINUTE, "Ulm"])
    (answer,) = often["answers"]
    assert answer["lower"] <= truth <= answer["upper"] == answer["estimate"]
    assert (often["windows"], often["sketches"]) == (1, 1)
    (answer,) = asked(place, "distances", *ALL, "--range", "10:20")["answers"]
    truth = sum(10 <= ride.km <= 20 for ride in place.in_time)
    assert answer["lower"] <= truth <= answer["upper"]
    newest = asked(place, "speeds", "--quantile", "0.9", "--key", "city=Ulm")
    assert newest["from"] == "2026-01-01T12:15:00+00:00"
    (answer,) = newest["answers"]
    assert answer["lower"] <= answer["estimate"] <= answer["upper"]
    (answer,) = asked(place, "often", "--window", "2026-01-01T12:00", "--inner", "2026-01-01T12:05")["answers"]
    first, second = (
        Counter(r.who for r in by_window(place.in_time, 5)[T0 + shift]) for shift in (0 * MINUTE, 5 * MINUTE)
    )
    assert sum(first[who] * second[who] for who in first) <= answer["estimate"]


def test_a_maybe_is_confirmed(place: Place, spark: SparkSession) -> None:
    assert asked(place, "seen", *ALL, "--item", "nobody")["answers"][0]["estimate"] == "no"
    (answer,) = asked(place, "seen", *ALL, "--item", "w1", "--confirm")["answers"]
    assert (answer["estimate"], answer["confidence"]) == ("yes", 1.0)
    # Four expected items and a false positive every other time: it says maybe of people who never were there.
    taken = next(name for name in (f"x{number}" for number in range(10_000)) if asked_of_all(place, name))
    product = place.pipeline.products["met"]
    source = place.pipeline.sources[product.source]
    span = SketchTable(place.lake.find("met")).span(None, None)
    span = replace(span, start=T0 - 60 * MINUTE, end=T0 + 60 * MINUTE)
    assert not is_in_bronze(spark, place.lake, source, product, taken, span)
    assert is_in_bronze(spark, place.lake, source, product, "w1", span)
    later = replace(span, start=T0 + 600 * MINUTE, end=T0 + 660 * MINUTE)
    assert not is_in_bronze(spark, place.lake, source, product, "w1", later)


def asked_of_all(place: Place, name: str) -> bool:
    """Whether a filter of ``met`` says maybe."""
    return any(BloomFilter.deserialize(row["sketch"]).query(name) for row in place.rows("met"))


def frame(spark: SparkSession, view: str, sketches: list[bytes]) -> None:
    """A view with the column ``sketch``."""
    spark.createDataFrame(pa.table({"sketch": pa.array(sketches, pa.binary())})).createOrReplaceTempView(view)


def test_spark_merges_what_python_wrote_and_the_reverse(place: Place, spark: SparkSession) -> None:
    for name in ("people", "speeds", "top"):
        path = place.lake.table("gold", name).path
        spark.read.format("delta").load(str(path)).where("sketch IS NOT NULL").createOrReplaceTempView(name)
    # Tumbling or not, distinct people are distinct people.
    in_spark = spark.sql("SELECT hll_sketch_estimate(hll_union_agg(sketch)) AS n FROM people").first()
    assert in_spark is not None
    assert in_spark["n"] == len({ride.who for ride in place.in_time})
    merged = spark.sql(
        "SELECT sketch, kll_sketch_get_n_double(sketch) AS n FROM "
        "(SELECT kll_merge_agg_double(sketch) AS sketch FROM speeds)"
    ).first()
    assert merged is not None
    assert merged["n"] == len(place.in_time)
    found = datasketches.kll_doubles_sketch.deserialize(bytes(merged["sketch"]))
    assert found.n == len(place.in_time)
    assert found.get_max_value() == max(ride.speed for ride in place.in_time)
    top = spark.sql(
        """
        SELECT approx_top_k_estimate(approx_top_k_combine(named_struct('sketch', sketch, 'maxItemsTracked', 10000,
          'itemDataType', CAST(NULL AS STRING), 'itemDataTypeDDL', 'item STRING NOT NULL')), 3) AS best FROM top
        """
    ).first()
    assert top is not None
    wanted = sorted(Counter(r.who for r in place.in_time).items(), key=lambda f: (-f[1], f[0]))[:3]
    assert sorted((-row["count"], row["item"]) for row in top["best"]) == [(-count, item) for item, count in wanted]


def test_javas_bloom_filter_is_the_same(spark: SparkSession) -> None:
    """DataSketches' own filter in Java, from Spark's class path: bit for bit, both ways."""
    jvm = spark.sparkContext._jvm
    assert jvm is not None
    java = jvm.org.apache.datasketches.filters.bloomfilter
    words = ["Köln", "Ulm", "Ōsaka", "a" * 50, "🚲" * 9, "1"]
    ours = BloomFilter(16, 7)
    theirs = java.BloomFilterBuilder.createBySize(1024, 7, 42)
    for word in words:
        put(ours, word)
        theirs.update(word)
    written = bytes(theirs.toByteArray())
    assert ours.serialize()[32:] == written[32:]
    read = BloomFilter.deserialize(written)
    assert all(read.query(word) for word in words)
    assert read.bits_set == ours.bits_set
    memory = jvm.org.apache.datasketches.memory.Memory.wrap(ours.serialize())
    again = java.BloomFilter.heapify(memory)
    assert all(again.query(word) for word in words)
    assert again.getBitsUsed() == ours.bits_set
    assert [again.query(f"x{n}") for n in range(50)] == [ours.query(f"x{n}") for n in range(50)]

"""What is declared changes, and what is expected: on a real broker, Spark and Delta."""

from __future__ import annotations

import dataclasses
import json
import shlex
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import duckdb
import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from lakehouse.contract.pipeline import load_pipeline
from lakehouse.contract.pipeline.expectations import HALT, QUARANTINE, WARN, Expectation
from lakehouse.contract.storage import spark_uri
from lakehouse.errors import BronzeReplaced, ExpectationHalt, QueryFailed
from lakehouse.maintain.care import compact_bronze
from lakehouse.quality.engine import EVENT, bound_checks
from lakehouse.quality.notes import accept
from lakehouse.quality.run import QualityRun, bronze_subject, check_tables, spark_verdicts
from lakehouse.replay import verify
from tests.lakehouse.lakes import Site, assert_exact, click, eventually, mixture, result, sent, tuples

pytestmark = [pytest.mark.spark, pytest.mark.broker]


def redeclared(place: Site, *changes: tuple[str, str]) -> Site:
    """The same lake with its pipeline file edited."""
    text = place.pipeline.path.read_text(encoding="utf-8")
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    place.pipeline.path.write_text(text, encoding="utf-8")
    return dataclasses.replace(place, pipeline=load_pipeline(place.pipeline.path.parent))


def equal(spark: SparkSession, place: Site) -> bool:
    found = list(verify(spark, place.settings, place.pipeline))
    return bool(found) and all(item.equal for item in found)


def rows(place: Site, name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = DeltaTable(str(place.lake.find(name).path)).to_pyarrow_table().to_pylist()
    return found


def test_a_schema_grows_and_widens_and_sql_changes(
    new_site: Callable[..., Site], spark: SparkSession, bucket: str, caplog: pytest.LogCaptureFixture
) -> None:
    place = new_site(bucket)
    place = redeclared(place, ("price BIGINT", "price INT"))
    place.send([sent(click(n, price=n, coupon=f"c{n % 3}")) for n in range(30)])
    place.send([sent(click(100, price=1 << 40)), sent(click(101, price=2.5)), sent(click(102, price="dear"))])
    place.run_until_arrived(spark)
    assert sum(n for _, n in tuples(result(place.lake, place.pipeline, "totals"), "window_start", "n")) == 30
    assert {row["reason"] for row in rows(place, "quarantine")} == {"does not fit the schema: price"}

    # int → bigint, and the field that was there all the time is declared: both hold for the past too.
    table_id = DeltaTable(str(place.lake.find("totals").path)).metadata().id
    place = redeclared(
        place.moved(),  # a machine that knows nothing of the earlier declaration
        ("price INT", "price BIGINT, coupon STRING"),
        ("AS window_start, count(*) AS n FROM", "AS window_start, count(*) AS n, count(coupon) AS coupons FROM"),
    )
    place.send([sent(click(200, price=1 << 41, coupon="c9"))])
    place.run_until_arrived(spark)
    assert "the declaration of source clicks has changed" in caplog.text
    found = rows(place, "totals")
    assert (sum(row["n"] for row in found), sum(row["coupons"] for row in found)) == (32, 31)
    assert DeltaTable(str(place.lake.find("totals").path)).metadata().id == table_id  # positions in it go on
    assert len(rows(place, "quarantine")) == 2
    assert equal(spark, place)

    # bigint → double: a column of the product widens with it, once it is built again.
    place = redeclared(place, ("price BIGINT", "price DOUBLE"))
    place.send([sent(click(201, price=0))])
    place.run_until_arrived(spark)
    assert place.lake.find("per_city").exists()
    assert sum(row["total"] or 0 for row in rows(place, "per_city")) == sum(range(30)) + (1 << 40) + (1 << 41) + 2.5
    assert [row["reason"] for row in rows(place, "quarantine")] == ["does not fit the schema: price"]
    assert equal(spark, place)

    # Another key: the product alone is built again, as another table; nothing of the old one is mixed in.
    caplog.clear()
    place = redeclared(
        place,
        (
            "AS window_start, count(*) AS n, count(coupon) AS coupons FROM clicks GROUP",
            "AS window_start, who, count(*) AS n FROM clicks GROUP",
        ),
        ("'1 minute')\"\n\n[products.top", "'1 minute'), who\"\n\n[products.top"),
    )
    place.send([sent(click(300, price=1.0, who="w1"))])
    place.run_until_arrived(spark)
    assert "product totals is built from bronze again" in caplog.text
    assert "product visitors is built" not in caplog.text
    events = [click(n) for n in range(30)] + [*map(click, (100, 101, 200, 201)), click(300, who="w1")]
    counted = Counter(event["who"] for event in events)
    again: Counter[str] = Counter()
    for row in rows(place, "totals"):
        again[row["who"]] += row["n"]
    assert again == counted
    assert equal(spark, place)

    # Spark, and SQL without Spark, read each kind of table alike.
    for name in ("clicks", "per_city", "totals", "top_tags", "quarantine"):
        path = str(place.lake.find(name).path)
        dataset = DeltaTable(path).to_pyarrow_dataset()
        here = duckdb.sql("SELECT count(*) AS n FROM dataset").to_arrow_table()["n"].to_pylist()
        assert here == [spark.read.format("delta").load(spark_uri(path)).count()] == [dataset.count_rows()]


def test_expectations_that_warn_and_halt(new_site: Callable[[], Site], spark: SparkSession) -> None:
    head = "[sources.clicks.expectations]\n"
    declared = 'who_known = { sql = "who <> \'nobody\'", action = "warn" }\n'
    declared += 'price_sane = { sql = "coalesce(price, 0) < 1000", action = "halt" }\n'
    place = redeclared(new_site(), (head, head + declared))
    place.send([*mixture(0, 40), sent(click(500, who="nobody")), sent(click(500, who="nobody"))])
    place.run_until_arrived(spark)
    assert_exact(place.lake, place.pipeline, place.records)
    (warned,) = rows(place, "warnings")  # counted like any other, and noted once
    assert (warned["event_id"], warned["reason"], warned["source"]) == ("500", "who_known", "clicks")

    before = {name: tuples(result(place.lake, place.pipeline, name), "window_start") for name in ("totals",)}
    bad = sent(click(600, price=5000))
    with pytest.raises(QueryFailed) as caught, place.running(spark) as alive:
        place.send([sent(click(599)), bad, sent(click(601))])
        eventually(lambda: not alive())
    assert "event 600 (" in str(caught.value)
    assert "fails expectation price_sane" in str(caught.value)
    assert shlex.join(["millrace", "quality", "clicks", "--accept", "600"]) in str(caught.value)
    assert {"totals": tuples(result(place.lake, place.pipeline, "totals"), "window_start")} == before
    with pytest.raises(ExpectationHalt, match="price_sane"), place.running(spark):
        pytest.fail("it started")  # it is not forgotten

    accept(place.lake, "clicks", "600")
    place.run_until_arrived(spark)
    assert_exact(place.lake, place.pipeline, place.records)
    assert equal(spark, place)

    # Declared otherwise: refused from now on, and so it was never counted.
    place = redeclared(place, ('action = "halt"', 'action = "quarantine"'), ("who <> 'nobody'", "who NOT LIKE 'w1%'"))
    place.run_until_arrived(spark)
    refused = [row["event_id"] for row in rows(place, "quarantine") if row["reason"] == "expectation price_sane failed"]
    assert refused == ["600"]
    assert equal(spark, place)
    assert {row["reason"] for row in rows(place, "warnings")} == {"who_known"}
    assert "500" not in {row["event_id"] for row in rows(place, "warnings")}


def test_bronze_is_put_together_while_it_is_written_and_read(new_site: Callable[[], Site], spark: SparkSession) -> None:
    place = new_site()
    table = place.lake.bronze("clicks")
    stop = threading.Event()
    fewer: list[int] = []

    def care() -> None:
        while not stop.wait(0.05):
            if table.exists():
                fewer.append(compact_bronze(place.lake, table, many=2))

    with place.running(spark) as alive:
        thread = threading.Thread(target=care)
        thread.start()
        try:
            for number in range(5):
                place.send(mixture(100 * number, 15))
                eventually(place.arrived(), alive=alive)
        finally:
            stop.set()
            thread.join()
    assert sum(fewer) > 0
    held = DeltaTable(str(table.path)).to_pyarrow_table(columns=["partition", "offset"]).to_pylist()
    assert len(held) == len({(row["partition"], row["offset"]) for row in held}) == len(place.records)
    assert_exact(place.lake, place.pipeline, place.records)
    assert equal(spark, place)

    # The record put back from a copy that is older than what was read of it.
    newest = max((table.path / "_delta_log").glob("[0-9]*.json"))
    for _ in range(3):
        newest.unlink()
        newest = max((table.path / "_delta_log").glob("[0-9]*.json"))
    with pytest.raises(BronzeReplaced, match="older than before"), place.running(spark):
        pytest.fail("it started")


def test_duckdb_judges_events_as_the_stream_does(new_site: Callable[[], Site], spark: SparkSession) -> None:
    place = new_site()
    predicates = {
        "low": "price < 5",
        "near": "place.city RLIKE '^[UK]' AND size(tags) < 3",
        "in_time": "timestamp_millis(at) < timestamp'2026-01-01 12:01:30'",
        "even": "id % 2 = 0 OR upper(who) LIKE 'W1%'",
        "divided": "10 div price >= 2",
    }
    source = dataclasses.replace(
        place.pipeline.sources["clicks"],
        expectations={
            n: Expectation(p, [QUARANTINE, WARN, HALT][i % 3]) for i, (n, p) in enumerate(predicates.items())
        },
    )
    declared = dataclasses.replace(place.pipeline, sources={"clicks": source})
    from deltalake import write_deltalake

    from lakehouse.bronze.table import create
    from tests.lakehouse.lakes import bronze_rows

    create(place.lake.bronze("clicks"))
    payloads = [json.dumps(click(n)).encode() for n in range(60)] + [b"{", b"\xff", None, b"{}", b'{"id": 1}']
    write_deltalake(str(place.lake.bronze("clicks").path), bronze_rows(payloads), mode="append")
    (here,) = check_tables(place.lake, declared, QualityRun(keep=False))
    (there,) = check_tables(place.lake, declared, QualityRun(keep=False, spark=spark))
    facts = [{f.expectation: (f.total, f.unexpected, f.success) for f in found.findings} for found in (here, there)]
    assert facts[0].keys() == predicates.keys()
    assert facts[0] == facts[1]
    assert 0 < facts[0]["near"][1] < 60
    asked = bound_checks((), source)
    verdicts = spark_verdicts(spark, source, bronze_subject(place.lake, source), asked)
    assert all(item.kind == EVENT for item in asked)
    assert verdicts["expectation low"].isna().sum() == 5  # not events: nothing to judge

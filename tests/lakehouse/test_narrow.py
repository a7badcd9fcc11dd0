"""What a batch keeps in memory of its events."""

from __future__ import annotations

from pyspark.sql import SparkSession

from lakehouse.contract.pipeline import Product
from lakehouse.contract.source import Source
from lakehouse.narrow import names_of, narrowed

SOURCE = Source(topic="clicks", schema="page STRING, note STRING, Who BIGINT", event_time="received_at", name="clicks")


def product(sql: str) -> Product:
    return Product(layer="gold", source="clicks", sql=sql, name="p")


COUNTED = "SELECT page, count(*) AS n, max(clicks.who) AS w FROM clicks GROUP BY page"


def test_names_are_those_of_every_product() -> None:
    assert names_of([product(COUNTED)]) == {"page", "n", "w", "who", "clicks"}
    assert names_of([product("SELECT * FROM clicks"), product(COUNTED)]) is None
    assert names_of([product("SELECT c.* FROM clicks c")]) is None
    assert names_of([]) == set()


def test_only_rejected_events_keep_what_nobody_reads(spark: SparkSession) -> None:
    rows = [("a", "long", 1, None, b"raw"), ("b", "long", 2, "bad", b"raw")]
    events = spark.createDataFrame(rows, "page STRING, note STRING, Who BIGINT, reason STRING, payload BINARY")
    kept = {row["page"]: row for row in narrowed(events, SOURCE, [product(COUNTED)]).collect()}
    assert (kept["a"]["note"], kept["a"]["payload"], kept["a"]["Who"]) == (None, None, 1)
    assert (kept["b"]["note"], bytes(kept["b"]["payload"]), kept["b"]["Who"]) == ("long", b"raw", 2)
    everything = narrowed(events, SOURCE, [product("SELECT * FROM clicks")])
    assert everything.columns == events.columns
    assert all(row["note"] == "long" for row in everything.collect())

"""What one would write without Millrace: Kafka → groupBy → foreachBatch MERGE into Delta, default settings.

It keeps one product of the three, no record of the events, and counts a repeated event twice: all in its favour.

Started as a process of its own by the benchmarks. Appends a line of JSON to ``--commits`` when a batch has been merged:
``{"at_ms": when, "ends": {"partition": next offset}}``.
"""

from __future__ import annotations

import argparse
import json
import signal
import threading
import time
from pathlib import Path

from delta.tables import DeltaTable
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from lakehouse.contract.jvm import jar_paths
from lakehouse.contract.pipeline import load_pipeline
from tests.bench.lakehouse_cases import CASES

# Which events are valid, and what is counted of them by minute.
_COUNTED = {
    "meetup": ("e.rsvp_id IS NOT NULL AND e.mtime IS NOT NULL", "explode(e.group.group_topics.topic_name)"),
    "clicks": ("e.view_id IS NOT NULL AND e.at IS NOT NULL", "e.page"),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--lake", "--kafka", "--commits", "--ready"):
        parser.add_argument(name, required=True)
    parser.add_argument("--case", choices=sorted(_COUNTED), default="meetup")
    parser.add_argument("--topic", default="", help="another than the source's")
    options = parser.parse_args()
    case = CASES[options.case]
    source = load_pipeline(case.pipeline).sources[case.source]
    topic = options.topic or source.topic
    valid, counted = _COUNTED[options.case]
    table, checkpoint = f"{options.lake}/plain", Path(options.lake) / "checkpoint"

    spark = (
        SparkSession.builder.master("local[*]")
        .config("spark.jars", ",".join(str(jar) for jar in jar_paths("spark")))
        .config("spark.driver.memory", "2g")
        .config("spark.ui.enabled", "false")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.extensions", "io.delta.sql.DeltaSparkSessionExtension")
        .config("spark.sql.catalog.spark_catalog", "org.apache.spark.sql.delta.catalog.DeltaCatalog")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("ERROR")
    spark.sql(
        f"CREATE TABLE IF NOT EXISTS delta.`{table}` "
        "(window_start TIMESTAMP, window_end TIMESTAMP, topic STRING, count BIGINT) USING delta"
    )
    events = (
        spark.readStream.format("kafka")
        .option("kafka.bootstrap.servers", options.kafka)
        .option("subscribe", topic)
        .option("startingOffsets", "earliest")
        .load()
        .select("timestamp", F.from_json(F.col("value").cast("string"), source.schema).alias("e"))
        .where(valid)
        .withWatermark("timestamp", "1 minute")
        .select("timestamp", F.expr(counted).alias("topic"))
    )
    counts = (
        events.groupBy(F.window("timestamp", "1 minute"), "topic")
        .count()
        .select(F.col("window.start").alias("window_start"), F.col("window.end").alias("window_end"), "topic", "count")
    )

    def merge(batch: DataFrame, batch_id: int) -> None:
        (
            DeltaTable.forPath(spark, table)
            .alias("t")
            .merge(batch.alias("b"), "t.window_start = b.window_start AND t.topic = b.topic")
            .whenMatchedUpdateAll()
            .whenNotMatchedInsertAll()
            .execute()
        )
        at_ms = time.time() * 1000
        ends = json.loads((checkpoint / "offsets" / str(batch_id)).read_text().splitlines()[-1])[topic]
        with Path(options.commits).open("a") as out:
            out.write(json.dumps({"at_ms": at_ms, "ends": ends}) + "\n")

    query = (
        counts.writeStream.outputMode("update")
        .option("checkpointLocation", str(checkpoint))
        .foreachBatch(merge)
        .start()
    )
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    Path(options.ready).touch()
    while not stop.wait(0.5) and query.isActive:
        pass
    query.stop()
    spark.stop()


if __name__ == "__main__":
    main()

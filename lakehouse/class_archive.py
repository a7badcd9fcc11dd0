"""A driver that uses Spark once as drivers do, and writes the archive of its classes (:mod:`jobs.local.machine`).

``python -m lakehouse.class_archive ARCHIVE FOLDER``
"""

from __future__ import annotations

import sys
from pathlib import Path

from pyspark.sql import SparkSession
from pyspark.sql.pandas.types import from_arrow_schema

from lakehouse.batch import build, rejected_rows
from lakehouse.bronze.table import COLUMNS, create
from lakehouse.contract.lake import Lake
from lakehouse.contract.pipeline import load_pipeline
from lakehouse.contract.settings import Settings, conf_dir, load_settings
from lakehouse.live import LiveProducts
from lakehouse.session import build_session


def main(archive: Path, folder: Path) -> int:
    """Write the archive; returns the exit code of the JVM."""
    from pyspark import SparkContext

    settings = load_settings({}, lake=folder / "lake")
    session = build_session(settings, "millrace prepare", record_classes=archive)
    play(session, settings)
    session.stop()
    gateway = SparkContext._gateway
    assert gateway is not None
    process = gateway.proc
    gateway.shutdown()
    process.stdin.close()  # its sign to end
    return int(process.wait())


def play(spark: SparkSession, settings: Settings) -> None:
    """Use Spark as a driver of the shipped pipeline does, on an empty lake."""
    pipeline = load_pipeline(conf_dir() / "pipelines" / "meetup")
    lake = Lake.of(settings)
    for source in pipeline.sources.values():
        table = lake.bronze(source.name)
        create(table)
        live = LiveProducts(spark, settings, pipeline, source, pipeline.products_of(source.name), f"play-{source.name}")
        live.start()
        try:
            for rehearsal in live.local.rehearsals():
                rehearsal()
            rows = spark.createDataFrame([], from_arrow_schema(COLUMNS))
            rows.write.format("delta").mode("append").save(str(table.path))
            rejected_rows(build(spark, table.path, source, 0), source)
            stream = spark.readStream.format("delta").load(str(table.path)).writeStream.trigger(availableNow=True)
            stream.foreachBatch(lambda batch, _: batch.toArrow()).start().awaitTermination()
        finally:
            live.stop()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))

"""The Spark session."""

from __future__ import annotations

import pytest
from pyspark.sql import DataFrame, SparkSession

from lakehouse.contract.jvm import jar_paths
from lakehouse.contract.sql.spark import SPARK_FUNCTIONS
from lakehouse.session import INTAKE, JVM_OPTIONS, in_pool

pytestmark = pytest.mark.spark


def test_delta_and_kafka_are_there(spark: SparkSession) -> None:
    jvm = spark._jvm
    assert jvm is not None
    loader = jvm.java.lang.Thread.currentThread().getContextClassLoader()
    for name in ("io.delta.sql.DeltaSparkSessionExtension", "org.apache.spark.sql.kafka010.KafkaSourceProvider"):
        assert loader.loadClass(name).getName() == name
    ours = [str(path) for path in jar_paths("spark")]
    assert spark.conf.get("spark.jars").split(",")[: len(ours)] == ours  # S3A's follow where a test of the run is on S3


def test_a_bad_value_is_null_and_times_are_utc(spark: SparkSession) -> None:
    (row,) = spark.sql("SELECT cast('x' AS INT) AS a, cast(timestamp_seconds(0) AS STRING) AS t").collect()
    assert (row.a, row.t) == (None, "1970-01-01 00:00:00")


def test_the_jvm_knows_the_flags_it_is_given(spark: SparkSession) -> None:
    assert spark._jvm is not None
    given = list(spark._jvm.java.lang.management.ManagementFactory.getRuntimeMXBean().getInputArguments())
    assert set(JVM_OPTIONS.split()) <= set(given)


def test_bronze_columns_without_repeated_values_have_no_dictionary(spark: SparkSession) -> None:
    assert spark.sparkContext is not None
    hadoop = spark.sparkContext._jsc.hadoopConfiguration()
    assert hadoop.get("parquet.enable.dictionary#payload") == "false"


def test_jobs_that_read_kafka_go_first(spark: SparkSession) -> None:
    assert spark.sparkContext.getConf().get("spark.scheduler.mode") == "FAIR"
    scala = spark.sparkContext._jsc.sc()
    pools: list[str | None] = []

    def note(_: DataFrame, __: int) -> None:
        pools.append(spark.sparkContext.getLocalProperty("spark.scheduler.pool"))

    with in_pool(spark, INTAKE):
        query = spark.readStream.format("rate").load().writeStream.foreachBatch(note).start()
    try:
        query.processAllAvailable()
    finally:
        query.stop()
    assert set(pools) == {INTAKE}, "of the batches' jobs"
    assert scala.getLocalProperty("spark.scheduler.pool") is None
    assert scala.getPoolForName(INTAKE).get().minShare() > scala.defaultParallelism()


def test_check_knows_the_functions_of_spark(spark: SparkSession) -> None:
    shown = {row[0] for row in spark.sql("SHOW SYSTEM FUNCTIONS").collect()}
    assert {name for name in shown if name.isidentifier()} <= SPARK_FUNCTIONS

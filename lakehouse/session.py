"""The Spark session, tuned for short micro-batches on few cores.

``python -m lakehouse.session ARCHIVE FOLDER`` uses one as drivers do, and writes the archive of its JVM's classes
(:mod:`jobs.local.machine`).

Every setting below was measured on the worked case (docs/decisions/0004-short-micro-batches.md); a value in
``[spark.conf]`` of the settings, or on spark-submit's command line, goes before it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from urllib.parse import urlsplit

from pyspark import SparkConf, SparkContext
from pyspark.errors import PySparkRuntimeError
from pyspark.find_spark_home import _find_spark_home
from pyspark.java_gateway import launch_gateway
from pyspark.sql import SparkSession
from pyspark.sql.pandas.types import from_arrow_schema

from lakehouse.bronze.table import COLUMNS, UNLIKE, create
from lakehouse.contract.avro import SCHEMAS
from lakehouse.contract.errors import EnvironmentProblem
from lakehouse.contract.jvm import find_java, jar_paths, log_flags, recording, sharing
from lakehouse.contract.lake import Lake
from lakehouse.contract.pipeline import load_pipeline
from lakehouse.contract.settings import Settings, conf_dir, load_settings
from lakehouse.contract.tomlfile import http_address
from lakehouse.silver.avro import FOLDER, REGISTRY

JVM_OPTIONS = (
    "-XX:ReservedCodeCacheSize=256m -XX:+UseSerialGC -Xss2m "
    # A batch on its way to Python is large and short-lived: it must fit the young generation.
    "-XX:InitialRAMPercentage=4 -XX:NewRatio=1 "
    # C2 compiles what runs eight times as often as it would have to by default: it is worth its CPU for what runs with
    # each event, and not for what runs while the driver starts.
    "-XX:Tier4InvocationThreshold=40000 -XX:Tier4MinInvocationThreshold=8000 -XX:Tier4CompileThreshold=80000 "
    "-XX:Tier4BackEdgeThreshold=300000"
)

_NEEDED = ("io.delta.sql.DeltaSparkSessionExtension", "org.apache.spark.sql.kafka010.KafkaSourceProvider")
_NEEDED_ON_S3 = "org.apache.hadoop.fs.s3a.S3AFileSystem"

_TUNED = {
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.session.timeZone": "UTC",
    # One bad value must go to quarantine, not stop the stream.
    "spark.sql.ansi.enabled": "false",
    "spark.sql.mapKeyDedupPolicy": "LAST_WIN",  # a header sent twice
    "spark.sql.shuffle.partitions": "1",
    "spark.sql.adaptive.enabled": "false",
    # Interpreted: writing and formatting Java source for each task costs a short micro-batch more than it saves.
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.scheduler.mode": "FAIR",
    "spark.sql.streaming.noDataMicroBatches.enabled": "false",
    "spark.sql.streaming.metricsEnabled": "false",
    "spark.sql.streaming.numRecentProgressUpdates": "20",
    "spark.sql.streaming.minBatchesToRetain": "20",
    # A checkpoint file less twice a batch; a torn one is no loss, because bronze and the products say how far they are.
    "spark.sql.streaming.checkpoint.fileChecksum.enabled": "false",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    # Between the JVM and Python; over TCP a small table waits 40 ms for a delayed acknowledgement.
    "spark.python.unix.domain.socket.enabled": "true",
    "spark.sql.parquet.compression.codec": "zstd",
    "spark.hadoop.mapreduce.fileoutputcommitter.marksuccessfuljobs": "false",  # bronze's folders hold data files only
    # PySpark would tell the JVM the caller's file and line with each column that a query names: some eight calls of it.
    "spark.python.sql.dataFrameDebugging.enabled": "false",
    # A batch is cached for as long as its products are made: sizing up how to compress it costs more than it saves.
    "spark.sql.inMemoryColumnarStorage.compressed": "false",
    # Bronze is partitioned by day: a batch of one day needs no sort before it is written.
    "spark.sql.maxConcurrentOutputFileWriters": "4",
    # Bronze. Smaller row groups (compressed bytes) take less memory to write.
    **{f"spark.hadoop.parquet.enable.dictionary#{name}": "false" for name in UNLIKE},
    "spark.hadoop.parquet.size.statistics.enabled": "false",
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",  # 8 bytes, as everybody but Spark writes them
    "spark.hadoop.parquet.block.size": str(32 << 20),
    "spark.cleaner.periodicGC.interval": "5min",
    # Delta: a short commit. Checkpoints of tables are written by maintenance, outside the batch.
    "spark.databricks.delta.stats.collect": "false",
    "spark.databricks.delta.writeChecksumFile.enabled": "false",
    "spark.databricks.delta.snapshotPartitions": "1",
    "spark.databricks.delta.autoCompact.enabled": "false",
    "spark.databricks.delta.properties.defaults.checkpointInterval": "1000000",
    "spark.databricks.delta.properties.defaults.enableDeletionVectors": "false",
    # Hadoop without its native library starts a process (chmod, readlink) for each file that it makes or renames: some
    # ten a micro-batch, the greater part of the time of a short one. FileSystem's rename does without.
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
    ),
    "spark.delta.logStore.file.impl": "io.delta.storage.LocalLogStore",
}
# A JVM writes these to standard error by itself, past any log configuration: of a module that spark-submit adds, and of
# a library that Spark contains.
_WRITTEN_AT_EACH_START = (
    b"WARNING: Using incubator modules: ",
    b"Warning: Java versions > Java 11 can only operate in ",
)
_LOOPBACK = {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
# The same for the files themselves. On the driver's own class path, because spark-submit uses it before any jar.
_LOCAL_FILES = "com.globalmentor.apache.hadoop.fs.NakedLocalFileSystem"
_LOCAL_FILES_JAR = "hadoop-bare-naked-local-fs"


INTAKE = "intake"
"""Spark's pool of the jobs that read Kafka. They go first: the products' jobs fill the gaps between theirs."""


def build_session(settings: Settings, app: str, *, record_classes: Path | None = None) -> SparkSession:
    """A session with Delta and Kafka on its class path; fetches the jars where they are missing.

    Under spark-submit the master, memory and any setting given there are kept.

    Args:
        record_classes: where the JVM writes an archive of its classes when it ends
            (:mod:`lakehouse.contract.jvm`); None: it uses the one that there is.
    """
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # of the Python workers
    submitted = "SPARK_ENV_LOADED" in os.environ or "PYSPARK_GATEWAY_PORT" in os.environ
    builder = SparkSession.builder.appName(app)
    given: dict[str, str] = {}  # to spark-submit; not overridden
    if submitted:
        SparkContext._ensure_initialized()
        given = dict(SparkConf().getAll())
    s3 = str(settings.lake).startswith("s3")
    paths = [*jar_paths("spark"), *(jar_paths("s3") if s3 else [])]
    jars = ",".join(str(jar) for jar in paths)
    needed = (*_NEEDED, _NEEDED_ON_S3) if s3 else _NEEDED
    if submitted and _onto_class_path(jars.split(","), needed) and "spark.jars" in given:
        builder = builder.config("spark.jars", f"{given['spark.jars']},{jars}")
    master = given.get("spark.master", settings.spark.master)
    schemas = Lake.of(settings).shared / SCHEMAS
    classes = recording(record_classes) if record_classes else [] if submitted else sharing("spark", class_path(paths))
    conf = {
        "spark.jars": jars,
        "spark.driver.extraJavaOptions": " ".join([JVM_OPTIONS, *log_flags(), *classes]),
        "spark.executor.extraJavaOptions": JVM_OPTIONS,
        **(_LOOPBACK if _on_this_machine(master) else {}),
        **_TUNED,
        "spark.scheduler.allocation.file": Path(__file__).with_name("pools.xml").as_uri(),
        FOLDER: str(schemas.absolute() if isinstance(schemas, Path) else schemas),
        REGISTRY: http_address("kafka.schema_registry", settings.kafka.schema_registry),
        **(_s3_conf(os.environ) if s3 else {}),
        **({} if submitted else _one_process(settings, paths)),
        **settings.spark.conf,
    }
    if not submitted:
        conf = {"spark.master": master, "spark.driver.memory": settings.spark.driver_memory, **conf}
        _start_jvm(conf)
    for key, value in conf.items():
        if key not in given:
            builder = builder.config(key, value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    return session


def _start_jvm(conf: Mapping[str, str]) -> None:
    """Start the JVM unless this process has one already.

    Raises:
        EnvironmentProblem: there is no Java, or the JVM did not start.
    """
    if SparkContext._gateway is None:
        find_java()
        options = SparkConf().setAll(list(conf.items()))
        try:
            with _without_noise() as stderr:
                gateway = launch_gateway(options, {"stderr": stderr})  # type: ignore[no-untyped-call]
        except PySparkRuntimeError:
            remedy = "It says why above; look at [spark] of the settings"
            raise EnvironmentProblem("Spark's JVM did not start", remedy) from None
        SparkContext._ensure_initialized(gateway=gateway)


@contextmanager
def _without_noise() -> Iterator[int]:
    """A file whose lines go to standard error, less what a JVM writes at each start."""
    source, sink = os.pipe()

    def pass_on() -> None:
        with os.fdopen(source, "rb") as lines, os.fdopen(2, "wb", closefd=False) as stderr:
            for line in lines:
                if not line.startswith(_WRITTEN_AT_EACH_START):
                    stderr.write(line)
                    stderr.flush()

    Thread(target=pass_on, name="stderr of the JVM", daemon=True).start()
    try:
        yield sink
    finally:
        os.close(sink)


def _s3_conf(environ: Mapping[str, str]) -> dict[str, str]:
    """Spark's S3A by the variables that delta-rs reads too. Spark makes no commit."""
    conf = {"fs.s3a.endpoint.region": environ.get("AWS_REGION", "us-east-1"), "fs.s3a.input.stream.type": "classic"}
    if endpoint := environ.get("AWS_ENDPOINT_URL"):
        secure = str(endpoint.startswith("https:")).lower()
        conf |= {"fs.s3a.endpoint": endpoint, "fs.s3a.path.style.access": "true"}
        conf["fs.s3a.connection.ssl.enabled"] = secure
    return {f"spark.hadoop.{name}": value for name, value in conf.items()}


@contextmanager
def in_pool(spark: SparkSession, name: str) -> Iterator[None]:
    """Queries that start in this block run their jobs in a pool of ``pools.xml``."""
    jobs = spark.sparkContext._jsc
    jobs.setLocalProperty("spark.scheduler.pool", name)
    try:
        yield
    finally:
        jobs.setLocalProperty("spark.scheduler.pool", None)


def class_path(jars: Sequence[Path]) -> list[Path]:
    """The jars that the driver's JVM starts with: Spark's own, by name, and the local file system's."""
    spark = sorted((Path(_find_spark_home()) / "jars").glob("*.jar"))
    return [*spark, *(jar for jar in jars if jar.name.startswith(_LOCAL_FILES_JAR))]


def _on_this_machine(master: str) -> bool:
    """Whether executors reach the driver by the loopback address; elsewhere Spark finds out its own, or is told."""
    return master.startswith("local") or urlsplit(master).hostname in ("127.0.0.1", "localhost", "::1")


def _one_process(settings: Settings, jars: Sequence[Path]) -> dict[str, str]:
    """What pays where the driver is all there is: no processes for files, no network for results of tasks."""
    if not settings.spark.master.startswith("local"):
        return {}
    jar = next(path for path in jars if path.name.startswith(_LOCAL_FILES_JAR))
    return {
        "spark.driver.extraClassPath": str(jar),
        "spark.hadoop.fs.file.impl": _LOCAL_FILES,
        # A larger result of a task would come by way of the block manager and a TCP connection of the driver to itself.
        "spark.task.maxDirectResultSize": "100m",
    }


def _onto_class_path(jars: Sequence[str], needed: Sequence[str]) -> bool:
    """Add the jars to a driver that runs already, where ``spark.jars`` comes too late; False where it has them.

    Args:
        needed: classes that tell whether it has them.

    Raises:
        EnvironmentProblem: the driver's class loader takes no more jars.
    """
    from py4j.protocol import Py4JError  # type: ignore[import-untyped]

    assert SparkContext._jvm is not None
    java = SparkContext._jvm.java
    loader = java.lang.Thread.currentThread().getContextClassLoader()

    def has_all() -> bool:
        try:
            return all(loader.loadClass(name) for name in needed)
        except Py4JError:
            return False

    if has_all():
        return False
    try:
        for jar in jars:
            loader.addURL(java.io.File(jar).toURI().toURL())
    except Py4JError:
        pass  # another class loader than Spark's own
    if not has_all():
        raise EnvironmentProblem(
            "Delta and the Kafka source are not on the driver's class path",
            "Run: spark-submit --jars $(millrace prepare --jars) …",
        )
    return True


def write_archive(archive: Path, folder: Path) -> int:
    """Use Spark as a driver of the shipped pipeline does, and write the archive; returns the exit code of the JVM.

    Args:
        folder: of a lake that is empty.
    """
    settings = load_settings({}, lake=folder / "lake")
    session = build_session(settings, "millrace prepare", record_classes=archive)
    _play(session, settings)
    session.stop()
    gateway = SparkContext._gateway
    assert gateway is not None
    process = gateway.proc
    gateway.shutdown()
    process.stdin.close()  # its sign to end
    return int(process.wait())


def _play(spark: SparkSession, settings: Settings) -> None:
    from lakehouse.batch import build, rejected_rows
    from lakehouse.live import LiveProducts

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
    sys.exit(write_archive(Path(sys.argv[1]), Path(sys.argv[2])))

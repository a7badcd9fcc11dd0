"""The streaming queries of one driver: started together, watched, stopped cleanly.

One query a source takes its events from Kafka, appends them to bronze, and hands the same rows to the source's products
(:mod:`lakehouse.live`). Steps of one micro-batch, and what a crash after each of them means:

1. Spark writes the batch's offsets to its checkpoint. Crash: the same batch runs again.
2. The records are parsed once and appended to bronze, with the end offsets in the same commit. Crash: the batch runs
   again and is dropped, because bronze says that it has these offsets; the products read the rows from bronze.
3. The rows are handed to the products, which take them while Spark reads the next batch. Crash: products that are
   behind read the rows from bronze.
4. Spark notes in its checkpoint that the batch is done.
"""

from __future__ import annotations

import json
import logging
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery

from lakehouse.bronze.offsets import offset_of
from lakehouse.bronze.query import BronzeWriter, constant_time, read_topic, to_bronze
from lakehouse.bronze.readers import check_record, note_record
from lakehouse.bronze.table import create
from lakehouse.contract.lake import WARNINGS, Lake
from lakehouse.contract.pipeline import Pipeline, Source
from lakehouse.contract.pipeline.expectations import WARN
from lakehouse.contract.settings import Settings
from lakehouse.counts import RUNNING, count_batch
from lakehouse.derived.added import AddedQueries
from lakehouse.derived.derivations import Derivations
from lakehouse.errors import BronzeGap, LakehouseError, QueryFailed, TopicReplaced
from lakehouse.events import SMALL_BATCH, LocalEvents, SparkEvents, as_bronze, compiled_session, materialized
from lakehouse.live import LiveOptions, LiveProducts
from lakehouse.lock import WriterLocks
from lakehouse.stages import Stages
from lakehouse.stateful.live_join import LiveJoin

log = logging.getLogger(__name__)

_RAISED = re.compile(r"[A-Za-z_][\w.]*(?:Error|Exception)\b.*: ")  # the last line of a Python traceback, a Java cause
_BEGAN_ANEW = re.compile(r"Partition (?P<topic>\S+)-\d+ offset was changed from \d+ to \d+")  # Spark, of an end
_CONDITION = re.compile(r"\[[A-Z][A-Z0-9_.]+\]|Error|Exception")


def run(
    spark: SparkSession,
    settings: Settings,
    pipeline: Pipeline,
    stages: Stages,
    *,
    bootstrap: str,
    stop: threading.Event,
    started: Callable[[], None] | None = None,
    accept_loss: bool = False,
) -> None:
    """Run the queries until ``stop`` is set.

    Args:
        bootstrap: ``host:port`` of the broker; unused without bronze.
        started: called once all queries run.
        accept_loss: see :func:`lakehouse.bronze.query.start_bronze`.

    Raises:
        TableBusy: another process writes one of the tables.
        QueryFailed: a query stopped by itself.
        BronzeGap: Kafka no longer holds what bronze has not taken.
        TopicReplaced: a topic began anew, so that its offsets no longer say what bronze has.
    """
    lake = Lake(settings.lake)
    with WriterLocks(lake, stages.tables(pipeline), patience_s=2.0), ExitStack() as stops:
        warns = any(source.expected(WARN) for source in pipeline.sources.values())
        restore = not (lake.quarantine().exists() and (lake.table("silver", WARNINGS).exists() or not warns))
        running: list[Running] = []
        rehearsing = stops.enter_context(ThreadPoolExecutor(2, thread_name_prefix="rehearsal"))
        rehearsals: list[Future[object]] = []
        lives: dict[str, LiveProducts] = {}

        def begun(one: Running) -> None:
            running.append(one)
            stops.callback(one.stop)

        for source in pipeline.sources.values():
            derived = [lake.table(p.layer, p.name) for p in pipeline.products_of(source.name)]
            check_record(lake, source.name, derived)
            create(lake.bronze(source.name))
            note_record(lake, source.name)
            for trigger_ms, products in stages.by_trigger(pipeline, source).items():
                keeps = stages.rejected and source.name not in lives
                options = LiveOptions(keeps, restore and keeps, trigger_ms=trigger_ms)
                name = stages.set_name(source, trigger_ms)
                live = LiveProducts(spark, settings, pipeline, source, products, name, options)
                if settings.spark.rehearse:
                    rehearsals += [rehearsing.submit(play) for play in live.local.rehearsals()]
                live.start()
                begun(live)
                stops.callback(wait, rehearsals)  # before its queries are closed
                lives.setdefault(source.name, live)
            if stages.bronze:
                begun(_start_bronze(spark, settings, source, bootstrap, lives.get(source.name), accept_loss))
        for product in pipeline.joins:
            if product.layer in stages.layers:
                join = LiveJoin(spark, settings, pipeline, product)
                join.start()
                begun(join)
        for end in _derive(spark, settings, pipeline, stages, lives):
            stops.callback(end)
        wait(rehearsals)
        if started is not None:
            started()
        _watch(running, stop)


class Running(Protocol):
    """What a driver runs and watches."""

    @property
    def name(self) -> str: ...
    @property
    def is_active(self) -> bool: ...
    @property
    def error(self) -> BaseException | None: ...
    def stop(self) -> None:
        """End it; when this returns, nothing is written any more."""


def _start_bronze(
    spark: SparkSession,
    settings: Settings,
    source: Source,
    bootstrap: str,
    live: LiveProducts | None,
    accept_loss: bool,
) -> RunningQuery:
    """Start the query that takes the source's events in; ``live``: the products that its rows are handed to."""
    session = compiled_session(spark)
    records, bronze = read_topic(session, settings, source, bootstrap=bootstrap, accept_loss=accept_loss)
    checkpoint = Lake(settings.lake).checkpoint(f"bronze-{source.name}")
    writer = SourceWriter(source, settings.tenant, bronze, checkpoint, live)
    query = (
        records.writeStream.queryName(f"bronze-{source.name}")
        .option("checkpointLocation", str(checkpoint))
        .trigger(processingTime=f"{settings.spark.batch_interval_ms} milliseconds")
        .foreachBatch(writer)
        .start()
    )
    RUNNING[f"bronze-{source.name}"] = query
    return RunningQuery(query, writer)


@dataclass(frozen=True, slots=True)
class RunningQuery:
    """A streaming query and the writer that it hands its batches to."""

    query: StreamingQuery
    writer: SourceWriter

    @property
    def name(self) -> str:
        """Name of the query."""
        return self.query.name or "?"

    @property
    def is_active(self) -> bool:
        """Whether it runs."""
        return bool(self.query.isActive)

    @property
    def error(self) -> BaseException | None:
        """Why it stopped; None while it runs, or where it was stopped from outside."""
        return self.query.exception()

    def stop(self) -> None:
        """Stop it; when this returns, nothing is written any more and all files are closed."""
        RUNNING.pop(self.name, None)
        self.query.stop()
        self.writer.close()


class SourceWriter:
    """Takes a source's records, one micro-batch after another, into bronze and its products.

    Args:
        source: whose records.
        tenant: of records that do not say theirs.
        bronze: the table's writer.
        checkpoint: the query's.
        live: the products; None: bronze alone, and nothing is parsed.
    """

    def __init__(
        self,
        source: Source,
        tenant: str,
        bronze: BronzeWriter,
        checkpoint: Path,
        live: LiveProducts | None,
    ) -> None:
        self._busy = threading.Lock()
        self._source = source
        self._tenant = tenant
        self._bronze = bronze
        self._checkpoint = checkpoint
        self._live = live

    def __call__(self, events: DataFrame, batch: int) -> None:
        with self._busy:
            self._take(events, batch)

    def close(self) -> None:
        """Wait for the batch in hand: Spark does not, when it stops the query."""
        with self._busy:
            return

    def _take(self, events: DataFrame, batch: int) -> None:
        ends = self._end_offsets(batch)
        count = self._bronze.events_of(ends)
        if not count:
            return
        if self._live is not None and self._live.local.usable:
            self._take_local(events, ends, self._live, count)
        else:
            self._take_in_spark(events.coalesce(1) if count < SMALL_BATCH else events, ends)
        count_batch(self._checkpoint.name, count)

    def _take_local(self, records: DataFrame, ends: Mapping[str, int], live: LiveProducts, count: int) -> None:
        if count < SMALL_BATCH:
            rows = records.toArrow()
            events, bronze = live.local.of_records(rows.filter(self._bronze.unknown(rows)))
        else:
            events, bronze = live.local.of_batch(self._bronze.without_known(records))
        with live.writing():
            commit, whole = self._bronze.append(bronze, ends)
            events = events.set_column(events.schema.get_field_index("bronze_at"), "bronze_at", whole["bronze_at"])
            live.hand_over(commit.version, LocalEvents(live.local, events, whole))

    def _take_in_spark(self, records: DataFrame, ends: Mapping[str, int]) -> None:
        bronze = to_bronze(self._bronze.without_known(records), source=self._source.name, tenant=self._tenant)
        if self._live is None:
            self._bronze.append_frame(bronze, ends)
            return
        parsed = self._live.local.parsed(bronze.withColumn("bronze_at", F.lit(None).cast("timestamp")))
        with materialized(parsed) as rows:
            with self._live.writing():
                commit = self._bronze.append_frame(as_bronze(rows), ends)
                events = rows.withColumn("bronze_at", constant_time(commit.bronze_at))
                self._live.hand_over(commit.version, SparkEvents(events, self._source))
            self._live.wait_taken()

    def _end_offsets(self, batch: int) -> dict[str, int]:
        """``TOPIC/PARTITION`` to the offset behind the batch's last one, from the query's own write-ahead log."""
        topics = json.loads(offset_of(self._checkpoint, batch))
        return {f"{topic}/{number}": end for topic, ends in topics.items() for number, end in ends.items()}


def _derive(
    spark: SparkSession,
    settings: Settings,
    pipeline: Pipeline,
    stages: Stages,
    lives: dict[str, LiveProducts],
) -> list[Callable[[], None]]:
    """Start what follows the products: views, alerts, added queries; returns how to stop them, as they started."""
    if not stages.layers:
        return []
    derivations = Derivations(settings, pipeline, stages.layers)
    derivations.start()
    if not stages.derives_all:
        return [derivations.stop]
    added = AddedQueries(spark, settings, pipeline, lives, derivations)
    added.start()
    return [derivations.stop, added.stop]


def _watch(running: Sequence[Running], stop: threading.Event) -> None:
    while not stop.wait(0.5):
        for one in running:
            if not one.is_active:
                raise _why(one)


def _why(stopped: Running) -> LakehouseError:
    """Why a query stopped, in our own terms."""
    error, name = stopped.error, stopped.name
    if error is None:
        return QueryFailed(name, "STOPPED", "it was stopped from outside")
    text = str(error)
    if anew := _BEGAN_ANEW.search(text):
        return TopicReplaced(name.removeprefix("bronze-"), anew["topic"], anew[0])
    if "failOnDataLoss" in text or "KAFKA_DATA_LOSS" in text or "OffsetOutOfRange" in text:
        return BronzeGap(name.removeprefix("bronze-"), text.splitlines()[0])
    condition = getattr(error, "getCondition", lambda: None)() or type(error).__name__
    lines = text.splitlines() or [type(error).__name__]
    ours = [line.partition(": ")[2] for line in lines if line.startswith("lakehouse.errors.")]
    causes = [line for line in lines if _RAISED.match(line)] or [line for line in lines if _CONDITION.search(line)]
    return QueryFailed(name, condition, (ours or causes or lines)[0].strip())

"""The streaming queries of one driver: started together, watched, stopped cleanly.

One query a source takes its events from Kafka, appends them to bronze, and hands the same rows to the source's products
(:mod:`lakehouse.live`). Steps of one micro-batch, and what a crash after each of them means:

1. Spark writes the batch's offsets to its checkpoint. Crash: the same batch runs again.
2. The records are parsed once and appended to bronze, with the end offsets in the same commit. Crash: the batch runs
   again and is dropped, because bronze says that it has these offsets; the products read the rows from bronze.
3. The rows are handed to the products, which take them while Spark reads the next batches: one is in their hands, one
   may wait. Crash: products that are behind read the rows from bronze.
4. Spark notes in its checkpoint that the batch is done.
"""

from __future__ import annotations

import logging
import math
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery

from lakehouse.bronze.query import BronzeWriter, constant_time, first_rows, read_topic, to_bronze
from lakehouse.bronze.readers import batch_ends, check_record, note_record
from lakehouse.bronze.table import create
from lakehouse.contract.errors import crash_point
from lakehouse.contract.lake import ALERTS, WARNINGS, Lake, offsets_behind
from lakehouse.contract.pipeline import Pipeline, Product, Source, View
from lakehouse.contract.pipeline.expectations import WARN
from lakehouse.contract.pipeline.folder import PipelineFiles
from lakehouse.contract.settings import Settings
from lakehouse.contract.storage import is_away
from lakehouse.counts import RUNNING, count_batch
from lakehouse.derived.added import AddedQueries, said
from lakehouse.derived.derivations import Derivations
from lakehouse.errors import BronzeGap, LakehouseError, QueryFailed, TableBusy, TopicReplaced
from lakehouse.events import SMALL_BATCH, LocalEvents, SparkEvents, as_bronze, compiled_session, materialized
from lakehouse.live import LiveOptions, LiveProducts
from lakehouse.lock import WriterLocks
from lakehouse.session import INTAKE, in_pool
from lakehouse.stages import Stages
from lakehouse.stateful.live_join import LiveJoin

log = logging.getLogger(__name__)

_FIRST = 1_000  # events after a start whose results do not wait for all that came meanwhile
_LOOK_S = 0.5
_RETRY_S = 30.0  # after a source that was added could not start
_AWAY_RETRY_S = 2.0  # after the object store stopped a part
_RAISED = re.compile(r"[A-Za-z_][\w.]*(?:Error|Exception)\b.*: ")  # the last line of a Python traceback, a Java cause
_BEGAN_ANEW = re.compile(r"Partition (?P<topic>\S+)-\d+ offset was changed from \d+ to \d+")  # Spark, of an end
_CONDITION = re.compile(r"\[[A-Z][A-Z0-9_.]+\]|Error|Exception")


def run(
    spark: SparkSession,
    settings: Settings,
    pipeline: Pipeline,
    stages: Stages,
    kafka: KafkaAccess,
    stop: threading.Event,
    *,
    changes: PipelineChanges,
    started: Callable[[], None],
) -> None:
    """Run the queries until ``stop`` is set.

    Args:
        changes: followed meanwhile.

    Raises:
        TableBusy: another process writes one of the tables.
        QueryFailed: a query stopped by itself.
        BronzeGap: Kafka no longer holds what bronze has not taken.
        TopicReplaced: a topic began anew, so that its offsets no longer say what bronze has.
    """
    with PipelineQueries(spark, settings, stages, kafka) as queries:
        queries.start(pipeline)
        started()
        while not stop.wait(_LOOK_S):
            queries.check()
            queries.follow(changes)


@dataclass(frozen=True, slots=True)
class PipelineChanges:
    """What is declared while a driver runs.

    Attributes:
        tell: called with a changed pipeline before its queries start.
    """

    files: PipelineFiles
    tell: Callable[[Pipeline], None] = lambda _: None


@dataclass(frozen=True, slots=True)
class KafkaAccess:
    """Where events come from.

    Attributes:
        bootstrap: ``host:port`` of the broker; unused without bronze.
        accept_loss: see :func:`lakehouse.bronze.query.read_topic`.
        topics: makes a source's topics where they are absent.
    """

    bootstrap: str
    accept_loss: bool
    topics: Callable[[Source], None]


@dataclass(frozen=True, slots=True)
class _Part:
    """What starts and stops by itself: a source with its products, a join, or a view.

    Attributes:
        declared: what it is made of; when that differs, it is started anew.
        tables: that it writes.
        start: leaves on the stack how to stop it.
        alone: its failure ends nothing else: a source that was added at run time.
    """

    declared: object
    tables: Sequence[str]
    start: Callable[[ExitStack], Iterator[Running]]
    alone: bool = False


@dataclass(slots=True)
class _RunningPart:
    part: _Part
    stops: ExitStack
    running: list[Running]


class PipelineQueries:
    """All that a driver runs of a pipeline, part by part; a context manager that stops all of it.

    Parts start in one way, at the start of the driver and when their declarations change: from what bronze and the
    tables hold. So a part that changes is stopped and begins as after a restart, and the others go on. One that cannot
    start as it is declared now goes on as it was declared before.
    """

    def __init__(self, spark: SparkSession, settings: Settings, stages: Stages, kafka: KafkaAccess) -> None:
        self._spark = spark
        self._settings = settings
        self._stages = stages
        self._kafka = kafka
        self._lake = Lake.of(settings)
        self._stops = ExitStack()
        self._rehearsing = self._stops.enter_context(ThreadPoolExecutor(2, thread_name_prefix="rehearsal"))
        self._rehearsals: list[Future[object]] = []
        self._lives: dict[str, LiveProducts] = {}
        self._restore = False
        self._parts: dict[str, _RunningPart] = {}
        self._refused: dict[str, object] = {}  # declarations in whose place an earlier one runs
        self._told: dict[str, str] = {}
        self._away: set[str] = set()  # parts that the object store stopped
        self._derivations: Derivations | None = None
        self._added: AddedQueries | None = None
        self._pipeline: Pipeline | None = None
        self._due = math.inf  # when to apply it again

    def __enter__(self) -> PipelineQueries:
        return self

    def __exit__(self, *_: object) -> None:
        self._stops.close()

    # --- what is declared

    def start(self, pipeline: Pipeline) -> None:
        """Start everything. Raises what keeps a part from starting, unless it is a source that was added."""
        stages = self._stages
        if stages.derives_all:
            self._stops.enter_context(WriterLocks(self._lake, [ALERTS], patience_s=2.0))
        self._stops.callback(self._end_all)
        self._pipeline = pipeline
        if stages.layers:
            self._derivations = Derivations(self._settings, pipeline, stages.layers)
        self._begin_all(pipeline, {}, strict=True)
        if self._derivations is not None:
            self._derivations.start()
            self._stops.callback(self._derivations.stop)
            if stages.derives_all:
                self._added = AddedQueries(self._spark, self._settings, pipeline, self._lives, self._derivations)
                self._added.start()
                self._stops.callback(self._added.stop)
        wait(self._rehearsals)

    def follow(self, changes: PipelineChanges) -> None:
        """Look once for a changed declaration, and for parts that are to be tried again."""
        if (changed := changes.files.changed()) is not None:
            self._pipeline, self._due = changed, time.monotonic()
        if self._pipeline is None or time.monotonic() < self._due:
            return
        self._due = math.inf
        changes.tell(self._pipeline)
        try:
            self._apply(self._pipeline)
        except Exception as error:
            if not is_away(error):
                raise
            self._due = time.monotonic() + _AWAY_RETRY_S

    def check(self) -> None:
        """Raise why a part ended.

        A source that was added is stopped alone, and tried again later. So is a part that the object store stopped:
        what it had in hand is done again, as after a restart.
        """
        for name, running in list(self._parts.items()):
            stopped = next((one for one in running.running if not one.is_active), None)
            if stopped is None:
                continue
            error = _why(stopped)
            away = stopped.error is not None and is_away(stopped.error)
            if not running.part.alone and not away:
                raise error
            self._end(name)
            self._tell(name, f"has stopped: {error}")
            if away:
                self._away.add(name)
            self._due = time.monotonic() + (_AWAY_RETRY_S if away else _RETRY_S)

    def _apply(self, pipeline: Pipeline) -> None:
        wanted = self._wanted(pipeline)
        self._told = {name: text for name, text in self._told.items() if name in wanted}
        self._refused = {name: declared for name, declared in self._refused.items() if name in wanted}
        before = {}
        for name, running in reversed(list(self._parts.items())):
            declared = wanted[name].declared if name in wanted else None
            if declared != running.part.declared and (declared is None or declared != self._refused.get(name)):
                before[name] = self._end(name)
                crash_point("source.after_stop")
        if self._derivations is not None:
            self._derivations.declare(pipeline)
        self._begin_all(pipeline, before)
        if self._added is not None:
            self._added.declare(pipeline)

    def _wanted(self, pipeline: Pipeline) -> dict[str, _Part]:
        """The parts of a pipeline, in the order in which they start."""
        stages, found = self._stages, {}
        for source in pipeline.sources.values():
            found[f"source {source.name}"] = _Part(
                (source, stages.by_trigger(pipeline, source)),
                stages.tables(pipeline, source),
                partial(self._start_source, pipeline, source),
                source.name in pipeline.added,
            )
        for product in pipeline.joins:
            if product.layer in stages.layers:
                declared = (product, pipeline.sources[product.source], pipeline.sources[product.right])
                found[f"join {product.name}"] = _Part(
                    declared, [product.name], partial(self._start_join, pipeline, product)
                )
        for view in pipeline.views.values():
            if view.layer in stages.layers:
                found[f"view {view.name}"] = _Part(view, [view.name], partial(self._start_view, view))
        return found

    # --- parts

    def _begin_all(self, pipeline: Pipeline, before: Mapping[str, _Part], *, strict: bool = False) -> None:
        """Start what does not run; ``before``: what ran in its place."""
        warns = any(source.expected(WARN) for source in pipeline.sources.values())
        lake = self._lake
        self._restore = not (lake.quarantine().exists() and (lake.table("silver", WARNINGS).exists() or not warns))
        for name, part in self._wanted(pipeline).items():
            if name not in self._parts:
                self._begin(name, part, before.get(name), strict=strict)

    def _begin(self, name: str, part: _Part, before: _Part | None, *, strict: bool) -> None:
        try:
            self._parts[name] = self._started(part)
        except Exception as error:
            if (strict and not part.alone) or (name in self._away and isinstance(error, TableBusy)):
                raise
            log.debug("%s", name, exc_info=True)
            if is_away(error) and not strict:
                self._away.add(name)
                self._due = time.monotonic() + _AWAY_RETRY_S
                return
            self._tell(name, f"cannot start: {said(error)}")
            if before is None:
                self._due = time.monotonic() + _RETRY_S
                return
            self._refused[name] = part.declared
            self._parts[name] = self._started(before)
            log.warning("%s goes on as it was declared before", name)
        else:
            self._refused.pop(name, None)
            self._told.pop(name, None)
            self._away.discard(name)
            if not strict:
                log.info("%s runs", name)

    def _started(self, part: _Part) -> _RunningPart:
        with ExitStack() as stops:
            stops.enter_context(WriterLocks(self._lake, part.tables, patience_s=2.0))
            running = list(part.start(stops))
            return _RunningPart(part, stops.pop_all(), running)

    def _end(self, name: str) -> _Part:
        running = self._parts.pop(name)
        running.stops.close()
        log.info("%s is stopped", name)
        return running.part

    def _end_all(self) -> None:
        for name in reversed(list(self._parts)):
            self._end(name)

    def _tell(self, name: str, text: str) -> None:
        if self._told.get(name) != text:
            self._told[name] = text
            log.error("%s %s", name, text)

    def _start_source(self, pipeline: Pipeline, source: Source, stops: ExitStack) -> Iterator[Running]:
        lake, stages = self._lake, self._stages
        derived = [lake.table(p.layer, p.name) for p in pipeline.products_of(source.name)]
        check_record(lake, source.name, derived)
        create(lake.bronze(source.name))
        note_record(lake, source.name)
        stops.callback(self._lives.pop, source.name, None)
        for trigger_ms, products in stages.by_trigger(pipeline, source).items():
            keeps = stages.rejected and source.name not in self._lives
            options = LiveOptions(keeps, self._restore and keeps, trigger_ms=trigger_ms)
            name = stages.set_name(source, trigger_ms)
            live = LiveProducts(self._spark, self._settings, pipeline, source, products, name, options)
            rehearsals: list[Future[object]] = []
            if self._settings.spark.rehearse:
                rehearsals = [self._rehearsing.submit(play) for play in live.local.rehearsals()]
            live.start()
            stops.callback(live.stop)
            stops.callback(wait, rehearsals)  # before its queries are closed
            self._rehearsals = [one for one in self._rehearsals if not one.done()] + rehearsals
            self._lives.setdefault(source.name, live)
            yield live
        crash_point("source.after_products")
        if stages.bronze:
            writer = self._start_bronze(source)
            stops.callback(writer.stop)
            yield writer

    def _start_bronze(self, source: Source) -> SourceWriter:
        """Start the query that takes the source's events in, and hands them to its products."""
        session = compiled_session(self._spark)
        kafka = self._kafka
        kafka.topics(source)
        records, bronze = read_topic(
            session, self._settings, source, bootstrap=kafka.bootstrap, accept_loss=kafka.accept_loss
        )
        checkpoint = self._lake.checkpoint(f"bronze-{source.name}")
        writer = SourceWriter(source, self._settings.tenant, bronze, checkpoint, self._lives.get(source.name))
        with in_pool(self._spark, INTAKE):
            writer.query = (
                records.writeStream.queryName(writer.name)
                .option("checkpointLocation", str(checkpoint))
                .trigger(processingTime=f"{self._settings.spark.batch_interval_ms} milliseconds")
                .foreachBatch(writer)
                .start()
            )
        RUNNING[writer.name] = writer.query
        return writer

    def _start_join(self, pipeline: Pipeline, product: Product, stops: ExitStack) -> Iterator[Running]:
        join = LiveJoin(self._spark, self._settings, pipeline, product)
        join.start()
        stops.callback(join.stop)
        yield join

    def _start_view(self, view: View, stops: ExitStack) -> Iterator[Running]:
        assert self._derivations is not None
        self._derivations.add(view)
        stops.callback(self._derivations.remove, view.name)
        yield from ()


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


class SourceWriter:
    """Takes a source's records, one micro-batch after another, into bronze and its products.

    Args:
        tenant: of records that do not say theirs.
        live: the products; None: bronze alone, and nothing is parsed.

    Attributes:
        query: the streaming query that hands it the batches, once that is started.
    """

    query: StreamingQuery

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
        self._began = False

    def __call__(self, events: DataFrame, batch: int) -> None:
        with self._busy:
            self._take(events, batch)

    @property
    def name(self) -> str:
        return self._checkpoint.name

    @property
    def is_active(self) -> bool:
        return bool(self.query.isActive)

    @property
    def error(self) -> BaseException | None:
        """Why the query stopped; None while it runs, or where it was stopped from outside."""
        return self.query.exception()

    def stop(self) -> None:
        """Stop the query; when this returns, nothing is written any more and all files are closed."""
        RUNNING.pop(self.name, None)
        self.query.stop()
        with self._busy:  # Spark does not wait for the batch in hand
            return

    def _take(self, events: DataFrame, batch: int) -> None:
        ends = batch_ends(self._checkpoint, batch)
        count = self._bronze.events_of(ends)
        if not count:
            return
        if self._live is not None and self._live.local.usable:
            self._take_local(events, ends, self._live, count)
        else:
            self._take_in_spark(events.coalesce(1) if count < SMALL_BATCH else events, ends)
        self._began = True
        count_batch(self.name, count)

    def _take_local(self, records: DataFrame, ends: Mapping[str, int], live: LiveProducts, count: int) -> None:
        if count >= SMALL_BATCH:
            self._pass_on(*live.local.of_batch(self._bronze.without_known(records)), ends, live)
            return
        rows = records.toArrow()
        rows = rows.filter(self._bronze.unknown(rows))
        if not self._began and rows.num_rows > 2 * _FIRST:
            chosen = first_rows(rows, _FIRST)
            first, rows = rows.filter(chosen), rows.filter(pc.invert(chosen))
            live.wait_taken(self._pass_on(*live.local.of_records(first), offsets_behind(first), live))
        self._pass_on(*live.local.of_records(rows), ends, live)

    def _pass_on(self, events: pa.Table, bronze: pa.Table, ends: Mapping[str, int], live: LiveProducts) -> int:
        """Events and their rows of bronze, to bronze and the products; the version of bronze that has them."""
        with live.writing():
            version, whole = self._bronze.append(bronze, ends)
            events = events.set_column(events.schema.get_field_index("bronze_at"), "bronze_at", whole["bronze_at"])
            live.hand_over(version, LocalEvents(live.local, events, whole))
        return version

    def _take_in_spark(self, records: DataFrame, ends: Mapping[str, int]) -> None:
        bronze = to_bronze(self._bronze.without_known(records), source=self._source.name, tenant=self._tenant)
        if self._live is None:
            self._bronze.append_frame(bronze, ends)
            return
        parsed = self._live.local.parsed(bronze.withColumn("bronze_at", F.lit(None).cast("timestamp")))
        with materialized(parsed) as rows:
            with self._live.writing():
                version, bronze_at = self._bronze.append_frame(as_bronze(rows), ends)
                events = rows.withColumn("bronze_at", constant_time(bronze_at))
                self._live.hand_over(version, SparkEvents(events, self._source))
            self._live.wait_taken(version)


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

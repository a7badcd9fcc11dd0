"""The streaming queries of one driver: started together, watched, stopped cleanly."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from lakehouse.bronze.offsets import events_waiting
from lakehouse.bronze.query import start_bronze
from lakehouse.bronze.table import create
from lakehouse.contract.expectations import WARN
from lakehouse.contract.lake import ALERTS, WARNINGS, Lake
from lakehouse.contract.pipeline import Pipeline, Product, Source
from lakehouse.contract.settings import Settings
from lakehouse.errors import BronzeGap, LakehouseError, QueryFailed, TopicReplaced
from lakehouse.live import start_live
from lakehouse.livewriter import LiveWriter
from lakehouse.lock import WriterLocks
from lakehouse.queries.added import AddedQueries
from lakehouse.queries.derive import Derivations
from lakehouse.record import check_record, note_record
from lakehouse.running import RunningQuery
from lakehouse.stateful.joinquery import start_join

log = logging.getLogger(__name__)

LIVE = ("silver", "gold")
_RAISED = re.compile(r"[A-Za-z_][\w.]*(?:Error|Exception)\b.*: ")  # the last line of a Python traceback, a Java cause
_BEGAN_ANEW = re.compile(r"Partition (?P<topic>\S+)-\d+ offset was changed from \d+ to \d+")  # Spark, of an end
_CONDITION = re.compile(r"\[[A-Z][A-Z0-9_.]+\]|Error|Exception")


@dataclass(frozen=True, slots=True)
class Stages:
    """Which part of a pipeline a driver runs.

    Attributes:
        bronze: Kafka to bronze.
        layers: products of these layers, from bronze.
    """

    bronze: bool = True
    layers: tuple[str, ...] = LIVE

    def products(self, pipeline: Pipeline, source: Source) -> list[Product]:
        """The products of a source that this driver keeps."""
        return [p for p in pipeline.products_of(source.name) if p.layer in self.layers]

    @property
    def rejected(self) -> bool:
        """Whether this driver keeps the rejected events too: one driver must, and quarantine is in silver."""
        return "silver" in self.layers

    def by_trigger(self, pipeline: Pipeline, source: Source) -> dict[int, list[Product]]:
        """Those products by the pause between their commits in ms, 0 (none) first: a query each."""
        found: dict[int, list[Product]] = {0: []} if self.rejected else {}
        for product in sorted(self.products(pipeline, source), key=lambda p: p.trigger_ms):
            found.setdefault(product.trigger_ms, []).append(product)
        return found

    def query_name(self, source: Source, trigger_ms: int = 0) -> str:
        """Name of the query that keeps products of one trigger; each set has a checkpoint of its own."""
        kind = "live" if self.layers == LIVE else "-".join(self.layers)
        return f"{kind}-{source.name}" + (f"-every-{trigger_ms}" if trigger_ms else "")

    def tables(self, pipeline: Pipeline) -> list[str]:
        """Tables that the driver writes."""
        names = [p.name for source in pipeline.sources.values() for p in self.products(pipeline, source)]
        names += [p.name for p in pipeline.joins if p.layer in self.layers]
        names += [view.name for view in pipeline.views.values() if view.layer in self.layers]
        names += [ALERTS] if self.derives_all else []
        return names + (list(pipeline.sources) if self.bronze else [])

    @property
    def derives_all(self) -> bool:
        """Whether this driver keeps the alerts and the queries that are added at run time: one driver must."""
        return "gold" in self.layers


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
    with WriterLocks(lake, stages.tables(pipeline), patience_s=2.0):
        queries: list[StreamingQuery] = []
        stops: list[Callable[[], None]] = []
        warns = any(source.expected(WARN) for source in pipeline.sources.values())
        restore = not (lake.quarantine().exists() and (lake.table("silver", WARNINGS).exists() or not warns))
        lives: dict[str, RunningQuery[LiveWriter]] = {}
        try:
            for source in pipeline.sources.values():
                derived = [lake.table(p.layer, p.name) for p in pipeline.products_of(source.name)]
                check_record(lake, source.name, derived)
                create(lake.bronze(source.name))
                note_record(lake, source.name)
                waiting = events_waiting(spark, settings, source, bootstrap) if stages.bronze else 0
                for trigger_ms, products in stages.by_trigger(pipeline, source).items():
                    first = source.name not in lives
                    live = start_live(
                        spark,
                        settings,
                        pipeline,
                        source,
                        products,
                        stages.query_name(source, trigger_ms),
                        keep_rejected=stages.rejected and first,
                        restore_rejected=stages.rejected and restore and first,
                        trigger_ms=trigger_ms,
                        waiting=waiting,
                    )
                    queries.append(live.query)
                    stops.append(live.stop)
                    lives.setdefault(source.name, live)
                if stages.bronze:
                    bronze = start_bronze(
                        spark, settings, source, bootstrap=bootstrap, accept_loss=accept_loss, waiting=waiting
                    )
                    queries.append(bronze)
                    stops.append(bronze.stop)
            for product in pipeline.joins:
                if product.layer in stages.layers:
                    join = start_join(spark, settings, pipeline, product)
                    queries.append(join.query)
                    stops.append(join.stop)
            stops += _derive(spark, settings, pipeline, stages, lives)
            if started is not None:
                started()
            _watch(queries, stop)
        finally:
            for end in reversed(stops):
                end()


def _derive(
    spark: SparkSession,
    settings: Settings,
    pipeline: Pipeline,
    stages: Stages,
    lives: dict[str, RunningQuery[LiveWriter]],
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


def _watch(queries: Sequence[StreamingQuery], stop: threading.Event) -> None:
    while not stop.wait(0.5):
        for query in queries:
            if not query.isActive:
                raise _why(query)


def _why(query: StreamingQuery) -> LakehouseError:
    """Why a query stopped, in our own terms."""
    error = query.exception()
    name = query.name or "?"
    if error is None:
        return QueryFailed(name, "STOPPED", "it was stopped from outside")
    text = str(error)
    if anew := _BEGAN_ANEW.search(text):
        return TopicReplaced(name.removeprefix("bronze-"), anew["topic"], anew[0])
    if "failOnDataLoss" in text or "KAFKA_DATA_LOSS" in text or "OffsetOutOfRange" in text:
        return BronzeGap(name.removeprefix("bronze-"), text.splitlines()[0])
    condition = getattr(error, "getCondition", lambda: None)() or type(error).__name__
    lines = text.splitlines()
    ours = [line.partition(": ")[2] for line in lines if line.startswith("lakehouse.errors.")]
    causes = [line for line in lines if _RAISED.match(line)] or [line for line in lines if _CONDITION.search(line)]
    return QueryFailed(name, condition, (ours or causes or lines)[0].strip())

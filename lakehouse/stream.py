"""The streaming queries of one driver: started together, watched, stopped cleanly."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from lakehouse.bronze.query import start_bronze
from lakehouse.bronze.table import create
from lakehouse.contract.lake import Lake
from lakehouse.contract.pipeline import Pipeline, Product, Source
from lakehouse.contract.settings import Settings
from lakehouse.errors import BronzeGap, LakehouseError, QueryFailed
from lakehouse.live import start_live
from lakehouse.lock import WriterLocks

log = logging.getLogger(__name__)

LIVE = ("silver", "gold")
_RAISED = re.compile(r"[A-Za-z_][\w.]*(?:Error|Exception)\b.*: ")  # the last line of a Python traceback, a Java cause
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

    def query_name(self, source: Source) -> str:
        """Name of the query that keeps those products; each set has a checkpoint of its own."""
        kind = "live" if self.layers == LIVE else "-".join(self.layers)
        return f"{kind}-{source.name}"

    def tables(self, pipeline: Pipeline) -> list[str]:
        """Tables that the driver writes."""
        names = [p.name for source in pipeline.sources.values() for p in self.products(pipeline, source)]
        return names + (list(pipeline.sources) if self.bronze else [])


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
    """
    lake = Lake(settings.lake)
    with WriterLocks(lake, stages.tables(pipeline)):
        queries: list[StreamingQuery] = []
        stops: list[Callable[[], None]] = []
        restore = not lake.quarantine().exists()
        try:
            for source in pipeline.sources.values():
                create(lake.bronze(source.name))
                products = stages.products(pipeline, source)
                if products or stages.rejected:
                    live = start_live(
                        spark,
                        settings,
                        pipeline,
                        source,
                        products,
                        stages.query_name(source),
                        keep_rejected=stages.rejected,
                        restore_rejected=stages.rejected and restore,
                    )
                    queries.append(live.query)
                    stops.append(live.stop)
                if stages.bronze:
                    bronze = start_bronze(spark, settings, source, bootstrap=bootstrap, accept_loss=accept_loss)
                    queries.append(bronze)
                    stops.append(bronze.stop)
            if started is not None:
                started()
            _watch(queries, stop)
        finally:
            for end in reversed(stops):
                end()


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
    if "failOnDataLoss" in text or "KAFKA_DATA_LOSS" in text or "OffsetOutOfRange" in text:
        return BronzeGap(name.removeprefix("bronze-"), text.splitlines()[0])
    condition = getattr(error, "getCondition", lambda: None)() or type(error).__name__
    lines = text.splitlines()
    causes = [line for line in lines if _RAISED.match(line)] or [line for line in lines if _CONDITION.search(line)]
    return QueryFailed(name, condition, (causes or lines)[0].strip())

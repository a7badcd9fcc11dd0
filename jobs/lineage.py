"""OpenLineage: what a run reads and writes, told to a receiver such as Marquez (setting ``lineage``).

A *step* is a job of the graph: topic to bronze, bronze to a product, files to bronze. Each run of the driver, the
loader or a replay tells START and then COMPLETE or FAIL of its steps; one that goes on until it is stopped also tells
RUNNING every minute. One thread makes and sends the events, out of a bounded queue, and gives up what cannot be sent:
nothing else ever waits for it.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from deltalake import DeltaTable
from deltalake.exceptions import DeltaError
from prometheus_client import Counter

from lakehouse.contract.errors import EnvironmentProblem
from lakehouse.contract.lake import Lake, TableRef
from lakehouse.contract.pipeline import Pipeline, Source
from lakehouse.contract.settings import Settings
from lakehouse.contract.sql.ddl import parse_ddl
from lakehouse.contract.storage import StorePath
from lakehouse.contract.tomlfile import http_address
from lakehouse.stages import Stages

log = logging.getLogger(__name__)

DROPPED = Counter("millrace_lineage_dropped", "OpenLineage events that could not be sent", registry=None)
RUNNING_S = 60.0
_WAITING = 1_000  # events at most
_LAST_S = 10.0  # for what waits when the run ends
_NAMESPACE = "millrace"


@dataclass(frozen=True, slots=True)
class LineageStep:
    """One job and its datasets: topics as :class:`Source`, tables, files, and URLs as text."""

    name: str
    inputs: tuple[Source | TableRef | Path | str, ...]
    outputs: tuple[TableRef, ...] = ()


def driver_steps(lake: Lake, pipeline: Pipeline, stages: Stages) -> list[LineageStep]:
    """Topics to bronze, bronze to products, products to views: as far as these stages do it."""
    name, steps = pipeline.name, []
    if stages.bronze:
        steps += [LineageStep(f"{name}.{s.name}", (s,), (lake.bronze(s.name),)) for s in pipeline.sources.values()]
    layers = {one.name: one.layer for one in pipeline.products.values()}
    layers |= {one.name: one.layer for one in pipeline.views.values()}
    tables = {name: lake.table(layer, name) for name, layer in layers.items()}
    for product in pipeline.products.values():
        if product.layer in stages.layers:
            sources = (product.source, product.right) if product.operator == "join" else (product.source,)
            read = tuple(map(lake.bronze, sources))
            steps.append(LineageStep(f"{name}.{product.name}", read, (tables[product.name],)))
    for view in pipeline.views.values():
        if view.layer in stages.layers:
            steps.append(LineageStep(f"{name}.{view.name}", (tables[view.base],), (tables[view.name],)))
    return steps


def replay_step(lake: Lake, pipeline: Pipeline) -> LineageStep:
    """Bronze and products, compared; nothing is written."""
    read = [lake.bronze(name) for name in pipeline.sources]
    read += [lake.table(product.layer, product.name) for product in pipeline.products.values()]
    return LineageStep(f"{pipeline.name}.replay", tuple(read))


@contextmanager
def told(settings: Settings, steps: Sequence[LineageStep], *, streaming: bool = False) -> Iterator[list[str]]:
    """Tell the run of the block: START, then COMPLETE, or FAIL with the error that ended it.

    Yields a list; a problem that the block puts there makes the run one that failed.

    Args:
        streaming: tell RUNNING every minute too.

    Raises:
        EnvironmentProblem: a receiver is set, and the client is not installed.
        ConfigError: the setting is no address.
    """
    problems: list[str] = []
    if not settings.lineage:
        yield problems
        return
    teller = _Teller(settings, steps, streaming=streaming)
    try:
        yield problems
    except BaseException as error:
        problems.append(str(error) or type(error).__name__)
        raise
    finally:
        teller.end("; ".join(problems))


class _Teller:
    def __init__(self, settings: Settings, steps: Sequence[LineageStep], *, streaming: bool) -> None:
        try:
            from openlineage.client import OpenLineageClient
            from openlineage.client.transport.http import ApiKeyTokenProvider, HttpConfig, HttpTransport, TokenProvider
            from openlineage.client.uuid import generate_new_uuid
        except ImportError:
            raise EnvironmentProblem(
                "lineage is set, and openlineage-python is not installed", "Install the extra `lineage`, or unset it"
            ) from None
        key = os.environ.get("OPENLINEAGE_API_KEY")  # the client's own name of it
        config = HttpConfig(
            http_address("lineage", settings.lineage),
            auth=ApiKeyTokenProvider({"apiKey": key}) if key else TokenProvider({}),
            retry={"total": 1, "allowed_methods": ["POST"]},
        )
        self._client = OpenLineageClient(transport=HttpTransport(config))
        self._kafka = settings.kafka.bootstrap
        self._streaming = streaming
        self._runs = [(step, str(generate_new_uuid())) for step in steps]
        self._queue: queue.Queue[tuple[str, datetime, str] | None] = queue.Queue(_WAITING)
        self._dropped = 0
        self._give_up = float("inf")
        self._thread = threading.Thread(target=self._work, name="lineage", daemon=True)
        self._thread.start()
        self._tell("START")

    def end(self, problem: str) -> None:
        """Tell the end, and wait a little for what is still to be sent."""
        self._give_up = time.monotonic() + _LAST_S
        self._tell("FAIL" if problem else "COMPLETE", problem)
        self._queue.put(None)
        self._thread.join(_LAST_S + 1)
        if self._dropped:
            log.warning("%d OpenLineage events could not be sent", self._dropped)

    def _tell(self, state: str, error: str = "") -> None:
        try:
            self._queue.put_nowait((state, datetime.now(UTC), error))
        except queue.Full:
            self._drop(len(self._runs))

    def _drop(self, count: int) -> None:
        self._dropped += count
        DROPPED.inc(count)

    def _work(self) -> None:
        while True:
            try:
                found = self._queue.get(timeout=RUNNING_S if self._streaming else None)
            except queue.Empty:
                found = ("RUNNING", datetime.now(UTC), "")
            if found is None:
                return
            for step, run in self._runs:
                if time.monotonic() > self._give_up:
                    self._drop(1)
                    continue
                try:
                    self._client.emit(self._event(step, run, *found))
                except Exception as error:  # noqa: BLE001 - whatever it is, the run goes on
                    if not self._dropped:
                        log.warning("an OpenLineage event could not be sent: %s", error)
                    self._drop(1)

    def _event(self, step: LineageStep, run: str, state: str, at: datetime, error: str) -> Any:
        from openlineage.client.event_v2 import InputDataset, Job, OutputDataset, Run, RunEvent, RunState
        from openlineage.client.facet_v2 import error_message_run, job_type_job

        kind = job_type_job.JobTypeJobFacet("STREAMING" if self._streaming else "BATCH", "MILLRACE", "JOB")
        facets: dict[str, Any] = {}
        if error:
            facets["errorMessage"] = error_message_run.ErrorMessageRunFacet(error[:10_000], "PYTHON")
        return RunEvent(
            eventTime=at.isoformat(),
            producer="https://pypi.org/project/millrace-lakehouse",
            run=Run(run, facets),
            job=Job(_NAMESPACE, step.name, {"jobType": kind}),
            eventType=RunState(state),
            inputs=[InputDataset(**self._dataset(one)) for one in step.inputs],
            outputs=[OutputDataset(**self._dataset(one)) for one in step.outputs],
        )

    def _dataset(self, one: Source | TableRef | Path | StorePath | str) -> dict[str, Any]:
        """Namespace, name (by OpenLineage's naming) and facets."""
        from openlineage.client.facet_v2 import schema_dataset

        if isinstance(one, Path):
            return {"namespace": "file", "name": str(one.absolute())}
        if isinstance(one, str | StorePath):
            parts = urlsplit(str(one))
            return {"namespace": f"{parts.scheme}://{parts.netloc}", "name": parts.path or "/"}
        if isinstance(one, Source):
            place = {"namespace": f"kafka://{self._kafka.partition(',')[0]}", "name": one.topic}
            fields = [(name, field.declared) for name, field in parse_ddl(one.schema).items()]
        else:
            place = self._dataset(one.path)
            fields = _columns(one)
        known = [schema_dataset.SchemaDatasetFacetFields(name, kind) for name, kind in fields]
        return place | ({"facets": {"schema": schema_dataset.SchemaDatasetFacet(known)}} if known else {})


def _columns(table: TableRef) -> list[tuple[str, str]]:
    if not table.exists():
        return []
    try:
        schema = DeltaTable(str(table.path)).schema()
    except (DeltaError, OSError):
        return []  # it is being made
    return [(field.name, getattr(field.type, "type", str(field.type))) for field in schema.fields]

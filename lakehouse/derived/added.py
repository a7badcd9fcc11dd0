"""Queries that are added while the driver runs: each started, watched and removed alone.

A query over a source is a set of products of its own (:class:`~lakehouse.live.LiveProducts`), with an index of seen
events and a table of its own: nothing of the others has to stop for it. One over a product is a view. What fails stops
that query only: ``millrace query ls`` shows why. A thread starts them, because building from bronze may take long.
"""

from __future__ import annotations

import logging
import shutil
import threading
from contextlib import ExitStack
from dataclasses import dataclass, replace

from pyspark.sql import SparkSession

from lakehouse.bronze.table import BronzeClock
from lakehouse.contract.errors import MillraceError, crash_point
from lakehouse.contract.lake import Lake
from lakehouse.contract.pipeline import Pipeline
from lakehouse.contract.pipeline.added import OWNER, Declared, QuerySpec, State
from lakehouse.contract.settings import Settings
from lakehouse.contract.storage import is_away
from lakehouse.derived.derivations import Derivations, forget, query_name
from lakehouse.live import LiveOptions, LiveProducts
from lakehouse.lock import WriterLocks

log = logging.getLogger(__name__)

_SCAN_S = 0.5
_GROUP = "millrace-added-queries"


@dataclass(frozen=True, slots=True)
class _Running:
    """A query that was begun; closing ``ends`` stops it and lets go of its table."""

    spec: QuerySpec
    live: LiveProducts | None
    ends: ExitStack


class AddedQueries:
    """The added queries of one driver.

    Args:
        live: the queries that keep the sources' own products, by source: a query from now begins with a copy of
            their index of seen events.
        derivations: keeps those that are views.
    """

    def __init__(
        self,
        spark: SparkSession,
        settings: Settings,
        pipeline: Pipeline,
        live: dict[str, LiveProducts],
        derivations: Derivations,
    ) -> None:
        self._spark = spark
        self._settings = settings
        self._lake = Lake.of(settings)
        self._pipeline = self._declared_now = pipeline
        self._live = live
        self._derivations = derivations
        self._declared = Declared(self._lake, QuerySpec)
        self._running: dict[str, _Running] = {}
        self._failed: dict[str, QuerySpec] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="added queries", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop all of them; they go on with the next driver."""
        self._stop.set()
        if self._thread.is_alive():
            self._spark.sparkContext.cancelJobGroup(_GROUP)  # a build from bronze that is under way
            self._thread.join()
        for name in list(self._running):
            self._end(name)

    def declare(self, pipeline: Pipeline) -> None:
        """Follow another pipeline from the next turn on. Queries over a source that has changed start anew."""
        self._declared_now = pipeline

    def _run(self) -> None:
        self._spark.sparkContext.setJobGroup(_GROUP, "queries that were added", interruptOnCancel=False)
        while not self._stop.wait(self._lake.pause_s(_SCAN_S)):
            try:
                self.turn()
            except Exception:  # one bad file must not end the others
                log.exception("queries that were added could not be looked at; it is tried again")

    def turn(self) -> None:
        """Look at every declaration once."""
        if self._pipeline is not self._declared_now:
            self._follow(self._declared_now)
        declared = self._declared.all()
        for name in [name for name, running in self._running.items() if declared.get(name) != running.spec]:
            self._end(name)
        self._failed = {name: spec for name, spec in self._failed.items() if declared.get(name) == spec}
        for name, spec in declared.items():
            if self._stop.is_set():
                return
            if spec.removed:
                with WriterLocks(self._lake, [name]):
                    forget(self._lake, name, drop=spec.drop)
                log.info("query %s is removed%s", name, ", with its table" if spec.drop else "")
            elif name in self._running:
                self._look_after(self._running[name])
            elif name not in self._failed:
                self._begin(spec)

    def _follow(self, pipeline: Pipeline) -> None:
        before, self._pipeline = self._pipeline.sources, pipeline
        self._failed.clear()
        for name, running in list(self._running.items()):
            of = running.spec.relation
            if running.live is not None and before[of] != pipeline.sources.get(of):
                self._end(name)

    # --- one query

    def _begin(self, spec: QuerySpec) -> None:
        known = {*self._pipeline.sources, *self._pipeline.products, *self._pipeline.views, *self._declared.all()}
        if spec.relation not in known:
            self._fail(spec, f"there is no source or product {spec.relation!r}")
            return
        log.info("query %s begins", spec.name)
        with ExitStack() as ends:
            try:
                ends.enter_context(WriterLocks(self._lake, [spec.name], patience_s=2.0))
            except MillraceError as error:
                self._fail(spec, str(error))
                return
            live = None
            try:
                if spec.relation in self._pipeline.sources:
                    live = self._start(spec)
                    ends.callback(live.stop)
                else:
                    self._derivations.add(spec.view())
                    ends.callback(self._derivations.remove, spec.name)
            except Exception as error:  # noqa: BLE001 - whatever it is, it is this query's alone, and is told
                if not self._stop.is_set() and not is_away(error):
                    self._fail(spec, said(error))
                return
            self._running[spec.name] = _Running(spec, live, ends.pop_all())
        if live is not None:
            self._tell(spec, "running")

    def _start(self, spec: QuerySpec) -> LiveProducts:
        source = self._pipeline.sources[spec.relation]
        product = spec.product()
        self._tell(spec, "starting")
        if spec.start == "now" and not self._declared.state(spec.name).since:
            self._begin_now(spec)
        state = self._declared.state(spec.name)
        options = LiveOptions(keep_rejected=False, since=state.since, start_version=state.start_version)
        pipeline = replace(self._pipeline, name=OWNER)
        live = LiveProducts(self._spark, self._settings, pipeline, source, [product], query_name(spec.name), options)
        live.start()
        return live

    def _begin_now(self, spec: QuerySpec) -> None:
        """Note from which bronze commit on events count, and take over what was seen before.

        1. The index of seen events of the source's own query is copied: it says how far in bronze it is complete.
        2. ``now`` is a time of the bronze clock: every commit that follows is later.
        3. Both are noted before the query starts; a crash before that begins again, one after it goes on.
        """
        start = -1
        copied = self._lake.state / "seen" / query_name(spec.name)
        shutil.rmtree(copied, ignore_errors=True)
        if (live := self._live.get(spec.relation)) is not None:
            # It may hold more than its position says, which does no harm: an entry names the row that counts.
            position = live.seen.copy(copied)
            declared = live.seen.folder.with_suffix(".declaration")
            if declared.is_file():
                shutil.copyfile(declared, copied.with_suffix(".declaration"))
            start = int(position or -1)
        crash_point("added.after_copy")
        with BronzeClock(self._lake, self._lake.bronze(spec.relation)).turn() as now:
            self._declared.tell(spec.name, State("starting", since=now, start_version=start))
            crash_point("added.after_note")

    def _look_after(self, running: _Running) -> None:
        if running.live is None or running.live.is_active:
            return
        error = running.live.error
        self._end(running.spec.name)
        if error is not None and is_away(error):
            return  # it begins again when the store answers
        self._fail(running.spec, said(error) if error is not None else "it was stopped from outside")

    def _end(self, name: str) -> None:
        self._running.pop(name).ends.close()

    def _fail(self, spec: QuerySpec, reason: str) -> None:
        log.error("query %s failed: %s", spec.name, reason)
        self._failed[spec.name] = spec
        self._tell(spec, "failed", reason)

    def _tell(self, spec: QuerySpec, state: str, reason: str = "") -> None:
        self._declared.tell(spec.name, replace(self._declared.state(spec.name), state=state, reason=reason))


def said(error: BaseException) -> str:
    """What an error says, in a line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    named = [line for line in lines if "Error" in line or "Exception" in line]
    return ((named or lines or [type(error).__name__])[0])[:500]

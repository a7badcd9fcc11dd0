"""The mergeable products of a source, and their index of seen events, kept at one bronze version.

There is one way in which they move on: :meth:`LiveProducts.advance`, from the version that they hold to a later one.
The rows of the version that the driver has just written are handed over in memory (:meth:`LiveProducts.hand_over`). All
others are read from bronze: after a restart, those that a batch loader wrote, or in a driver of products alone.

Steps from one version to the next, and what a crash after each of them means (each has a crash point):

1. The index of seen events says which rows are first copies, and is made durable. Crash: judging again gives the same.
2. Each product merges its partial rows and commits them with the bronze version in the same commit. Crash in between:
   the products that are behind read these versions of bronze again; those that hold them are passed over.

So every crash is the ordinary case that products are behind bronze.
"""

from __future__ import annotations

import logging
import shutil
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable
from pyspark import InheritableThread
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_schema

from lakehouse.batch import build, byte_size, clock_of, kafka_ends, rejected_rows, run_partial, slices
from lakehouse.bronze.readers import id_of, note_reader, noted_reader
from lakehouse.bronze.seen import JUDGED, seen_index
from lakehouse.bronze.table import COLUMNS, changes, newest_version
from lakehouse.contract.errors import crash_point
from lakehouse.contract.lake import Lake
from lakehouse.contract.pipeline import Pipeline, Product, Source
from lakehouse.contract.settings import Settings
from lakehouse.contract.storage import file_rows, spark_uri
from lakehouse.counts import LateEvents, count_batch
from lakehouse.declaration import DedupeDeclaration, product_declaration
from lakehouse.errors import QueryFailed, VersionsGone
from lakehouse.events import Events, LocalQueries, Partial, SparkEvents, materialized
from lakehouse.gold.mark import BatchMark, Marks
from lakehouse.gold.state_store import StateStore, store_of
from lakehouse.gold.store import ProductStore
from lakehouse.maintain.care import Maintenance
from lakehouse.quality.watch import Watch, warned_columns
from lakehouse.silver.quarantine import Quarantine

log = logging.getLogger(__name__)

_POLL_S = 0.05
_READ = (*JUDGED, "received_at", "event_time")
_JUDGED_BYTES = 128  # of a row, about, as it is fetched to be judged
_SMALL_BYTES = 2 << 20  # compressed bytes of bronze that the driver reads by itself
_SILENCE_S = 5.0  # without a new version of bronze, before time goes on by the wall clock …
_TICK_S = 1.0  # … in such steps
_NOTE_EVERY_S = 5.0  # an older position is good too: what it reads again, the products pass over
_QUIET_S = 1_800.0  # commits without rows (compaction) are noted in the products this often
_JUDGED_COLUMNS = pa.schema(
    [("dedupe_key", pa.binary()), *((name, COLUMNS.field(name).type) for name in JUDGED if name in COLUMNS.names)]
)
_WITHOUT_DATE = pa.schema([field for field in COLUMNS if field.name != "date"])  # of a data file


class BronzeFollower(ABC):
    """A thread that brings what it keeps to the newest version of bronze, and follows bronze from then on.

    :meth:`stop` must be called even if :meth:`start` never was: the files are open from the beginning.

    Args:
        name: of the thread, for logs and errors.
        pause_ms: between two looks at bronze, at least, unless it is woken.

    Attributes:
        error: what has ended it.
    """

    def __init__(self, lake: Lake, name: str, pause_ms: int) -> None:
        self.name = name
        self.error: BaseException | None = None
        self._pause_s = max(lake.pause_s(_POLL_S), pause_ms / 1000)
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def is_active(self) -> bool:
        return self.error is None

    def start(self) -> None:
        try:
            self._catch_up()
        except BaseException:
            self.stop()
            raise
        self._thread.start()

    def stop(self) -> None:
        """End the thread. When this returns, nothing is written any more and all files are closed."""
        self._stop.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()
        self._close()

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._wake.wait(self._pause_s)
                self._wake.clear()
                self._follow()
        except BaseException as error:
            log.debug("%s ends", self.name, exc_info=True)
            self.error = error
        finally:
            self._ended()

    @abstractmethod
    def _catch_up(self) -> None:
        """Build what is missing and take what bronze has now."""

    @abstractmethod
    def _follow(self) -> None:
        """Take what is new in bronze. Called again and again in the thread."""

    def _ended(self) -> None:
        """Tell whoever waits for the thread that it has ended."""
        log.debug("%s has ended", self.name)

    @abstractmethod
    def _close(self) -> None:
        """Close all files. Called when the thread has ended."""


@dataclass(frozen=True, slots=True)
class LiveOptions:
    """What a set of products keeps beside its products.

    Attributes:
        keep_rejected: the source's rows of the tables ``quarantine`` and ``warnings``, and the count of what arrived
            too late: one set of a source must.
        restore_rejected: these tables are lost: fill them in from bronze.
        since: events of bronze commits up to this time count in none of the products (microseconds since the epoch).
        start_version: bronze version that a product which is not there yet begins behind; -1: build it from bronze.
        trigger_ms: pause between two advances, at least.
    """

    keep_rejected: bool = True
    restore_rejected: bool = False
    since: int = 0
    start_version: int = -1
    trigger_ms: int = 0


class LiveProducts(BronzeFollower):
    """Keeps a set of products of one source up to date with bronze, which must exist.

    Args:
        products: all of one source.
        name: of the set; its index of seen events has the same.

    Attributes:
        position: bronze version that all of them hold.
    """

    def __init__(
        self,
        spark: SparkSession,
        settings: Settings,
        pipeline: Pipeline,
        source: Source,
        products: Sequence[Product],
        name: str,
        options: LiveOptions = LiveOptions(),
    ) -> None:
        lake = Lake.of(settings)
        super().__init__(lake, name, options.trigger_ms)
        self.source = source
        self.position = -1
        self._lake = lake
        self._bronze = lake.bronze(source.name)
        self._options = options
        self._max_bytes = byte_size(settings.spark.max_bytes_per_trigger)
        self._table_id = id_of(self._bronze)
        self.application = f"bronze-{self._table_id}"
        self.stores = [
            store_of(p, lake.table(p.layer, p.name), pipeline.name, product_declaration(p, source)) for p in products
        ]
        self._timed = [store for store in self.stores if isinstance(store, StateStore) and store.by_wall_clock]
        self._tick_at = time.monotonic() + _SILENCE_S
        self._quarantine = Quarantine(lake.quarantine()) if options.keep_rejected else None
        self._declaration = DedupeDeclaration(lake, name, source)
        latenesses = {source.lateness, *(product.lateness for product in pipeline.products_of(source.name))} - {""}
        self._late = LateEvents(source.name, latenesses if options.keep_rejected else ())
        self._watch = Watch(lake, source, keep_warned=options.keep_rejected, again=self._declaration.warned_otherwise())
        operators = [store.operator for store in self.stores]
        needed = (*_READ, *self._watch.columns)
        self.local = LocalQueries(spark, source, products, operators, needed, settings.tenant)
        self._spark = self.local.session
        self._maintenance = Maintenance()
        self._marks = Marks()
        self._committed_at = self._noted_at = time.monotonic()
        self._writing = threading.Condition()  # held while this driver writes bronze, or looks up how far bronze is
        self._handed: tuple[int, Events] | None = None
        self._anew = self._declaration.is_stale()
        if self._anew:
            log.warning(
                "the declaration of source %s has changed: its products are built from bronze again", source.name
            )
            self._declaration.begin()
            shutil.rmtree(self._declaration.folder, ignore_errors=True)
            crash_point("rebuild.after_forget")
        self.seen = seen_index(self._declaration.folder, source)

    # --- life

    def _catch_up(self) -> None:
        self.local.plan()
        self._bring_up()
        for table in (self._quarantine, self._watch.warnings):
            if table is not None:
                table.create()  # only now: while one is absent, what was rejected has still to be filled in
        crash_point("rebuild.before_note")
        self._declaration.note()
        self._note_reader()

    def _follow(self) -> None:
        with self._writing:
            handed, self._handed = self._handed, None
            self._writing.notify_all()
            # What was handed over is there. Versions behind it are found in the next turn.
            newest = newest_version(self._bronze, self.position) if handed is None else handed[0]
        if newest > self.position:
            if handed is None:
                self.advance(newest)
            else:
                self.advance(newest - 1)
                self._step(*handed)
            self._maintenance.after_batch(self.stores)
            self._tick_at = time.monotonic() + _SILENCE_S
        elif self._timed and time.monotonic() >= self._tick_at:
            for store in self._timed:
                store.tick()
            self._tick_at = time.monotonic() + _TICK_S
        with self._writing:
            self._writing.notify_all()

    def _ended(self) -> None:
        with self._writing:
            self._writing.notify_all()

    def _close(self) -> None:
        self.seen.close()
        self.local.close()

    # --- from one version of bronze to another

    @contextmanager
    def writing(self) -> Iterator[None]:
        """The time from before a commit to bronze until its rows were handed over.

        It begins once the products have begun with the rows handed over before, so that only one batch waits.
        Raises QueryFailed: the products ended.
        """
        with self._writing:
            self._wait(lambda: self._handed is None)
            yield

    def hand_over(self, version: int, events: Events) -> None:
        """Give the products the rows of a version that this driver has just committed, so that none is read again."""
        self._handed = version, events
        self._wake.set()

    def wait_taken(self, version: int) -> None:
        """Wait until the products hold a version of bronze. Raises QueryFailed: they ended."""
        with self._writing:
            self._wait(lambda: self.position >= version)

    def _wait(self, reached: Callable[[], bool]) -> None:
        self._writing.wait_for(lambda: reached() or self._stop.is_set() or not self.is_active)
        if not reached() or not self.is_active:
            why = str(self.error or "they were stopped").partition("\n")[0]
            raise QueryFailed(self.name, "STOPPED", f"the products of the source ended: {why}")

    def advance(self, version: int) -> None:
        """Read bronze from the version that the products hold up to another, unless they hold that."""
        for found in changes(self._bronze, self.position, version, self._max_bytes):
            if not found.files:
                self._pass_over(found.version)
            elif self.local.usable and found.bytes <= _SMALL_BYTES:
                rows = file_rows(found.files, _WITHOUT_DATE).to_table()
                rows = rows.append_column("date", pa.nulls(rows.num_rows, pa.date32()))
                self._step(found.version, self.local.of_bronze(rows))
            else:
                schema = from_arrow_schema(_WITHOUT_DATE)
                bronze = self._spark.read.schema(schema).parquet(*map(spark_uri, found.files))
                with materialized(self.local.read_again(bronze)) as frame:
                    self._step(found.version, SparkEvents(frame, self.source))

    def _step(self, version: int, events: Events) -> None:
        """Bring the index and the products to a version, given all events between."""
        rows = events.columns([*_READ, *self._watch.columns])
        counts = self.seen.judge(rows, str(version))
        crash_point("live.after_judge")
        first = rows.filter(pa.array(counts))
        if self._options.since:
            first = first.filter(pc.greater(pc.cast(first["bronze_at"], pa.int64()), self._options.since))
        self._watch.check(first)
        fresh = events.only(rows, counts)
        if self._watch.warned(first):
            assert self._watch.warnings is not None
            self._watch.warnings.apply(fresh.warned(), self.application, version)
        counted = first.filter(pc.invert(first["rejected"]))
        rejected = first.num_rows - counted.num_rows
        mark = self._marks.of(self.application, (version,), rows, counted)
        self._late.take(version, counted)
        self._commit(fresh, mark, rejected=rejected > 0)
        count_batch(self.name, rows.num_rows, copies=int((~counts).sum()), rejected=rejected)
        self._moved_to(version)

    def _commit(self, fresh: Events, mark: BatchMark, *, rejected: bool) -> None:
        crash_point("live.before_commit")
        if rejected and self._quarantine is not None:
            self._quarantine.apply(fresh.rejected(), mark.application, mark.transaction)
        stores = [store for store in self.stores if not store.holds(mark)]
        if not stores:
            return

        def commit(store: ProductStore, partial_rows: Partial) -> None:
            store.apply(partial_rows(), mark)
            crash_point("live.after_first_commit")

        partials = fresh.partials([store.operator for store in stores], self._options.since)
        side_by_side([partial(commit, *pair) for pair in zip(stores, partials, strict=True)])
        self._committed_at = time.monotonic()
        crash_point("live.after_commits")

    def _pass_over(self, version: int) -> None:
        """Bronze versions without rows: care of bronze made them."""
        if self.stores and time.monotonic() - self._committed_at > _QUIET_S:
            nothing = self._spark.createDataFrame([], from_arrow_schema(COLUMNS))
            self._step(version, SparkEvents(self.local.parsed(nothing), self.source))
        self._moved_to(version)

    def _moved_to(self, version: int) -> None:
        self.position = version
        if not self._lake.remote or time.monotonic() - self._noted_at > _NOTE_EVERY_S:
            self._note_reader()

    def _note_reader(self) -> None:
        note_reader(self._lake, self.name, self._table_id, self.position + 1, self._late.totals)
        self._noted_at = time.monotonic()

    # --- building

    def _bring_up(self) -> None:
        newest = DeltaTable(str(self._bronze.path)).version()
        held = {id(store): self._position_of(store) for store in self.stores}
        restore = self._options.restore_rejected or self._anew
        if self._quarantine is not None:
            noted = noted_reader(self._lake, self.name)
            if noted is not None and noted.table_id == self._table_id:
                held[id(self)] = noted.next_version - 1
                restore |= not self._late.reset(noted.too_late, noted.next_version - 1)
            else:
                restore = True
        try:
            self._advance_from({position for position in held.values() if position is not None}, newest)
        except VersionsGone as gone:
            log.warning("%s", gone)
            held, restore = dict.fromkeys(held), True
            self._advance_from(set(), newest)
        missing = [store for store in self.stores if held[id(store)] is None]
        if missing or restore or self._watch.restore:
            self._build(newest, missing, restore=restore)

    def _advance_from(self, positions: set[int], newest: int) -> None:
        """Bring the index, and products that hold these versions, to the newest one."""
        oldest = min(positions, default=newest)
        noted = self.seen.position()
        indexed = int(noted) if noted.isdigit() else -1
        if indexed < oldest:
            self._fill(oldest)
        self.position = oldest
        for boundary in sorted({*positions, indexed, newest}):
            if self.position < boundary <= newest:
                self.advance(boundary)

    def _position_of(self, store: ProductStore) -> int | None:
        """The bronze version that a product holds; None: it has to be built."""
        if self._anew:
            return None
        mark = store.mark()
        if mark is None or mark.application != self.application:
            return self._options.start_version if self._options.start_version >= 0 else None
        if why := store.outdated():
            log.warning("product %s is built from bronze again: %s", store.product.name, why)
            return None
        # The wall clock is that product's alone.
        self._marks.go_on_from(replace(mark, clock=None) if store in self._timed else mark)
        return mark.transaction

    def _build(self, version: int, stores: Sequence[ProductStore], *, restore: bool) -> None:
        """Build products from all of bronze up to ``version``; with ``restore`` also what was rejected."""
        if self._is_empty(version):
            self._late.reset(dict.fromkeys(self._late.sql, 0), version)
            return
        log.info("building %d products of %s from bronze", len(stores), self.source.name)
        events = build(self._spark, self._bronze.path, self.source, version).persist()
        with ExitStack() as after:
            after.callback(events.unpersist)
            self._watch.check_all(events)
            valid = events.where(F.col("reason").isNull())
            if self._options.since:
                valid = valid.where(F.unix_micros("bronze_at") > self._options.since)
            self._marks.reached(kafka_ends(self._spark, self._bronze.path, version))
            self._marks.clock = clock_of(valid)
            mark = BatchMark(self.application, (version,), dict(self._marks.through), clock=self._marks.clock)
            for store in stores:
                store.replace(run_partial(valid, self.source.name, store.operator), mark)
                crash_point("rebuild.after_first_replace")
            if counts := [F.expr(sql).alias(text) for text, sql in self._late.sql.items()]:
                self._late.reset(valid.agg(*counts).collect()[0].asDict(), version)
            done = (self.application, version)
            if self._quarantine is not None and restore:
                self._quarantine.replace(rejected_rows(events, self.source), self.source.name, done)
            if self._watch.warnings is not None and (restore or self._watch.restore):
                self._watch.warnings.replace(warned_columns(events).toArrow(), self.source.name, done)

    def _is_empty(self, version: int) -> bool:
        return not DeltaTable(str(self._bronze.path), version=version).file_uris()

    def _fill(self, version: int) -> None:
        """Enter all of bronze in the index; the position last, so that what a crash breaks off is done again."""
        if not self._is_empty(version):
            for events in slices(self._spark, self._bronze.path, self.source, version, F.lit(_JUDGED_BYTES)):
                self.seen.judge(events.select(*JUDGED).toArrow(), "")
        self.seen.judge(_JUDGED_COLUMNS.empty_table(), str(version))


def side_by_side(tasks: Sequence[Callable[[], None]]) -> None:
    """Run the tasks at once in threads with Spark's local properties; the first error is raised after all ended."""
    errors: list[BaseException] = []

    def guarded(task: Callable[[], None]) -> None:
        try:
            task()
        except BaseException as error:  # noqa: BLE001 - raised again below, in the query's own thread
            errors.append(error)

    threads = [InheritableThread(target=guarded, args=(task,)) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]

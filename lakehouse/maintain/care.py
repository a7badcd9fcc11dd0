"""Care of tables: small files put together, partials folded, logs kept short, old files removed, retention kept.

Three rules:

- A product has one writer. Whatever makes a commit of its table runs in that writer, between two batches, or with the
  writer's lock held. Such a commit carries the mark of the newest batch, so that the table still says how far it is.
- Bronze is append-only and its commits take turns by a lock in the lake (:mod:`lakehouse.bronze.table`), so its files
  can be compacted beside the writers.
- No file or version is removed that was promised to a subscriber, or that a query has still to read.

Writers take care of their own tables (:class:`Maintenance`), a thread of the driver of all others
(:class:`Caretaker`), and ``millrace maintain`` of a whole lake (:func:`maintain`).
"""

from __future__ import annotations

import dataclasses
import logging
import math
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, date, datetime

from deltalake import ColumnProperties, CommitProperties, DeltaTable, WriterProperties, write_deltalake

from lakehouse.bronze.readers import readers_of, unread_since
from lakehouse.bronze.table import UNLIKE, BronzeClock, progress
from lakehouse.contract.deltalog import DeltaLog, kept_ms
from lakehouse.contract.errors import crash_point
from lakehouse.contract.lake import LOADS, PROPERTY_DECLARATION, QUALITY, QUARANTINE, WARNINGS, Lake, TableRef
from lakehouse.contract.pipeline import Pipeline, Product
from lakehouse.contract.storage import is_away
from lakehouse.contract.tomlfile import duration_ms
from lakehouse.declaration import product_declaration, source_declaration
from lakehouse.errors import LakehouseError, TableBusy
from lakehouse.gold.state_store import store_of
from lakehouse.gold.store import ProductStore
from lakehouse.load.staging import refresh
from lakehouse.lock import WriterLocks
from lakehouse.maintain.report import SMALL, Ask, RetentionWatch
from lakehouse.quality.notes import note_unknown_fields

log = logging.getLogger(__name__)

LOOK_EVERY_S = 5.0
TIDY_EVERY_S = 30.0
SWEEP_EVERY_S = 600.0
CHECKPOINT_EVERY = 200  # commits
LARGE = 128 << 20  # bytes of bronze's files without writers: a turn may then take minutes
MANY_BRONZE_FILES = 64  # files of one day that make a compaction worth while …
_FEWER = 4  # … where the target takes at least so many of each: to put two together costs as much as it saves
MANY_FILES = 200  # files of any other table
FOLD_ROWS = 2_000_000  # a larger table of partials is folded only while its pipeline does not run
_FOLD_ROWS_OFFLINE = 50_000_000  # nobody waits
_BRONZE_FILES = WriterProperties(
    compression="ZSTD",
    compression_level=1,
    column_properties={name: ColumnProperties(dictionary_enabled=False) for name in UNLIKE},
)
_WORTH = 0.7  # a fold that leaves more of the rows than this share is not worth its commit
_DATE = re.compile(r"(?:^|/)date=(\d{4}-\d{2}-\d{2})/")
# Several writers append to these and retry: commits of care do not conflict with theirs.
_SHARED = (QUARANTINE, WARNINGS, QUALITY, LOADS)


# --- Bronze


def compact_bronze(lake: Lake, table: TableRef, *, target: int = SMALL, many: int = MANY_BRONZE_FILES) -> int:
    """Put the small files of each day together; returns by how many files the table shrank.

    Rows stay as they are, and the commits have ``dataChange = false``, so streams skip them.
    """
    removed = 0
    for day, count in sorted(_small_files(table, target // _FEWER).items()):
        if count < many:
            continue
        with _bronze_turn(lake, table) as properties:
            began = time.monotonic()
            found = DeltaTable(str(table.path)).optimize.compact(
                partition_filters=[("date", "=", day)],
                target_size=target,
                commit_properties=properties,
                writer_properties=_BRONZE_FILES,
            )
            took = time.monotonic() - began
        removed += int(found["numFilesRemoved"]) - int(found["numFilesAdded"])
        log.info("bronze %s, %s: %d files into %d in %.2f s", table.name, day, count, found["numFilesAdded"], took)
    return removed


def end_retention(lake: Lake, table: TableRef, keep_ms: int) -> list[date]:
    """Remove whole days that are older than the source's ``bronze_retention``; returns them.

    Nothing is removed while a query has not read everything before the end of those days. Products keep the rows
    derived from them, but a product that is built again starts with the remaining days.
    """
    end = datetime.fromtimestamp(time.time() - keep_ms / 1000, UTC).date()
    days = [date.fromisoformat(day) for day in _small_files(table, 1 << 62)]
    old = sorted(day for day in days if day < end)
    if not old:
        return []
    last_moment = datetime(end.year, end.month, end.day, tzinfo=UTC).timestamp()
    for reader in readers_of(lake, table):
        waiting = unread_since(table, reader)
        if waiting is not None and time.time() - waiting <= last_moment:
            log.warning(
                "bronze %s: %s days are past their retention, and stay until %s has read them (its position: %s)",
                *(table.name, len(old), reader.query, reader.place),
            )
            return []
    with _bronze_turn(lake, table) as properties:
        delta = DeltaTable(str(table.path))
        if delta.metadata().configuration.get("delta.appendOnly") == "true":
            delta.alter.set_table_properties({"delta.appendOnly": "false"}, raise_if_not_exists=False)
        delta.delete(f"date < '{end.isoformat()}'", commit_properties=properties)
    log.warning("bronze %s: %d days before %s are past their retention and were removed", table.name, len(old), end)
    return old


def may_clean(lake: Lake, table: TableRef, keep_s: float) -> bool:
    """Whether bronze's versions and files older than ``keep_s`` may go: no query has still to read one of them."""
    waiting = [unread_since(table, reader) for reader in readers_of(lake, table)]
    return all(age is None or age < keep_s / 2 for age in waiting)


@contextmanager
def _bronze_turn(lake: Lake, table: TableRef) -> Iterator[CommitProperties]:
    """The turn to commit to bronze; gives the properties of a commit that leaves the table's progress as it is."""
    with BronzeClock(lake, table).turn() as bronze_at:
        reached = dataclasses.replace(progress(table), bronze_at=bronze_at)
        yield CommitProperties(custom_metadata={"userMetadata": reached.to_metadata()})


def _small_files(table: TableRef, target: int) -> Counter[str]:
    """Number of files below ``target`` bytes, by day."""
    adds = DeltaTable(str(table.path)).get_add_actions(flatten=True)
    paths, sizes = adds.column("path").to_pylist(), adds.column("size_bytes").to_pylist()
    found: Counter[str] = Counter()
    for path, size in zip(paths, sizes, strict=True):
        day = _DATE.search(path)
        if day and size < target:
            found[day[1]] += 1
    return found


# --- Products, by their one writer between two batches


def compact_product(store: ProductStore, *, many: int = MANY_FILES, fold_rows: int = FOLD_ROWS) -> str:
    """Fold partials or put small files together if there are many files; returns what was done, empty for nothing.

    No result row changes: subscribers see an empty change, and positions live as long as promised.
    """
    if not store.table.exists():
        return ""
    began = time.monotonic()
    files = len(store.delta().file_uris())
    if files < many:
        return ""
    done = "folded"
    crash_point("care.before_commit")
    if not (store.folded and fold(store, fold_rows)):
        store.delta().optimize.compact(target_size=SMALL, commit_properties=_marked(store))
        done = "compacted"
    crash_point("care.after_commit")
    after = len(store.delta().file_uris())
    log.info("%s %s: %d files into %d in %.2f s", store.table.name, done, files, after, time.monotonic() - began)
    return done


def fold(store: ProductStore, most: int = FOLD_ROWS) -> bool:
    """Replace the partial rows of each key by one row; False if there are too many rows or too few partials."""
    delta = store.delta()
    if delta.to_pyarrow_dataset().count_rows() > most:
        return False
    rows = delta.to_pyarrow_table()
    if not rows.num_rows:
        return False
    folded = store.operator.merge(None, rows)
    if folded.num_rows > rows.num_rows * _WORTH:
        return False
    write_deltalake(delta, folded, mode="overwrite", commit_properties=_marked(store))
    return True


def vacuum_product(store: ProductStore) -> int:
    """Delete files that no promised version needs; returns how many. Makes no commit if there are none."""
    if not store.table.exists() or not store.delta().vacuum(dry_run=True):
        return 0
    return len(store.delta().vacuum(dry_run=False, commit_properties=_marked(store)))


def _marked(store: ProductStore) -> CommitProperties:
    """Properties of a commit without events: the mark of the newest batch."""
    mark = store.mark()
    said = dataclasses.replace(mark, events=0, oldest=None, newest=None).to_metadata() if mark else {}
    return CommitProperties(custom_metadata=said, max_commit_retries=0)


# --- Any table


def checkpoint_log(lake: Lake, table: TableRef, *, every: int = CHECKPOINT_EVERY) -> str:
    """Write a log checkpoint and remove old entries if the log has grown by ``every`` versions; makes no commit.

    Returns:
        What was done, empty for nothing.
    """
    history = DeltaLog(table.path)
    if history.newest() - max(history.checkpoints(), default=0) < every:
        return ""
    delta = DeltaTable(str(table.path))
    delta.create_checkpoint()
    kept_s = kept_ms(delta.metadata().configuration, "logRetentionDuration") / 1000
    if table.layer == "bronze" and not may_clean(lake, table, kept_s):
        return "log checkpoint (old versions stay: a query has still to read them)"
    delta.cleanup_metadata()
    return "log checkpoint"


def vacuum_table(lake: Lake, table: TableRef) -> int:
    """Delete files that no kept version needs; returns how many. The caller holds its writer's lock, but bronze's."""
    delta = DeltaTable(str(table.path))
    if table.layer == "bronze":
        kept_s = kept_ms(delta.metadata().configuration, "deletedFileRetentionDuration") / 1000
        if not may_clean(lake, table, kept_s) or not delta.vacuum(dry_run=True):
            return 0
        with _bronze_turn(lake, table) as properties:
            return len(DeltaTable(str(table.path)).vacuum(dry_run=False, commit_properties=properties))
    if table.name in _SHARED and len(delta.file_uris()) >= MANY_FILES:
        delta.optimize.compact(target_size=SMALL)
    return len(delta.vacuum(dry_run=False)) if delta.vacuum(dry_run=True) else 0


@contextmanager
def leading(lake: Lake) -> Iterator[bool]:
    """Whether this is the one process that takes care of the lake now."""
    with ExitStack() as held:
        try:
            held.enter_context(WriterLocks(lake, ["maintenance"]))
        except TableBusy:
            yield False
            return
        yield True


class Maintenance:
    """Takes care of a writer's products between its batches, one product at a time, in the writer's thread.

    Args:
        now: monotonic seconds.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._tidied: dict[str, float] = {}
        self._removed: dict[str, float] = {}

    def after_batch(self, stores: Iterable[ProductStore]) -> None:
        """Look whether one of the writer's products needs care."""
        now = self._now()
        for store in stores:
            if self._care_of(store, now):
                break

    def _care_of(self, store: ProductStore, now: float) -> bool:
        name = store.table.name
        try:
            if now - self._tidied.setdefault(name, now) >= TIDY_EVERY_S:
                self._tidied[name] = now
                return bool(compact_product(store))
            if now - self._removed.setdefault(name, now) >= SWEEP_EVERY_S:
                self._removed[name] = now
                return vacuum_product(store) > 0
        except Exception:  # care must never stop the writer; it is tried again
            log.warning("maintenance of %s failed", name, exc_info=True)
        return False


@dataclass(frozen=True, slots=True)
class TableCare:
    """The care of one table.

    Attributes:
        said: what was done, in words; empty: nothing was due.
        busy: its writer runs, and takes care of it.
    """

    table: str
    said: str = ""
    busy: bool = False


def maintain(
    lake: Lake,
    pipeline: Pipeline,
    *,
    everything: bool = False,
    fold_rows: int = _FOLD_ROWS_OFFLINE,
    bronze: bool = True,
) -> Iterator[TableCare]:
    """Take care of each table once, with its writer's lock; a table whose writer runs is left to that writer.

    Args:
        everything: compact and checkpoint all that can be, whether it is worth while or not.
        fold_rows: a table of partials with more rows is not folded.
        bronze: also of bronze, where a turn may take minutes.

    Raises:
        LakehouseError: another process takes care of the lake now.
    """
    with leading(lake) as first:
        if not first:
            raise LakehouseError("another process looks after this lake at this moment; try again later")
        for table in lake.tables():
            if table.layer == "bronze" and not bronze:
                continue
            try:
                with WriterLocks(lake, [table.name]):
                    yield TableCare(table.name, ", ".join(_care_of(lake, pipeline, table, everything, fold_rows)))
            except TableBusy:
                yield TableCare(table.name, busy=True)
            except Exception as error:  # the other tables need care too
                log.warning("care of %s failed", table.name, exc_info=True)
                yield TableCare(table.name, f"failed: {str(error).splitlines()[0]}")


def _care_of(lake: Lake, pipeline: Pipeline, table: TableRef, everything: bool, fold_rows: int) -> Iterator[str]:
    if table.layer == "bronze":
        yield from _care_of_bronze(lake, pipeline, table, everything)
    elif (product := pipeline.products.get(table.name)) is not None:
        store = store_of(product, table, pipeline.name)
        if _is_redeclared(pipeline, product, store):
            yield "left as it is: its declaration has changed, and its driver builds it again when it starts"
        elif done := compact_product(store, many=2 if everything else MANY_FILES, fold_rows=fold_rows):
            yield done
    if done := checkpoint_log(lake, table, every=1 if everything else CHECKPOINT_EVERY):
        yield done
    if removed := vacuum_table(lake, table):
        yield f"{removed} files deleted"


def _care_of_bronze(lake: Lake, pipeline: Pipeline, table: TableRef, everything: bool) -> Iterator[str]:
    source = pipeline.sources.get(table.name)
    if source is not None and (fresh := note_unknown_fields(lake, source)):
        yield f"fields that the schema lacks: {', '.join(fresh[:10])}"
    if fewer := compact_bronze(lake, table, target=LARGE, many=2 if everything else MANY_BRONZE_FILES):
        yield f"{fewer} files fewer"
    keep = source.bronze_retention if source is not None else ""
    if keep and (days := end_retention(lake, table, duration_ms(keep))):
        yield f"{len(days)} days past their retention removed"


def _is_redeclared(pipeline: Pipeline, product: Product, store: ProductStore) -> bool:
    """Whether the table names another declaration than the pipeline's: its rows may fold differently."""
    found = store.delta().metadata().configuration.get(PROPERTY_DECLARATION)
    declared = product_declaration(product, pipeline.sources[product.source])
    if product in pipeline.joins:
        declared += source_declaration(pipeline.sources[product.right])
    return bool(found) and found != declared


class Caretaker:
    """A thread of the driver that takes care of bronze, of logs, and of tables without a running writer.

    Products and joins take care of their own tables between two batches (:class:`Maintenance`). One process of a lake
    at a time does what this thread does. It also watches the topics' retention, and refreshes staging copies on their
    schedules.

    Args:
        ask: asks the broker; None: the driver has none.
        now: monotonic seconds.
    """

    def __init__(
        self, lake: Lake, pipeline: Pipeline, ask: Ask | None = None, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._lake = lake
        self._now = now
        self._watch = RetentionWatch(lake, ask, now) if ask is not None else None
        self._staged: dict[str, float] = {}
        self.declare(pipeline)
        self._swept = now()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="caretaker", daemon=True)

    def declare(self, pipeline: Pipeline) -> None:
        """Follow another pipeline from the next turn on."""
        self._pipeline = pipeline
        if self._watch is not None:
            self._watch.sources = pipeline.sources

    def __enter__(self) -> Caretaker:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def turn(self) -> list[str]:
        """Look once; returns what was done to copies and to tables without a running writer."""
        if self._watch is not None:
            self._watch.turn()
        said = list(self._staging())
        sweeps = self._now() - self._swept >= SWEEP_EVERY_S
        self._look(sweeps)
        if sweeps:
            try:
                for done in maintain(self._lake, self._pipeline, fold_rows=FOLD_ROWS, bronze=False):
                    if done.said:
                        said.append(f"{done.table}: {done.said}")
                        log.info("care of %s, which has no running writer: %s", done.table, done.said)
                self._swept = self._now()
            except LakehouseError as error:  # another process takes care now: try again at the next turn
                log.debug("%s", error)
        return said

    def _look(self, sweeps: bool) -> None:
        """Take care of what needs no writer's lock."""
        with leading(self._lake) as first:
            for table in self._lake.tables() if first else ():
                try:
                    if "stay" in checkpoint_log(self._lake, table):
                        log.warning("bronze %s keeps old versions that a query has still to read", table.name)
                    if table.layer == "bronze":
                        compact_bronze(self._lake, table)
                        if sweeps:
                            self._sweep_bronze(table)
                except Exception:  # the other tables need care too; it is tried again
                    log.warning("maintenance of %s failed", table.name, exc_info=True)

    def _sweep_bronze(self, table: TableRef) -> None:
        source = self._pipeline.sources.get(table.name)
        if source is not None:
            if fresh := note_unknown_fields(self._lake, source):
                log.warning("payloads of %s have fields that the schema lacks: %s", table.name, ", ".join(fresh[:10]))
            if source.bronze_retention:
                end_retention(self._lake, table, duration_ms(source.bronze_retention))
        vacuum_table(self._lake, table)

    def _staging(self) -> Iterator[str]:
        """Refresh the copies that are due; at the start of the driver all with a schedule are."""
        now = self._now()
        for copy in self._pipeline.staging.values():
            due = self._staged.get(copy.name, -math.inf) + duration_ms(copy.every) / 1000 if copy.every else math.inf
            if now < due or copy.product not in {table.name for table in self._lake.tables()}:
                continue
            self._staged[copy.name] = now
            try:
                done = refresh(self._lake, self._pipeline, copy)
            except Exception:  # the other copies are due too; this one is again after its pause
                log.warning("staging table %s is not refreshed", copy.name, exc_info=True)
            else:
                if done.changed:
                    yield f"{copy.name}: {done.rows} rows of {done.product} version {done.product_version}"

    def _run(self) -> None:
        while not self._stop.wait(LOOK_EVERY_S):
            try:
                self.turn()
            except Exception as error:  # care must never end the driver; it is tried again
                if not is_away(error):  # of that the store tells
                    log.warning("care of the lake failed", exc_info=True)

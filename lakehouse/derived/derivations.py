"""One thread that keeps all views and alerts of a driver, beside the queries and never in their way.

It looks at each product's log a few dozen times a second (two ``stat`` calls), takes in new versions, and lets alerts
look at each and the views at the newest. A view or an alert that fails says so and is left alone until it is declared
otherwise or the driver starts again; the others go on.
"""

from __future__ import annotations

import errno
import logging
import shutil
import threading
import time
from collections.abc import Iterable

from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from lakehouse.bronze.readers import reader_file
from lakehouse.contract.errors import crash_point
from lakehouse.contract.lake import PROPERTY_PIPELINE, Lake
from lakehouse.contract.pipeline import Pipeline, View
from lakehouse.contract.pipeline.added import MAX_COLUMNS, OWNER, Declared, QuerySpec, State
from lakehouse.contract.pipeline.folder import Alert, in_order
from lakehouse.contract.pipeline.tenants import border_of
from lakehouse.contract.settings import Settings
from lakehouse.contract.storage import is_away, remove_tree
from lakehouse.declaration import declaration_files
from lakehouse.derived.alerts import AlertBook, Watcher
from lakehouse.derived.views import Follower, ViewEngine, ViewKeeper
from lakehouse.errors import QueryError

log = logging.getLogger(__name__)

_POLL_S = 0.02
_SCAN_S = 0.5
_RETRY_S = 2.0
_SWEEP_S = 600.0


class Derivations:
    """Views and alerts of one driver.

    Args:
        pipeline: its alerts are kept; views are added.
        layers: of the products that this driver keeps; alerts go with gold.
    """

    def __init__(self, settings: Settings, pipeline: Pipeline, layers: tuple[str, ...]) -> None:
        self._lake = Lake.of(settings)
        self._settings = settings.queries
        self._pipeline = pipeline
        self._border = border_of(pipeline, settings.tenant)
        self._alerting = "gold" in layers
        self._alerts_declared = Declared(self._lake, Alert)
        self._states = Declared(self._lake, QuerySpec)
        self._wanted: dict[str, View] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="views and alerts", daemon=True)
        self._followers: dict[str, Follower] = {}
        self._keepers: dict[str, ViewKeeper] = {}
        self._watchers: dict[str, Watcher] = {}
        self._book: AlertBook | None = None
        self._failed: set[str] = set()
        self._told: dict[str, State] = {}
        self._alerts: dict[str, Alert] = {}
        self._scanned = -_SCAN_S
        self._retry_at: dict[str, float] = {}
        self._swept = time.monotonic()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End after what is in hand."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def declare(self, pipeline: Pipeline) -> None:
        with self._lock:
            self._pipeline = pipeline

    def add(self, view: View) -> None:
        """Keep a view from now on."""
        with self._lock:
            self._wanted[view.name] = view
            self._forget_failure(f"view {view.name}")

    def remove(self, name: str) -> None:
        """Keep a view no longer; when this returns its table is not written any more."""
        with self._lock:
            self._wanted.pop(name, None)
            self._keepers.pop(name, None)
            self._drop(name)

    def _run(self) -> None:
        engine = ViewEngine()
        try:
            while not self._stop.wait(self._lake.pause_s(_POLL_S)):
                with self._lock:
                    try:
                        self.turn(engine)
                    except Exception:  # the thread must live: what it could not do now it tries again
                        log.exception("views and alerts failed; they are taken up again")
                        self._start_over()
                        self._stop.wait(_RETRY_S)
        finally:
            engine.close()

    def turn(self, engine: ViewEngine) -> None:
        """Look at everything once."""
        if time.monotonic() - self._scanned >= self._lake.pause_s(_SCAN_S):
            self.scan()
        views = in_order(self._wanted)
        for base in dict.fromkeys([*(alert.product for alert in self._alerts.values()), *(v.base for v in views)]):
            if base not in self._wanted:
                self._follow(base, engine)
        for view in views:  # each after the one it reads
            self._follow(view.name, engine)
        if time.monotonic() - self._swept >= _SWEEP_S:
            self._swept = time.monotonic()
            self._sweep()

    # --- one product

    def _follow(self, name: str, engine: ViewEngine) -> None:
        views = [v for v in self._wanted.values() if v.base == name and f"view {v.name}" not in self._failed]
        watchers = [w for w in self._watchers.values() if w.alert.product == name]
        if (not views and not watchers) or time.monotonic() < self._retry_at.get(name, 0):
            return
        try:
            follower, moved = self._at_hand(name, watchers)
            if follower is None:
                return
            self._look(follower, watchers, engine)
            while follower.step():
                moved = True
                self._look(follower, watchers, engine)
            if not moved and follower.lost():
                self._drop(name)
        except QueryError as error:  # of the product itself: nothing of it can be kept now
            self._drop(name)
            self._retry_at[name] = time.monotonic() + _RETRY_S
            for view in views:
                self._tell(f"view {view.name}", State("failed", str(error)))
            for watcher in watchers:
                self._tell(f"alert {watcher.alert.name}", State("failed", str(error)))
            return
        for view in views:
            self._refresh(view, follower, engine, again=moved)

    def _at_hand(self, name: str, watchers: Iterable[Watcher]) -> tuple[Follower | None, bool]:
        """The product's follower, and whether it was opened just now; None while the table is not there."""
        follower = self._followers.get(name)
        if follower is not None and not follower.replaced():
            return follower, False
        self._drop(name)
        table = next((t for t in self._lake.tables() if t.name == name and t.layer != "bronze"), None)
        if table is None:
            return None, False
        follower = self._followers[name] = Follower(table, self._settings.max_base_rows)
        follower.open()
        newest = follower.version
        for watcher in watchers:
            if watcher.table_id != follower.table_id:  # new, or of another table of this name: from here on
                watcher.table_id, watcher.version = follower.table_id, newest - 1
        oldest = min((watcher.version for watcher in watchers), default=newest)
        if oldest < newest - 1:
            try:
                follower.open(max(0, oldest))
            except QueryError as error:
                log.warning("alerts of %s: versions %d to %d are gone (%s)", name, oldest, newest, error)
                follower.open()
        return follower, True

    def _drop(self, name: str) -> None:
        if (follower := self._followers.pop(name, None)) is not None:
            follower.close()

    def _look(self, follower: Follower, watchers: Iterable[Watcher], engine: ViewEngine) -> None:
        for watcher in watchers:
            name = f"alert {watcher.alert.name}"
            if name in self._failed:
                continue
            try:
                watcher.look(follower, engine)
                self._tell(name, State("running"))
            except QueryError as error:
                self._fail(name, error)

    def _refresh(self, view: View, base: Follower, engine: ViewEngine, *, again: bool) -> None:
        name = f"view {view.name}"
        try:
            keeper = self._keepers.get(view.name)
            if keeper is None:
                owner = self._pipeline.name if view.name in self._pipeline.views else OWNER
                limits = {"max_rows": self._settings.max_view_rows, "max_columns": MAX_COLUMNS}
                keeper = self._keepers[view.name] = ViewKeeper(
                    view, self._lake.table(view.layer, view.name), owner, **limits
                )
                again = True
            if again:
                keeper.refresh(base, engine)
                self._tell(name, State("running"))
        except QueryError as error:
            self._keepers.pop(view.name, None)
            self._fail(name, error)

    def _sweep(self) -> None:
        """Delete files that no position needs, by the handle that writes the table."""
        deltas = [keeper.delta for keeper in self._keepers.values()]
        if self._book is not None:
            deltas.append(self._book.delta)
        for delta in deltas:
            try:
                if delta is not None and delta.vacuum(dry_run=True):
                    delta.vacuum(dry_run=False)
                    delta.update_incremental()
            except (DeltaError, OSError):  # it is tried again
                log.warning("old files of a view or of the alerts could not be removed", exc_info=True)

    # --- what is declared

    def scan(self) -> None:
        """Look at which alerts are declared now."""
        self._scanned = time.monotonic()
        if not self._alerting:
            return
        wanted = {**self._alerts_declared.all(), **self._pipeline.alerts}
        for name in [name for name, alert in self._alerts.items() if wanted.get(name) != alert]:
            del self._alerts[name]
            self._watchers.pop(name, None)
            self._forget_failure(f"alert {name}")
        if self._book is None and (wanted or self._lake.table("gold", "alerts").exists()):
            self._book = AlertBook(self._lake, self._border)
        if self._book is None:
            return
        self._book.keep_only(wanted)
        for name, alert in wanted.items():
            if name not in self._alerts:
                self._alerts[name] = alert
                try:
                    self._watchers[name] = Watcher(alert, self._book)
                    self._drop(alert.product)  # opened again, as far back as the alert has looked
                except QueryError as error:
                    self._fail(f"alert {name}", error)

    def _start_over(self) -> None:
        for name in list(self._followers):
            self._drop(name)
        self._keepers.clear()
        self._watchers.clear()
        self._alerts.clear()
        self._book = None

    def _forget_failure(self, name: str) -> None:
        self._failed.discard(name)
        self._told.pop(name, None)

    def _fail(self, name: str, error: QueryError) -> None:
        if is_away(error):
            raise OSError(errno.EIO, str(error))  # everything is taken up again when the store answers
        log.error("%s failed: %s", name, error)
        self._failed.add(name)
        self._tell(name, State("failed", str(error)))

    def _tell(self, name: str, state: State) -> None:
        if self._told.get(name) != state:
            self._told[name] = state
            kind, _, short = name.partition(" ")
            (self._states if kind == "view" else self._alerts_declared).tell(short, state)


def query_name(name: str) -> str:
    """Name of an added query's set of products (and its index)."""
    return f"query-{name}"


def forget(lake: Lake, name: str, *, drop: bool) -> None:
    """Remove a query's note as a reader, its index, state and declaration; with ``drop`` its table too.

    The declaration goes last: it says that the query is removed, so that after a crash the next driver begins again.
    The caller holds the table's lock.
    """
    reader_file(lake, query_name(name)).unlink(missing_ok=True)
    crash_point("forget.after_reader")
    shutil.rmtree(lake.state / "seen" / query_name(name), ignore_errors=True)
    for file in declaration_files(lake, query_name(name)):
        file.unlink(missing_ok=True)
    crash_point("forget.after_index")
    if drop and is_ours(lake, name):
        remove_tree(lake.table("gold", name).path)
    crash_point("forget.after_table")
    Declared(lake, QuerySpec).remove(name)


def is_ours(lake: Lake, name: str) -> bool:
    """Whether there is a table of this name that an added query made."""
    table = lake.table("gold", name)
    return table.exists() and DeltaTable(str(table.path)).metadata().configuration.get(PROPERTY_PIPELINE) == OWNER

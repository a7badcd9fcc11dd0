"""Care of a lake by its driver when no batch calls for it, and of tables that none of its queries keeps.

Sets of products and joins look after their own tables between two batches
(:class:`~lakehouse.maintain.care.Maintenance`).
Left over are: a driver whose sources are quiet, a driver of bronze alone, and tables with another writer or none:
staging copies, ``loads``, products that were taken out of the pipeline, those of a stage that does not run.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from lakehouse.contract.lake import Lake
from lakehouse.contract.pipeline import Pipeline
from lakehouse.errors import LakehouseError
from lakehouse.maintain.backlog import Ask, RetentionWatch
from lakehouse.maintain.care import LOOK_EVERY_S, SWEEP_EVERY_S, Maintenance
from lakehouse.maintain.job import maintain
from lakehouse.maintain.products import FOLD_ROWS

log = logging.getLogger(__name__)


class Caretaker:
    """A thread of the driver that takes care where nobody else does, and watches how near retention is.

    Args:
        lake: the lake.
        pipeline: as of :class:`Maintenance`.
        ask: the broker, as of :class:`RetentionWatch`; None: the driver has none.
        now: seconds.
    """

    def __init__(
        self, lake: Lake, pipeline: Pipeline, ask: Ask | None = None, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._lake = lake
        self._pipeline = pipeline
        self._now = now
        self._maintenance = Maintenance(lake, now, pipeline)
        self._watch = RetentionWatch(lake, pipeline, ask, now) if ask is not None else None
        self._rounded = now()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="caretaker", daemon=True)

    def __enter__(self) -> Caretaker:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.close()

    def close(self) -> None:
        """Finish what is being done."""
        self._maintenance.close()

    def turn(self) -> list[str]:
        """Look once; returns what was done to tables that nobody keeps."""
        said: list[str] = []
        if self._watch is not None:
            self._watch.turn()
        if self._now() - self._rounded >= SWEEP_EVERY_S:
            try:
                for done in maintain(self._lake, self._pipeline, fold_rows=FOLD_ROWS, bronze=False):
                    if done.said:
                        said.append(f"{done.table}: {done.said}")
                        log.info("nobody keeps %s: %s", done.table, done.said)
                self._rounded = self._now()
            except LakehouseError as error:  # somebody looks at this moment: at the next turn
                log.debug("%s", error)
        elif not self._maintenance.looked_lately():
            self._maintenance.after_batch()
        return said

    def _run(self) -> None:
        while not self._stop.wait(LOOK_EVERY_S):
            try:
                self.turn()
            except Exception:  # care must never end the driver; it is tried again
                log.warning("care of the lake failed", exc_info=True)

"""A thread that keeps something at the newest version of one or more bronze tables."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod

from lakehouse.contract.lake import Lake

log = logging.getLogger(__name__)

_POLL_S = 0.05


class BronzeFollower(ABC):
    """Brings what it keeps to the newest version of bronze, and follows bronze from then on.

    :meth:`stop` must be called even if :meth:`start` never was: the files are open from the beginning.

    Args:
        name: of the thread, for logs and errors.
        pause_ms: between two looks at bronze, at least, unless it is woken.
    """

    def __init__(self, lake: Lake, name: str, pause_ms: int) -> None:
        self.name = name
        self._pause_s = max(lake.pause_s(_POLL_S), pause_ms / 1000)
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def is_active(self) -> bool:
        """Whether no error has ended it."""
        return self._error is None

    @property
    def error(self) -> BaseException | None:
        """The error that ended it."""
        return self._error

    def start(self) -> None:
        """Build what is missing, take what bronze has, and follow bronze in a thread."""
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
            self._error = error
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

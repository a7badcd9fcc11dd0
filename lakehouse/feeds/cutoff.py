"""The end of a download that takes too long, or that nobody wants any more, whatever it is waiting for.

httpx has a limit for each wait of a download, not for all of it: a server that sends a byte now and then, be it of the
headers, keeps every one of them. So the connections are shut from beside.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any

_LOOK_S = 0.2


class Cutoff:
    """Shuts the connections of one download when its time is up; a context manager.

    Args:
        allowed_s: seconds that the download has.
        stop: ends it at once.

    Attributes:
        shut: whether that has come about: an error of the connection, or its end, means nothing then.
    """

    def __init__(self, allowed_s: float, stop: threading.Event) -> None:
        self.shut = False
        self._until = time.monotonic() + allowed_s
        self._stop = stop
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._thread = threading.Thread(target=self._watch, name="feed-cutoff", daemon=True)

    def __enter__(self) -> Cutoff:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        for one in self._sockets:
            one.close()

    @property
    def left_s(self) -> float:
        """Seconds that are left."""
        return max(0.0, self._until - time.monotonic())

    def trace(self, event: str, info: Mapping[str, Any]) -> None:
        """Hear of connections: httpx' request extension ``trace``."""
        if event == "connection.connect_tcp.complete":
            connection: socket.socket = info["return_value"].get_extra_info("socket")
            with self._lock:
                self._sockets.append(connection.dup())  # it stays ours when TLS takes the other one over
                if self.shut:
                    self._shut()

    def _watch(self) -> None:
        while not self._over.wait(_LOOK_S):
            if self._stop.is_set() or not self.left_s:
                with self._lock:
                    self.shut = True
                    self._shut()
                return

    def _shut(self) -> None:
        for one in self._sockets:
            with contextlib.suppress(OSError):  # the server has closed it
                one.shutdown(socket.SHUT_RDWR)

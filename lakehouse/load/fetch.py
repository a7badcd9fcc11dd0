"""Feeds by URL: a file is fetched only after a change, resumed if its download broke off, bounded in size and time.

The state of a feed (ETag, date, last check) is stored in the lake, so that a restart repeats no request. A fetched file
is loaded like any other, and then removed.

The address guard: unless the feed says ``private = true``, its host must resolve to public addresses only, on every hop
of a redirect, and the connection must go to one of them (a name may resolve differently a moment later).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import httpx

from lakehouse.contract.access import is_public
from lakehouse.contract.lake import Lake
from lakehouse.contract.pipeline.source import FeedSpec
from lakehouse.contract.storage import write_whole
from lakehouse.errors import FetchFailed

log = logging.getLogger(__name__)

TRIES = 4
_HOPS = 5
_STALL_S = 30.0
_POLL_S = 0.2
_RETRYABLE = {408, 425, 429, 500, 502, 503, 504}


@dataclass(frozen=True, slots=True)
class FeedState:
    """What is stored of a feed.

    Attributes:
        looked_at: last check, seconds since the epoch; 0: never.
        etag, modified: of the file that has been loaded.
        part_etag: of the file whose beginning is stored.
        met_at: when the address first offered a file that is not loaded yet; 0: it offers nothing new.
    """

    looked_at: float = 0.0
    etag: str = ""
    modified: str = ""
    part_etag: str = ""
    met_at: float = 0.0


@dataclass(frozen=True, slots=True)
class Download:
    """A fetched file.

    Attributes:
        path: its place until it is loaded.
        state: state of the feed once it is loaded.
        met_at: when the address first offered it, or an earlier file that was never loaded, seconds since the epoch.
            The SLA counts from here, over all attempts.
    """

    path: Path
    state: FeedState
    met_at: float


class Cutoff:
    """Shuts the connections of one download after ``allowed_s`` or at ``stop``; a context manager.

    httpx limits each wait of a download, but not the whole: a server that sends a byte now and then, in the body or in
    the headers, never exceeds a wait. So a thread shuts the connections.

    Attributes:
        shut: whether it has shut them; errors of the connection mean nothing then.
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

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        for one in self._sockets:
            one.close()

    @property
    def left_s(self) -> float:
        return max(0.0, self._until - time.monotonic())

    def trace(self, event: str, info: Mapping[str, Any]) -> None:
        """Notes new connections: httpx' request extension ``trace``."""
        if event == "connection.connect_tcp.complete":
            connection: socket.socket = info["return_value"].get_extra_info("socket")
            with self._lock:
                self._sockets.append(connection.dup())  # our copy stays open when TLS takes over the other one
                if self.shut:
                    self._shut()

    def _watch(self) -> None:
        while not self._over.wait(_POLL_S):
            if self._stop.is_set() or not self.left_s:
                with self._lock:
                    self.shut = True
                    self._shut()
                return

    def _shut(self) -> None:
        for one in self._sockets:
            with contextlib.suppress(OSError):  # the server has closed it
                one.shutdown(socket.SHUT_RDWR)


class FeedFetcher:
    """Fetches the files of one source's feeds.

    Args:
        now: seconds since the epoch.
        sleep: waits between two tries.
        stop: ends a download, and the wait for another try.
    """

    def __init__(
        self,
        lake: Lake,
        source: str,
        *,
        now: Callable[[], float] = time.time,
        sleep: Callable[[float], object] | None = None,
        stop: threading.Event | None = None,
    ) -> None:
        self._folder = lake.state / "loads" / source / "feeds"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._now = now
        self._stop = stop or threading.Event()
        self._sleep = sleep or self._stop.wait

    def due(self, feed: FeedSpec) -> float:
        """Seconds until the next check of the feed; 0 or less: now."""
        return self._state(feed).looked_at + feed.every_ms / 1000 - self._now()

    def fetch(self, feed: FeedSpec) -> Download | None:
        """Check the address; None if it offers nothing new.

        Raises FetchFailed: it gives no file, or one that is too large or too slow. The next call resumes the download.
        """
        with Cutoff(feed.timeout_ms / 1000, self._stop) as cutoff:
            for number in range(1, TRIES + 1):
                try:
                    return self._try(feed, cutoff)
                except httpx.HTTPError as error:
                    failed = FetchFailed(feed.name, f"{type(error).__name__}: {error}")
                except FetchFailed as error:
                    failed = error
                if cutoff.shut:
                    problem = "stopped" if self._stop.is_set() else f"the download took longer than {feed.timeout}"
                    failed = FetchFailed(feed.name, problem, retryable=False)
                if not failed.retryable or number == TRIES:
                    break
                log.info("%s; trying again", failed)
                self._sleep(min(2.0**number, 30.0, cutoff.left_s))
        if not self._stop.is_set():
            self._keep(feed, replace(self._state(feed), looked_at=self._now()))
        raise failed

    def loaded(self, feed: FeedSpec, pulled: Download) -> None:
        """Note that the file is in bronze, and remove it."""
        self._keep(feed, pulled.state)
        pulled.path.unlink(missing_ok=True)

    def _try(self, feed: FeedSpec, cutoff: Cutoff) -> Download | None:
        state = self._state(feed)
        part = self._folder / f"{feed.name}.part"
        have = part.stat().st_size if part.exists() and state.part_etag else 0
        headers = {"Accept-Encoding": "identity"}
        if have:
            headers |= {"Range": f"bytes={have}-", "If-Range": state.part_etag}
        elif state.etag:
            headers["If-None-Match"] = state.etag
        elif state.modified:
            headers["If-Modified-Since"] = state.modified
        timeout = httpx.Timeout(min(_STALL_S, max(cutoff.left_s, 0.1)), pool=None)
        with (
            httpx.Client(timeout=timeout, trust_env=not feed.private) as client,
            contextlib.closing(_open(client, feed, headers, cutoff)) as response,
        ):
            if response.status_code == 304:
                self._keep(feed, replace(state, looked_at=self._now(), met_at=0.0))
                return None
            if response.status_code == 416:  # nothing follows the stored part: begin again
                part.unlink(missing_ok=True)
                raise FetchFailed(feed.name, "the file has become shorter while it was fetched")
            if response.status_code not in (200, 206):
                retryable = response.status_code in _RETRYABLE
                raise FetchFailed(feed.name, f"the server answers {response.status_code}", retryable=retryable)
            return self._take(feed, response, part, have, cutoff)

    def _take(self, feed: FeedSpec, response: httpx.Response, part: Path, have: int, cutoff: Cutoff) -> Download:
        state = self._state(feed)
        etag, modified = response.headers.get("etag", ""), response.headers.get("last-modified", "")
        if response.status_code == 200:
            have = 0
            strong = etag if etag and not etag.startswith("W/") else ""
            state = replace(state, part_etag=strong, met_at=state.met_at or self._now())
            self._keep(feed, state)
        length = response.headers.get("content-length", "")
        total = have + int(length) if length.isdigit() else None
        problem = f"the file has more than the {feed.max_bytes} bytes allowed"
        too_large = FetchFailed(feed.name, problem, retryable=False)
        if total is not None and total > feed.max_bytes:
            raise too_large
        with part.open("r+b" if have else "wb") as file:
            file.seek(have)
            for block in response.iter_raw():  # as received: with larger blocks a slow server takes hours to fill one
                have += len(block)
                if have > feed.max_bytes:
                    raise too_large
                if cutoff.shut:
                    break
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        if cutoff.shut or (total is not None and have < total):
            raise FetchFailed(feed.name, f"the download broke off after {have} of {total} bytes")
        whole = part.with_suffix(".whole")
        part.replace(whole)
        return Download(whole, FeedState(self._now(), etag, modified), state.met_at)

    def _state(self, feed: FeedSpec) -> FeedState:
        try:
            return FeedState(**json.loads((self._folder / f"{feed.name}.json").read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return FeedState()

    def _keep(self, feed: FeedSpec, state: FeedState) -> None:
        write_whole(self._folder / f"{feed.name}.json", json.dumps(asdict(state)).encode())


def _open(client: httpx.Client, feed: FeedSpec, headers: dict[str, str], cutoff: Cutoff) -> httpx.Response:
    """The response after all redirects; its body is unread."""
    url = httpx.URL(feed.url)
    for _ in range(_HOPS):
        if url.scheme not in ("http", "https"):
            raise FetchFailed(feed.name, f"it leads to {url.scheme}:, which is not fetched", retryable=False)
        guarded = not feed.private and not _proxied(url)  # a proxy makes the connection and applies its own rules
        if guarded:
            try:
                found = socket.getaddrinfo(url.host, url.port or 0, type=socket.SOCK_STREAM)
            except OSError as error:
                raise FetchFailed(feed.name, f"the host {url.host} is not known: {error}") from None
            for entry in found:
                _check_address(feed, str(entry[4][0]), url.host)
        request = client.build_request("GET", url, headers=headers, extensions={"trace": cutoff.trace})
        response = client.send(request, stream=True)
        stream: Any = response.extensions.get("network_stream")
        peer = stream.get_extra_info("server_addr") if stream is not None else None
        if guarded and peer:
            _check_address(feed, str(peer[0]), url.host)
        if not response.has_redirect_location:
            return response
        response.close()
        url = url.join(response.headers["location"])
    raise FetchFailed(feed.name, f"more than {_HOPS} redirects", retryable=False)


def _check_address(feed: FeedSpec, address: str, host: str) -> None:
    if not is_public(address):
        raise FetchFailed(
            feed.name, f"{host} is the private address {address}; if that is meant, set private = true", retryable=False
        )


def _proxied(url: httpx.URL) -> bool:
    return url.scheme in urllib.request.getproxies() and not urllib.request.proxy_bypass(url.host)

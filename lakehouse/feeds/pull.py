"""Files fetched by URL: only when they have changed, resumed where a download broke off, bounded in size and time.

What was learned of a feed (ETag, date, when it was looked at) is kept beside the lake's other state, so that a restart
asks for nothing twice. A file that came is loaded like any other, and then removed.

The address guard: unless the feed says ``private = true``, its host must resolve to public addresses only, on every hop
of a redirect, and the connection that was made must be to one of them (a name that resolves otherwise a moment later).
"""

from __future__ import annotations

import ipaddress
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import httpx

from lakehouse.contract.feed import FeedSpec
from lakehouse.contract.lake import Lake
from lakehouse.feeds.cutoff import Cutoff
from lakehouse.feeds.errors import PullFailed

log = logging.getLogger(__name__)

TRIES = 4
_HOPS = 5
_STALL_S = 30.0
_AGAIN = {408, 425, 429, 500, 502, 503, 504}


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of a feed's address.

    Attributes:
        looked_at: seconds since the epoch; 0: never.
        etag, modified: of the file that has been loaded.
        part_etag: of the file whose beginning lies here.
        met_at: when the address first offered something that is not loaded yet; 0: it offers nothing new.
    """

    looked_at: float = 0.0
    etag: str = ""
    modified: str = ""
    part_etag: str = ""
    met_at: float = 0.0


@dataclass(frozen=True, slots=True)
class Pulled:
    """A fetched file.

    Attributes:
        path: where it lies until it is loaded.
        known: to be kept once it is.
        met_at: when the address first offered it, or one before it that was never loaded, seconds since the epoch: the
            SLA counts from here, however many attempts it takes.
    """

    path: Path
    known: Known
    met_at: float


class Puller:
    """Fetches the files of one source's feeds.

    Args:
        lake: keeps what is known.
        source: whose feeds they are.
        now: seconds since the epoch.
        sleep: waits between two tries.
        stop: ends a download, and the waiting for another try.
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
        """Seconds until the feed is to be looked at; 0 or less: now."""
        return self._known(feed).looked_at + feed.every_s - self._now()

    def fetch(self, feed: FeedSpec) -> Pulled | None:
        """Look at the address; None where there is nothing new.

        Raises:
            PullFailed: it gives no file, or one that is too large or too slow; what came is kept, to go on from.
        """
        with Cutoff(feed.timeout_s, self._stop) as cutoff:
            for number in range(1, TRIES + 1):
                try:
                    return self._try(feed, cutoff)
                except httpx.HTTPError as error:
                    failed = PullFailed(feed.name, f"{type(error).__name__}: {error}")
                except PullFailed as error:
                    failed = error
                if cutoff.shut:
                    problem = "stopped" if self._stop.is_set() else f"the download took longer than {feed.timeout}"
                    failed = PullFailed(feed.name, problem, passing=False)
                if not failed.passing or number == TRIES:
                    break
                log.info("%s; trying again", failed)
                self._sleep(min(2.0**number, 30.0, cutoff.left_s))
        if not self._stop.is_set():
            self._keep(feed, replace(self._known(feed), looked_at=self._now()))
        raise failed

    def loaded(self, feed: FeedSpec, pulled: Pulled) -> None:
        """The file is in bronze: remember it, and remove it."""
        self._keep(feed, pulled.known)
        pulled.path.unlink(missing_ok=True)

    def _try(self, feed: FeedSpec, cutoff: Cutoff) -> Pulled | None:
        known = self._known(feed)
        part = self._folder / f"{feed.name}.part"
        have = part.stat().st_size if part.exists() and known.part_etag else 0
        headers = {"Accept-Encoding": "identity"}
        if have:
            headers |= {"Range": f"bytes={have}-", "If-Range": known.part_etag}
        elif known.etag:
            headers["If-None-Match"] = known.etag
        elif known.modified:
            headers["If-Modified-Since"] = known.modified
        timeout = httpx.Timeout(min(_STALL_S, max(cutoff.left_s, 0.1)), pool=None)
        with httpx.Client(timeout=timeout, trust_env=not feed.private) as client:
            response = _open(client, feed, headers, cutoff)
            try:
                if response.status_code == 304:
                    self._keep(feed, replace(known, looked_at=self._now(), met_at=0.0))
                    return None
                if response.status_code == 416:  # there is nothing behind what we have: begin again
                    part.unlink(missing_ok=True)
                    raise PullFailed(feed.name, "the file has become shorter while it was fetched")
                if response.status_code not in (200, 206):
                    passing = response.status_code in _AGAIN
                    raise PullFailed(feed.name, f"the server answers {response.status_code}", passing=passing)
                return self._take(feed, response, part, have, cutoff)
            finally:
                response.close()

    def _take(self, feed: FeedSpec, response: httpx.Response, part: Path, have: int, cutoff: Cutoff) -> Pulled:
        known = self._known(feed)
        etag, modified = response.headers.get("etag", ""), response.headers.get("last-modified", "")
        if response.status_code == 200:
            have = 0
            strong = etag if etag and not etag.startswith("W/") else ""
            known = replace(known, part_etag=strong, met_at=known.met_at or self._now())
            self._keep(feed, known)
        length = response.headers.get("content-length", "")
        total = have + int(length) if length.isdigit() else None
        if total is not None and total > feed.max_bytes:
            raise _too_large(feed)
        with part.open("r+b" if have else "wb") as file:
            file.seek(have)
            for block in response.iter_raw():  # as they come: a slow server must not fill a larger one for hours
                have += len(block)
                if have > feed.max_bytes:
                    raise _too_large(feed)
                if cutoff.shut:
                    break
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        if cutoff.shut or (total is not None and have < total):
            raise PullFailed(feed.name, f"the download broke off after {have} of {total} bytes")
        whole = part.with_suffix(".whole")
        part.replace(whole)
        return Pulled(whole, Known(self._now(), etag, modified), known.met_at)

    def _known(self, feed: FeedSpec) -> Known:
        try:
            return Known(**json.loads((self._folder / f"{feed.name}.json").read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return Known()

    def _keep(self, feed: FeedSpec, known: Known) -> None:
        path = self._folder / f"{feed.name}.json"
        fresh = path.with_suffix(".new")
        fresh.write_text(json.dumps(asdict(known)), encoding="utf-8")
        fresh.replace(path)


def _too_large(feed: FeedSpec) -> PullFailed:
    return PullFailed(feed.name, f"the file has more than the {feed.max_bytes} bytes allowed", passing=False)


def _open(client: httpx.Client, feed: FeedSpec, headers: dict[str, str], cutoff: Cutoff) -> httpx.Response:
    """The answer behind all redirects, its body not read."""
    url = httpx.URL(feed.url)
    for _ in range(_HOPS):
        if url.scheme not in ("http", "https"):
            raise PullFailed(feed.name, f"it leads to {url.scheme}:, which is not fetched", passing=False)
        if not feed.private:
            _check_host(feed, url)
        request = client.build_request("GET", url, headers=headers, extensions={"trace": cutoff.trace})
        response = client.send(request, stream=True)
        if not feed.private:
            _check_peer(feed, response, url)
        if not response.has_redirect_location:
            return response
        response.close()
        url = url.join(response.headers["location"])
    raise PullFailed(feed.name, f"more than {_HOPS} redirects", passing=False)


def _check_host(feed: FeedSpec, url: httpx.URL) -> None:
    if _proxied(url):
        return  # the proxy makes the connection, and is where such rules belong then
    try:
        found = socket.getaddrinfo(url.host, url.port or 0, type=socket.SOCK_STREAM)
    except OSError as error:
        raise PullFailed(feed.name, f"the host {url.host} is not known: {error}") from None
    for address in {str(entry[4][0]) for entry in found}:
        _check_address(feed, address, url.host)


def _check_peer(feed: FeedSpec, response: httpx.Response, url: httpx.URL) -> None:
    stream: Any = response.extensions.get("network_stream")
    peer = stream.get_extra_info("server_addr") if stream is not None else None
    if peer and not _proxied(url):
        try:
            _check_address(feed, str(peer[0]), url.host)
        except PullFailed:
            response.close()
            raise


def _check_address(feed: FeedSpec, address: str, host: str) -> None:
    if not ipaddress.ip_address(address.partition("%")[0]).is_global:
        raise PullFailed(
            feed.name, f"{host} is the private address {address}; if that is meant, set private = true", passing=False
        )


def _proxied(url: httpx.URL) -> bool:
    import urllib.request

    return url.scheme in urllib.request.getproxies() and not urllib.request.proxy_bypass(url.host)

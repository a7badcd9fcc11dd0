"""Files fetched by URL, from a real server on the loopback address."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from lakehouse.contract.errors import ConfigError
from lakehouse.contract.lake import Lake
from lakehouse.contract.pipeline.source import FeedSpec
from lakehouse.errors import FetchFailed
from lakehouse.load.fetch import Download, FeedFetcher
from lakehouse.load.loader import FeedResult, LoaderService
from lakehouse.load.worker import LoadJob
from tests.lakehouse.load.offers import SOURCE, bronze, ids, job, offers


@dataclass
class Upstream:
    """What the server has, and what it was asked.

    Attributes:
        body: the file; None: there is none.
        cut: answers so many bytes of the next request and closes.
        status: answers this to the next request.
        move: answers a redirect to there.
        drip: sends a byte now and then and never ends: of the ``headers``, or of the ``body``.
    """

    body: bytes | None = b""
    etag: str = '"1"'
    cut: int | None = None
    status: int | None = None
    move: str = ""
    drip: str = ""
    length: bool = True
    asked: list[dict[str, str]] = field(default_factory=list)
    url: str = ""


@pytest.fixture
def upstream() -> Iterator[Upstream]:
    found, over = Upstream(), threading.Event()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None: ...

        def do_GET(self) -> None:
            headers = {name.lower(): text for name, text in self.headers.items()}
            found.asked.append(headers)
            status, found.status = found.status, None
            if found.drip:
                self._drip()
            elif status is not None or found.body is None:
                self._say(status or 404, b"")
            elif found.move and self.path != "/moved":
                self._say(302, b"", Location=found.move)
            elif headers.get("if-none-match") == found.etag:
                self._say(304, b"")
            elif headers.get("range") and headers.get("if-range") == found.etag:
                start = int(headers["range"].removeprefix("bytes=").rstrip("-"))
                self._say(206, found.body[start:])
            else:
                self._say(200, found.body)

        def _drip(self) -> None:
            self.close_connection = True
            length = "Content-Length: 1000000\r\n" if found.length else ""
            self.wfile.write(b"HTTP/1.1 200 OK\r\n" + length.encode())
            self.wfile.write(b"X-Slow: " if found.drip == "headers" else b"\r\n")
            with contextlib.suppress(OSError):  # until the other side has gone
                while not over.wait(0.02):
                    self.wfile.write(b"x")

        def _say(self, status: int, body: bytes, **headers: str) -> None:
            cut, found.cut = (found.cut, None) if body else (None, found.cut)
            self.send_response(status)
            self.send_header("ETag", found.etag)
            if found.length:
                self.send_header("Content-Length", str(len(body)))
            for name, text in headers.items():
                self.send_header(name, text)
            self.end_headers()
            self.wfile.write(body[:cut])
            self.close_connection = cut is not None or not found.length

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found.url = f"http://127.0.0.1:{server.server_port}/offers.jsonl"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield found
    over.set()
    server.shutdown()
    thread.join()
    server.server_close()


def fetcher(root: Path, now: float | None = None) -> FeedFetcher:
    return FeedFetcher(Lake(root), "offers", sleep=lambda _: None, now=time.time if now is None else lambda: now)


def feed(upstream: Upstream, **options: Any) -> FeedSpec:
    return FeedSpec(upstream.url, private=True, **options)


def test_a_file_is_fetched_only_when_it_changes(tmp_path: Path, upstream: Upstream) -> None:
    upstream.body = b"x" * 1_000
    spec = feed(upstream)
    pulled = fetcher(tmp_path).fetch(spec)
    assert pulled is not None
    assert pulled.path.read_bytes() == upstream.body
    fetcher(tmp_path).loaded(spec, pulled)
    assert not pulled.path.exists()
    assert fetcher(tmp_path).fetch(spec) is None
    assert upstream.asked[-1]["if-none-match"] == '"1"'
    upstream.etag, upstream.body = '"2"', b"y"
    again = fetcher(tmp_path).fetch(spec)
    assert again is not None
    assert again.path.read_bytes() == b"y"


def test_a_broken_download_goes_on_where_it_was(tmp_path: Path, upstream: Upstream) -> None:
    upstream.body = bytes(range(256)) * 4_000
    upstream.cut = 300_000
    pulled = fetcher(tmp_path).fetch(feed(upstream))
    assert pulled is not None
    assert pulled.path.read_bytes() == upstream.body
    assert upstream.asked[-1]["if-range"] == '"1"'
    assert upstream.asked[-1]["range"].startswith("bytes=")
    assert upstream.asked[-1]["range"] != "bytes=0-"


def test_a_file_that_changed_meanwhile_is_fetched_anew(tmp_path: Path, upstream: Upstream) -> None:
    upstream.body, upstream.cut = b"a" * 600_000, 300_000
    spec = feed(upstream, timeout="1 hour")

    def changed(_: float) -> None:  # while the loader waits before it tries again
        upstream.etag, upstream.body = '"2"', b"b" * 10

    pulled = FeedFetcher(Lake(tmp_path), "offers", sleep=changed).fetch(spec)
    assert pulled is not None
    assert pulled.path.read_bytes() == b"b" * 10
    assert upstream.asked[-1]["if-range"] == '"1"'


def test_a_passing_error_is_tried_again_and_another_is_not(tmp_path: Path, upstream: Upstream) -> None:
    upstream.body, upstream.status = b"x", 503
    assert fetcher(tmp_path).fetch(feed(upstream)) is not None
    assert len(upstream.asked) == 2
    upstream.body = None
    with pytest.raises(FetchFailed, match="answers 404"):
        fetcher(tmp_path).fetch(feed(upstream, name="other"))
    assert len(upstream.asked) == 3


@pytest.mark.parametrize("length", [True, False])
def test_a_file_that_is_too_large_is_refused(tmp_path: Path, upstream: Upstream, length: bool) -> None:
    upstream.body, upstream.length = b"x" * 5_000, length
    with pytest.raises(FetchFailed, match="more than the 1000 bytes allowed"):
        fetcher(tmp_path).fetch(feed(upstream, max_bytes=1_000))
    assert len(upstream.asked) == 1


def test_private_addresses_are_refused_unless_meant(tmp_path: Path, upstream: Upstream) -> None:
    upstream.body = b"x"
    by_nat64 = "http://[64:ff9b::7f00:1]:1/offers.jsonl"  # 127.0.0.1 behind a gateway
    for url in (upstream.url, upstream.url.replace("127.0.0.1", "localhost"), by_nat64):
        with pytest.raises(FetchFailed, match=r"private address .* set private = true"):
            fetcher(tmp_path).fetch(FeedSpec(url))
    assert upstream.asked == []


def test_redirects_are_followed_but_not_to_anything(tmp_path: Path, upstream: Upstream) -> None:
    upstream.body, upstream.move = b"x", "/moved"
    assert fetcher(tmp_path).fetch(feed(upstream)) is not None
    upstream.move = "file:///etc/passwd"
    with pytest.raises(FetchFailed, match="leads to file:"):
        fetcher(tmp_path).fetch(feed(upstream, name="other"))


def test_feeds_come_due(tmp_path: Path, upstream: Upstream) -> None:
    upstream.body = b"x"
    spec = feed(upstream, every="10 minutes")
    assert fetcher(tmp_path, 1_000_000.0).due(spec) < 0
    pulled = fetcher(tmp_path, 1_000_000.0).fetch(spec)
    assert pulled is not None
    fetcher(tmp_path, 1_000_000.0).loaded(spec, pulled)
    assert fetcher(tmp_path, 1_000_060.0).due(spec) == pytest.approx(540.0)


def checked(made: LoadJob) -> list[FeedResult]:
    """Results of checking each feed once."""
    return list(LoaderService(threading.Event(), once=True).fetch([made]))


def test_what_is_fetched_is_loaded(tmp_path: Path, lake: Lake, upstream: Upstream) -> None:
    rows = offers(50)
    upstream.body = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
    made = job(lake, source=replace(SOURCE, feeds=(feed(upstream, sla="1 hour"),)))
    outcomes = checked(made)
    assert [(one.feed, one.load is not None and one.load.ok, one.problem) for one in outcomes] == [
        ("offers.jsonl", True, "")
    ]
    assert sorted(bronze(made)["event_id"].to_pylist()) == ids(rows)
    metrics = (lake.state / "run" / "loader.prom").read_text()
    assert 'millrace_loader_rows_total{source="offers"} 50.0' in metrics
    assert [one.load for one in checked(made)] == [None]
    (again,) = checked(replace(made, lake=Lake(lake.root, tmp_path / "other")))  # a machine that has not fetched it
    assert again.load is not None and (again.load.ok, again.load.new_rows, bronze(made).num_rows) == (True, 0, 50)
    upstream.body = None
    upstream.etag = '"gone"'
    assert [one.problem for one in LoaderService(threading.Event(), once=True).fetch([made])] == [
        "the server answers 404"
    ]


def in_time(fetch: Callable[[], object]) -> BaseException:
    """What it raises, within a minute."""
    raised: list[BaseException] = []

    def work() -> None:
        try:
            fetch()
        except FetchFailed as error:
            raised.append(error)

    fetching = threading.Thread(target=work, daemon=True)
    fetching.start()
    fetching.join(60)
    assert not fetching.is_alive()
    return raised[0]


@pytest.mark.parametrize(("drip", "length"), [("headers", True), ("body", True), ("body", False)])
def test_a_server_that_drips_does_not_keep_the_feed_for_ever(
    tmp_path: Path, upstream: Upstream, drip: str, length: bool
) -> None:
    upstream.drip, upstream.length = drip, length
    spec = feed(upstream, timeout="1 second")
    assert "the download took longer than 1 second" in str(in_time(lambda: fetcher(tmp_path).fetch(spec)))
    assert len(upstream.asked) == 1
    assert fetcher(tmp_path).due(spec) > 0
    assert not list(tmp_path.rglob("*.whole"))


def test_a_download_ends_when_it_is_told_to(tmp_path: Path, upstream: Upstream) -> None:
    upstream.drip, stop = "body", threading.Event()
    made = job(tmp_path, source=replace(SOURCE, feeds=(feed(upstream),)))

    def run() -> None:
        (outcome,) = LoaderService(stop).fetch([made])
        raise FetchFailed(outcome.feed, outcome.problem)

    def asked() -> None:
        while not upstream.asked:
            stop.wait(0.02)
        stop.set()

    threading.Thread(target=asked, daemon=True).start()
    assert str(in_time(run)) == "feed offers.jsonl: stopped"
    assert FeedFetcher(made.lake, "offers").due(made.source.feeds[0]) <= 0  # it is looked at again at once


def test_the_sla_counts_from_when_a_file_was_first_offered(tmp_path: Path, upstream: Upstream) -> None:
    clock = [1_000_000.0]

    def fetch() -> Download | None:
        return FeedFetcher(Lake(tmp_path), "offers", now=lambda: clock[0], sleep=lambda _: None).fetch(spec)

    spec = feed(upstream)
    upstream.body, upstream.cut, upstream.etag = b"a" * 1_000, 10, 'W/"1"'  # no way to go on with the beginning
    first = fetch()
    clock[0] += 600.0
    upstream.etag = 'W/"2"'
    again = fetch()  # the first was never loaded
    assert first is not None and again is not None
    assert (first.met_at, again.met_at) == (1_000_000.0, 1_000_000.0)
    FeedFetcher(Lake(tmp_path), "offers").loaded(spec, again)
    clock[0] += 600.0
    assert fetch() is None
    upstream.etag = 'W/"3"'
    newer = fetch()
    assert newer is not None
    assert newer.met_at == clock[0]
    clock[0] += 600.0
    upstream.etag = 'W/"2"'  # taken back before it was loaded
    assert fetch() is None
    upstream.etag = 'W/"4"'
    newest = fetch()
    assert newest is not None
    assert newest.met_at == clock[0]


def test_addresses_that_are_none() -> None:
    for url in ("ftp://host/x", "https:///x", "https://user:pw@host/x"):
        with pytest.raises(ConfigError):
            FeedSpec(url)
    assert FeedSpec("https://host/a/Offers.CSV?x=1").name == "offers.csv"

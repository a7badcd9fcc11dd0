"""The supervisor of the stack: it goes on looking after its parts while the embedded broker is started again."""

from __future__ import annotations

import functools
import threading
import time
import urllib.request
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from deltalake import DeltaTable

from ingest.broker import EmbeddedBroker
from jobs.local.stack import Stack, inbox_folders, parts
from lakehouse.contract.errors import ConfigError
from lakehouse.contract.lake import Lake
from lakehouse.contract.settings import load_settings


@pytest.mark.broker
def test_tending_does_not_wait_for_the_broker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stack = Stack(load_settings({}, lake=tmp_path / "lake"))
    (tmp_path / "lake" / "_millrace" / "run").mkdir(parents=True)
    start, held = EmbeddedBroker.start, threading.Event()

    def slowly(broker: EmbeddedBroker, timeout_s: float = 60.0) -> str:
        assert held.wait(60)
        return start(broker, timeout_s)

    held.set()
    monkeypatch.setattr(EmbeddedBroker, "start", slowly)
    stack._start_broker()
    broker = stack._broker
    assert broker is not None
    try:
        _until(lambda: broker.running() and not stack._is_starting())
        held.clear()
        broker.kill()
        for _ in range(5):
            stack.tend()  # returns although the broker is not back
        assert stack.restarts_of_broker == 1, "and it is started once"
        assert not broker.running()
        held.set()
        _until(broker.running)
        stack.tend()
        assert stack.restarts_of_broker == 1
    finally:
        held.set()
        stack.stop()
    assert not broker.running()


PIPELINE = """
[sources.offers]
topic = "offers"
schema = "id BIGINT, price DOUBLE"
event_id = "{id}"
event_time = "received_at"

[[sources.offers.feeds]]
url = "URL/offers.csv"
every = "1 hour"
private = true
"""


def test_feeds_and_inboxes_are_parts_of_the_stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served, inbox, folder = tmp_path / "served", tmp_path / "inbox", tmp_path / "shop"
    for made in (served, inbox, folder):
        made.mkdir()
    (served / "offers.csv").write_text("id,price\n1,2.5\n2,3.5\n")
    (inbox / "more.jsonl").write_text('{"id": 3, "price": 1.0}\n')
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(SimpleHTTPRequestHandler, directory=served))
    threading.Thread(target=server.serve_forever).start()
    url = f"http://127.0.0.1:{server.server_port}"
    (folder / "pipeline.toml").write_text(PIPELINE.replace("URL", url))
    lake = Lake(tmp_path / "lake")
    settings = load_settings({}, lake=lake.root, pipeline=str(folder), kafka__bootstrap="127.0.0.1:1")
    stack = Stack(settings, feeds=True, inboxes=inbox_folders([str(inbox)], ["offers"]))
    (lake.state / "run").mkdir(parents=True)
    monkeypatch.setenv("no_proxy", "*")
    try:
        stack.start_loaders()
        loaded = {"feeds": "files: 1 loaded; 2 rows", "inbox-offers": "files: 1 loaded; 1 rows"}

        def told() -> bool:
            stack.tend()
            return {part.name: part.remarks for part in parts(lake) if part.running} == loaded

        _until(told)
        for part in parts(lake):
            if part.running:
                text = urllib.request.urlopen(part.metrics, timeout=60).read().decode()
                assert 'millrace_loader_files_total{source="offers",state="loaded"} 1.0' in text
    finally:
        stack.stop()
        server.shutdown()
        server.server_close()
    rows = DeltaTable(str(lake.bronze("offers").path)).to_pyarrow_table(columns=["event_id", "collector"]).to_pylist()
    found = sorted((row["event_id"], row["collector"]) for row in rows)
    assert found == [("1", "feeds"), ("2", "feeds"), ("3", "inbox-offers")]
    assert {part.name: part.running for part in parts(lake)} == {"feeds": False, "inbox-offers": False, "broker": False}


def test_whose_inbox_it_is(tmp_path: Path) -> None:
    assert inbox_folders([f"b={tmp_path}"], ["a", "b"]) == {"b": tmp_path}
    for given, says in ((str(tmp_path), "whose files"), (f"c={tmp_path}", "no source 'c'"), ("a=/none", "no folder")):
        with pytest.raises(ConfigError, match=says):
            inbox_folders([given], ["a", "b"])


def _until(check: object) -> None:
    deadline = time.monotonic() + 60
    while not check():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_disk_that_takes_no_notes_ends_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stack = Stack(load_settings({}, lake=tmp_path))
    run = tmp_path / "_millrace" / "run"
    run.parent.mkdir(parents=True)
    run.write_bytes(b"")  # no file can be written below a file
    stack.tend()
    stack.tend()
    assert caplog.text.count("cannot note which parts run") == 1
    run.unlink()
    stack.tend()
    assert [part.name for part in parts(Lake(tmp_path))] == ["broker"]

"""OpenLineage events, as a receiver on a real socket gets them.

``RUN_EVENT`` says in JSON Schema what the specification (2-0-2, ``RunEvent``) requires of the parts that are sent.
"""

from __future__ import annotations

import http.server
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator, FormatChecker  # type: ignore[import-untyped]
from typer.testing import CliRunner

from jobs import lineage
from jobs.cli import app
from jobs.lineage import LineageStep, driver_steps, told
from lakehouse.contract.errors import ConfigError
from lakehouse.contract.lake import Lake
from lakehouse.contract.pipeline import load_pipeline
from lakehouse.contract.settings import Settings, conf_dir, load_settings
from lakehouse.stages import Stages

URI = {"type": "string", "format": "uri", "minLength": 1}
FACETS = {
    "type": "object",
    "additionalProperties": {
        "type": "object",
        "required": ["_producer", "_schemaURL"],
        "properties": {"_producer": URI, "_schemaURL": URI},
    },
}
SCHEMA_FACET = {
    "properties": {
        "fields": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["name"],
                "properties": {"name": {"type": "string"}, "type": {"type": "string"}},
            },
        }
    }
}
DATASET = {
    "type": "object",
    "required": ["namespace", "name"],
    "properties": {
        "namespace": {"type": "string", "minLength": 1},
        "name": {"type": "string", "minLength": 1},
        "facets": {**FACETS, "properties": {"schema": SCHEMA_FACET}},
    },
}
RUN_EVENT = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "required": ["eventTime", "producer", "schemaURL", "run", "job"],
    "properties": {
        "eventTime": {"type": "string", "format": "date-time"},
        "producer": URI,
        "schemaURL": URI,
        "eventType": {"enum": ["START", "RUNNING", "COMPLETE", "ABORT", "FAIL", "OTHER"]},
        "run": {
            "type": "object",
            "required": ["runId"],
            "properties": {"runId": {"type": "string", "format": "uuid"}, "facets": FACETS},
        },
        "job": {
            "type": "object",
            "required": ["namespace", "name"],
            "properties": {"namespace": {"type": "string"}, "name": {"type": "string"}, "facets": FACETS},
        },
        "inputs": {"type": "array", "items": DATASET},
        "outputs": {"type": "array", "items": DATASET},
    },
}
VALIDATOR = Draft202012Validator(RUN_EVENT, format_checker=FormatChecker())


class Receiver(http.server.ThreadingHTTPServer):
    """Keeps every event, and answers with the status that it is told to."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.events: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()
        self.status = 201
        self.pause_s = 0.0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def states(self) -> list[tuple[str, str]]:
        return [(event["job"]["name"], event["eventType"]) for event in self.events]


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        assert self.path == "/api/v1/lineage"
        event = json.loads(self.rfile.read(int(self.headers["content-length"])))
        time.sleep(self.server.pause_s)
        if self.server.status == 201:
            self.server.events.append(event)
            self.server.keys.add(self.headers.get("authorization"))
        self.send_response(self.server.status)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def receiving() -> Iterator[Receiver]:
    with Receiver() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as server:
        yield server


def settings_for(receiver: Receiver, folder: Path) -> Settings:
    return load_settings({}, lake=folder, lineage=receiver.url, kafka__bootstrap="127.0.0.1:9092")


def test_a_driver_tells_each_step_at_its_start_between_and_at_its_end(
    receiver: Receiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lineage, "RUNNING_S", 0.05)
    monkeypatch.setenv("OPENLINEAGE_API_KEY", "k1")
    pipeline = load_pipeline(conf_dir() / "pipelines" / "meetup")
    settings = settings_for(receiver, tmp_path)
    steps = driver_steps(Lake(tmp_path), pipeline, Stages())
    with told(settings, steps, streaming=True):
        while ("meetup.rsvps", "RUNNING") not in receiver.states():
            time.sleep(0.01)
    for event in receiver.events:
        VALIDATOR.validate(event)
    for step in steps:
        states = [state for name, state in receiver.states() if name == step.name]
        assert (states[0], states[-1], set(states[1:-1])) == ("START", "COMPLETE", {"RUNNING"})
    assert len({(event["job"]["name"], event["run"]["runId"]) for event in receiver.events}) == len(steps)
    edges = {(i["name"], o["name"]) for e in receiver.events for i in e["inputs"] for o in e["outputs"]}
    bronze = str(tmp_path / "bronze" / "rsvps")
    assert edges >= {("meetup-raw-rsvps", bronze), (bronze, str(tmp_path / "gold" / "top_topics"))}
    (topic,) = receiver.events[0]["inputs"]
    assert topic["namespace"] == "kafka://127.0.0.1:9092"
    assert {"name": "rsvp_id", "type": "BIGINT"}.items() <= topic["facets"]["schema"]["fields"][0].items()
    assert receiver.keys == {"Bearer k1"}


def test_what_ends_a_run_is_told(receiver: Receiver, tmp_path: Path) -> None:
    settings = settings_for(receiver, tmp_path)
    with pytest.raises(ValueError, match="no disk"), told(settings, [LineageStep("job", ())]):
        raise ValueError("no disk")
    with told(settings, [LineageStep("other", ())]) as problems:
        problems.append("a file is not in")
    assert receiver.states() == [("job", "START"), ("job", "FAIL"), ("other", "START"), ("other", "FAIL")]
    assert receiver.events[1]["run"]["facets"]["errorMessage"]["message"] == "no disk"


def test_a_receiver_that_is_slow_broken_or_away_delays_nothing_and_is_counted(
    receiver: Receiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lineage, "_LAST_S", 0.3)
    steps = [LineageStep(f"job{n}", ()) for n in range(10)]
    before = lineage.DROPPED._value.get()
    receiver.status = 400
    with told(settings_for(receiver, tmp_path), steps):
        pass
    assert lineage.DROPPED._value.get() - before == 20
    receiver.status, receiver.pause_s = 201, 1.0
    began = time.monotonic()
    with told(settings_for(receiver, tmp_path), steps):
        assert time.monotonic() - began < 5
    assert time.monotonic() - began < 10  # twenty answers take twenty seconds
    away = load_settings({}, lake=tmp_path, lineage="http://127.0.0.1:1")
    with told(away, steps):
        pass
    assert lineage.DROPPED._value.get() - before > 40
    with pytest.raises(ConfigError, match="lineage"), told(load_settings({}, lineage="nowhere"), steps):
        pass


def test_a_load_tells_its_files_and_the_table_with_its_columns(receiver: Receiver, tmp_path: Path) -> None:
    file = tmp_path / "offers.jsonl"
    file.write_text('{"merchant": "m", "offer_id": "1", "version": 1, "price": 2.0}\n')
    given = ["--lake", str(tmp_path / "lake"), "--pipeline", "offers", "--set", f"lineage={receiver.url}"]
    ran = CliRunner().invoke(app, [*given, "load", str(file), "--workers", "1", "--json"])
    assert ran.exit_code == 0, ran.output
    assert receiver.states() == [("load.offers", "START"), ("load.offers", "COMPLETE")]
    (done,) = [event for event in receiver.events if event["eventType"] == "COMPLETE"]
    VALIDATOR.validate(done)
    assert [one["name"] for one in done["inputs"]] == [str(file)]
    (table,) = done["outputs"]
    assert table["name"] == str(tmp_path / "lake" / "bronze" / "offers")
    assert {"event_id", "payload", "received_at"} <= {field["name"] for field in table["facets"]["schema"]["fields"]}

"""Requests made from both OpenAPI documents, good and bad ones: no answer is a 500, and each is as documented."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import hypothesis
import pytest
import schemathesis
from hypothesis.strategies import booleans, one_of
from schemathesis import GenerationMode, checks

from lakehouse.contract.settings import ControlSettings, Settings
from serve.control.app import control_openapi, run_control
from serve.http.routes import ROUTES
from serve.http.schema import openapi
from tests.serve.conftest import Spawned
from tests.serve.lakes import city, rsvps_by_city, top_topics, topics, window
from tests.serve.postgres import Postgres

SHORT, LONG = 6, 400  # requests of each operation
STREAMS = ("/v1/subscribe",)  # an event stream does not end: tests/serve/push asks it
TOLD = (
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
    checks.unsupported_method,
)


class Running:
    """A control plane in a thread."""

    def __init__(self, lake: Path, database: str, serve_url: str) -> None:
        self.url = ""
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        control = ControlSettings(port=0, database=database, serve_url=serve_url)
        up = threading.Event()

        def ready(url: str) -> None:
            self.url = url
            up.set()

        run = run_control(Settings(lake=lake, control=control), ready=ready, stop=self._stop)
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(run,))
        self._thread.start()
        assert up.wait(60)
        self.key = (lake / "_millrace" / "control" / "admin.key").read_text().strip()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(30)
        self._loop.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Spawned]:
    root = tmp_path_factory.mktemp("lake")
    top_topics(root).overwrite(topics(0, [5, 4, 3]), [window(0)])
    rsvps_by_city(root).append([city(0, "Berlin", 1), city(0, "Bonn", 2)])
    spawned = Spawned(root)
    yield spawned
    spawned.close()


@pytest.fixture(scope="module")
def control(server: Spawned, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    running = Running(tmp_path_factory.mktemp("control"), "", server.url)
    yield running
    running.close()


@pytest.fixture(scope="module")
def control_with_postgres(
    server: Spawned, postgres: Postgres, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    running = Running(tmp_path_factory.mktemp("control"), postgres.new_database(), server.url)
    yield running
    running.close()


def operations(document: dict[str, Any]) -> list[Any]:
    """The operations of a document, as pytest's parameters."""
    found = [one.ok() for one in schemathesis.openapi.from_dict(document).get_all_operations()]
    return [pytest.param(one, id=f"{one.method.upper()} {one.path}") for one in found if one.path not in STREAMS]


OF_SERVER, OF_CONTROL = operations(openapi(ROUTES)), operations(control_openapi())


EXISTING = {"tenant": "acme", "app": "shop", "name": "rsvps_by_city", "key": "Berlin"}
"""Path parameters of what there is, for every second request."""


def ask(operation: Any, url: str, count: int, **options: Any) -> None:
    """Send so many requests, good and bad, and check each answer."""

    @hypothesis.settings(max_examples=count, suppress_health_check=list(hypothesis.HealthCheck))
    @hypothesis.given(one_of(*(operation.as_strategy(generation_mode=mode) for mode in GenerationMode)), booleans())
    def send(case: schemathesis.Case, existing: bool) -> None:
        if existing:
            case.path_parameters |= {name: EXISTING[name] for name in case.path_parameters.keys() & EXISTING.keys()}
        if "wait" in (case.query or {}):
            case.query["wait"] = "0"
        if operation.path == "/v1/tenants/{tenant}" and operation.method.upper() == "DELETE" and existing:
            return  # its name would not be given again
        answer = case.call(base_url=url, **options)
        assert answer.status_code < 500 or answer.status_code == 503, answer.text
        if options:
            case.validate_response(answer, checks=list(TOLD))

    send()


def ask_control(operation: Any, control: Running, count: int) -> None:
    headers = {"Authorization": f"Bearer {control.key}"}
    for path, name in (("tenants", "acme"), ("tenants/acme/apps", "shop")):  # unless an operation before removed them
        httpx.post(f"{control.url}/v1/{path}", json={"name": name}, headers=headers, timeout=60)
    ask(operation, control.url, count, headers=headers)


@pytest.mark.parametrize("operation", OF_SERVER)
def test_server_answers_no_500(operation: Any, server: Spawned) -> None:
    ask(operation, server.url, SHORT)


@pytest.mark.parametrize("operation", OF_CONTROL)
def test_control_plane_answers_no_500(operation: Any, control: Running) -> None:
    ask_control(operation, control, SHORT)


@pytest.mark.soak
@pytest.mark.parametrize("operation", OF_SERVER)
def test_server_answers_no_500_for_long(operation: Any, server: Spawned) -> None:
    ask(operation, server.url, LONG)


@pytest.mark.soak
@pytest.mark.parametrize("operation", OF_CONTROL)
def test_control_plane_over_postgresql_answers_no_500_for_long(operation: Any, control_with_postgres: Running) -> None:
    ask_control(operation, control_with_postgres, LONG)

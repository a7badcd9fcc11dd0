"""Nothing that the server has is without a word in its documents."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from starlette.routing import Route

from serve import access_metrics, metrics
from serve.openapi import MESSAGES, OPERATIONS, asyncapi, openapi
from serve.push import sse
from serve.routes import ROUTES

ROOT = Path(__file__).parents[2]


def test_every_route_is_described_and_nothing_else() -> None:
    routed = {
        (method, re.sub(r":\w+\}", "}", route.path))
        for route in ROUTES
        if isinstance(route, Route)
        for method in (route.methods or {"GET"}) - {"HEAD"}
    }
    assert routed == set(OPERATIONS)
    described = {(m.upper(), path) for path, operations in openapi()["paths"].items() for m in operations}
    assert described == routed


def test_every_message_is_described() -> None:
    source = (ROOT / "serve" / "messages.py").read_text(encoding="utf-8")
    kinds = set(re.findall(r'"type": "(\w+)"', source))
    assert kinds >= {"snapshot", "change", "heartbeat"} and sse.SSE.name
    assert kinds <= set(MESSAGES)
    assert set(asyncapi()["components"]["messages"]) >= kinds


@pytest.mark.parametrize("module", [metrics, access_metrics])
def test_every_metric_is_described(module: object) -> None:
    page = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    source = Path(str(module.__file__)).read_text(encoding="utf-8")  # type: ignore[attr-defined]
    names = set(re.findall(r'"millrace_serve_(\w+)"', source)) | set(re.findall(r'^ +\("(\w+)", "', source, re.M))
    names = {name.removeprefix("millrace_serve_") for name in names}
    assert len(names) >= 5
    assert [name for name in sorted(names) if f"`{name}`" not in page] == []

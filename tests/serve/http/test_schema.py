"""Nothing that the server has is without a word in its documents."""

from __future__ import annotations

import re
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from functools import reduce
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from jsonschema import Draft7Validator, Draft202012Validator  # type: ignore[import-untyped]
from openapi_spec_validator import OpenAPIV31SpecValidator

from serve.http.routes import ROUTES
from serve.http.schema import ANSWERS, PUSHED, asyncapi, openapi
from serve.push import sse
from tests.serve.conftest import serving
from tests.serve.lakes import top_topics, topics, window

ROOT = Path(__file__).parents[3]


def test_every_route_is_described() -> None:
    for path, operations in openapi(ROUTES)["paths"].items():
        for operation in operations.values():
            words = operation["summary"]
            assert words[0].isupper() and len(words) > 10 and "`" not in words and words[-1] != ".", (path, words)
    asked = openapi(ROUTES)["paths"]["/v1/tables/{name}"]["get"]["parameters"]
    assert [each["name"] for each in asked] == ["name", "where", "columns", "select", "limit", "as_of"]


def test_every_message_is_described() -> None:
    source = (ROOT / "serve" / "core" / "messages.py").read_text(encoding="utf-8")
    kinds = set(re.findall(r'"type": "(\w+)"', source))
    assert kinds >= {"snapshot", "change", "heartbeat"} and sse.SSE.name
    assert kinds == set(PUSHED)
    assert set(asyncapi()["components"]["messages"]) >= kinds


def test_every_field_is_in_the_protocol() -> None:
    page = (ROOT / "docs" / "reference" / "protocol.md").read_text(encoding="utf-8")
    for name, (_, fields) in PUSHED.items():
        [row] = re.findall(rf"^\| `{name}` \| (.*)$", page, re.M)
        assert [field for field in fields if f"`{field}`" not in row] == []


def test_references_lead_somewhere() -> None:
    def references(part: Any) -> Iterator[str]:
        if isinstance(part, dict):
            yield from [part["$ref"]] if isinstance(part.get("$ref"), str) else []
            part = list(part.values())
        for each in part if isinstance(part, list) else []:
            yield from references(each)

    for document in (openapi(ROUTES), asyncapi()):
        found = set(references(document))
        assert len(found) > 5
        for reference in found:
            reduce(lambda part, name: part[name], reference.split("/")[1:], document)
        for schema in document["components"]["schemas"].values():
            Draft202012Validator.check_schema(schema)


def test_the_documents_pass_the_official_schemas(tmp_path: Path) -> None:
    described = orjson.loads(orjson.dumps(openapi(ROUTES)))
    assert [error.message for error in OpenAPIV31SpecValidator(described).iter_errors()] == []
    if shutil.which("npm") is None:
        pytest.skip("there is no npm, which has AsyncAPI's schema")
    packed = subprocess.run(["npm", "pack", "--silent", "@asyncapi/specs@6.11.1"], cwd=tmp_path, check=False)
    if packed.returncode:
        pytest.skip("npm cannot fetch AsyncAPI's schema")
    with tarfile.open(next(tmp_path.glob("*.tgz"))) as package:
        schema = orjson.loads(package.extractfile("package/schemas/3.0.0.json").read())  # type: ignore[union-attr]
    pushed = orjson.loads(orjson.dumps(asyncapi()))
    assert [f"{list(error.path)}: {error.message}" for error in Draft7Validator(schema).iter_errors(pushed)] == []
    assert list(Draft7Validator(schema).iter_errors(pushed | {"info": {}})), "it tells a bad one"


async def test_answers_are_as_described(root: Path) -> None:
    top_topics(root).overwrite(topics(0, [1]), [window(0)])
    document = openapi(ROUTES)
    seen, made = set(), "x"
    async with serving(root, webhook_private=True) as url, httpx.AsyncClient(base_url=url, timeout=60) as client:
        tag = (await client.get("/v1/tables/top_topics")).headers["etag"]
        requests: list[tuple[str, str, dict[str, Any]]] = [
            ("GET", "/v1/tables", {}),
            ("GET", "/v1/tables/{name}", {}),
            ("GET", "/v1/tables/{name}", {"params": {"as_of": "1"}}),
            ("GET", "/v1/tables/{name}", {"headers": {"If-None-Match": tag}}),
            ("GET", "/v1/tables/{name}/{key}", {}),
            ("GET", "/v1/poll", {"params": {"table": "top_topics"}}),
            ("GET", "/v1/poll", {"params": {"table": "nope"}}),
            ("POST", "/v1/webhooks", {"json": {"table": "top_topics", "url": "ftp://127.0.0.1/"}}),
            ("POST", "/v1/webhooks", {"json": {"table": "top_topics", "url": "http://127.0.0.1:1/"}}),
            ("GET", "/v1/webhooks", {}),
            ("GET", "/v1/webhooks/{ident}", {}),
            ("GET", "/v1/webhooks/{ident}/dead", {}),
            ("DELETE", "/v1/webhooks/{ident}", {}),
            ("GET", "/v1/history/{name}", {"params": {"since": "0"}}),
            ("GET", "/v1/quality/{path}", {}),
            ("GET", "/v1/openapi.json", {}),
            ("GET", "/v1/asyncapi.json", {}),
            ("GET", "/healthz", {}),
            ("GET", "/metrics", {}),
        ]
        for method, path, asked in requests:
            place = path.format(name="top_topics", key="2026-01-01T00:00:00Z", ident=made, path="index.html")
            answer = await client.request(method, place, **asked)
            if answer.status_code == 201:
                made = answer.json()["id"]
            described = document["paths"][path][method.lower()]["responses"]
            one = described.get(str(answer.status_code)) or described[f"{answer.status_code // 100}XX"]
            kind = answer.headers.get("content-type", "").partition(";")[0]
            assert (kind in one["content"]) if kind else ("content" not in one), (method, path, answer.status_code)
            schema = one["content"][kind].get("schema") if kind else None
            if schema is not None and kind.endswith("json"):
                Draft202012Validator(document | schema).validate(answer.json())
            seen.add((method, path))
    assert {key for key in ANSWERS if key[0] == "GET"} - seen == {("GET", "/v1/subscribe")}

"""Declarations of tables; and continuous queries over HTTP, against a server on a real socket."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import httpx
import pytest

from lakehouse.contract.access import KeyFile
from lakehouse.contract.errors import ConfigError
from lakehouse.contract.lake import Lake
from lakehouse.contract.pipeline import load_pipeline
from lakehouse.contract.pipeline.added import Declared, QuerySpec, State
from serve.access import ReaderKey
from serve.http.catalog import declarations
from tests.serve.conftest import serving

PIPELINES = Path(__file__).parents[3] / "conf" / "pipelines"
COUNTS = {"name": "answers", "sql": "SELECT response, count(*) AS n FROM rsvps GROUP BY response"}


def test_declarations_name_kind_origin_and_what_matters_to_the_kind(root: Path) -> None:
    meetup = dict(declarations(Lake(root), load_pipeline(PIPELINES / "meetup")))
    assert meetup["rsvps_by_city"] == {"kind": "aggregate", "from": ["rsvps"]}
    assert meetup["members"] == {"kind": "distinct", "from": ["rsvps"], "window": "1 minute", "item": "member_id"}
    ads = dict(declarations(Lake(root), load_pipeline(PIPELINES / "ads")))
    assert ads["time_to_click"] == {"kind": "join", "from": ["impressions", "clicks"]}
    meters = dict(declarations(Lake(root), load_pipeline(PIPELINES / "meters")))
    assert meters["next_hour_price"] == {"kind": "view", "from": ["hourly_load"]}
    assert dict(declarations(Lake(root), load_pipeline(PIPELINES / "offers")))["bargains"]["kind"] == "staging"


def test_continuous_queries_are_declared_too(root: Path) -> None:
    queries = Declared(Lake(root), QuerySpec)
    sql = "SELECT received_at, response FROM rsvps"
    options = {"operator": "top_n", "item": "response"}
    queries.add(QuerySpec("answers", sql, "rsvps", created="2026-01-01T00:00:00Z", options=options))
    queries.add(QuerySpec("cities", "SELECT city FROM rsvps_by_city", "rsvps_by_city", ("city",)))
    found = dict(declarations(Lake(root), load_pipeline(PIPELINES / "meetup")))
    top = {"kind": "top_n", "from": ["rsvps"], "window": "1 minute", "item": "response", "query": True}
    assert found["answers"] == top
    assert found["cities"] == {"kind": "view", "from": ["rsvps_by_city"], "query": True}


async def test_a_query_is_added_listed_and_removed(root: Path) -> None:
    declared = Declared(Lake(root), QuerySpec)
    async with serving(root) as url, httpx.AsyncClient(base_url=url, timeout=60) as client:
        made = await client.post("/v1/queries", json={**COUNTS, "from": "start"})
        assert (made.status_code, made.headers["location"]) == (201, "/v1/queries/answers")
        assert made.json() | {"created": ""} == {
            **COUNTS,
            "source": "rsvps",
            "key": ["response"],
            "from": "start",
            "options": {},
            "created": "",
            "state": "waiting",
        }
        assert declared.all()["answers"].start == "start"
        declared.tell("answers", State("failed", "because"))
        found = (await client.get("/v1/queries/answers")).json()
        assert (found["state"], found["detail"]) == ("failed", "because")
        again = await client.post("/v1/queries", json=COUNTS)
        assert (again.status_code, again.json()["code"]) == (409, "taken")
        gone = await client.delete("/v1/queries/answers?drop=true")
        assert gone.status_code == 202
        assert dataclasses.replace(declared.all()["answers"], created="") == QuerySpec(
            "answers", COUNTS["sql"], "rsvps", ("response",), "start", removed=True, drop=True
        )
        assert [q["state"] for q in (await client.get("/v1/queries")).json()["queries"]] == ["removing"]
        assert (await client.get("/v1/queries/other")).status_code == 404
        assert (await client.delete("/v1/queries/other")).status_code == 404
        assert (await client.delete("/v1/queries/answers?drop=maybe")).status_code == 400


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({**COUNTS, "name": "Answers"}, 422, "name"),
        ({**COUNTS, "name": "rsvps"}, 409, "taken"),
        ({**COUNTS, "name": "quarantine"}, 409, "taken"),
        ({**COUNTS, "sql": "SELECT reflect('a', 'b') AS n, response FROM rsvps GROUP BY response"}, 422, "function"),
        ({**COUNTS, "sql": "SELECT response AS r, count(*) AS n FROM secrets GROUP BY response"}, 422, "relation"),
        ({**COUNTS, "sql": "DROP TABLE rsvps"}, 422, "sql"),
        ({**COUNTS, "sql": "SELECT respons, count(*) AS n FROM rsvps GROUP BY respons"}, 422, "column"),
        ({**COUNTS, "sql": f"SELECT '{'x' * 20_000}' AS n FROM rsvps"}, 429, "quota"),
        ({**COUNTS, "from": "yesterday"}, 422, "option"),
        ({**COUNTS, "options": {"operator": "magic"}}, 422, "option"),
        ({**COUNTS, "keys": ["n"]}, 400, "bad_request"),
        ({**COUNTS, "key": "n"}, 400, "bad_request"),
        ([], 400, "bad_request"),
    ],
)
async def test_what_is_refused_says_why(root: Path, body: Any, status: int, code: str | None) -> None:
    async with serving(root) as url, httpx.AsyncClient(base_url=url, timeout=60) as client:
        answer = await client.post("/v1/queries", json=body)
    assert (answer.status_code, answer.json().get("code")) == (status, code)
    assert answer.headers["content-type"] == "application/problem+json"
    assert Declared(Lake(root), QuerySpec).all() == {}


async def test_only_callers_on_this_machine_change_anything(root: Path) -> None:
    async with serving(root) as url, httpx.AsyncClient(base_url=url, timeout=60) as client:
        form = {"content-type": "text/plain"}
        assert (await client.post("/v1/queries", content=b"{}", headers=form)).status_code == 415
        foreign = {"origin": "https://elsewhere.example"}
        assert (await client.post("/v1/queries", json=COUNTS, headers=foreign)).status_code == 403
        assert (await client.post("/v1/queries", json=COUNTS, headers={"origin": url})).status_code == 201
        assert (await client.delete("/v1/queries/answers", headers=foreign)).status_code == 403
        long = b'{"name": "' + b"x" * 100_000 + b'"}'
        json = {"content-type": "application/json"}
        assert (await client.post("/v1/queries", content=long, headers=json)).status_code == 413
        assert (await client.post("/v1/queries", content=b"{", headers=json)).status_code == 400


async def test_a_key_that_may_changes_queries_on_any_address(root: Path) -> None:
    file = KeyFile(Lake(root).state / "readers.toml", ReaderKey)
    may, may_not = file.new(ReaderKey("0" * 64, queries=True)), file.new(ReaderKey("0" * 64))
    async with serving(root, host="0.0.0.0") as url, httpx.AsyncClient(timeout=60) as client:  # type: ignore[arg-type]
        queries = f"{url.replace('0.0.0.0', '127.0.0.1')}/v1/queries"
        for key, added, removed in ((may_not, 403, 403), (may, 201, 202)):
            headers = {"Authorization": f"Bearer {key}"}
            assert (await client.post(queries, json=COUNTS, headers=headers)).status_code == added
            assert (await client.delete(f"{queries}/answers", headers=headers)).status_code == removed


@pytest.mark.parametrize("limit", [{"tables": ("rsvps",)}, {"rows": {"*": "id = 1"}}, {"tenant": "acme"}])
def test_no_key_is_made_that_is_limited_and_may_change_queries(limit: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as refused:
        ReaderKey("0" * 64, queries=True, **limit)
    assert (refused.value.key, "two keys" in refused.value.remedy) == ("queries", True)


async def test_on_an_address_that_others_reach_it_answers_403(root: Path) -> None:
    async with serving(root, host="0.0.0.0", allow_anonymous=True) as url:  # type: ignore[arg-type]
        local = url.replace("0.0.0.0", "127.0.0.1")
        async with httpx.AsyncClient(base_url=local, timeout=60) as client:
            assert (await client.post("/v1/queries", json=COUNTS)).status_code == 403
            assert (await client.delete("/v1/queries/answers")).status_code == 403
            assert (await client.get("/v1/queries")).json() == {"queries": []}

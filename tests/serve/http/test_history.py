"""The history of a table on a real socket: pages of changes between two versions or times."""

from __future__ import annotations

import json
import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from serve.http import rows
from tests.serve.conftest import serving
from tests.serve.lakes import city, rsvps_by_city, top_topics, topics, window
from tests.serve.push.clients import WebSocketClient

PATH = "/v1/history/rsvps_by_city"


async def pages(http: httpx.AsyncClient, **query: str) -> list[dict[str, Any]]:
    """All pages, each found by the link in the one before."""
    found, url = [], f"{PATH}?{httpx.QueryParams(query)}"
    while url:
        answer = await http.get(url)
        assert answer.status_code == 200, answer.text
        found.append(answer.json())
        assert ("next" in answer.links) == (found[-1]["next"] is not None)
        url = answer.links.get("next", {}).get("url", "")
    return found


def cities(changes: list[dict[str, Any]]) -> list[str]:
    return [row["city"] for change in changes for row in change["upserts"]]


async def test_changes_between_versions_page_by_page(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    product = rsvps_by_city(root)
    for number in range(7):
        product.append([city(number, f"c{number}", number), city(number, "Ulm", 1)])
    async with serving(root) as url, httpx.AsyncClient(base_url=url, timeout=60) as http:
        [page] = await pages(http, since="2", until="5")
        assert cities(page["changes"]) == ["Ulm", "c2", "Ulm", "c3", "Ulm", "c4"] and page["until"] == 5
        several = await pages(http, since="2", until="5", limit="2")
        assert [len(each["changes"]) for each in several] == [2, 1]
        assert [change for each in several for change in each["changes"]] == page["changes"]
        assert several[-1]["position"] == page["position"]
        some = await pages(http, since="0", where="city = 'c6'", columns="yes")
        assert [change["upserts"] for change in some[-1]["changes"]][-1][0]["yes"] == 6
        monkeypatch.setattr(rows, "MAX_VERSIONS", 2)
        rare = await pages(http, since="0", where="city = 'c6'")
        assert [cities(each["changes"]) for each in rare] == [[], [], [], ["c6"]], "a page reads so many versions"
        totals = await pages(http, since="0", select="SELECT city, sum(yes) AS yes GROUP BY city", where="city = 'Ulm'")
        assert [row["yes"] for page in totals for c in page["changes"] for row in c["upserts"]] == list(range(1, 8))
        assert totals[0]["key"] == ["city"] and totals[0]["columns"] == ["city", "yes"]
        async with WebSocketClient(url, {"table": "rsvps_by_city", "from": page["position"]}) as client:
            await client.receive("resumed")
            assert cities(await client.changes(2)) == ["Ulm", "c5", "Ulm", "c6"], "a subscription goes on from a page"


async def test_times_lines_and_tags(root: Path) -> None:
    product = rsvps_by_city(root)
    before = datetime.now(UTC).isoformat()
    product.append([city(0, "Bonn", 1)])
    async with serving(root) as url, httpx.AsyncClient(base_url=url, timeout=60) as http:
        [page] = await pages(http, since="2020-01-01", until=datetime.now(UTC).isoformat())
        assert cities(page["changes"]) == ["Bonn"]
        assert cities((await pages(http, since=before))[0]["changes"]) == ["Bonn"]
        answer = await http.get(PATH, params={"since": "0"}, headers={"Accept": "application/x-ndjson"})
        assert answer.headers["content-type"] == "application/x-ndjson"
        assert [json.loads(line) for line in answer.text.splitlines()] == page["changes"]
        known = {"If-None-Match": answer.headers["etag"]}
        lines = known | {"Accept": "application/x-ndjson"}
        assert (await http.get(PATH, params={"since": "0"}, headers=lines)).status_code == 304
        assert (await http.get(PATH, params={"since": "0"}, headers=known)).status_code == 200, "JSON is not lines"
        product.append([city(1, "Kiel", 1)])
        newer = await http.get(PATH, params={"since": "0"}, headers=lines)
        assert (newer.status_code, len(newer.text.splitlines())) == (200, 2)


@pytest.mark.parametrize(
    ("query", "status", "code"),
    [
        ({}, 400, "bad_request"),
        ({"since": "0", "from": "x"}, 400, "bad_position"),
        ({"since": "yesterday"}, 400, "bad_request"),
        ({"since": "99"}, 400, "bad_request"),
        ({"since": "2", "until": "1"}, 400, "bad_request"),
        ({"since": "0", "limit": "0"}, 400, "bad_request"),
        ({"since": "0", "limit": "1001"}, 400, "bad_request"),
        ({"since": "0", "window": "1"}, 400, "bad_request"),
        ({"since": "0", "where": "nothing = 1"}, 400, "bad_filter"),
        ({"since": "0", "select": "SELECT rank() OVER ()"}, 400, "bad_filter"),
    ],
)
async def test_what_is_refused(root: Path, query: dict[str, str], status: int, code: str) -> None:
    product = rsvps_by_city(root)
    product.append([city(0, "Bonn", 1)])
    product.append([city(1, "Bonn", 1)])
    async with serving(root) as url, httpx.AsyncClient(base_url=url, timeout=60) as http:
        answer = await http.get(PATH, params=query)
        assert (answer.status_code, answer.json()["code"]) == (status, code), answer.text
        assert (await http.get("/v1/history/nothing", params={"since": "0"})).status_code == 404


async def test_versions_that_are_cleaned_up_answer_410_with_the_way_on(root: Path) -> None:
    product = top_topics(root)
    for number in range(4):
        product.overwrite(topics(number, [5, number]), [window(number)])
    async with serving(root) as url, httpx.AsyncClient(base_url=url, timeout=60) as http:
        first = await http.get("/v1/history/top_topics", params={"since": "1", "limit": "1"})
        assert len(first.json()["changes"]) == 1
        log = product.folder / "_delta_log"
        product.table.update_incremental()
        product.table.create_checkpoint()
        for version in range(4):
            (log / f"{version:020d}.json").unlink()
        gone = await http.get("/v1/history/top_topics", params={"since": "1"})
        assert (gone.status_code, gone.json()["code"]) == (410, "expired")
        assert "GET /v1/tables/top_topics" in gone.json()["remedy"]
        early = await http.get("/v1/history/top_topics", params={"since": "2020-01-01"})
        assert (early.status_code, early.json()["code"]) == (410, "expired"), "the log does not reach back so far"
        shutil.rmtree(product.folder)
        again = top_topics(root)
        again.overwrite(topics(0, [1]), [window(0)])
        other = await http.get("/v1/history/top_topics", params={"from": first.json()["next"]})
        assert (other.status_code, other.json()["code"]) == (410, "expired"), "a table of the same name is another"

"""The latest rows by plain HTTP, only if they are newer."""

from __future__ import annotations

import json
from pathlib import Path

import httpx

from serve.channel import Channel
from serve.push.etag import _cache_control

from ..conftest import serving
from ..lakes import rsvps_by_city, top_topics, topics, window
from .clients import WebSocketClient


async def test_only_if_newer(root: Path) -> None:
    product = top_topics(root)
    product.overwrite(topics(0, [5, 1]), [window(0)])
    async with serving(root) as url, httpx.AsyncClient(base_url=url, timeout=60) as http:
        query = {"where": "count > 1", "columns": "count"}
        first = await http.get("/v1/tables/top_topics", params=query)
        assert [row["count"] for row in first.json()["rows"]] == [5]
        tag = first.headers["etag"]
        assert tag == f'"{first.json()["position"]}"'
        for known in (tag, f"W/{tag}", f'"x", {tag}', "*"):
            same = await http.get("/v1/tables/top_topics", params=query, headers={"If-None-Match": known})
            assert (same.status_code, same.content, same.headers["etag"]) == (304, b"", tag)
        whole = await http.get("/v1/tables/top_topics", headers={"If-None-Match": tag})
        assert (whole.status_code, len(whole.json()["rows"])) == (200, 2), "of another filter it is another thing"
        product.overwrite(topics(0, [6]), [window(0)])
        asked = {"table": "top_topics", **query, "from": first.json()["position"]}
        async with WebSocketClient(url, asked) as client:  # it goes on from there on any other transport
            await client.receive("resumed")
            change = await client.receive("change")
        newer = await http.get("/v1/tables/top_topics", params=query, headers={"If-None-Match": tag})
        assert newer.json()["rows"] == change["upserts"]
        assert newer.json()["position"] == change["position"]


async def test_an_aggregate_and_what_is_refused(root: Path) -> None:
    rsvps_by_city(root)
    async with serving(root) as url, httpx.AsyncClient(base_url=url, timeout=60) as http:
        asked = {"select": "SELECT count(*) AS n, sum(yes) AS yes"}
        assert (await http.get("/v1/tables/rsvps_by_city", params=asked)).json()["rows"] == [{"n": 0, "yes": None}]
        for wrong in ({"where": "x"}, {"window": "1"}, {"conflate": "1"}, {"limit": "0"}, {"wait": "1"}):
            refused = await http.get("/v1/tables/rsvps_by_city", params=wrong)
            assert (refused.status_code, refused.headers["content-type"]) == (400, "application/problem+json")
            assert json.loads(refused.content)["code"] in ("bad_filter", "bad_request")


class Known(Channel):
    """A channel of which only the times of commits matter here."""

    def __init__(self, interval_ms: float | None, committed_at: int) -> None:
        from lakehouse.contract.lake import CommitFacts
        from serve.model import TableInfo
        from serve.state import TableState

        self.interval_ms = interval_ms
        self.state = TableState(TableInfo("t", "id", (), ()), 0, CommitFacts(committed_at), {})


def test_the_hint_is_what_is_left_of_the_usual_pause() -> None:
    assert _cache_control(Known(None, 0), 0) == "private, no-cache"
    assert _cache_control(Known(60_000, 100_000), 110_500) == "private, max-age=49"
    assert _cache_control(Known(60_000, 100_000), 159_500) == "private, no-cache", "it is due"
    assert _cache_control(Known(500, 100_000), 100_000) == "private, no-cache", "live tables are not kept at all"

"""A table's rows over HTTP: the latest, only if they are newer; older versions; the cache of answers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import httpx

from serve.core.channel import Channel
from serve.http.rows import ENTRY_BYTES, ByteCache, cache_control
from tests.serve.conftest import serving
from tests.serve.lakes import rsvps_by_city, top_topics, topics, window
from tests.serve.push.clients import WebSocketClient


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
        from serve.core.model import TableInfo
        from serve.tables.state import TableState

        self.interval_ms = interval_ms
        self.state = TableState(TableInfo("t", "id", (), ()), 0, CommitFacts(committed_at), {})


def test_the_hint_is_what_is_left_of_the_usual_pause() -> None:
    assert cache_control(Known(None, 0), 0) == "private, no-cache"
    assert cache_control(Known(60_000, 100_000), 110_500) == "private, max-age=49"
    assert cache_control(Known(60_000, 100_000), 159_500) == "private, no-cache", "it is due"
    assert cache_control(Known(500, 100_000), 100_000) == "private, no-cache", "live tables are not kept at all"


def test_the_least_used_go_when_there_are_too_many_bytes() -> None:
    kept = ByteCache(4 * (100 + ENTRY_BYTES))
    for name in "abcd":
        kept.put(name, name.encode() * 100)
    assert kept.get("a") == b"a" * 100
    kept.put("e", b"e" * 100)
    assert [name for name in "abcde" if kept.get(name) is None] == ["b"]
    kept.put("f", b"f" * (100 + ENTRY_BYTES + 1))
    assert kept.get("f") is None, "one that would push out a quarter of the others"


def test_answers_without_a_body_count_too() -> None:
    kept = ByteCache(10 * ENTRY_BYTES)
    for number in range(100):
        kept.put(number, b"")
    assert [number for number in range(100) if kept.get(number) is not None] == list(range(90, 100))


async def test_a_version_of_a_table_that_was_there_before_is_not_shown(root: Path) -> None:
    async with serving(root) as url, httpx.AsyncClient(base_url=url, timeout=60) as client:
        for count in (3, 7):
            top_topics(root).overwrite(topics(0, [count]), [window(0)])
            for _ in range(2):
                answer = await client.get("/v1/tables/top_topics?as_of=1")
                assert [row["count"] for row in answer.json()["rows"]] == [count]
            shutil.rmtree(root / "gold" / "top_topics")
        assert (await client.get("/v1/tables/top_topics?as_of=1")).status_code == 404

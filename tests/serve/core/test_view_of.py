"""What is declared of a channel holds on every way to the table."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from lakehouse.contract.errors import ConfigError
from lakehouse.contract.pipeline import load_pipeline
from lakehouse.contract.pipeline.product import ChannelSpec
from lakehouse.contract.settings import ServeSettings, Settings
from serve.app import make_app, run_server
from serve.core.channel import channels_of, view_of
from serve.core.model import Principal, SubscribeRequest
from serve.errors import FilterError
from tests.contract.sql.test_closures import TABLE
from tests.serve.conftest import receive, subscribed
from tests.serve.lakes import city, rsvps_by_city, top_topics, topics, window

PIPELINE = """
[sources.rsvps]
topic = "rsvps"
schema = "id BIGINT"
event_time = "received_at"

[products.top_topics]
layer = "gold"
source = "rsvps"
sql = "SELECT 1"

[products.rsvps_by_city]
layer = "silver"
source = "rsvps"
sql = "SELECT 1"
channel = false
"""
CHANNEL = """
[products.top_topics.channel]
where = "count > 5 OR rank = 9"
columns = ["item", "COUNT"]
"""


def folder(root: Path, text: str) -> Path:
    found = root.parent / "pipeline"
    found.mkdir(parents=True, exist_ok=True)
    (found / "pipeline.toml").write_text(text, encoding="utf-8")
    return found


@asynccontextmanager
async def declared(root: Path, text: str) -> AsyncIterator[str]:
    stop, up = asyncio.Event(), asyncio.get_running_loop().create_future()
    settings = Settings(lake=root, pipeline=str(folder(root, text)), serve=ServeSettings(port=0, poll_ms=5))
    task = asyncio.create_task(run_server(settings, ready=up.set_result, stop=stop))
    try:
        yield await asyncio.wait_for(up, 60)
    finally:
        stop.set()
        await task


async def test_the_declared_filter_holds_for_snapshot_changes_resume_look_up_and_history(root: Path) -> None:
    product = top_topics(root)
    product.overwrite(topics(0, [9, 7, 3]), [window(0)])
    columns = ["window_start", "rank", "item", "count"]
    async with (
        declared(root, PIPELINE + CHANNEL) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as client,
        subscribed(url, "top_topics") as connection,
    ):
        snapshot = await receive(connection, "snapshot")
        assert [(row["rank"], row["count"]) for row in snapshot["rows"]] == [(1, 9), (2, 7)]
        assert snapshot["columns"] == columns == list(snapshot["rows"][0])
        assert "where" not in snapshot, "its own filter, of which there is none"
        product.overwrite(topics(0, [9, 2, 6]), [window(0)])
        change = await receive(connection, "change")
        assert [row["rank"] for row in change["upserts"]] == [3]
        assert [key["rank"] for key in change["deletes"]] == [2] == [key["rank"] for key in change["leaves"]]
        async with subscribed(url, "top_topics", snapshot["position"]) as again:
            assert (await receive(again, "resumed"))["columns"] == columns
            assert await receive(again, "change") == change
        now = (await client.get("/v1/tables/top_topics", params={"where": "count > 8"})).json()
        assert [list(row.values())[1:] for row in now["rows"]] == [[1, "topic 1", 9]]
        before = (await client.get("/v1/tables/top_topics", params={"as_of": str(product.version - 1)})).json()
        assert before["rows"] == snapshot["rows"]
        start = window(0).isoformat().replace("+00:00", "Z")
        assert (await client.get(f"/v1/tables/top_topics/{start},2")).status_code == 404
        found = (await client.get(f"/v1/tables/top_topics/{start},3")).json()
        assert [list(row) for row in found["rows"]] == [columns]
        listed = (await client.get("/v1/tables")).json()["tables"]
        assert [table["columns"] for table in listed if table["table"] == "top_topics"] == [columns]
        for query in ({"where": "error = 0"}, {"columns": "error"}, {"select": "SELECT max(error) AS e"}):
            refused = await client.get("/v1/tables/top_topics", params=query)
            assert (refused.status_code, refused.json()["code"]) == (400, "bad_filter"), query
            assert "error" not in refused.json()["detail"].split("Columns: ")[1], "nor is it told that it is there"


async def test_a_table_without_a_channel_is_not_served(root: Path) -> None:
    rsvps_by_city(root).append([city(0, "Bonn", 1)])
    async with declared(root, PIPELINE) as url, httpx.AsyncClient(base_url=url, timeout=60) as client:
        answers = []
        for path in ("", "?as_of=0", "/2026-01-01T00:00:00Z"):
            answers.append((await client.get(f"/v1/tables/rsvps_by_city{path}")).status_code)
        assert answers == [409] * 3
        [table] = (await client.get("/v1/tables")).json()["tables"]
        assert not table["served"]
        assert "no channel" in table["detail"]
        async with subscribed(url, "rsvps_by_city") as connection:
            assert json.loads(await connection.recv())["code"] == "not_served"
        assert (await client.get("/readyz")).json()["not_served"] == 1


async def test_channels_are_served_as_they_are_declared_now(root: Path) -> None:
    top_topics(root).overwrite(topics(0, [9, 7, 3]), [window(0)])
    added = root / "_millrace" / "control" / "state" / "sources" / "visits.toml"
    added.parent.mkdir(parents=True)
    async with declared(root, PIPELINE) as url, subscribed(url, "top_topics") as connection:
        assert len((await receive(connection, "snapshot"))["rows"]) == 3
        source = PIPELINE.partition("[sources.rsvps]")[2].partition("[products")[0]
        fresh = added.with_suffix(".new")
        product = "[products.secrets]\nlayer = 'silver'\nsql = 'SELECT id FROM visits'\nchannel = false\n"
        fresh.write_text(source.replace('"rsvps"', '"visits"') + product)
        fresh.replace(added)
        rsvps_by_city(root, "secrets").append([city(0, "Bonn", 1)])  # at once: not served for a moment either
        folder(root, PIPELINE + CHANNEL)
        assert json.loads(await connection.recv())["code"] == "busy"
        async with subscribed(url, "secrets") as other:
            assert json.loads(await other.recv())["code"] == "not_served"
        async with subscribed(url, "top_topics") as again:
            assert [row["count"] for row in (await receive(again, "snapshot"))["rows"]] == [9, 7]


async def test_a_filter_that_does_not_fit_the_table_keeps_it_from_being_served(root: Path) -> None:
    top_topics(root).overwrite(topics(0, [9]), [window(0)])
    wrong = PIPELINE + "[products.top_topics.channel]\nwhere = 'price > 1'\n"
    async with declared(root, wrong) as url, httpx.AsyncClient(base_url=url, timeout=60) as client:
        async with asyncio.timeout(60):
            while (answer := await client.get("/v1/tables/top_topics")).status_code != 409:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert "products.top_topics.channel does not fit it: there is no column 'price'" in answer.text


@pytest.mark.parametrize("where", ["count >", "sleep(1) = 1", "count > (SELECT 1)", "count > 1; DROP TABLE x"])
def test_what_is_no_filter_is_refused_at_the_start(root: Path, where: str) -> None:
    text = PIPELINE + f"[products.top_topics.channel]\nwhere = '{where}'\n"
    path = folder(root, text)
    with pytest.raises(ConfigError) as caught:
        make_app(Settings(lake=root, pipeline=str(path)))
    assert caught.value.key == "products.top_topics.channel.where"
    assert caught.value.file == path / "pipeline.toml"
    assert caught.value.line == text.count("\n", 0, text.index("[products.top_topics.channel]")) + 1
    assert "docs/reference/protocol.md" in caught.value.remedy


def test_a_principal_s_condition_and_the_declared_one_both_hold(root: Path) -> None:
    spec = ChannelSpec(where="i = 1 OR i = 2", columns=("s",))
    asked = SubscribeRequest("x", where="s = 'a' OR TRUE")
    view = view_of(TABLE, asked, Principal(rows={"x": "b OR i = 2"}).condition("x"), spec)
    assert view.columns == ("k", "s")
    assert view.guard == '("i" = 1 OR "i" = 2) AND ("b" OR "i" = 2)'
    assert view_of(TABLE, asked, "", spec).id != view.id
    with pytest.raises(FilterError, match="no column 'i'"):
        view_of(TABLE, SubscribeRequest("x", where="i = 1"), "", spec)
    with pytest.raises(FilterError, match="no column 'i'"):
        view_of(TABLE, SubscribeRequest("x", select="SELECT s, sum(i) AS n GROUP BY s"), "", spec)
    grouped = view_of(TABLE, SubscribeRequest("x", select="SELECT s, count(*) AS n GROUP BY s"), "i > 0", spec)
    assert grouped.guard == '("i" = 1 OR "i" = 2) AND "i" > 0'
    assert channels_of(load_pipeline(folder(root, PIPELINE + CHANNEL)))["top_topics"].columns == ("item", "COUNT")


@pytest.mark.parametrize(
    ("select", "where", "columns"),
    [
        ("SELECT * FROM x WHERE i > 1", "i > 1", ()),
        ("SELECT s FROM x", "", ("s",)),
        ("SELECT S, i", "", ("s", "i")),
        ("SELECT s FROM x WHERE i = 2 OR b", "i = 2 OR b", ("s",)),
    ],
)
def test_select_without_group_by_is_a_filter_with_columns(select: str, where: str, columns: tuple[str, ...]) -> None:
    plain = SubscribeRequest("x", where=where, columns=columns)
    assert view_of(TABLE, SubscribeRequest("x", select=select), "").id == view_of(TABLE, plain, "").id


def test_select_of_rows_sees_declared_columns_only() -> None:
    spec = ChannelSpec(columns=("s",))
    everything = view_of(TABLE, SubscribeRequest("x", select="SELECT * FROM x"), "", spec)
    assert "i" not in everything.columns
    with pytest.raises(FilterError):
        view_of(TABLE, SubscribeRequest("x", select="SELECT i FROM x"), "", spec)


@pytest.mark.parametrize(
    ("select", "said"),
    [
        ("SELECT i + 1 FROM x", "is no column"),
        ("SELECT i AS n FROM x", "is no column"),
        ("SELECT x.i FROM x", "qualified"),
        ("SELECT * EXCLUDE (i) FROM x", "is no column"),
        ("SELECT i FROM y", "FROM names this table"),
        ("SELECT i FROM x ORDER BY i", "ORDER is not kept"),
        ("SELECT nope FROM x", "nope"),
        ("SELECT i FROM x WHERE random() > 0.5", "not taken"),
        ("DELETE FROM x", "not one SELECT"),
    ],
)
def test_select_that_is_refused_says_why(select: str, said: str) -> None:
    with pytest.raises(FilterError, match=re.escape(said)):
        view_of(TABLE, SubscribeRequest("x", select=select), "")

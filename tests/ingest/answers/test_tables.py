"""Rows of real Delta tables by key, and following products by version."""

from __future__ import annotations

import asyncio
import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path

import orjson
import pytest

from ingest.answers.tables import Coordinates, LakeState, ProductRows, ProductWatch, TenantRows
from ingest.errors import RequestRefused
from lakehouse.contract import rows
from lakehouse.contract.lake import Lake
from lakehouse.contract.pipeline.tenants import TenantBorder
from tests.ingest.lakes import commit

T0 = datetime(2026, 1, 1, 12, tzinfo=UTC)


@pytest.fixture(params=[100_000, 0], ids=["in memory", "from files"])
def lake(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Lake:
    monkeypatch.setattr(rows, "IN_MEMORY_ROWS", request.param)
    return Lake(tmp_path)


def test_a_tenant_finds_its_own_rows_whatever_it_asks_for(lake: Lake) -> None:
    rows = ProductRows(lake, TenantBorder("home", {"scores": "tenant", "prices": "*"}))
    for name in ("scores", "prices", "secrets"):
        every = [{"visitor": "v1", "tenant": tenant, "score": n} for n, tenant in enumerate(("acme", "home"))]
        commit(lake, name, every, key="visitor,tenant")
    for tenant, score in (("acme", 0), ("home", 1), ("", 1)):
        part = rows.seen_by(tenant, "scores")
        assert [row["score"] for row in rows.by_key(part, ["v1"]).rows] == [score]
        assert [row["score"] for row in rows.where(part, {"visitor": "v1"}).rows] == [score]
        others = {"acme", "home"} - {tenant or "home"}
        assert rows.where(part, {"tenant": others.pop()}).rows == []
        assert b'"score":%d' % score in rows.by_keys(part, {("v1",)})[1]["v1",]
    assert rows.seen_by("acme", "prices") == rows.seen_by("home", "prices"), "one read serves both"
    assert len(rows.by_key(rows.seen_by("acme", "prices"), ["v1"]).rows) == 2
    assert len(rows.by_key(rows.seen_by("", "secrets"), ["v1"]).rows) == 2
    with pytest.raises(RequestRefused) as hidden:
        rows.seen_by("acme", "secrets")
    with pytest.raises(RequestRefused) as missing:
        rows.by_key(rows.seen_by("home", "nothing"), ["v1"])
    assert str(hidden.value).replace("secrets", "nothing") == str(missing.value)


def test_a_row_by_key_and_its_next_version(lake: Lake) -> None:
    rows = ProductRows(lake)
    with pytest.raises(RequestRefused) as caught:
        rows.by_key(TenantRows("scores"), ["v1"])
    assert caught.value.status == 404
    commit(
        lake,
        "scores",
        [{"visitor": "v1", "score": 0.5, "sketch": b"x"}, {"visitor": "v2", "score": 1.5, "sketch": b"y"}],
        key="visitor",
    )
    found = rows.by_key(TenantRows("scores"), ["v1"])
    assert (found.version, found.rows) == (1, [{"visitor": "v1", "score": 0.5}])
    assert orjson.loads(found.json(product="scores")) == {
        "product": "scores", "version": 1, "rows": [{"visitor": "v1", "score": 0.5}],
    }  # fmt: skip
    commit(lake, "scores", [{"visitor": "v1", "score": 0.75, "sketch": b"z"}], key="visitor")
    assert (
        rows.by_key(TenantRows("scores"), ["v1"]).rows[0]["score"],
        rows.by_key(TenantRows("scores"), ["v1"]).version,
    ) == (0.75, 2)
    assert rows.by_key(TenantRows("scores"), ["v2"]).rows == []
    assert rows.where(TenantRows("scores"), {"visitor": "v1", "score": "0.75"}).rows
    for match, status in (({"nobody": "1"}, 400), ({"score": "much"}, 0)):
        if status:
            with pytest.raises(RequestRefused, match="no column 'nobody'"):
                rows.where(TenantRows("scores"), match)
        else:
            assert rows.where(TenantRows("scores"), match).rows == [], "no number equals a text that is none"
    with pytest.raises(RequestRefused, match="looked up by visitor"):
        rows.by_key(TenantRows("scores"), ["v1", "v2"])
    shutil.rmtree(lake.table("gold", "scores").path)
    commit(lake, "scores", [{"visitor": "v9", "score": 9.0}], key="visitor")
    assert rows.by_key(TenantRows("scores"), ["v9"]).rows == [{"visitor": "v9", "score": 9.0}], (
        "a table that was made again"
    )


def test_windows_newest_first_and_the_newest_alone(lake: Lake) -> None:
    table = [
        {"window_start": T0 + timedelta(minutes=n), "city": city, "zone": n % 2, "cars": 10 * n + len(city)}
        for n in range(3)
        for city in ("Ulm", "Bonn")
    ]
    commit(lake, "traffic", table, key="window_start,city,zone")
    rows = ProductRows(lake)
    assert [row["cars"] for row in rows.by_key(TenantRows("traffic"), ["Ulm"]).rows] == [23, 13, 3]
    assert [row["cars"] for row in rows.by_key(TenantRows("traffic"), ["Ulm", "1"]).rows] == [13]
    version, newest = rows.by_keys(TenantRows("traffic"), [("Ulm", "0"), ("Bonn", "0"), ("Bonn", "7")])
    assert version == 1
    assert {key: [row["cars"] for row in orjson.loads(body)] for key, body in newest.items()} == {
        ("Ulm", "0"): [23], ("Bonn", "0"): [24], ("Bonn", "7"): [],
    }  # fmt: skip
    assert b'"window_start":"2026-01-01T12:02:00Z"' in newest["Ulm", "0"]


def test_keys_of_several_widths_each_find_their_own(lake: Lake) -> None:
    table = [{"city": city, "zone": zone, "cars": zone} for city in ("Ulm", "Bonn") for zone in (1, 2)]
    commit(lake, "traffic", table, key="city,zone")
    rows = ProductRows(lake)
    assert rows.width("traffic") is None
    _, found = rows.by_keys(
        TenantRows("traffic"), [("Ulm",), ("Bonn", "2"), ("Ulm", "1"), ("Ulm", "1", "x"), ("Kiel",)]
    )
    assert {key: sorted(row["cars"] for row in orjson.loads(body)) for key, body in found.items()} == {
        ("Ulm",): [1, 2], ("Bonn", "2"): [2], ("Ulm", "1"): [1], ("Ulm", "1", "x"): [], ("Kiel",): [],
    }  # fmt: skip
    assert rows.width("traffic") == 2


def test_partial_rows_are_folded(lake: Lake) -> None:
    fold = {"n": "sum", "most": "max"}
    commit(lake, "sums", [{"city": "Ulm", "n": 1, "most": 5}], key="city", fold=fold)
    commit(
        lake,
        "sums",
        [{"city": "Ulm", "n": 2, "most": 3}, {"city": "Bonn", "n": 7, "most": 1}],
        key="city",
        fold=fold,
        mode="append",
    )
    assert ProductRows(lake).by_key(TenantRows("sums"), ["Ulm"]).rows == [{"city": "Ulm", "n": 3, "most": 5}]


def test_of_rows_by_version_the_latest_counts(lake: Lake) -> None:
    fold = {"price": "latest", "at": "latest"}
    for price, at in ((10, 2), (20, 3), (30, 1)):
        commit(
            lake, "offers", [{"sku": "a", "price": price, "at": at}], key="sku", fold=fold, order="at", mode="append"
        )
    assert ProductRows(lake).by_key(TenantRows("offers"), ["a"]).rows == [{"sku": "a", "price": 20, "at": 3}]


class Counting(LakeState):
    """Counts looks."""

    looks = 0

    def progress(self, name: str) -> tuple[int, dict[str, int]]:
        self.looks += 1
        return super().progress(name)


async def test_everybody_is_told_when_their_event_is_held(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    state = Counting(lake)
    watch = ProductWatch(state, 0.005)
    early = [asyncio.create_task(watch.holds("tops", Coordinates("t", 0, 4))) for _ in range(50)]
    late = asyncio.create_task(watch.holds("tops", Coordinates("t", 1, 0)))
    newer = asyncio.create_task(watch.newer("tops", 0))
    await asyncio.sleep(0.05)
    assert not any(task.done() for task in (*early, late, newer)), "the product does not exist yet"
    await asyncio.to_thread(commit, lake, "tops", [{"n": 1}], key="n", through={"t/0": 4})
    await asyncio.to_thread(commit, lake, "tops", [{"n": 2}], key="n", through={"t/0": 5})
    async with asyncio.timeout(60):
        assert {await task for task in early} <= {2, 3}
        assert await newer >= 1
        assert not late.done()
        late.cancel()
        await asyncio.gather(late, return_exceptions=True)
        assert await watch.holds("tops", Coordinates("t", 0, 4)) == 2, "held already"
    looks = state.looks
    await asyncio.sleep(0.1)
    assert state.looks <= looks + 1, "nobody waits, so nobody looks"
    waiting = asyncio.create_task(watch.newer("tops", 99))
    await asyncio.sleep(0.02)
    watch.close()
    with pytest.raises(asyncio.CancelledError):
        await waiting

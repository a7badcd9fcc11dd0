"""Example clickstream: pages by visitor and hour, visits with expiry, coupons, against plain Python."""

from __future__ import annotations

import asyncio
import shutil
import time
import uuid
from collections import Counter, defaultdict
from contextlib import ExitStack
from datetime import datetime
from itertools import count, islice
from pathlib import Path
from typing import Any

import httpx
import pytest
from pyspark.sql import SparkSession

from ingest.broker import EmbeddedBroker
from ingest.simulate.scenes import SCENES
from lakehouse.contract.pipeline import load_pipeline
from lakehouse.contract.settings import conf_dir, load_settings
from lakehouse.replay import verify
from tests.ingest.conftest import running_node
from tests.lakehouse.examples.play import START_MS, Event, Example, at, parts
from tests.lakehouse.lakes import Site, eventually
from tests.serve.conftest import serving

pytestmark = pytest.mark.spark
GAP = 1_800_000


def scene() -> list[Event]:
    """Some four hours, with the events of one visitor in ten an hour late."""
    found = list(islice(SCENES["clickstream"](2, START_MS), 9_000))
    few = [event for event in found if int(event[1]["visitor"][1:]) % 4 == 0]
    late = [event for event in few if event[1]["visitor"].endswith("8")]
    rest = [event for event in few if not event[1]["visitor"].endswith("8")]
    alike = {**found[0][1], "visitor": "exact", "kind": "view"}
    exact = [(found[0][0], {**alike, "action_id": 10**9 + n, "at": START_MS + n * GAP}) for n in range(3)]
    # Just the gap apart, two of them in one batch: three visits.
    return [*exact[:2], *rest[: len(rest) * 3 // 4], *late, *rest[len(rest) * 3 // 4 :], exact[2]]


def views(events: list[Event]) -> dict[tuple[Any, str], int]:
    hour = 3_600_000
    return dict(Counter((at(e["at"] // hour * hour), e["visitor"]) for _, e in events if e["kind"] == "view"))


def visits(events: list[Event]) -> dict[tuple[str, Any], tuple[Any, ...]]:
    by: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for _, e in events:
        by[e["visitor"]].append(e)
    clock = max(e["at"] for _, e in events)
    found: dict[tuple[str, Any], tuple[Any, ...]] = {}
    for visitor, acts in by.items():
        groups: list[list[dict[str, Any]]] = []
        for e in sorted(acts, key=lambda e: e["at"]):
            if groups and e["at"] - groups[-1][-1]["at"] < GAP:
                groups[-1].append(e)
            else:
                groups.append([e])
        for some in groups:
            kinds = Counter(e["kind"] for e in some)
            removed = [e for e in some if e["kind"] == "remove"]
            last = max((f"{e['at']:014d} {e['sku']}" for e in removed), default=None)
            newest = [(e["action_id"], e["kind"]) for e in sorted(some, key=lambda e: (-e["at"], -e["action_id"]))]
            found[visitor, at(some[0]["at"])] = (
                at(some[-1]["at"]),
                clock - some[-1]["at"] >= GAP,
                len(some),
                *(kinds[kind] for kind in ("view", "add", "remove", "buy")),
                last,
                [number for number, _ in newest][:50],
                [number for number, kind in newest if kind != "view"][:50],
            )
    return found


COLUMNS = ("session_end", "closed", "actions", "views", "added", "removed", "bought", "last_removed")


def held(example: Example) -> dict[tuple[str, Any], tuple[Any, ...]]:
    rows = example.rows("visits")
    return {
        (row["visitor"], row["session_start"]): (
            *(row[name] for name in COLUMNS),
            *([action["action_id"] for action in row[name]] for name in ("recent", "cart")),
        )
        for row in rows
    }


def shop(folder: Path, *changes: tuple[str, str]) -> Path:
    """The shipped pipeline with changes."""
    shutil.copytree(conf_dir() / "pipelines" / "clickstream", folder)
    file = folder / "pipeline.toml"
    text = file.read_text(encoding="utf-8")
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    file.write_text(text, encoding="utf-8")
    return folder


def coupons(events: list[Event]) -> set[tuple[str, Any, str]]:
    return {
        (visitor, start, row[7][15:])
        for (visitor, start), row in visits(events).items()
        if not row[1] and row[5] and not row[6]
    }


def test_views_visits_and_coupons(tmp_path: Path, spark: SparkSession) -> None:
    events = scene()
    example = Example(tmp_path, shop(tmp_path / "clickstream", ('clock = "wall"', 'clock = "events"')))  # of January
    chunks = list(parts(events, [500, 400, 400]))
    example.write(chunks[0])
    with example.running(spark) as driver:
        example.wait(driver)
        assert held(example) == visits(chunks[0])
        example.write(chunks[1])
        example.wait(driver)
        assert held(example) == visits([*chunks[0], *chunks[1]])
    with example.running(spark) as driver:
        for chunk in chunks[2:]:
            example.write(chunk)
        example.wait(driver)
        wanted = coupons(events)
        shown = lambda: {(r["visitor"], r["session_start"], r["sku"]) for r in example.rows("coupons")}  # noqa: E731
        eventually(lambda: shown() == wanted, alive=driver.is_alive)
        assert wanted
    assert held(example) == visits(events)
    assert {row[1] for row in visits(events).values()} == {True, False}
    rows = {(row["window_start"], row["visitor"]): row["views"] for row in example.rows("views_by_hour")}
    assert rows == views(events)
    found = example.verified(spark)
    assert found["visits"]
    assert found["views_by_hour"]
    assert found["quarantine"]


@pytest.mark.broker
async def test_a_visitor_is_answered_and_the_visit_ends_on_time(
    tmp_path: Path, broker: EmbeddedBroker, spark: SparkSession
) -> None:
    """Collector, broker, driver and server: the coupon in the POST's answer, the session in one look-up, its expiry."""
    topic = f"actions-{uuid.uuid4().hex[:8]}"
    folder = shop(
        tmp_path / "clickstream",
        ("clickstream-actions", topic),
        ("30 minutes", "15 seconds"),
        ('"{visitor}" }', '"{visitor}" }\ntimeout = "60 seconds"'),
    )
    pipeline = load_pipeline(folder)
    place = Site(
        load_settings({}, lake=tmp_path / "lake", pipeline=str(folder), kafka__bootstrap=broker.bootstrap),
        pipeline,
        broker.bootstrap,
        [],
    )
    numbers = count(1)

    async def act(collector: httpx.AsyncClient, kind: str, **more: str) -> list[dict[str, Any]]:
        action = {
            "action_id": next(numbers),
            "at": time.time_ns() // 10**6,
            "visitor": "ann",
            "kind": kind,
            "page": "p",
        }
        answer = await collector.post("/v1/actions", json=action | more)
        assert answer.status_code == 200, answer.text
        return list(answer.json()["rows"])

    with ExitStack() as stops:
        alive = await asyncio.to_thread(stops.enter_context, place.running(spark))
        async with (
            running_node(place.settings, pipeline, broker.bootstrap) as node,
            serving(place.settings.lake) as url,
            httpx.AsyncClient(base_url=node, timeout=70) as collector,
            httpx.AsyncClient(base_url=url, timeout=30) as server,
        ):
            assert await act(collector, "add", sku="s7") == []
            [coupon] = await act(collector, "remove", sku="s7")
            assert (coupon["visitor"], coupon["sku"]) == ("ann", "s7")
            last = time.time()
            [visit] = (await server.get("/v1/tables/visits/ann")).json()["rows"]
            assert ([a["kind"] for a in visit["recent"]], visit["closed"]) == (["remove", "add"], False)
            assert [(a["kind"], a["sku"]) for a in visit["cart"]] == [("remove", "s7"), ("add", "s7")]
            expires = datetime.fromisoformat(visit["expires_at"]).timestamp()
            assert expires - datetime.fromisoformat(visit["session_end"]).timestamp() == 15
            while not visit["closed"]:  # nobody does anything
                assert alive()
                assert time.time() < last + 90
                await asyncio.sleep(0.2)
                [visit] = (await server.get("/v1/tables/visits/ann")).json()["rows"]
            assert time.time() >= expires
            async with asyncio.timeout(30):
                while (await server.get("/v1/tables/coupons")).json()["rows"]:  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
            assert await act(collector, "view") == [], "another visit"
            assert len((await server.get("/v1/tables/visits/ann")).json()["rows"]) == 2
        await asyncio.to_thread(stops.close)
    assert all(found.equal for found in verify(spark, place.settings, pipeline))

"""Collector and broker killed, the link cut, the disk full: what was acknowledged is kept, counts once, and in order.

Senders take turns at the ways in: an event a request, up to 50 a request, up to 50 under way on a WebSocket. Two cuts
of the link with a kill of the broker and of the collector, and a full disk run with the other tests, and look into
Kafka. ``-m chaos`` runs twenty of each and looks into bronze and a product (:mod:`tests.chaos.bronze` says
what is asserted there). A failure is repeated with CHAOS_SEED=N, which a test prints with what it found.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import signal
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from ingest.broker import EmbeddedBroker
from jobs.local.stack import free_port
from lakehouse.contract.envelope import Envelope
from tests.chaos.agent import dice, fill
from tests.chaos.bronze import check_bronze
from tests.chaos.disk import small_disk
from tests.chaos.installation import Advertising
from tests.chaos.proxy import Link
from tests.chaos.rig import KEYS, Rig
from tests.ingest.conftest import consume, event, eventually
from tests.ingest.conftest import request as ask

pytestmark = pytest.mark.broker


async def check_all(request: pytest.FixtureRequest, folder: Path, bootstrap: str, topic: str, rig: Rig) -> None:
    """In Kafka, and in bronze and a product where many kills were asked for; the collector is ended."""
    await asyncio.to_thread(check, bootstrap, topic, rig.acknowledged)
    await rig.kill()  # or it would go on sending what Kafka did not answer
    if request.node.get_closest_marker("chaos"):
        spark = request.getfixturevalue("spark")
        work = functools.partial(check_bronze, spark, folder, bootstrap, topic, rig.acknowledged, rig.sent)
        seen = await asyncio.to_thread(work)
        found = {"test": request.node.name, "acknowledged": len(set(rig.acknowledged)), **rig.by_way, **asdict(seen)}
        print(json.dumps(found | {"lost": 0, "counted_twice": 0}))


def check(bootstrap: str, topic: str, acknowledged: list[int]) -> None:
    records = consume(bootstrap, topic, len(set(acknowledged)), 120)
    found: dict[int, int] = defaultdict(int)
    order: dict[bytes, list[int]] = defaultdict(list)
    for record in records:
        envelope = Envelope.from_headers(record.headers)
        number = int(envelope.event_id)
        assert record.value == event(number)
        if found[number] == 0:
            order[record.key].append(number)
        found[number] += 1
    assert set(acknowledged) <= set(found), "acknowledged and lost"
    for key, numbers in order.items():
        assert numbers == sorted(numbers), f"order within {key!r}"


MANY = pytest.param(20, marks=pytest.mark.chaos, id="many")


@pytest.mark.parametrize("kills", [MANY])
async def test_the_collector_is_killed(
    request: pytest.FixtureRequest, broker: EmbeddedBroker, tmp_path: Path, kills: int
) -> None:
    chance, topic = dice("collector"), f"chaos-collector-{kills}"
    rig = Rig(tmp_path, broker.bootstrap, topic)
    await rig.start()
    try:
        async with rig.sending():
            for _ in range(kills):
                await rig.more(chance.randrange(1, 60))
                await asyncio.sleep(chance.random() * 0.1)
                await rig.kill()
                await rig.start()
            await rig.more(KEYS)
        await check_all(request, tmp_path / "bronze", broker.bootstrap, topic, rig)
    finally:
        await rig.kill()


@pytest.mark.parametrize("cuts", [pytest.param(2, id="short"), MANY])
async def test_the_link_is_cut_and_both_ends_are_killed(
    request: pytest.FixtureRequest, broker: EmbeddedBroker, tmp_path: Path, cuts: int
) -> None:
    """Kafka tells its clients its own address: so the broker behind the proxy is one that advertises the proxy's."""
    chance, topic = dice("link"), f"chaos-link-{cuts}"
    outer = free_port()
    own = Advertising(tmp_path / "kafka", outer)
    inner = int(own.settle().rpartition(":")[2])
    rig = Rig(tmp_path / "lake", f"127.0.0.1:{outer}", topic)
    try:
        async with Link(outer, inner) as link:
            await asyncio.to_thread(own.start, 180)
            await rig.start()
            async with rig.sending():
                await rig.more(KEYS)
                for turn in range(cuts):
                    hurt: list[Callable[[], None]] = [link.cut, link.half_close]
                    link.delay_s = chance.choice([0.0, 0.05])
                    await rig.more(chance.randrange(1, 40))
                    hurt[turn % 2]()
                    link.up = turn % 3 != 2
                    if not link.up:
                        link.cut()
                        await rig.more(30)  # into the log
                        link.up = True
                link.delay_s = 0.0
                await asyncio.to_thread(own.kill)
                await rig.more(chance.randrange(1, 30))
                await rig.kill()
                await rig.start()
                await rig.more(2 * KEYS)  # into the log, although Kafka has been away since the start
                assert (await ask(rig.url, "GET", "/readyz"))[0] == 200
                await asyncio.to_thread(own.start, 180)
                await rig.more(KEYS)
            assert link.carried
            await check_all(request, tmp_path / "bronze", f"127.0.0.1:{outer}", topic, rig)
    finally:
        await rig.kill()
        await asyncio.to_thread(own.kill)


@pytest.mark.parametrize("kills", [MANY])
async def test_the_broker_is_killed(request: pytest.FixtureRequest, tmp_path: Path, kills: int) -> None:
    chance = dice("broker")
    broker = EmbeddedBroker(tmp_path / "kafka", heap_mb=192, die_with_parent=True)
    bootstrap = await asyncio.to_thread(broker.start, 180)
    rig = Rig(tmp_path / "lake", bootstrap, "chaos-broker")
    await rig.start()
    try:
        async with rig.sending():
            for _ in range(kills):
                await rig.more(chance.randrange(1, 200))
                await asyncio.to_thread(broker.kill)
                await rig.more(chance.randrange(1, 50))  # into the log meanwhile
                await asyncio.to_thread(broker.start, 180)
            await rig.more(KEYS)
        await check_all(request, tmp_path / "bronze", bootstrap, "chaos-broker", rig)
    finally:
        await rig.kill()
        await asyncio.to_thread(broker.kill)


async def test_the_disk_is_full(broker: EmbeddedBroker, tmp_path: Path) -> None:
    """No file of the collector may grow beyond 64 KiB for a while, so that the log's writes fail."""
    rig = Rig(tmp_path, broker.bootstrap, "chaos-disk", file_bytes=65_536)
    await rig.start()
    try:
        async with rig.sending():
            await eventually(lambda: rig.refused > 0, 120)
            rig.allow()
            await rig.more(3 * KEYS)
        assert rig.child is not None and rig.child.returncode is None
        await asyncio.to_thread(check, broker.bootstrap, "chaos-disk", rig.acknowledged)
    finally:
        await rig.kill()


@pytest.mark.chaos
async def test_the_disk_is_full_many_times(
    request: pytest.FixtureRequest, broker: EmbeddedBroker, tmp_path: Path
) -> None:
    """A real file system runs out of room, twenty times; now and then the collector is killed meanwhile."""
    chance, topic = dice("disk"), "chaos-disk-many"
    with small_disk(tmp_path / "disk") as disk:
        rig = Rig(disk, broker.bootstrap, topic)
        await rig.start()
        try:
            async with rig.sending():
                for _ in range(20):
                    await rig.more(chance.randrange(1, 60))
                    refused = rig.refused
                    await asyncio.to_thread(fill, disk / "ballast")
                    await eventually(lambda refused=refused: rig.refused > refused, 120)  # type: ignore[misc]
                    killed = chance.random() < 0.3
                    if killed:
                        await rig.kill()
                    (disk / "ballast").unlink()
                    if killed:
                        await rig.start()
                await rig.more(KEYS)
            await check_all(request, tmp_path / "bronze", broker.bootstrap, topic, rig)
        finally:
            await rig.kill()


async def flood(url: str, first: int) -> int:
    """Send 500 events from this number on in one request; its status."""
    body = b"\n".join(event(number) for number in range(first, first + 500))
    status, _, _ = await ask(url, "POST", "/v1/clicks", body, content_type="application/x-ndjson")
    return status


@pytest.mark.chaos
@pytest.mark.parametrize("how", ["away", "silent", "slow"])
async def test_memory_stays_flat(tmp_path: Path, how: str) -> None:
    """Kafka takes nothing (killed, or stopped in its tracks) or little: memory does not follow the log, which fills."""
    outer = free_port()
    own = Advertising(tmp_path / "kafka", outer)
    inner = int(own.settle().rpartition(":")[2])
    rig = Rig(tmp_path / "lake", f"127.0.0.1:{outer}", f"chaos-memory-{how}", log_bytes=192 * 1024 * 1024)
    async with Link(outer, inner) as link:
        try:
            await asyncio.to_thread(own.start, 180)
            await rig.start()
            await ready(rig)
            pid = own.pid
            assert pid is not None
            link.delay_s = 0.2 if how == "slow" else 0.0
            if how == "away":
                await asyncio.to_thread(own.kill)
            elif how == "silent":
                os.kill(pid, signal.SIGSTOP)
            taken, refused, resident = 0, 0, {0: rig.resident_mb}
            log_of = {0: 0.0}
            while refused < 20 and taken < 1_500_000:
                status = await flood(rig.url, taken)
                taken += 500 * (status == 202)
                refused += status == 503
                if status == 202 and taken % 50_000 == 0:
                    resident[taken] = rig.resident_mb
                    _, _, stats = await ask(rig.url, "GET", "/v1/stats")
                    log_of[taken] = stats["log"]["bytes"] / 1e6
            resident[taken] = rig.resident_mb
            found = {"test": f"memory, Kafka {how}", "events": taken, "refused": refused, "log_mb": log_of}
            print(json.dumps(found | {"resident_mb": {n: round(mb) for n, mb in resident.items()}}))
            assert refused or how == "slow", "the log's bound holds"
            settled = [mb for n, mb in resident.items() if n >= 150_000]
            assert settled and max(settled) - settled[0] < 64, "memory does not grow with the log"
            if how == "away":
                await asyncio.to_thread(own.start, 180)
            elif how == "silent":
                os.kill(pid, signal.SIGCONT)
            link.delay_s = 0.0
            await arrived(rig, taken)
        finally:
            await rig.kill()
            await asyncio.to_thread(own.kill)


async def ready(rig: Rig) -> None:
    """Return when the collector takes events."""

    async def look() -> int:
        with contextlib.suppress(OSError):
            return (await ask(rig.url, "GET", "/readyz"))[0]
        return 0

    async with asyncio.timeout(120):
        while await look() != 200:  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.05)


async def arrived(rig: Rig, count: int) -> None:
    """Return when Kafka has all of them."""
    async with asyncio.timeout(240):
        while True:
            _, _, stats = await ask(rig.url, "GET", "/v1/stats")
            source = stats["sources"]["clicks"]
            if source["in_log"] == 0 and source["published"] == source["received"] >= count:
                return
            await asyncio.sleep(0.2)

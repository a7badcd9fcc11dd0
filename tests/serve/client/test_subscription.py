from __future__ import annotations

import asyncio
import itertools
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from websockets.asyncio.client import connect
from websockets.asyncio.server import ServerConnection, serve

from jobs.local.stack import free_port
from serve.client import (
    Change,
    ClientError,
    ClientOptions,
    FileStore,
    MemoryStore,
    Message,
    Refused,
    Snapshot,
    TableQuery,
    TableView,
    subscribe,
)
from tests.serve.conftest import Spawned, serving, wait_until
from tests.serve.lakes import Product, top_topics, topics, window

HEAVY = (
    "pyspark",
    "pyarrow",
    "deltalake",
    "duckdb",
    "starlette",
    "uvicorn",
    "msgspec",
    "sqlglot",
    "sqlalchemy",
    "kafka",
)


def counts(message: Message) -> list[int]:
    return [row["count"] for row in (message.rows if isinstance(message, Snapshot) else message.upserts)]


async def test_a_view_is_the_table(root: Path) -> None:
    product = top_topics(root)
    product.overwrite(topics(0, [3, 2]), [window(0)])
    async with serving(root) as url, subscribe(url, "top_topics") as subscription:
        view = TableView()
        async for message in subscription:
            view.apply(message)
            if isinstance(message, Snapshot):
                assert message.reason == ""
                product.overwrite(topics(0, [4]), [window(0)])
            else:
                assert (message.events, message.through) == (10, {"rsvps/0": 20})
                break
    assert [row["count"] for row in view.rows.values()] == [4]
    assert list(view.rows) == [("2026-01-01T00:00:00Z", 1)]


async def test_the_next_run_goes_on_where_the_last_one_stopped(root: Path, tmp_path: Path) -> None:
    product = top_topics(root)
    store = FileStore(tmp_path / "position")
    seen: list[int] = []
    async with serving(root) as url:
        for run in range(3):
            for count in range(4):
                product.overwrite(topics(0, [run * 4 + count + 1]), [window(0)])
            async with subscribe(url, "top_topics", store) as subscription:
                async for message in subscription:
                    seen.extend(counts(message))
                    if seen[-1] == (run + 1) * 4:
                        break
            assert subscription.position == await store.load() == message.position
    assert seen == [4, *range(5, 13)]


async def test_what_failed_to_be_processed_comes_again(root: Path) -> None:
    product = top_topics(root)
    store = MemoryStore()
    async with serving(root) as url:
        async with subscribe(url, "top_topics", store) as subscription:
            await anext(aiter(subscription))
        product.overwrite(topics(0, [1]), [window(0)])
        product.overwrite(topics(0, [2]), [window(0)])
        with pytest.raises(ZeroDivisionError):
            async with subscribe(url, "top_topics", store) as subscription:
                async for _ in subscription:
                    raise ZeroDivisionError
        async with subscribe(url, "top_topics", store) as subscription:
            reader = aiter(subscription)
            assert [counts(await anext(reader)) for _ in range(2)] == [[1], [2]]


async def test_the_server_is_killed_and_every_change_is_applied_once(root: Path, spawned: list[Spawned]) -> None:
    product = top_topics(root)
    port = free_port()
    spawned.append(Spawned(root, poll_ms=5, port=port))
    async with subscribe(spawned[0].url, "top_topics") as subscription:
        reader = aiter(subscription)
        assert isinstance(await anext(reader), Snapshot)
        seen = []
        for count in range(1, 31):
            await asyncio.to_thread(product.overwrite, topics(0, [count]), [window(0)])
            if count % 10 == 5:
                spawned[-1].kill()
            elif count % 10 == 9:
                spawned.append(await asyncio.to_thread(Spawned, root, poll_ms=5, port=port))
                async with asyncio.timeout(60):  # else the next kill may come before the client has found it
                    while subscription.connects < len(spawned):  # noqa: ASYNC110 - it has no event to wait for
                        await asyncio.sleep(0.02)
        async with asyncio.timeout(60):
            while len(seen) < 30:
                message = await anext(reader)
                assert isinstance(message, Change)
                seen.extend(counts(message))
        assert seen == list(range(1, 31))
        assert subscription.connects >= len(spawned)


READER = """
import asyncio, sys
from serve.client import FileStore, subscribe

async def main():
    async with subscribe(sys.argv[1], "top_topics", FileStore(sys.argv[2])) as subscription:
        async for message in subscription:
            rows = message.upserts if hasattr(message, "upserts") else message.rows
            for row in rows:
                print(row["count"], flush=True)

asyncio.run(main())
"""


async def test_a_killed_reader_misses_nothing_and_repeats_one_message_at_most(root: Path, tmp_path: Path) -> None:
    product = top_topics(root)
    runs: list[list[int]] = []
    async with serving(root) as url:
        read = asyncio.Event()
        writing = asyncio.create_task(write_until(product, read))
        for _ in range(4):
            lines = await asyncio.to_thread(read_and_kill, url, tmp_path / "position", 10)
            runs.append(lines)
        read.set()
        await writing
    for before, after in itertools.pairwise(runs):
        assert after[0] in (before[-1], before[-1] + 1)
        assert after == list(range(after[0], after[0] + len(after)))


def read_and_kill(url: str, path: Path, lines: int) -> list[int]:
    with subprocess.Popen(
        [sys.executable, "-c", READER, url, str(path)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])},
    ) as process:
        assert process.stdout is not None
        read = [int(process.stdout.readline()) for _ in range(lines)]
        process.send_signal(signal.SIGKILL)
        return read + [int(line) for line in process.stdout]


async def write_until(product: Product, read: asyncio.Event) -> None:
    """A change every 50 ms or so for as long as somebody reads: however slowly readers start, each finds some."""
    for count in itertools.count(1):
        if read.is_set():
            return
        await asyncio.to_thread(product.overwrite, topics(0, [count]), [window(0)])
        await asyncio.sleep(0.05)


async def test_several_readers_share_one_subscription(root: Path) -> None:
    product = top_topics(root)
    store = MemoryStore()
    async with serving(root) as url, subscribe(url, "top_topics", store) as subscription:
        first, second = subscription.reader(), subscription.reader()
        snapshot = await anext(first)
        for count in (1, 2, 3):
            product.overwrite(topics(0, [count]), [window(0)])
        one = await anext(second)
        two = await anext(first)  # says that the snapshot is processed
        three = await anext(first)  # says that `two` is processed, which `one` before it is not
        assert [counts(message) for message in (one, two, three)] == [[1], [2], [3]]
        assert subscription.position == store.position == snapshot.position
        assert subscription.behind == 3
        waiting = asyncio.ensure_future(anext(second))
        await wait_until(lambda: store.position == two.position)
        assert subscription.connects == 1
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)


async def test_a_reader_knows_that_it_is_too_slow(root: Path) -> None:
    product = top_topics(root)
    async with (
        serving(root, heartbeat_ms=50) as url,
        subscribe(url, "top_topics", options=ClientOptions(queue=2)) as subscription,
    ):
        reader = aiter(subscription)
        await anext(reader)
        await wait_until(lambda: subscription.lag_ms is None and subscription.keeping_up)
        for count in range(4):
            product.overwrite(topics(0, [count]), [window(0)])
        await wait_until(lambda: not subscription.keeping_up)
        assert subscription.behind >= 3
        for _ in range(4):
            await anext(reader)
        await wait_until(lambda: subscription.keeping_up and subscription.lag_ms is not None)


async def test_a_void_position_gives_a_snapshot_that_says_why(root: Path) -> None:
    product = top_topics(root)
    for count in range(3):
        product.overwrite(topics(0, [count]), [window(0)])
    async with serving(root) as url:
        store = MemoryStore()
        async with subscribe(url, "top_topics", store) as subscription:
            await anext(aiter(subscription))
    for count in range(3):
        product.overwrite(topics(0, [count]), [window(0)])
    product.table.vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)
    async with serving(root) as url, subscribe(url, "top_topics", store) as subscription:
        message = await anext(aiter(subscription))
        assert isinstance(message, Snapshot)
        assert message.reason == "log"


async def test_a_position_of_garbage_is_refused_to_every_reader(root: Path) -> None:
    top_topics(root)
    async with serving(root) as url, subscribe(url, "top_topics", MemoryStore("garbage")) as subscription:
        for reader in (subscription.reader(), subscription.reader()):
            with pytest.raises(Refused) as refused:
                await anext(reader)
            assert refused.value.code == "bad_position"


@pytest.mark.parametrize("url", ["ftp://x", "localhost:8400", "http://"])
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(ClientError):
        subscribe(url, "t")


def test_the_client_imports_what_its_extra_installs_and_nothing_else() -> None:
    script = "import sys, serve.client; print(*sorted(name for name in sys.modules if name.split('.')[0] == 'serve'))"
    root = Path(__file__).parents[3]
    blocked = "".join(f"sys.modules[{name!r}] = None\n" for name in HEAVY)  # an import of one fails
    program = f"import sys\n{blocked}{script}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=root)
    loaded = done.stdout.split()
    assert all(name == "serve" or name.startswith("serve.client") for name in loaded)
    assert {"serve.client.subscription", "serve.client.publish", "serve.client.once"} <= set(loaded)


async def test_a_change_that_is_lost_on_the_way_is_noticed_and_asked_for_again(root: Path) -> None:
    product = top_topics(root)
    product.overwrite(topics(0, [1]), [window(0)])
    dropped: list[str] = []

    async with serving(root) as url:

        async def relay(front: ServerConnection) -> None:
            """A middle that swallows the second change, once."""
            assert front.request is not None
            async with connect(url.replace("http", "ws") + front.request.path, compression=None) as back:
                async for text in back:
                    if '"count":3' in str(text) and '"change"' in str(text) and not dropped:
                        dropped.append(str(text))
                    else:
                        await front.send(text)

        async with (
            serve(relay, "127.0.0.1", 0, compression=None) as middle,
            subscribe(
                f"http://127.0.0.1:{middle.sockets[0].getsockname()[1]}",
                "top_topics",
                query=TableQuery("count > 0", ["count"]),
            ) as subscription,
        ):
            reader = aiter(subscription)
            assert counts(await anext(reader)) == [1]
            for count in (2, 3, 4):
                product.overwrite(topics(0, [count]), [window(0)])
            assert [counts(await anext(reader)) for _ in range(3)] == [[2], [3], [4]]
            assert (len(dropped), subscription.gaps, subscription.connects) == (1, 1, 2)

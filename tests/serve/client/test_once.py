"""Exactly once to a third party: the royalties example, killed after each of its steps, and the handler's promises."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sqlite3
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import closing
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from docs.examples.royalties.pay import SHARE
from docs.examples.royalties.payments import PaymentService
from lakehouse.contract import lake
from serve.client import Change, ClientError, Declined, ExactlyOnce, SeenItem, SqliteSeen
from tests.crash_points import ONCE_CRASH_POINTS
from tests.serve.conftest import serving, wait_until
from tests.serve.lakes import Product

ROOT = Path(__file__).parents[3]
PAY = ROOT / "docs" / "examples" / "royalties" / "pay.py"
ROYALTIES = pa.schema([("statement", pa.string()), ("owner", pa.string()), ("plays", pa.int64())])


class Society:
    """The table of royalties, the service that pays, and the client that is killed."""

    def __init__(self, folder: Path, root: Path, url: str, seed: int) -> None:
        self.random = random.Random(seed)
        self.table = Product(root / "gold" / "royalties", ROYALTIES, {lake.PROPERTY_KEY: "statement"})
        self.service = PaymentService(str(folder / "paid.db"), 0, unanswered=0.2, lost=0.1, seed=seed)
        self.log = folder / "pay.db"
        self.due: dict[str, tuple[str, int]] = {}
        self._url = url
        self._thread = threading.Thread(target=self.service.serve_forever)

    def __enter__(self) -> Society:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.service.shutdown()
        self._thread.join()
        self.service.server_close()

    def commit(self) -> None:
        """One or two royalties more."""
        rows = []
        for _ in range(self.random.randint(1, 2)):
            row = {"statement": f"s{len(self.due)}", "owner": f"o{len(self.due) % 3}"}
            row["plays"] = self.random.randint(1, 100_000)
            self.due[row["statement"]] = row["owner"], int(row["plays"] * SHARE * Decimal(100))
            rows.append(row)
        self.table.append(rows)

    async def client(self, crash_at: str = "") -> asyncio.subprocess.Process:
        arguments = [PAY, self._url, self.service.url, self.log, "--settle-s", "0.3"]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "MILLRACE_CRASH_AT": crash_at}
        return await asyncio.create_subprocess_exec(sys.executable, *arguments, env=environment)

    async def until_killed(self, client: asyncio.subprocess.Process) -> None:
        """Royalties come as long as the client lives."""
        try:
            async with asyncio.timeout(60):
                ended = asyncio.create_task(client.wait())
                while not ended.done():
                    if len(self.due) < len(self.service.payments()) + 6:
                        await asyncio.to_thread(self.commit)
                    await asyncio.wait({ended}, timeout=0.05)
        finally:
            await end(client)
        assert client.returncode == -signal.SIGKILL

    async def settled(self) -> None:
        """A client that nobody kills pays what is left; then all is as it should be."""
        client = await self.client()
        try:
            await wait_until(lambda: len(self.service.payments()) >= len(self.due) and self.under_way() == 0)
            await asyncio.sleep(0.5)  # for a payment too many
        finally:
            await end(client)
        assert sorted(self.service.payments()) == sorted((royalty, *due) for royalty, due in self.due.items())

    def under_way(self) -> int:
        with closing(sqlite3.connect(self.log)) as database:
            counted = "SELECT (SELECT count(*) FROM messages) + (SELECT count(*) FROM requests)"
            return int(database.execute(counted).fetchone()[0])


async def end(client: asyncio.subprocess.Process) -> None:
    if client.returncode is None:
        client.kill()
    await client.wait()


async def test_every_royalty_is_paid_once_though_the_client_is_killed_after_each_step(
    root: Path, tmp_path: Path
) -> None:
    async with serving(root) as url:
        with Society(tmp_path, root, url, seed=7) as society:
            for point in ONCE_CRASH_POINTS:
                await society.until_killed(await society.client(f"{point}:{society.random.randint(1, 3)}"))
            await society.settled()


@pytest.mark.chaos
@pytest.mark.parametrize("seed", range(20))
async def test_every_royalty_is_paid_once_whenever_the_client_is_killed(root: Path, tmp_path: Path, seed: int) -> None:
    async with serving(root) as url:
        with Society(tmp_path, root, url, seed) as society:
            for point in society.random.sample(ONCE_CRASH_POINTS, len(ONCE_CRASH_POINTS)):
                await society.until_killed(await society.client(f"{point}:{society.random.randint(1, 9)}"))
                client = await society.client()
                asyncio.get_running_loop().call_later(society.random.uniform(0.5, 2.5), client.kill)
                await society.until_killed(client)
            await society.settled()


class Ledger:
    """A third party that notes what it is asked, and does as it is told."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.asked = 0
        self.answers = True
        self.fails = 0
        self.declines: set[str] = set()

    def items(self, message: Change) -> Iterator[tuple[str, Mapping[str, Any]]]:
        return ((row["id"], row) for row in message.upserts)

    def process(self, item: Mapping[str, Any]) -> Mapping[str, Any]:
        return item

    async def request(self, item_id: str, request: Mapping[str, Any]) -> Any:
        if item_id in self.declines:
            raise Declined("no such account")
        if self.fails:
            self.fails -= 1
            raise TimeoutError
        self.done.append(item_id)
        return "ok" if self.answers else None

    async def lookup(self, item_id: str, request: Mapping[str, Any]) -> Any:
        self.asked += 1
        return "found" if item_id in self.done else None


def change(position: str, *ids: str) -> Change:
    return Change("t", ("id",), position, [{"id": each} for each in ids], [], None, 0, 1, None, None)


async def test_a_third_party_that_never_answers_is_asked_instead(tmp_path: Path) -> None:
    ledger = Ledger()
    ledger.answers = False
    async with ExactlyOnce(ledger, tmp_path / "log", settle_s=5) as once:
        await once.process(change("p1", "a", "b"))
        assert (ledger.done, ledger.asked) == (["a", "b"], 2)
        assert {item.answer for item in (await once.state(["a", "b"])).values()} == {"found"}


async def test_a_failed_request_is_sent_again_only_when_it_can_no_longer_take_effect(tmp_path: Path) -> None:
    ledger = Ledger()
    ledger.fails = 1
    loop = asyncio.get_running_loop()
    began = loop.time()
    async with ExactlyOnce(ledger, tmp_path / "log", settle_s=0.4) as once:
        await once.process(change("p1", "a"))
    assert ledger.done == ["a"]
    assert loop.time() - began >= 0.4


async def test_what_is_declined_is_not_asked_again_and_holds_nothing_up(tmp_path: Path) -> None:
    ledger = Ledger()
    ledger.declines = {"a"}
    async with ExactlyOnce(ledger, tmp_path / "log") as once:
        await once.process(change("p1", "a", "b"))
        ledger.declines = set()
        await once.process(change("p2", "a", "b", "c"))
        declined = (await once.state(["a"]))["a"]
        assert (declined.state, declined.answer) == ("declined", "no such account")
    assert ledger.done == ["b", "c"]


async def test_another_machine_takes_over_by_the_shared_store(tmp_path: Path) -> None:
    ledger = Ledger()
    shared = SqliteSeen(tmp_path / "shared")
    async with ExactlyOnce(ledger, tmp_path / "first", shared=shared) as once:
        await once.process(change("p1", "a"))
    ledger.done.append("b")  # the first machine is lost after it has asked, and before it has noted the answer
    await shared.put([SeenItem("b", "sending", 0.0)])
    async with ExactlyOnce(ledger, tmp_path / "second", shared=shared) as once:
        await once.process(change("p1", "a", "b", "c"))
    assert ledger.done == ["a", "b", "c"]
    assert {item.state for item in (await shared.get(["a", "b", "c"])).values()} == {"done"}
    shared.close()


async def test_nothing_is_sent_while_the_shared_store_is_away(tmp_path: Path) -> None:
    ledger = Ledger()
    shared = Away(tmp_path / "shared")
    async with ExactlyOnce(ledger, tmp_path / "log", shared=shared) as once:
        work = asyncio.create_task(once.process(change("p1", "a")))
        await wait_until(lambda: shared.asked > 2)
        assert ledger.done == []
        shared.away = False
        await work
        assert ledger.done == ["a"]
    shared.close()


class Away(SqliteSeen):
    """A shared store that is not reached at first."""

    away = True
    asked = 0

    async def get(self, ids: Any) -> Any:
        self.asked += 1
        if self.away:
            raise ConnectionError
        return await super().get(ids)


async def test_one_process_at_a_time(tmp_path: Path) -> None:
    async with ExactlyOnce(Ledger(), tmp_path / "log"):
        with pytest.raises(ClientError, match="another process"):
            await ExactlyOnce(Ledger(), tmp_path / "log").__aenter__()
    async with ExactlyOnce(Ledger(), tmp_path / "log"):
        pass

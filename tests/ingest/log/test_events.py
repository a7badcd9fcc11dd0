"""Groups of events that become durable together."""

from __future__ import annotations

import asyncio

from ingest.log.events import CommitGroup


async def test_one_that_cannot_be_told_keeps_nobody_else_from_it() -> None:
    told: list[str] = []

    def fail() -> None:
        told.append("fails")
        raise TypeError("recursion limit reached")

    group = CommitGroup()
    for call in (lambda: told.append("before"), fail, lambda: told.append("after")):
        group.then(call)
    waiting = asyncio.create_task(group.wait())
    await asyncio.sleep(0)
    group.close()
    async with asyncio.timeout(60):
        await waiting
    assert (told, group.acknowledgeable) == (["before", "fails", "after"], True)

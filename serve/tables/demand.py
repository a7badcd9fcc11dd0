"""What the subscribers of this process want, told upstream (:mod:`lakehouse.contract.pipeline.demand`)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Mapping

from lakehouse.contract.pipeline import Pipeline
from lakehouse.contract.pipeline.demand import LOOK_S, DemandNote, Want, sources_of
from serve.core.channel import ViewStream
from serve.core.hub import Hub
from serve.tables.tables import Tables, clock_ms

log = logging.getLogger(__name__)

_ASKED_MS = 10_000


async def tell_demand(hub: Hub, tables: Tables, pipeline: Callable[[], Pipeline]) -> None:
    """Say what subscribers want, until cancelled.

    A table may not exist before its first event: who was refused because of that counts as a subscriber for a while.
    Nothing is taken back at the end: the subscribers may be about to connect to another process.
    """
    note, failed = DemandNote(tables.lake), False

    def tell(followed: Iterable[tuple[str, ViewStream]], asked: Iterable[tuple[str, str]]) -> None:
        declared, reads = pipeline(), tables.reads
        missing = {Want(tenant, source) for tenant, table in asked for source in sources_of(table, declared, reads)}
        note.tell(_wants(followed, declared, reads) | missing)

    while True:
        late = clock_ms() - _ASKED_MS
        for asked in [asked for asked, at in tables.asked.items() if at < late]:
            del tables.asked[asked]
        try:
            await asyncio.to_thread(tell, list(hub.followed), list(tables.asked))
            failed = False
        except Exception:  # tried again; what was said holds as long as the lease
            if not failed:
                log.exception("collectors cannot be told what subscribers want")
            failed = True
        await asyncio.sleep(LOOK_S)


def _wants(
    followed: Iterable[tuple[str, ViewStream]], pipeline: Pipeline, reads: Mapping[str, Collection[str]]
) -> frozenset[Want]:
    sources: dict[str, set[str]] = {}
    wants: set[Want] = set()
    for tenant, stream in followed:
        table = stream.channel.name
        if table not in sources:
            sources[table] = sources_of(table, pipeline, reads)
        column, values = stream.pinned or ("", frozenset(("",)))
        wants.update(Want(tenant, source, column, value) for source in sources[table] for value in values)
    return frozenset(wants)

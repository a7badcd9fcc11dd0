"""``millrace collect``: a collecting node that tells how far it is with what an earlier run left in its log."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ingest.node import CollectorNode, run_collector

log = logging.getLogger(__name__)

_BAR_S = 0.2
_LINE_S = 5.0


async def collect_until(console: Console, *arguments: Any, **options: Any) -> None:
    """:func:`ingest.node.run_collector`, and the progress of its replay.

    Args:
        console: gets a bar where it is a terminal; else there is a line in the log now and then.
        arguments: of ``run_collector``.
        options: of ``run_collector``.
    """
    telling: list[asyncio.Task[None]] = []

    def made(node: CollectorNode) -> None:
        telling.append(asyncio.create_task(_tell(node, console)))

    try:
        await run_collector(*arguments, made=made, **options)
    finally:
        for task in telling:
            task.cancel()
        await asyncio.gather(*telling, return_exceptions=True)


async def _tell(node: CollectorNode, console: Console) -> None:
    left, of = node.replay
    if not console.is_terminal:
        while left:
            log.info("%d of %d events of an earlier run are still to be sent to Kafka", left, of)
            await asyncio.sleep(_LINE_S)
            left, of = node.replay
        return
    columns = (TextColumn("sending again"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not left) as bar:
        shown = bar.add_task("", total=of)
        while left:
            bar.update(shown, completed=of - left)
            await asyncio.sleep(_BAR_S)
            left, of = node.replay
        bar.update(shown, completed=of)

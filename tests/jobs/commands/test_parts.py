"""What ``millrace collect`` shows while it sends again what an earlier run left."""

from __future__ import annotations

import asyncio
import io
import logging
from pathlib import Path

import pytest
from rich.console import Console

from ingest.broker import EmbeddedBroker
from ingest.log.message_log import MessageLog
from ingest.node import CollectorNode
from jobs.commands.parts import collect_until
from lakehouse.contract.lake import Lake
from tests.ingest.conftest import LIMIT, append, consume, pipeline_of, settings_of

pytestmark = pytest.mark.broker


@pytest.mark.parametrize("terminal", [True, False])
async def test_the_replay_is_shown(
    broker: EmbeddedBroker, tmp_path: Path, caplog: pytest.LogCaptureFixture, terminal: bool
) -> None:
    log = MessageLog(Lake(tmp_path).collector_log("collector-1"), "collector-1", limit=LIMIT)
    lane = log.lane("clicks/http/0", "clicks")
    for number in range(30):
        append(log, lane, number)
    await log.close()
    caplog.set_level(logging.INFO, logger="jobs.commands.parts")
    written, stop, topic = io.StringIO(), asyncio.Event(), f"collecting-{terminal}"
    console = Console(file=written, force_terminal=terminal, width=100)
    collector = CollectorNode(settings_of(tmp_path, broker.bootstrap), pipeline_of(topic, "http"))
    node = asyncio.create_task(collect_until(stop, collector, console, lambda _: stop.set()))
    async with asyncio.timeout(60):
        await node
    assert len(await asyncio.to_thread(consume, broker.bootstrap, topic, 30)) >= 30
    lines = [record.getMessage() for record in caplog.records if record.name == "jobs.commands.parts"]
    if terminal:
        assert "sending again" in written.getvalue() and "0/30" in written.getvalue()
        assert not lines
    else:
        assert lines[0] == "30 of 30 events of an earlier run are still to be sent to Kafka"
        assert not written.getvalue()

"""The wikipedia pipeline over its whole way: our player as the SSE upstream, collector, Kafka, bronze, products.

Played is the recording of Wikipedia edits where it is there, made into ``recentchange`` events, else the seeded scene.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import threading
import uuid
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from ingest.broker import EmbeddedBroker
from ingest.simulate.scenes import SCENES
from jobs.account import end_offsets, tables_through
from lakehouse.contract.lake import Lake
from lakehouse.contract.pipeline import Pipeline, load_pipeline
from lakehouse.contract.settings import CollectSettings, conf_dir, load_settings
from lakehouse.stages import Stages
from tests.ingest.conftest import running_node
from tests.ingest.streams import Link, playing
from tests.lakehouse.lakes import driving, eventually
from tests.recordings import RECORDINGS

pytestmark = [pytest.mark.spark, pytest.mark.broker]
DATA = RECORDINGS / "events/wikiticker-2015-09-12-sampled.json.gz"
EVENTS = 3_000
CUTS = 6  # of the connection; not without end, so that the slowest machine comes to the end of the stream


def recorded() -> Iterator[dict[str, Any]]:
    """Rows of the recording as Wikimedia would send them today."""
    with gzip.open(DATA, "rt", encoding="utf-8") as file:
        for number, line in enumerate(islice(file, EVENTS)):
            row = json.loads(line)
            language, _, project = row["channel"].removeprefix("#").partition(".")
            at = datetime.fromisoformat(row["time"])
            yield {
                "meta": {"id": f"ticker-{number}", "dt": row["time"], "domain": f"{language}.{project}.org"},
                "id": number, "type": "new" if row["isNew"] else "edit", "title": row["page"], "user": row["user"],
                "timestamp": int(at.timestamp()), "bot": row["isRobot"], "minor": row["isMinor"],
                "wiki": f"{language}wiki", "server_name": f"{language}.{project}.org", "comment": row["comment"],
                "length": {"old": 10_000, "new": 10_000 + (row["delta"] or 0)},
            }  # fmt: skip


def played(folder: Path) -> tuple[Path, list[dict[str, Any]]]:
    """The file to play, some of it twice, and its events."""
    events = (
        list(recorded()) if DATA.exists() else [p for _, p in islice(SCENES["wikipedia"](7, 1_767_268_800_000), EVENTS)]
    )
    lines = [json.dumps(event, ensure_ascii=False) for event in events]
    path = folder / "edits.jsonl"
    path.write_text("\n".join([*lines, *lines[::20], "{broken"]), encoding="utf-8")
    return path, events


class Expected:
    """What the products must be, in plain Python."""

    def __init__(self, events: list[dict[str, Any]]) -> None:
        self.wikis: dict[tuple[datetime, str, str], list[int]] = defaultdict(lambda: [0, 0, 0])
        self.pages: dict[datetime, Counter[str]] = defaultdict(Counter)
        self.editors: dict[datetime, set[str]] = defaultdict(set)
        for event in events:
            if event["type"] not in ("edit", "new") or event["meta"]["domain"] == "canary":
                continue
            minute = datetime.fromtimestamp(event["timestamp"] // 60 * 60, UTC)
            size = event.get("length") or {}
            language, _, project = event["server_name"].partition(".")
            row = self.wikis[minute, event["wiki"], language if project.startswith(("wikip", "wikt")) else ""]
            row[0] += 1
            row[1] += bool(event["bot"])
            row[2] += (size.get("new") or 0) - (size.get("old") or 0)
            self.pages[minute][f"{event['wiki']} {event['title']}"] += 1
            self.editors[minute].add(f"{event['wiki']} {event['user']}")


def rows(lake: Lake, name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = DeltaTable(str(lake.table("gold", name).path)).to_pyarrow_table().to_pylist()
    return found


def check(lake: Lake, expected: Expected) -> None:
    assert {
        (r["window_start"], r["wiki"], r["language"]): [r["edits"], r["by_bots"], r["bytes"]]
        for r in rows(lake, "edits_by_wiki")
    } == expected.wikis
    tops: dict[datetime, dict[str, int]] = defaultdict(dict)
    for row in rows(lake, "top_pages"):
        assert row["error"] == 0
        tops[row["window_start"]][row["item"]] = row["count"]
    for minute, counts in expected.pages.items():
        assert sorted(tops[minute].values(), reverse=True) == sorted(counts.values(), reverse=True)[:10]
        assert all(counts[page] == count for page, count in tops[minute].items())
    for row in rows(lake, "editors"):
        assert row["lower"] <= len(expected.editors[row["window_start"]]) <= row["upper"]
    assert {r["window_start"] for r in rows(lake, "editors")} == set(expected.editors)


@contextlib.contextmanager
def upstream_and_node(pipeline: Pipeline, lake: Path, file: Path, bootstrap: str) -> Iterator[None]:
    """The player behind a link that is cut now and then, and a collecting node, in a thread of their own."""
    stop = threading.Event()
    started = threading.Event()
    settings = replace(load_settings({}, lake=lake), collect=CollectSettings(port=0, backoff_max_s=0.2))

    lines = file.read_bytes().split(b"\n")

    async def main() -> None:
        async with playing(file.parent, lines, 3_000.0) as port, Link(port) as link:
            urls = {"edits": f"http://127.0.0.1:{link.port}/sse?from=0"}
            async with running_node(settings, pipeline, bootstrap, urls=urls):
                started.set()
                for _ in range(CUTS):
                    await asyncio.sleep(0.4)
                    link.cut()
                await asyncio.to_thread(stop.wait)

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    try:
        assert started.wait(60)
        yield
    finally:
        stop.set()
        thread.join()


def test_edits_through_everything(spark: SparkSession, broker: EmbeddedBroker, tmp_path: Path) -> None:
    file, events = played(tmp_path)
    pipeline = load_pipeline(conf_dir() / "pipelines" / "wikipedia")
    topic = f"edits-{uuid.uuid4().hex[:8]}"
    pipeline = replace(pipeline, sources={"edits": replace(pipeline.sources["edits"], topic=topic)})
    lake = Lake(tmp_path / "lake")
    settings = load_settings({}, lake=lake.root, pipeline="wikipedia")

    with (
        upstream_and_node(pipeline, lake.root, file, broker.bootstrap),
        driving(spark, settings, pipeline, Stages(), broker.bootstrap) as driver,
    ):
        total = EVENTS + EVENTS // 20 + 1

        def done() -> bool:
            ends = end_offsets(broker.bootstrap, [topic])
            return ends is not None and sum(ends.values()) >= total and tables_through(lake, pipeline, ends)

        eventually(done, 300, driver.is_alive)
    check(lake, Expected(events))
    refused = DeltaTable(str(lake.quarantine().path)).to_pyarrow_table().to_pylist()
    assert [row["payload"] for row in refused] == ["{broken"]

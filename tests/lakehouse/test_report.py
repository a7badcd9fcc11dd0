"""What `millrace tables` tells, care by a process of its own, and readers of every kind of table."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
from deltalake import DeltaTable
from typer.testing import CliRunner

from ingest.broker import EmbeddedBroker
from jobs.cli import app
from jobs.local.broker import Topics, ensure_topics
from lakehouse.bronze.table import Progress
from lakehouse.contract.lake import Lake
from lakehouse.contract.pipeline import Pipeline
from lakehouse.errors import LakehouseError
from lakehouse.lock import WriterLocks
from lakehouse.maintain.care import leading, maintain
from lakehouse.maintain.report import ALARM, OK, WARN, Backlog, TableFacts, table_facts
from lakehouse.quality.notes import accepted
from tests.lakehouse.lakes import mixture, pipeline_in, produce
from tests.lakehouse.test_maintain import bronze, reading, store_with

ROOT = Path(__file__).parents[2]


@pytest.fixture
def clicks(tmp_path: Path) -> Pipeline:
    return pipeline_in(tmp_path / "p", "clicks")


def facts(lake: Lake, pipeline: Pipeline, found: Backlog | None = None) -> dict[str, TableFacts]:
    return {item.name: item for item in table_facts(lake, pipeline, lambda *_: found)}


def test_facts_of_a_lake(tmp_path: Path, clicks: Pipeline) -> None:
    lake = Lake(tmp_path / "lake")
    table = bronze(lake, 6)
    store_with(lake, clicks.products["totals"], 3)
    reading(lake, table, 7)
    found = facts(lake, clicks, Backlog(5, 10.0, 0, 1000.0))
    assert (found["clicks"].version, found["clicks"].files, found["clicks"].behind) == (6, 6, 5)
    assert (found["clicks"].health, found["clicks"].keeps) == (OK, "")
    totals = found["totals"]
    assert (totals.rows, totals.version, totals.oldest, totals.log_s) == (3, 3, 0, 6 * 3600)
    assert totals.behind == 4  # its mark says that version 3 is next, and bronze is at 6
    assert totals.bytes > 0


def test_what_comes_near_a_retention_is_told_before_it_bites(tmp_path: Path, clicks: Pipeline) -> None:
    lake = Lake(tmp_path / "lake")
    table = bronze(lake, 3)
    reading(lake, table, 2)
    assert facts(lake, clicks)["clicks"].health == OK
    assert facts(lake, clicks, Backlog(5, 600.0, 0, 1000.0))["clicks"].health == WARN
    near = facts(lake, clicks, Backlog(5, 900.0, 0, 1000.0))["clicks"]
    assert near.health == ALARM
    assert near.remarks == (
        "records have waited 15 minutes in the topic, which keeps them for 17 minutes: run the pipeline",
    )
    assert "no longer holds 7 records" in facts(lake, clicks, Backlog(0, 0.0, 7, 1000.0))["clicks"].remarks[0]
    assert "began anew" in facts(lake, clicks, Backlog(0, 0.0, 0, 1000.0, anew=True))["clicks"].remarks[0]
    log_s = facts(lake, clicks)["clicks"].log_s
    old = time.time() - 0.9 * log_s
    os.utime(table.path / "_delta_log" / f"{2:020d}.json", (old, old))
    late = facts(lake, clicks)["clicks"]
    assert late.health == ALARM
    assert late.remarks[0].startswith("query live-clicks has not read for ")


def test_a_table_that_cannot_be_read(tmp_path: Path, clicks: Pipeline) -> None:
    (tmp_path / "gold" / "broken" / "_delta_log").mkdir(parents=True)
    assert facts(Lake(tmp_path), clicks)["broken"].health == ALARM


def test_care_by_a_process_of_its_own(tmp_path: Path, clicks: Pipeline) -> None:
    lake = Lake(tmp_path / "lake")
    table = bronze(lake, 4)
    store_with(lake, clicks.products["totals"], 4)
    before = DeltaTable(str(table.path)).to_pyarrow_table().sort_by("offset")
    with WriterLocks(lake, ["totals"]):
        done = {item.table: item for item in maintain(lake, clicks, everything=True)}
    assert done["totals"].busy
    assert done["clicks"].said == "3 files fewer, log checkpoint"
    done = {item.table: item for item in maintain(lake, clicks, everything=True)}
    assert done["totals"].said == "compacted, log checkpoint"
    assert DeltaTable(str(table.path)).to_pyarrow_table().sort_by("offset").equals(before)
    with leading(lake), pytest.raises(LakehouseError, match="another process looks after"):
        list(maintain(lake, clicks))


@pytest.mark.broker
def test_how_far_bronze_is_behind_its_topic(tmp_path: Path, broker: EmbeddedBroker) -> None:
    topic = f"clicks-{uuid.uuid4().hex[:8]}"
    pipeline = pipeline_in(tmp_path, topic)
    source = pipeline.sources["clicks"]
    topics = Topics(broker.bootstrap)
    assert topics.backlog(source, Progress()) is None  # there is no topic
    ensure_topics(pipeline.sources.values(), broker.bootstrap)
    assert topics.backlog(source, Progress()) == Backlog(0, 0.0, 0, 7 * 86_400.0)
    records = mixture(0, 20)
    produce(broker.bootstrap, topic, records)
    found = topics.backlog(source, Progress({f"{topic}/0": 2}))
    assert found is not None
    assert (found.records, found.lost) == (len(records) - 2, 0)
    assert 0 < found.oldest_s < 600
    assert not found.anew
    for done in (Progress({f"{topic}/0": 500}), Progress({f"{topic}/0": 1}, topics={topic: "AAAAAAAAAAAAAAAAAAAAAA"})):
        anew = topics.backlog(source, done)
        assert anew is not None
        assert (anew.anew, anew.records, anew.lost, anew.health) == (True, len(records), 0, ALARM)
    assert Topics("127.0.0.1:1").backlog(source, Progress()) is None
    assert Topics("").backlog(source, Progress()) is None


def test_the_commands(tmp_path: Path, clicks: Pipeline) -> None:
    lake = Lake(tmp_path / "lake")
    bronze(lake, 3)
    place = ["--lake", str(lake.root), "--pipeline", str(clicks.path.parent)]
    command = [sys.executable, "-m", "jobs.cli", "maintain", "--once", "--all", "--json", *place]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert json.loads(done.stdout) == [{"table": "clicks", "said": "2 files fewer, log checkpoint", "busy": False}]
    run = CliRunner().invoke
    found = run(app, ["tables", "--json", "--check", *place])
    assert found.exit_code == 0
    assert [(t["table"], t["files"], t["health"]) for t in json.loads(found.stdout)] == [("clicks", 1, "ok")]
    assert "bronze/clicks" in run(app, ["tables", *place]).stdout
    judged = run(app, ["quality", "--json", *place])
    (looked,) = json.loads(judged.stdout)
    assert (judged.exit_code, looked["passed"], looked["findings"][0]["total"]) == (0, True, 6)
    assert run(app, ["quality", "clicks", "--batch", "7", *place]).exit_code == 1
    assert run(app, ["quality", "clicks", "--accept", "e1", *place]).exit_code == 0
    assert accepted(lake, "clicks") == {"e1"}
    assert "no source" in str(run(app, ["quality", "visits", "--accept", "e1", *place]).exception)

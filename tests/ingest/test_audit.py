"""The audit against tables whose every time is known."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from ingest.audit import AuditPeriod, Duplicates, SourceAudit, audit_source, trace
from jobs.cli import app
from jobs.commands.care import retention
from lakehouse.bronze.table import COLUMNS, create
from lakehouse.contract.lake import Lake
from lakehouse.contract.pipeline import Pipeline, load_pipeline
from lakehouse.maintain.report import Backlog
from tests.ingest.lakes import commit

NOW = datetime.now(UTC).replace(microsecond=0)
PIPELINE = """
[sources.clicks]
topic = "clicks"
schema = "id BIGINT"
event_time = "received_at"
event_id = "{id}"

[products.totals]
source = "clicks"
layer = "gold"
operator = "top_n"
item = "id"
sql = "SELECT received_at, id FROM clicks"
n = 3
window = "30 seconds"
"""


def pipeline_in(folder: Path) -> Pipeline:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pipeline.toml").write_text(PIPELINE)
    return load_pipeline(folder)


def row(offset: int, *, ago: float = 60.0, broker: float = 0.1, bronze: float = 0.5, **other: Any) -> dict[str, Any]:
    """A row that was received ``ago`` seconds before now, in Kafka and bronze so many seconds after that."""
    received = NOW - timedelta(seconds=ago)
    at = received + timedelta(seconds=broker + bronze)
    return {
        "event_id": f"e{offset}", "fingerprint": f"f{offset}", "source": "clicks", "tenant": "default",
        "collector": "c1", "topic": "clicks", "partition": 0, "offset": offset, "origin": "stream",
        "received_at": received, "broker_time": received + timedelta(seconds=broker), "bronze_at": at,
        "date": at.date(), **other,
    }  # fmt: skip


def write(lake: Lake, rows: Sequence[dict[str, Any]]) -> None:
    create(lake.bronze("clicks"))
    write_deltalake(str(lake.bronze("clicks").path), pa.Table.from_pylist(list(rows), schema=COLUMNS), mode="append")


def look(lake: Lake, pipeline: Pipeline, **options: Any) -> SourceAudit:
    source = pipeline.sources["clicks"]
    return audit_source(lake, pipeline, source, AuditPeriod(timedelta(hours=2), end=NOW, **options))


def test_times_of_each_hop(tmp_path: Path) -> None:
    lake, pipeline = Lake(tmp_path / "lake"), pipeline_in(tmp_path / "p")
    write(lake, [row(n, broker=0.1 * (n + 1), bronze=1.0 * (n + 1)) for n in range(3)])
    write(lake, [row(9, ago=3 * 3600)])  # too old
    write(lake, [row(10, origin="file:x")])  # from a file: it took another way
    found = look(lake, pipeline)
    assert found.rows == 3
    assert found.offsets == {"clicks/0": 3}
    hops = {hop.name: (hop.count, hop.min_s, hop.avg_s, hop.max_s) for hop in found.hops}
    assert hops["received to broker"] == pytest.approx((3, 0.1, 0.2, 0.3))
    assert hops["broker to bronze"] == pytest.approx((3, 1.0, 2.0, 3.0))
    assert hops["bronze to totals"] == (0, 0.0, 0.0, 0.0)


def test_products_and_the_way_of_one_event(tmp_path: Path) -> None:
    lake, pipeline = Lake(tmp_path / "lake"), pipeline_in(tmp_path / "p")
    write(lake, [row(0), row(1), row(2, event_id="e1")])
    commit(lake, "totals", [{"k": 1}], key="k", through={"clicks/0": 1})
    commit(lake, "totals", [{"k": 2}], key="k", through={"clicks/0": 2})
    found = look(lake, pipeline)
    hop = next(hop for hop in found.hops if hop.name == "bronze to totals")
    assert hop.count == 2, "offset 2 is in no product yet"
    steps = trace(lake, pipeline, "e1")
    assert [step.hop for step in steps] == ["received", "broker", "broker", "bronze", "totals"]
    assert [step.where for step in trace(lake, pipeline, "e0") if step.hop == "totals"] == ["version 1"]
    assert "version 2" in [step.where for step in steps]
    # the log is cut: the oldest commit that is left may not be the one that brought the event
    (lake.table("gold", "totals").path / "_delta_log" / f"{0:020d}.json").unlink()
    assert next(hop for hop in look(lake, pipeline).hops if hop.name == "bronze to totals").count == 1
    assert trace(lake, pipeline, "nobody") == []


def test_duplicates_are_told_apart(tmp_path: Path) -> None:
    lake, pipeline = Lake(tmp_path / "lake"), pipeline_in(tmp_path / "p")
    write(lake, [row(0), row(1), row(2)])
    write(lake, [row(1)])  # bronze took a record twice
    write(lake, [row(3, event_id="e2", fingerprint="f2")])  # a collector sent it twice
    write(lake, [row(4, fingerprint="f0"), row(5, fingerprint="f0")])  # the source said it three times
    assert look(lake, pipeline).duplicates == Duplicates(by_coordinates=1, sent_again=1, same_payload=2)


@settings(max_examples=15)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=12))
def test_duplicates_add_up(tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[int, int, int]]) -> None:
    """A record has one event and an event one payload: rows less all duplicates are the different payloads."""
    folder = tmp_path_factory.mktemp("dup")
    lake, pipeline = Lake(folder / "lake"), pipeline_in(folder / "p")
    write(lake, [row(o, event_id=f"e{o % (i + 1)}", fingerprint=f"f{o % (i + 1) % (f + 1)}") for o, i, f in rows[:1]])
    ids = {o: (i, f) for o, i, f in reversed(rows)}
    payload = {i: f for _, (i, f) in sorted(ids.items(), reverse=True)}
    more = [row(o, event_id=f"x{ids[o][0]}", fingerprint=f"y{payload[ids[o][0]]}", partition=1) for o, _, _ in rows]
    write(lake, more)
    found = look(lake, pipeline)
    double = found.duplicates
    payloads = {r["fingerprint"] for r in more}
    assert found.rows - sum((double.by_coordinates, double.sent_again, double.same_payload)) == len(payloads) + 1


def test_who_is_slow_by_declared_and_by_learnt_thresholds(tmp_path: Path) -> None:
    lake, pipeline = Lake(tmp_path / "lake"), pipeline_in(tmp_path / "p")
    before = [row(n, ago=3600, collector=f"c{n % 2}") for n in range(400)]
    now = [row(400 + n, ago=30, broker=9.0 if n % 2 else 0.1, collector=f"c{n % 2}") for n in range(20)]
    write(lake, before + now)
    found = look(lake, pipeline)
    assert [(slow.kind, slow.name, slow.learnt) for slow in found.slow] == [("producer", "c1", True)]
    assert found.slow[0].avg_s == pytest.approx(9.0)
    declared = look(lake, pipeline, producer_s=10.0, consumer_s=0.4)
    assert [(slow.kind, slow.name, slow.learnt) for slow in declared.slow] == [("consumer", "bronze", False)]


@pytest.mark.parametrize(
    ("backlog", "expected"),
    [
        (None, "ok"),
        (Backlog(5, 10.0, 0, 100.0), "ok"),
        (Backlog(5, 50.0, 0, 100.0), "warn"),
        (Backlog(5, 80.0, 0, 100.0), "alarm"),
        (Backlog(0, 0.0, 3, 100.0), "alarm"),
        (Backlog(5, 50.0, 0, -0.001), "ok"),
    ],
)
def test_retention_is_told_before_it_bites(backlog: Backlog | None, expected: str) -> None:
    assert retention(backlog) == expected


def test_command(tmp_path: Path) -> None:
    lake, pipeline = Lake(tmp_path / "lake"), pipeline_in(tmp_path / "p")
    common = ["--lake", str(lake.root), "--pipeline", str(pipeline.path.parent)]
    runner = CliRunner()
    empty = runner.invoke(app, ["audit", *common, "--json"])
    assert (empty.exit_code, json.loads(empty.stdout)[0]["rows"]) == (0, 0)
    write(lake, [row(0), row(1)])
    prom = tmp_path / "millrace.prom"
    done = runner.invoke(app, ["audit", *common, "--json", "--metrics", str(prom)])
    (shown,) = json.loads(done.stdout)
    assert (shown["source"], shown["rows"], shown["lag"], shown["retention"]) == ("clicks", 2, None, "ok")
    assert 'millrace_audit_hop_seconds{figure="avg",hop="received to broker",source="clicks"} 0.1' in prom.read_text()
    way = runner.invoke(app, ["audit", *common, "--event", "e1", "--json"])
    assert [step["hop"] for step in orjson.loads(way.stdout)] == ["received", "broker", "bronze"]
    assert runner.invoke(app, ["audit", *common, "--event", "none"]).exit_code == 1
    assert "received to broker" in runner.invoke(app, ["audit", *common]).output
    assert DeltaTable(str(lake.bronze("clicks").path)).version() == 1, "an audit changes nothing"

"""What products remember, as shown beside their writer."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pytest
from typer.testing import CliRunner

from jobs.cli import app
from lakehouse.contract.errors import ConfigError
from lakehouse.contract.lake import Lake
from lakehouse.contract.pipeline import load_pipeline
from lakehouse.contract.settings import conf_dir
from lakehouse.gold.mark import BatchMark
from lakehouse.gold.state_store import store_of
from lakehouse.stateful.join_index import JoinIndex
from lakehouse.stateful.report import join_key, remembered, report, stateful_products
from tests.lakehouse.stateful.test_join_index import SCHEMA

AT = datetime(2026, 1, 1, 12, tzinfo=UTC)
MICROS = int(AT.timestamp() * 1e6)
MARK = BatchMark("q", (0,), clock=MICROS)


@pytest.fixture
def shop(tmp_path: Path) -> Lake:
    """Two visits of the shop, one of them long over."""
    lake = Lake(tmp_path / "lake")
    pipeline = load_pipeline(conf_dir() / "pipelines" / "clickstream")
    product = pipeline.products["visits"]
    row = {"actions": 2, "views": 1, "added": 1, "removed": 0, "bought": 0, "last_removed": None}
    rows = [
        {"visitor": who, "session_start": at, "session_end": at, **row}
        for who, at in (("u1", AT - timedelta(hours=5)), ("u1", AT), ("u2", AT))
    ]
    times = [(name, pa.timestamp("us", "UTC")) for name in ("session_start", "session_end")]
    counts = [(name, pa.int64()) for name in row if name != "last_removed"]
    action = pa.struct([("at", pa.int64()), ("action_id", pa.int64())])
    lists = [(name, pa.list_(action)) for name in ("recent", "cart")]
    schema = pa.schema([("visitor", pa.string()), *times, *counts, *lists, ("last_removed", pa.string())])
    store_of(product, lake.table("gold", "visits"), "clickstream").apply(
        pa.Table.from_pylist(rows, schema=schema), MARK
    )
    return lake


def test_sessions(shop: Lake) -> None:
    pipeline = load_pipeline(conf_dir() / "pipelines" / "clickstream")
    (product,) = stateful_products(pipeline)
    facts = report(shop, pipeline, product)
    assert facts is not None
    assert (facts.live, facts.settled, facts.clock) == (2, 1, AT)
    found = remembered(shop, product, {"visitor": "u1"})
    shown = sorted((row["session_start"], row["closed"]) for row in found)
    assert shown == [(AT - timedelta(hours=5), True), (AT, False)]
    with pytest.raises(ConfigError, match="nobody is not its key"):
        remembered(shop, product, {"nobody": "u1"})


def test_a_join(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    pipeline = load_pipeline(conf_dir() / "pipelines" / "ads")
    product = pipeline.products["click_through"]
    assert report(lake, pipeline, product) is None
    index = JoinIndex(lake.state / "joins" / "click_through", product)
    rows = [
        {"side": side, "join_key": join_key(["i1"]), "at": AT, "dedupe_key": bytes([side]) * 16, "body": body}
        for side, body in ((0, '{"campaign":"tea"}'), (1, '{"click_id":"c1"}'))
    ]
    index.enter(pa.Table.from_pylist(rows, schema=SCHEMA), 0, "q/0")
    index.close()
    found = remembered(lake, product, {"impression_id": "i1"})
    assert [(row["side"], row["at"], row["event"]) for row in found] == [
        ("impressions", AT, {"campaign": "tea"}),
        ("clicks", AT, {"click_id": "c1"}),
    ]
    assert remembered(lake, product, {"impression_id": "i2"}) == []
    with pytest.raises(ConfigError, match="nothing is not its key"):
        remembered(lake, product, {})


def test_the_command(shop: Lake) -> None:
    options = ["--lake", str(shop.root), "--pipeline", "clickstream", "--json"]
    found = CliRunner().invoke(app, ["state", *options])
    assert found.exit_code == 0
    (facts,) = json.loads(found.stdout)
    assert (facts["product"], facts["live"], facts["clock"]) == ("visits", 2, AT.isoformat())
    found = CliRunner().invoke(app, ["state", "visits", "--key", "visitor=u2", *options])
    assert [row["session_end"] for row in json.loads(found.stdout)] == [AT.isoformat()]
    for wrong in (["nope"], ["visits", "--key", "u2"], ["--key", "visitor=u2"]):
        assert isinstance(CliRunner().invoke(app, ["state", *wrong, *options]).exception, ConfigError)
    plain = CliRunner().invoke(app, ["state", "visits", *options[:-1]])
    assert "sessions" in plain.stdout

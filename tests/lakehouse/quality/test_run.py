"""Expectations of tables and batches, from the declaration to the report and the history; no JVM."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from lakehouse.bronze.table import create
from lakehouse.contract.errors import ConfigError
from lakehouse.contract.lake import Lake, UnknownTable
from lakehouse.contract.pipeline import Pipeline, load_pipeline
from lakehouse.contract.pipeline.expectations import GX_TYPES
from lakehouse.errors import QualityProblem
from lakehouse.gold.mark import BatchMark
from lakehouse.gold.store import ProductStore
from lakehouse.quality.engine import Finding
from lakehouse.quality.notes import accept, accepted, note_unknown_fields, noted_unknown_fields, unknown_fields
from lakehouse.quality.run import QualityRun, TableCheck, check_tables, gate
from tests.lakehouse.lakes import T0, bronze_rows, click

DECLARED = """
[sources.clicks]
topic = "clicks"
schema = "id BIGINT, at BIGINT, who STRING, price BIGINT, tags ARRAY<STRING>, place STRUCT<city: STRING, lat: DOUBLE>"
event_id = "{id}"
event_time = "timestamp_millis(at)"
required = ["id", "place.city"]
[sources.clicks.expectations]
price_not_negative = "price IS NULL OR price >= 0"
recent = { sql = "timestamp_millis(at) > timestamp'2025-01-01'", action = "warn" }
price_sane = { sql = "coalesce(price, 0) < 1000", action = "halt" }
[sources.clicks.table_expectations]
some = { expect = "expect_table_row_count_to_be_between", min_value = 2 }
who_mostly = { expect = "expect_column_values_to_not_be_null", column = "who", mostly = 0.2 }
[sources.clicks.table_expectations.city_known]
expect = "expect_column_values_to_be_in_set"
column = "place.city"
value_set = ["Ulm", "Ōsaka", "Köln"]

[products.per_city]
layer = "silver"
source = "clicks"
storage = "append"
sql = '''SELECT window.start AS window_start, place.city AS city, count(*) AS n FROM clicks
GROUP BY window(event_time, '1 minute'), place.city'''
[products.per_city.expectations]
counted = "n > 0"
few = { sql = "n < 3", action = "warn" }
one_row_a_key = { expect = "expect_compound_columns_to_be_unique", column_list = ["window_start", "city"] }
n_is_whole = { expect = "expect_column_values_to_be_of_type", column = "n", type_ = "bigint" }
fresh = { expect = "fresh", column = "window_start", within = "1 hour" }
as_declared = { expect = "expect_table_columns_to_match_set", column_set = ["window_start", "city", "n"] }
"""


@pytest.fixture
def declared(tmp_path: Path) -> Pipeline:
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "pipeline.toml").write_text(DECLARED, encoding="utf-8")
    return load_pipeline(tmp_path / "p")


def events(*changed: dict[str, object]) -> pa.Table:
    return bronze_rows([json.dumps(click(n, **{"price": 1, **c})).encode() for n, c in enumerate(changed)])


def with_bronze(lake: Lake, *commits: pa.Table) -> Lake:
    create(lake.bronze("clicks"))
    for rows in commits:
        write_deltalake(str(lake.bronze("clicks").path), rows, mode="append")
    return lake


def look(lake: Lake, pipeline: Pipeline, names: Sequence[str] = (), **options: Any) -> list[TableCheck]:
    return check_tables(lake, pipeline, QualityRun(names, **options))


def by_name(looked: TableCheck) -> dict[str, Finding]:
    return {finding.expectation: finding for finding in looked.findings}


def test_a_source_and_its_batches_with_a_report_and_a_history(tmp_path: Path, declared: Pipeline) -> None:
    bad = [b"{", b"\xff", None, b"[1]", b'{"id": 3}']  # not judged: the stream refuses them before that
    lake = with_bronze(
        Lake(tmp_path / "lake"),
        events({}, {"price": -1}, {"place": {"city": "Rom", "lat": 1.0}}),
        pa.concat_tables([events({"at": 5}, {"price": 5000, "extra": {"a": 1}}), bronze_rows(bad)]),
    )
    (whole,) = look(lake, declared, ["clicks"], report=tmp_path / "report")
    found = by_name(whole)
    assert (whole.subject.version, whole.subject.batch, whole.passed) == (2, "", False)
    assert {n: (f.success, f.unexpected) for n, f in found.items()} == {
        "price_not_negative": (False, 1),
        "recent": (False, 1),
        "price_sane": (False, 1),
        "some": (True, 0),
        "city_known": (False, 1),
        "who_mostly": (True, 5),
    }
    assert [n for n, f in found.items() if f.blocking] == ["some", "who_mostly", "city_known"]
    assert found["city_known"].observed == "['Rom']"
    assert whole.unknown == {"extra": 1}
    assert "price_not_negative" not in found["some"].expected
    page = (tmp_path / "report" / "index.html").read_text(encoding="utf-8")
    assert ">2 of 6<" in page, "expectations that are met, of all"
    for html in (tmp_path / "report").rglob("*.html"):
        text = html.read_text(encoding="utf-8")
        assert "<script" not in text
        assert not re.findall(r"""(?:src|href)=["']https?://[^"']*\.(?:css|js|png)""", text), "nothing from elsewhere"
    [found_page] = (tmp_path / "report" / "validations").rglob("*.html")
    assert f'href="{found_page.relative_to(tmp_path / "report")}"' in page
    assert "price_not_negative" not in page

    (latest,) = look(lake, declared, batch="latest")
    assert (latest.subject.batch, latest.passed) == ("2", True)
    (first,) = look(lake, declared, ["clicks"], batch="1", keep=False)
    assert by_name(first)["recent"].success
    (both,) = look(lake, declared, ["clicks"], batch="1..2", keep=False)
    assert [f.unexpected for f in both.findings] == [f.unexpected for f in whole.findings]

    kept = DeltaTable(str(lake.find("quality").path)).to_pyarrow_table().to_pylist()
    assert len(kept) == 12
    assert {(row["table"], row["batch"]) for row in kept} == {("clicks", ""), ("clicks", "2")}
    assert sum(not row["success"] for row in kept if row["batch"] == "") == 4


def test_a_product_is_judged_by_its_folded_rows(tmp_path: Path, declared: Pipeline) -> None:
    lake = Lake(tmp_path / "lake")
    product = declared.products["per_city"]
    store = ProductStore(product, lake.table("silver", "per_city"), "p")
    times = pa.array([T0, T0 + timedelta(minutes=1)], pa.timestamp("us", "UTC"))
    rows = pa.table({"window_start": times, "city": ["Ulm", "Ulm"], "n": pa.array([1, 1], pa.int64())})
    for batch in range(4):
        store.apply(rows, BatchMark("q", (batch,), {}, 2))
    (looked,) = look(lake, declared, now=T0 + timedelta(minutes=30))
    assert looked.passed
    found = by_name(looked)
    assert (found["few"].success, found["few"].unexpected, found["few"].total) == (False, 2, 2)
    (stale,) = look(lake, declared, ["per_city"], now=T0 + timedelta(hours=2), keep=False)
    assert [f.expectation for f in stale.findings if not f.success and f.blocking] == ["fresh"]
    assert "2026-01-01" in by_name(stale)["fresh"].observed


def test_a_gate_before_a_commit(declared: Pipeline) -> None:
    source = declared.sources["clicks"]
    assert gate(events({}, {"price": -1}), source).passed  # the stream will quarantine that one
    refused = gate(events({}, {"price": 5000}), source)
    assert [f.expectation for f in refused.failed] == ["price_sane"]
    assert str(refused) == "clicks does not pass: price_sane: 1 of 2 rows"
    assert [f.expectation for f in gate(events({}), source).failed] == ["some"]
    assert "1" in gate(events({}), source).failed[0].observed


@pytest.mark.parametrize(
    ("text", "key", "says"),
    [
        ('few = {expect = "expect_table_row_count"}', "few.expect", "is not known"),
        ("few = {min = 1}", "few", "not an expectation"),
        ('few = {sql = "n > 0", mustly = 0.9}', "few.mustly", "is not known"),
        ('few = {sql = "n > 0", action = "quarantine"}', "few.action", "is not known"),
        ('few = {expect = "fresh", column = "at"}', "few", "fresh takes column and within"),
        ('few = {expect = "fresh", column = "at", within = "soon"}', "few.within", "not a duration"),
        ('few = " "', "few", "needs a predicate"),
    ],
)
def test_what_is_refused_at_start(tmp_path: Path, text: str, key: str, says: str) -> None:
    head, _, _ = DECLARED.partition("[products.per_city.expectations]")
    (tmp_path / "pipeline.toml").write_text(f"{head}[products.per_city.expectations]\n{text}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=says) as caught:
        load_pipeline(tmp_path)
    assert caught.value.key == f"products.per_city.expectations.{key}"


@pytest.mark.parametrize(
    ("text", "key", "says"),
    [
        ('price_sane = { sql = "true", action = "ignore" }', "expectations.price_sane.action", "not known"),
        ('price_sane = ""', "expectations.price_sane.sql", "needs a predicate"),
    ],
)
def test_what_is_refused_of_expectations_on_events(tmp_path: Path, text: str, key: str, says: str) -> None:
    declared = DECLARED.replace('price_sane = { sql = "coalesce(price, 0) < 1000", action = "halt" }', text)
    (tmp_path / "pipeline.toml").write_text(declared, encoding="utf-8")
    with pytest.raises(ConfigError, match=says) as caught:
        load_pipeline(tmp_path)
    assert caught.value.key == f"sources.clicks.{key}"


def test_what_cannot_be_looked_at(tmp_path: Path, declared: Pipeline) -> None:
    lake = Lake(tmp_path / "lake")
    with pytest.raises(UnknownTable):
        look(lake, declared, ["nobody"])
    with pytest.raises(QualityProblem, match="no such table yet"):
        look(lake, declared, ["clicks"])
    with_bronze(lake, events({}))
    with pytest.raises(QualityProblem, match="no versions 7"):
        look(lake, declared, ["clicks"], batch="7")
    with pytest.raises(QualityProblem, match="is no batch"):
        look(lake, declared, ["clicks"], batch="newest")


def test_arguments_that_the_library_does_not_take(tmp_path: Path) -> None:
    text = DECLARED.replace("min_value = 2", "least = 2").replace("> timestamp'2025-01-01'", "> nonsense(1)")
    (tmp_path / "pipeline.toml").write_text(text, encoding="utf-8")
    lake = with_bronze(Lake(tmp_path / "lake"), events({}))
    with pytest.raises(QualityProblem, match=r"nonsense does not exist.*--engine spark"):
        look(lake, load_pipeline(tmp_path))
    (tmp_path / "pipeline.toml").write_text(DECLARED.replace("min_value = 2", "least = 2"), encoding="utf-8")
    with pytest.raises(QualityProblem, match=r"expectation some .*least; extra fields not permitted"):
        look(lake, load_pipeline(tmp_path))


def test_the_names_are_those_of_the_library() -> None:
    from great_expectations.expectations.registry import get_expectation_impl

    assert all(get_expectation_impl(name) for name in GX_TYPES)


def test_fields_that_the_schema_does_not_have(tmp_path: Path, declared: Pipeline) -> None:
    source = declared.sources["clicks"]
    odd = [b'{"id": 1, "place": {"zip": 2}, "new": {"a": {"b": 1}}}', b'{"new": 2}', b"{", b"[]", None]
    assert unknown_fields(odd, source) == {"new": 2, "place.zip": 1}
    lake = with_bronze(Lake(tmp_path / "lake"), bronze_rows(odd))
    assert note_unknown_fields(lake, source) == ["new", "place.zip"]
    assert note_unknown_fields(lake, source) == []  # told once
    assert noted_unknown_fields(lake, "clicks") == ["new", "place.zip"]
    note_unknown_fields(lake, dataclasses.replace(source, schema=source.schema + ", new STRING"))
    assert noted_unknown_fields(lake, "clicks") == ["place.zip"]


def test_events_that_were_let_pass(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    assert accepted(lake, "clicks") == frozenset()
    accept(lake, "clicks", "a")
    accept(lake, "clicks", "b'")
    accept(lake, "clicks", "a")
    assert accepted(lake, "clicks") == {"a", "b'"}
    assert accepted(lake, "visits") == frozenset()
    (lake.state / "accepted" / "clicks.json").write_text("{")
    with pytest.raises(QualityProblem, match="damaged"):
        accepted(lake, "clicks")


def test_old_findings_go(tmp_path: Path, declared: Pipeline) -> None:
    lake = with_bronze(Lake(tmp_path / "lake"), events({}, {}))
    now = datetime.now(UTC)
    look(lake, declared, now=now - timedelta(days=100))
    look(lake, declared, now=now)
    assert set(DeltaTable(str(lake.find("quality").path)).to_pyarrow_table()["at"].to_pylist()) == {now}

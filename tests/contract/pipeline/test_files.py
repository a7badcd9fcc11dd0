"""Files of a pipeline that change while a process runs, and sources that are added in files of their own."""

from __future__ import annotations

import os
import time
from itertools import count
from pathlib import Path

import pytest

from lakehouse.contract.errors import ConfigError
from lakehouse.contract.pipeline.files import PipelineFiles, added_source, declared_pipeline
from lakehouse.contract.settings import load_settings
from lakehouse.contract.tomlfile import read_toml

OWN = """
[sources.clicks]
topic = "clicks"
schema = "id BIGINT"
event_time = "received_at"
[products.totals]
layer = "gold"
source = "clicks"
sql = "totals.sql"
"""
ADDED = """
topic = "visits"
schema = "id BIGINT, at BIGINT, who STRING"
event_time = "timestamp_millis(at)"
collectors = [{ kind = "http" }]
expectations = { known = "who <> 'nobody'" }
[products.visitors]
layer = "gold"
sql = "SELECT who, count(*) AS n FROM visits GROUP BY who"
"""
later = count(10)


def write(file: Path, text: str) -> None:
    """Two edits in one tick of the clock are two edits."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    at = time.time() + next(later)
    os.utime(file, (at, at))


@pytest.fixture
def files(tmp_path: Path) -> PipelineFiles:
    write(tmp_path / "shop" / "pipeline.toml", OWN)
    write(tmp_path / "shop" / "totals.sql", "SELECT count(*) AS n FROM clicks GROUP BY id")
    return PipelineFiles(tmp_path / "shop", tmp_path / "sources")


def test_sources_come_change_and_go(files: PipelineFiles, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "sources" / "visits.toml"
    assert set(files.load().sources) == {"clicks"}
    assert files.changed() is None
    write(file, ADDED)
    found = files.changed()
    assert found is not None
    assert (set(found.sources), found.added) == ({"clicks", "visits"}, {"visits"})
    assert [product.name for product in found.products_of("visits")] == ["visitors"]
    write(file, ADDED.replace("who, count(*)", "whom, count(*)"))
    kept = files.changed()
    assert kept is not None
    assert kept.products == found.products, "what a wrong file said before stays"
    assert f"{file}:9: products.visitors.sql: there is no column 'whom'. Did you mean 'who'?" in caplog.text
    write(tmp_path / "shop" / "totals.sql", "SELECT count(*) AS m FROM clicks GROUP BY id")
    again = files.changed()
    assert again is not None
    assert "AS m" in again.products["totals"].sql, "the SQL beside pipeline.toml is followed too"
    assert caplog.text.count("whom") == 1, "a wrong file is told of once"
    assert list(files.problems) == [file]
    write(tmp_path / "shop" / "pipeline.toml", OWN + "[")
    assert files.changed() is None
    assert "not valid TOML" in caplog.text
    write(tmp_path / "shop" / "pipeline.toml", OWN)
    file.unlink()
    gone = files.changed()
    assert gone is not None
    assert not gone.added


@pytest.mark.parametrize(
    ("changed", "key"),
    [
        (('kind = "http"', 'kind = "os:system"'), "collectors[0].kind"),
        (('kind = "http"', 'kind = "sse", url = "http://h/", headers = { a = "$HOME" }'), "collectors[0].headers"),
        (("expe", 'enrich = { city = { key = "{who}", column = "who", file = "/a" } }\nexpe'), "enrich.city.file"),
        (("timestamp_millis(at)", "reflect('java.lang.System', 'exit', '1')"), "event_time"),
        (("timestamp_millis(at)", "(SELECT max(at) FROM clicks)"), "event_time"),
        (("who <> 'nobody'", "java_method('a', 'b') IS NULL"), "expectations.known"),
        (("FROM visits", "FROM clicks"), "products.visitors.sql"),
        (("FROM visits", "FROM parquet.`/etc/passwd`"), "products.visitors.sql"),
        (("visitors]", 'visitors]\nsource = "clicks"'), "products.visitors"),
        (("visitors]", "visitors]\nexpectations = { a = 'n > 0' }"), "products.visitors.expectations"),
        (("visitors]", "visitors]\nn = 3"), "products.visitors.n"),
        (("visitors]", "visitors]\nchannel = { where = 'getenv(1)' }"), "products.visitors.channel.where"),
        (("schema", "schemo"), "schemo"),
    ],
)  # fmt: skip
def test_what_an_added_source_may_not_say(tmp_path: Path, changed: tuple[str, str], key: str) -> None:
    file = tmp_path / "visits.toml"
    write(file, ADDED.replace(*changed, 1))
    with pytest.raises(ConfigError) as refused:
        added_source(read_toml(file), file)
    assert (refused.value.file, refused.value.key) == (file, key)
    assert refused.value.remedy


def test_a_name_is_taken(files: PipelineFiles, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path / "sources" / "clicks.toml", ADDED.replace("FROM visits", "FROM clicks"))
    write(tmp_path / "sources" / "visits.toml", ADDED.replace("visitors", "totals"))
    assert set(files.load().sources) == {"clicks"}
    assert len(files.problems) == 2
    assert "products.totals: the name is taken" in caplog.text


def test_the_settings_name_the_folder(files: PipelineFiles, tmp_path: Path) -> None:
    write(tmp_path / "lake" / "_millrace" / "control" / "state" / "sources" / "visits.toml", ADDED)
    of_lake = load_settings({}, lake=tmp_path / "lake", pipeline=str(tmp_path / "shop"))
    assert set(declared_pipeline(of_lake).sources) == {"clicks", "visits"}
    elsewhere = load_settings(
        {}, [f"control.state={tmp_path}"], lake=tmp_path / "lake", pipeline=str(tmp_path / "shop")
    )
    assert set(declared_pipeline(elsewhere).sources) == {"clicks"}

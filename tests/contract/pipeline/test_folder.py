"""The pipeline model, its files that change while a process runs, and sources that are added in files of their own."""

from __future__ import annotations

import os
import time
from itertools import count
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lakehouse.contract.errors import ConfigError
from lakehouse.contract.pipeline import Template, load_pipeline
from lakehouse.contract.pipeline.folder import PipelineFiles, added_source, declared_pipeline
from lakehouse.contract.settings import conf_dir, load_settings
from lakehouse.contract.tomlfile import read_toml

SOURCE = """
[sources.clicks]
topic = "clicks"
schema = "id BIGINT"
event_time = "received_at"
"""


def load(folder: Path, text: str) -> None:
    (folder / "pipeline.toml").write_text(text, encoding="utf-8")
    load_pipeline(folder)


def test_the_shipped_pipeline() -> None:
    pipeline = load_pipeline(conf_dir() / "pipelines" / "meetup")
    assert pipeline.name == "meetup"
    rsvps = pipeline.sources["rsvps"]
    assert rsvps.topic == "meetup-raw-rsvps"
    assert rsvps.retention_ms == 7 * 86_400_000
    assert [c.kind for c in rsvps.collectors] == ["websocket", "http"]
    assert rsvps.event_id_template is not None
    assert rsvps.event_id_template.render({"rsvp_id": 7, "mtime": 8}) == "7:8"
    assert [p.name for p in pipeline.products_of("rsvps")] == ["rsvps_by_city", "top_topics", "members"]
    assert pipeline.products["top_topics"].sql.startswith("SELECT")
    assert pipeline.products["top_topics"].window_ms == 60_000
    assert pipeline.products_of("nobody") == []


@pytest.mark.parametrize(
    ("text", "key", "line", "says"),
    [
        ("", "", None, "key 'sources' is missing"),
        ("[sources]", "sources", 1, "needs a source"),
        (SOURCE + "partitions = 0", "sources.clicks.partitions", 6, "at least 1"),
        (SOURCE + 'retention = "long"', "sources.clicks.retention", 6, "not a duration"),
        (SOURCE + 'event_id = "id"', "sources.clicks.event_id", 6, "names no field"),
        (SOURCE + 'topc = "x"', "sources.clicks.topc", 6, "unknown key"),
        (SOURCE + 'collectors = [{kind = "pigeon"}]', "sources.clicks.collectors[0].kind", 6, "not known"),
        (SOURCE.replace('"clicks"', '"a b"'), "sources.clicks.topic", 3, "no Kafka topic"),
        (SOURCE.replace(".clicks", ".Clicks"), "sources.Clicks", 2, "not a table name"),
        (SOURCE.replace(".clicks", ".quarantine"), "sources.quarantine", 2, "taken"),
    ],
)
def test_what_is_refused_of_sources(tmp_path: Path, text: str, key: str, line: int | None, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        load(tmp_path, text)
    assert (caught.value.key, caught.value.line) == (key, line)
    assert caught.value.file == tmp_path / "pipeline.toml"


@pytest.mark.parametrize(
    ("product", "key", "says"),
    [
        ('source = "visits"', "products.p.source", "no source 'visits'"),
        ('layer = "bronze"', "products.p.layer", "not known"),
        ('operator = "median"', "products.p.operator", "not known"),
        ('operator = "top_n"', "products.p.item", "needs the column"),
        ('operator = "top_n"\nitem = "x"\nn = 0', "products.p.n", "between 1 and 10000"),
        ("lg_k = 22", "products.p.lg_k", "between 4 and 21"),
        ('storage = "heap"', "products.p.storage", "not known"),
        ('window = "a while"', "products.p.window", "not a duration"),
        ('sql = "absent.sql"', "products.p.sql", "absent.sql cannot be read"),
    ],
)
def test_what_is_refused_of_products(tmp_path: Path, product: str, key: str, says: str) -> None:
    lines = {"layer": '"gold"', "source": '"clicks"', "sql": '"SELECT 1"'}
    given_keys = {line.partition(" =")[0] for line in product.splitlines()}
    rest = "\n".join(f"{name} = {value}" for name, value in lines.items() if name not in given_keys)
    with pytest.raises(ConfigError, match=says) as caught:
        load(tmp_path, f"{SOURCE}\n[products.p]\n{rest}\n{product}\n")
    assert caught.value.key == key


def test_a_product_with_the_name_of_a_source(tmp_path: Path) -> None:
    text = SOURCE + '[products.clicks]\nlayer = "gold"\nsource = "clicks"\nsql = "SELECT 1"\n'
    with pytest.raises(ConfigError, match="the name is taken"):
        load(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "payload", "expected"),
    [
        ("{a}", {"a": 1}, "1"),
        ("{a}:{b.c}", {"a": "x", "b": {"c": 2}}, "x:2"),
        ("{a}-{a}", {"a": "y"}, "y-y"),
        ("x{a}y", {"a": True}, "xtruey"),
        ("{a}", {"a": False}, "false"),
        ("{a}", {"a": None}, None),
        ("{a}", {}, None),
        ("{a.b}", {"a": 3}, None),
        ("{a.b}", {"a": None}, None),
        ("{a}", {"a": {"b": 1}}, None),
        ("{a}", {"a": [1]}, None),
        ("{a}", {"a": ""}, ""),
        ("{a}", {"a": "{b}", "b": "never"}, "{b}"),
        ("{a}", {"a": r"\1"}, r"\1"),
    ],
)
def test_a_template_renders(text: str, payload: dict[str, object], expected: str | None) -> None:
    assert Template(text).render(payload) == expected


@given(st.lists(st.one_of(st.text(), st.integers()), min_size=1, max_size=4))
def test_a_template_puts_every_value_in_its_place(values: list[object]) -> None:
    names = [f"f{i}" for i in range(len(values))]
    text = "<" + "|".join(f"{{{name}}}" for name in names) + ">"
    assert Template(text).fields == tuple(names)
    assert Template(text).render(dict(zip(names, values, strict=True))) == "<" + "|".join(map(str, values)) + ">"


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

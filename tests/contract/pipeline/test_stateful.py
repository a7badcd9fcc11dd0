"""Keys of products that remember."""

from __future__ import annotations

from pathlib import Path

import pytest

from lakehouse.contract.errors import ConfigError
from lakehouse.contract.pipeline import load_pipeline
from lakehouse.contract.pipeline.product import DETECTORS, STATEFUL, TAKEN_BY
from lakehouse.contract.settings import conf_dir

SOURCES = """
[sources.clicks]
topic = "clicks"
schema = "id BIGINT"
event_time = "received_at"
[sources.shows]
topic = "shows"
schema = "id BIGINT"
event_time = "received_at"
[products.p]
layer = "gold"
source = "shows"
"""
JOIN = 'operator = "join"\nsql = "SELECT 1"\nright = "clicks"\non = ["id"]\n'
SESSIONS = 'operator = "sessions"\naggregates = { n = "count(*)" }\n'


def load(folder: Path, product: str) -> None:
    (folder / "pipeline.toml").write_text(SOURCES + product, encoding="utf-8")
    load_pipeline(folder)


@pytest.mark.parametrize("name", ["ads", "trips", "clickstream"])
def test_the_shipped_examples(name: str) -> None:
    pipeline = load_pipeline(conf_dir() / "pipelines" / name)
    assert pipeline.products
    assert {p.name for p in pipeline.joins} == ({"click_through", "time_to_click"} if name == "ads" else set())
    assert not set(pipeline.joins) & {p for source in pipeline.sources for p in pipeline.products_of(source)}


def test_columns_of_a_join(tmp_path: Path) -> None:
    (tmp_path / "pipeline.toml").write_text(SOURCES + JOIN.replace('"id"', '"id", "a = b"'), encoding="utf-8")
    assert load_pipeline(tmp_path).products["p"].columns_on == (("id", "id"), ("a", "b"))


@pytest.mark.parametrize(
    ("product", "key", "says"),
    [
        ('operator = "sessions"', "aggregates", "needs what to keep"),
        (SESSIONS + 'gap = "long"', "gap", "not a duration"),
        (SESSIONS + 'gap = "0s"', "gap", "at least 1"),
        (SESSIONS + 'storage = "append"', "storage", "no partial rows"),
        (SESSIONS + "size = 3", "size", "says nothing to sessions"),
        (SESSIONS.replace("n =", '"n m" ='), "aggregates", "no column name"),
        ('operator = "count_window"\naggregates = { n = "count(*)" }\nsize = 0', "size", "at least 1"),
        ('operator = "drift"', "value", "needs the column"),
        ('operator = "drift"\nvalue = "x"\ndetector = "ouija"', "detector", "not known"),
        ('operator = "drift"\nvalue = "x"\nparameters = { power = 1.0 }', "parameters", "no parameter 'power'"),
        ('operator = "join"\nsql = "SELECT 1"', "right", "its other source"),
        (JOIN.replace('on = ["id"]', ""), "on", "must be equal"),
        (JOIN.replace('["id"]', '["id = "]'), None, ""),
        (JOIN.replace('["id"]', '["a b"]'), "on", "no column name"),
        (JOIN.replace('"clicks"', '"shows"'), "right", "not another source"),
        (JOIN.replace('"clicks"', '"visits"'), "right", "not another source"),
        (JOIN + 'kind = "full"', "kind", "not known"),
        (JOIN + 'match = "last"', "match", "not known"),
        (JOIN + 'by = ["id"]', "by", "says nothing to join"),
        ('sql = "SELECT 1"\ntrigger = "often"', "trigger", "not a duration"),
        ('sql = "SELECT 1"\ngap = "1 minute"', "gap", "says nothing to plain SQL"),
        ("", "", "'sql' is missing"),
    ],
)
def test_what_is_refused(tmp_path: Path, product: str, key: str | None, says: str) -> None:
    if key is None:
        load(tmp_path, product)
        return
    with pytest.raises(ConfigError, match=says) as caught:
        load(tmp_path, product)
    assert caught.value.key == f"products.p.{key}".rstrip(".")
    assert caught.value.file == tmp_path / "pipeline.toml"


def test_every_key_and_detector_is_in_the_docs() -> None:
    docs = Path(__file__).parents[3] / "docs" / "guide"
    pipelines, stateful = ((docs / name).read_text(encoding="utf-8") for name in ("pipelines.md", "stateful.md"))
    stateful_keys = [key for key, takers in TAKEN_BY.items() if set(takers) & set(STATEFUL)]
    keys = [*stateful_keys, "trigger", "retention"]
    assert [key for key in keys if f"`{key}`" not in pipelines] == []
    parameters = [name for detector in DETECTORS.values() for name in detector]
    assert [name for name in (*DETECTORS, *parameters) if f"`{name}`" not in stateful] == []

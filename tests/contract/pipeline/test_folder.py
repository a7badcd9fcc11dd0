"""The pipeline model."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lakehouse.contract.errors import ConfigError
from lakehouse.contract.pipeline import Template, load_pipeline
from lakehouse.contract.settings import conf_dir

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

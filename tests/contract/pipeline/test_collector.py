"""Collectors of the pipeline model: each kind takes its options and no others."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from lakehouse.contract.errors import ConfigError
from lakehouse.contract.pipeline import load_pipeline
from lakehouse.contract.pipeline.source import COLLECTOR_KINDS, AnswerSpec, CollectorSpec, EnrichSpec
from lakehouse.contract.settings import conf_dir

ROOT = Path(__file__).parents[3]
GOOD: dict[str, dict[str, Any]] = {
    "websocket": {"url": "wss://h/s", "resume_param": "from"},
    "sse": {"url": "https://h/s", "headers": {"A": "b"}},
    "lines": {"url": "http://h/s", "resume_param": "from", "headers": {"A": "$B"}},
    "http": {"ack": "none"},
    "udp": {"port": 9, "host": "::1", "framing": "lines", "sequence": "{n}", "sender": "{a.b}", "buffer_bytes": 5_000},
    "mine.kinds:build": {"options": {"any": 1}},
}


@pytest.mark.parametrize("kind", GOOD)
def test_a_kind_takes_its_options_and_no_others(kind: str) -> None:
    assert CollectorSpec(kind, **GOOD[kind]).kind == kind
    values = {name: value for options in GOOD.values() for name, value in options.items()}
    assert set(values) == {field.name for field in dataclasses.fields(CollectorSpec)} - {"kind"}, "each is tried"
    for name, value in values.items():
        if name not in GOOD[kind]:
            with pytest.raises(ConfigError, match="has no such option") as caught:
                CollectorSpec(kind, **{name: value})
            assert caught.value.key == name


def test_every_kind_of_ours_is_tried_and_told() -> None:
    assert set(COLLECTOR_KINDS) == {kind for kind in GOOD if ":" not in kind}
    text = (ROOT / "docs" / "guide" / "patterns.md").read_text(encoding="utf-8")
    for kind, options in GOOD.items():
        assert f"`{kind}`" in text or ":" in kind
        assert all(f"`{name}`" in text for name in options), kind
    fields = [*dataclasses.fields(AnswerSpec), *dataclasses.fields(EnrichSpec)]
    assert [f.name for f in fields if f"\n{f.name} = " not in text] == []


@pytest.mark.parametrize(
    ("kind", "options", "key"),
    [
        ("pigeon", {}, "kind"),
        ("pigeon:", {}, "kind"),
        ("websocket", {"url": "http://h/"}, "url"),
        ("sse", {"url": "ws://h/"}, "url"),
        ("http", {"ack": "perhaps"}, "ack"),
        ("udp", {"framing": "frame"}, "framing"),
        ("udp", {"port": 70_000}, "port"),
        ("udp", {"buffer_bytes": 1}, "buffer_bytes"),
        ("udp", {"sequence": "n"}, "sequence"),
    ],
)
def test_what_is_refused(kind: str, options: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        CollectorSpec(kind, **options)
    assert caught.value.key == key


@pytest.mark.parametrize(
    ("text", "key", "says"),
    [
        ('respond = "sync"', "sources.s.respond", "go together"),
        ('respond = "later"', "sources.s.respond", "not known"),
        ('answer = { product = "p", key = { a = "{a}" } }', "sources.s.respond", "go together"),
        ('respond = "sync"\nanswer = { product = "p", key = {} }', "sources.s.answer.key", "needs the key"),
        (
            'respond = "sync"\nanswer = { product = "p", key = { a = "{a}" } }',
            "sources.s.answer.product",
            "no product 'p'",
        ),
        (
            'respond = "sync"\nanswer = { product = "p", key = { a = "{a}" }, timeout = "soon" }',
            "sources.s.answer.timeout",
            "not a duration",
        ),
        ('enrich.c = { key = "{a}" }', "sources.s.enrich.c.file", "a file or a topic"),
        ('enrich.c = { key = "{a}", file = "x", topic = "y" }', "sources.s.enrich.c.file", "a file or a topic"),
        ('enrich.c = { key = "{a}", file = "x" }', "sources.s.enrich.c.column", "needs the column"),
        ('enrich.C = { key = "{a}", topic = "x" }', "sources.s.enrich", "no name of a header"),
    ],
)
def test_answers_and_references_are_checked_at_load(tmp_path: Path, text: str, key: str, says: str) -> None:
    source = f'[sources.s]\ntopic = "t"\nschema = "a STRING"\nevent_time = "received_at"\n{text}\n'
    (tmp_path / "pipeline.toml").write_text(source, encoding="utf-8")
    with pytest.raises(ConfigError, match=says) as caught:
        load_pipeline(tmp_path)
    assert caught.value.key == key


@pytest.mark.parametrize("folder", sorted((conf_dir() / "pipelines").iterdir()), ids=lambda folder: folder.name)
def test_shipped_pipelines_load(folder: Path) -> None:
    assert load_pipeline(folder).sources

"""What a product may say of its channel."""

from __future__ import annotations

from pathlib import Path

import pytest

from lakehouse.contract.errors import ConfigError
from lakehouse.contract.pipeline import load_pipeline
from lakehouse.contract.pipeline.product import EVERYTHING, ChannelSpec

from .test_product import load


def test_a_channel_is_a_truth_value_or_a_table(tmp_path: Path) -> None:
    def channel(text: str) -> ChannelSpec:
        return load(tmp_path, text).products["p"].channel

    assert channel("") == EVERYTHING == channel("channel = true")
    assert not EVERYTHING.narrows
    none = channel("channel = false")
    assert (bool(none), none.served, none.narrows) == (False, False, False)
    some = channel("[products.p.channel]\nwhere = \"city = 'Bonn'\"\ncolumns = ['city', 'n']")
    assert (some.served, some.where, some.columns, some.narrows) == (True, "city = 'Bonn'", ("city", "n"), True)


@pytest.mark.parametrize(
    ("channel", "key", "says"),
    [
        ("channel = 'no'", "channel.served", "not of type bool"),
        ("channel = 1", "channel", "not of type ChannelSpec"),
        ("channel = { were = 'x' }", "channel.were", "Did you mean 'where'"),
        ("channel = { columns = 'x' }", "channel.columns", "not of type tuple"),
    ],
)
def test_what_is_refused(tmp_path: Path, channel: str, key: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        load(tmp_path, channel)
    assert caught.value.key == f"products.p.{key}"
    assert caught.value.file == tmp_path / "pipeline.toml"


def test_a_view_has_one_too(tmp_path: Path) -> None:
    load(tmp_path, "")
    with (tmp_path / "pipeline.toml").open("a") as file:
        file.write("\n[products.v]\nfrom = 'p'\nsql = 'SELECT 1'\nkey = ['a']\nchannel = { where = 'a > 1' }\n")
    assert load_pipeline(tmp_path).views["v"].channel.where == "a > 1"


def test_every_key_is_in_the_docs() -> None:
    text = (Path(__file__).parents[3] / "docs" / "guide" / "pipelines.md").read_text(encoding="utf-8")
    table = text.split("[products.top_topics.channel]")[1].split("```")[0]
    assert [name for name in ("where", "columns") if f"\n{name} = " not in table] == []
    assert "`channel = false`" in text

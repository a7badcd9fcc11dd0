"""Where things lie."""

from __future__ import annotations

from pathlib import Path

import pytest

from lakehouse.contract.lake import LAYERS, NAME_PATTERN, Lake, UnknownTable


def made(lake: Lake, layer: str, name: str) -> None:
    (lake.table(layer, name).path / "_delta_log").mkdir(parents=True)


def test_an_empty_lake(tmp_path: Path) -> None:
    lake = Lake(tmp_path / "none")
    assert lake.tables() == []
    with pytest.raises(UnknownTable) as caught:
        lake.find("clicks")
    assert str(caught.value) == "no table 'clicks'; there are: none yet"
    assert not lake.root.exists()


def test_tables_in_order_of_layer_and_name(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    for layer, name in [("gold", "b"), ("gold", "a"), ("bronze", "z"), ("silver", "quarantine")]:
        made(lake, layer, name)
    (tmp_path / "gold" / "no_table").mkdir()
    (tmp_path / "_millrace" / "_delta_log").mkdir(parents=True)
    assert [(t.layer, t.name) for t in lake.tables()] == [
        ("bronze", "z"),
        ("silver", "quarantine"),
        ("gold", "a"),
        ("gold", "b"),
    ]
    assert lake.find("quarantine") == lake.quarantine()
    with pytest.raises(UnknownTable) as caught:
        lake.find("c")
    assert caught.value.known == ["z", "quarantine", "a", "b"]


def test_a_table_exists_once_it_has_a_log(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    assert not lake.bronze("clicks").exists()
    made(lake, "bronze", "clicks")
    assert lake.bronze("clicks").exists()


def test_state_is_apart_from_tables(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    for path in (lake.checkpoint("q"), lake.collector_log("n"), lake.broker()):
        assert path.is_relative_to(lake.state)
    assert all(not lake.state.is_relative_to(tmp_path / layer) for layer in LAYERS)


@pytest.mark.parametrize("name", ["a", "rsvps_by_city", "a1", "a" * 63])
def test_names_of_tables(name: str) -> None:
    assert NAME_PATTERN.fullmatch(name)


@pytest.mark.parametrize("name", ["", "1a", "A", "a-b", "a/b", "../a", "_a", "a" * 64, "a b"])
def test_what_is_no_name_of_a_table(name: str) -> None:
    assert not NAME_PATTERN.fullmatch(name)

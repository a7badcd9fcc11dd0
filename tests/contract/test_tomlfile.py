"""TOML into dataclasses, and what is said when it does not fit."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lakehouse.contract.errors import ConfigError
from lakehouse.contract.tomlfile import build, duration_ms, read_toml


@dataclass(frozen=True)
class Wheel:
    spokes: int
    rim: str = "steel"


@dataclass(frozen=True)
class Cart:
    name: str
    load: float = 1.0
    brake: bool = False
    place: Path = Path("yard")
    wheels: tuple[Wheel, ...] = ()
    tags: dict[str, str] = field(default_factory=dict)
    owner: str | None = None
    axle: Wheel = field(default_factory=lambda: Wheel(4))


def load(tmp_path: Path, text: str) -> Cart:
    path = tmp_path / "cart.toml"
    path.write_text(text, encoding="utf-8")
    return build(Cart, read_toml(path), file=path)


def refused(tmp_path: Path, text: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    return caught.value


def test_a_whole_file(tmp_path: Path) -> None:
    text = """
        name = "a"
        load = 2            # an integer where a float is wanted
        brake = true
        place = "/x/y"
        owner = "them"
        tags = {colour = "red"}
        axle = {spokes = 8}
        [[wheels]]
        spokes = 12
        [[wheels]]
        spokes = 16
        rim = "wood"
    """
    wheels = (Wheel(12), Wheel(16, "wood"))
    assert load(tmp_path, text) == Cart("a", 2.0, True, Path("/x/y"), wheels, {"colour": "red"}, "them", Wheel(8))


def test_an_unknown_key_names_file_line_and_the_nearest_key(tmp_path: Path) -> None:
    error = refused(tmp_path, 'name = "a"\n\n[[wheels]]\nspokse = 3\n')
    assert (error.file, error.line, error.key) == (tmp_path / "cart.toml", 4, "wheels[0].spokse")
    assert error.problem == "unknown key"
    assert "'spokes'" in error.remedy
    assert str(error) == f"{tmp_path / 'cart.toml'}:4: wheels[0].spokse: unknown key. Did you mean 'spokes'?"


def test_an_unknown_key_like_no_other_lists_those_there_are(tmp_path: Path) -> None:
    error = refused(tmp_path, 'name = "a"\n[axle]\nspokes = 1\nzzzz = 3\n')
    assert (error.line, error.remedy) == (4, "Known keys: rim, spokes")


@pytest.mark.parametrize(
    ("text", "key", "line"),
    [
        ("name = 1", "name", 1),
        ('name = "a"\nload = "1"', "load", 2),
        ('name = "a"\nload = true', "load", 2),
        ('name = "a"\nbrake = 1', "brake", 2),
        ('name = "a"\nwheels = 3', "wheels", 2),
        ('name = "a"\n[[wheels]]\nspokes = 2.5', "wheels[0].spokes", 3),
        ('name = "a"\naxle = "x"', "axle", 2),
        ('name = "a"\n[tags]\ncolour = 3', "tags.colour", 3),
        ('name = "a"\nplace = 3', "place", 2),
        ('name = "a"\nowner = 3', "owner", 2),
    ],
)
def test_another_type_names_the_place(tmp_path: Path, text: str, key: str, line: int) -> None:
    error = refused(tmp_path, text)
    assert (error.key, error.line) == (key, line)
    assert "is not of type" in error.problem


def test_a_missing_key(tmp_path: Path) -> None:
    error = refused(tmp_path, 'name = "a"\n[[wheels]]\nrim = "x"\n')
    assert (error.key, error.problem) == ("wheels[0]", "key 'spokes' is missing")


def test_no_file_and_no_toml(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no such file"):
        read_toml(tmp_path / "absent.toml")
    for content in (b"a = = 1", b"a = '\xff'"):
        (tmp_path / "bad.toml").write_bytes(content)
        with pytest.raises(ConfigError, match="not valid TOML"):
            read_toml(tmp_path / "bad.toml")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("250 ms", 250),
        ("250ms", 250),
        ("3 milliseconds", 3),
        ("1 millisecond", 1),
        ("5s", 5_000),
        ("1 second", 1_000),
        ("30 seconds", 30_000),
        ("5m", 300_000),
        ("1 minute", 60_000),
        ("90 minutes", 5_400_000),
        ("1.5 hours", 5_400_000),
        ("2h", 7_200_000),
        (" 40 days ", 3_456_000_000),
        ("1d", 86_400_000),
    ],
)
def test_durations(text: str, expected: int) -> None:
    assert duration_ms(text) == expected


@pytest.mark.parametrize("text", ["", "5", "minutes", "-1 s", "5 parsecs", "1 minute 30 seconds", "1e3 s", "5 S"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(ValueError, match="is not a duration"):
        duration_ms(text)


@given(st.integers(0, 10**6), st.sampled_from([("ms", 1), ("s", 1_000), ("m", 60_000), ("h", 3_600_000)]))
def test_every_number_and_unit(number: int, unit: tuple[str, int]) -> None:
    assert duration_ms(f"{number}{unit[0]}") == duration_ms(f"{number} {unit[0]}") == number * unit[1]

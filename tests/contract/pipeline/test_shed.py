"""Load shedding in the pipeline model."""

from __future__ import annotations

from typing import Any

import pytest

from lakehouse.contract.errors import ConfigError
from lakehouse.contract.pipeline.source import KeepTest, ShedSpec

EVENT = {"kind": "buy", "amount": 150, "vip": False, "member": {"id": 7, "vip": True, "tags": []}, "none": None}


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("kind", True),
        ("vip", False),
        ("member.vip", True),
        ("member.tags", False),
        ("none", False),
        ("kind.deeper", False),
        ("kind = 'buy'", True),
        ('kind="buy"', True),
        ("kind != 'buy'", False),
        ("nothing != 'buy'", False),
        ("amount >= 150", True),
        ("amount > 150", False),
        ("amount < 150.5", True),
        ("member.id in [1, 7]", True),
        ("member.id in [1]", False),
        ("kind > 5", False),
        ("vip = false", True),
    ],
)
def test_a_test_of_a_field(text: str, holds: bool) -> None:
    assert KeepTest.read(text).holds(EVENT) is holds


@pytest.mark.parametrize(
    "text", ["", "1 = 1", "a b", "a ~ 1", "a = b", "a in 5", "a = [1]", "a = {}", "a; b", "a =", "f(a)"]
)
def test_what_is_no_test(text: str) -> None:
    with pytest.raises(ValueError, match=r"no test|no JSON|does not go"):
        KeepTest.read(text)


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({}, "on_events"),
        ({"on_events": -1}, "on_events"),
        ({"on_events": 1, "share": 1.0}, "share"),
        ({"on_events": 1, "share": 0.0}, "share"),
        ({"on_events": 1, "off": 1.0}, "off"),
        ({"on_events": 1, "mode": "fair"}, "mode"),
        ({"on_events": 1, "mode": "semantic"}, "keep"),
        ({"on_events": 1, "keep": ("a",)}, "keep"),
        ({"on_events": 1, "mode": "semantic", "keep": ("a", "a b")}, "keep[1]"),
        ({"on_age": "soon"}, "on_age"),
        ({"on_bytes": 1, "hold": "long"}, "hold"),
    ],
)
def test_what_is_refused(given: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ShedSpec(**given)
    assert caught.value.key == key

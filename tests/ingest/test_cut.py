"""What is cut out of a JSON text is what a parser finds there, and not a byte of it is another."""

from __future__ import annotations

import json
from typing import Any

import orjson
from hypothesis import given, settings
from hypothesis import strategies as st

from ingest.cut import elements, member

_NAMES = st.sampled_from(["event", "evenT", "", 'e"vent', "ev\\ent", "}", "[", "é"]) | st.text(max_size=5)
_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**80), 2**80)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(["]", '"', "\\", '\\"', "{,}", "\\\\", "\n", "\u2028"])
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_NAMES, inner, max_size=4),
    max_leaves=12,
)
_STYLES = st.sampled_from([{}, {"separators": (",", ":")}, {"indent": 2}, {"ensure_ascii": False}, {"indent": "\t"}])


@settings(max_examples=40, deadline=None)
@given(st.lists(_VALUES, max_size=6), _STYLES, st.sampled_from(["", " \r\n\t"]))
def test_the_elements_of_an_array(values: list[Any], style: dict[str, Any], around: str) -> None:
    text = (around + json.dumps(values, **style) + around).encode()
    found = list(elements(text))
    assert [json.loads(part) for part in found] == values
    at = 0
    for part in found:
        at = text.index(part, at) + len(part)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(_NAMES, _VALUES), max_size=6), _STYLES)
def test_a_member_of_an_object(members: list[tuple[str, Any]], style: dict[str, Any]) -> None:
    text = (
        "{" + ", ".join(f"{json.dumps(name, **style)} : {json.dumps(value, **style)}" for name, value in members) + "}"
    )
    found = member(text.encode(), "event")
    assert json.loads(found) == dict(members).get("event")
    assert found.decode() in text or found == b"null"


def test_numbers_stay_as_they_were_written() -> None:
    numbers = [b"0.12345678901234567890123", b"123456789012345678901234567890", b"1E+2", b"-0.0", b"1.10"]
    text = b"[" + b" , ".join(numbers) + b"]"
    assert list(elements(text)) == numbers
    assert [orjson.dumps(value) for value in orjson.loads(text)] != numbers, "which is why they are cut out"
    assert member(b'{"\\u0065vent":{"n":1.10},"event" :{"n": 1.20 }}', "event") == b'{"n": 1.20 }'
    assert member(b'{"event":1,"\\u0065vent":{"n":1.10}}', "event") == b'{"n":1.10}'
    assert member(b"{}", "event") == b"null"

"""Events are cut out of a request byte for byte, and of malformed requests nothing is cut. CloudEvents."""

from __future__ import annotations

import json
import random
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingest.errors import RequestRefused
from ingest.intake import JSON, NotACloudEvent, cloud_event, elements, published_event, split, structured

GOOD: dict[str, Any] = {"specversion": "1.0", "id": "a-1", "source": "/s", "type": "t"}
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
_GAPS = st.sampled_from(["", " ", "\n", " \r\n\t"])
# What breaks JSON, or looks as if it did.
_SHARDS = [
    *(bytes([byte]) for byte in b'[]{},:"\\-+. \x00\x01\xff'),
    *(b"NaN", b"Infinity", b"1e999", b"01", b".5", b"5.", b"tru", b"null", b"\xed\xa0\x80", b"\\ud800", b"\\u00"),
    b"\xef\xbb\xbf",
]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(_VALUES, _STYLES, _GAPS), max_size=6), _GAPS)
def test_elements_keep_every_byte(items: list[tuple[Any, dict[str, Any], str]], around: str) -> None:
    parts = [json.dumps(value, **style) for value, style, _ in items]
    text = around + "[" + ",".join(gap + part + gap for part, (_, _, gap) in zip(parts, items, strict=True)) + "]"
    assert elements((text + around).encode()) == [part.encode() for part in parts]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(_NAMES, _VALUES), max_size=6), _STYLES, _GAPS)
def test_published_event_keeps_every_byte(members: list[tuple[str, Any]], style: dict[str, Any], gap: str) -> None:
    texts = [(name, json.dumps(name), json.dumps(value, **style)) for name, value in members]
    text = "{" + ",".join(f"{gap}{name}{gap}:{gap}{value}{gap}" for _, name, value in texts) + "}"
    wanted = {name: value for name, _, value in texts}.get("event", "null")
    assert published_event(text.encode()) == wanted.encode()


@settings(max_examples=200, deadline=None)
@given(st.lists(_VALUES, min_size=1, max_size=4), st.integers(0, 2**32))
def test_only_valid_arrays_are_cut(values: list[Any], seed: int) -> None:
    chance = random.Random(seed)
    body = bytearray(json.dumps(values, ensure_ascii=False).encode())
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(body) + 1)
        body[at : at + chance.choice((0, 0, 1, 2))] = chance.choice([b"", *_SHARDS])
    try:
        one, events = split(JSON, bytes(body))
    except RequestRefused:
        assert orjson.loads(body) == []
        return
    if one:
        assert events == (bytes(body),), "the border refuses it as one event"
        return
    assert [json.loads(event) for event in events] == json.loads(body)
    at = 0
    for event in events:
        at = body.index(event, at) + len(event)


def test_spelling_of_numbers_and_names_is_kept() -> None:
    numbers = [b"0.12345678901234567890123", b"123456789012345678901234567890", b"1E+2", b"-0.0", b"1.10"]
    text = b"[" + b" , ".join(numbers) + b"]"
    assert elements(text) == numbers
    assert [orjson.dumps(value) for value in orjson.loads(text)] != numbers, "which is why they are cut out"
    assert published_event(b'{"\\u0065vent":{"n":1.10},"event" :{"n": 1.20 }}') == b'{"n": 1.20 }'
    assert published_event(b'{"event":1,"\\u0065vent":{"n":1.10}}') == b'{"n":1.10}'
    assert published_event(b"{}") == b"null"


@pytest.mark.parametrize(("opening", "closing"), [(b"[", b"]"), (b'{"a":', b"}")])
@pytest.mark.parametrize("depth", [100, 900, 960, 1_000, 1_022])
def test_any_depth_that_orjson_reads_is_cut(opening: bytes, closing: bytes, depth: int) -> None:
    deep = opening * depth + b"1" + closing * depth
    orjson.loads(deep)
    assert elements(b'[1, %b ,{"b":2}]' % deep) == [b"1", deep, b'{"b":2}']
    assert published_event(b'{"event": %b}' % deep) == deep


def test_the_data_is_kept_byte_for_byte() -> None:
    data = b'{"x": 0.12345678901234567890123 , "y":"\\u00e9"}'
    text = b'{"specversion":"1.0", "data": %b ,"id":"a","source":"/s","type":"t"}' % data
    payload, event_id, headers = structured(text)
    assert payload == data
    assert event_id == "/s a"
    assert headers == (("ce_specversion", "1.0"), ("ce_id", "a"), ("ce_source", "/s"), ("ce_type", "t"))


def test_data_in_base64_and_attributes_that_are_no_text() -> None:
    more = {"data_base64": "eyJpZCI6MX0=", "tries": 3, "sampled": True, "subject": None}
    payload, _, headers = structured(orjson.dumps(GOOD | more | {"datacontenttype": "application/vnd.shop+json; v=1"}))
    assert payload == b'{"id":1}'
    assert dict(headers).items() >= {
        ("ce_tries", "3"), ("ce_sampled", "true"), ("content-type", "application/vnd.shop+json; v=1"),
    }  # fmt: skip
    assert "ce_subject" not in dict(headers)


def test_attributes_as_headers() -> None:
    payload, _, headers = cloud_event(GOOD | {"time": "2026-03-01T10:00:00Z"}, b"anything")
    assert (payload, dict(headers)["ce_time"]) == (b"anything", "2026-03-01T10:00:00Z")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"specversion": "0.3"}, "specversion is not 1.0"),
        ({"id": ""}, "id is missing"),
        ({"source": 1}, "source is missing"),
        ({"source": "a b"}, "source is no URI"),
        ({"type": None}, "type is missing"),
        ({"time": "yesterday"}, "time is no RFC 3339 timestamp"),
        ({"time": "2026-03-01T10:00:00"}, "time is no RFC 3339 timestamp"),
        ({"datacontenttype": "text/xml"}, "datacontenttype is text/xml; an event's data is JSON"),
        ({"Upper": "x"}, "'Upper' is no name of an attribute"),
        ({"list": [1]}, "list is no plain value"),
        ({"note": "a\nb"}, "note is no plain value"),
        ({"note": "x" * 9_000}, "its attributes have more than 8192 bytes"),
        ({"id": "x" * 600}, "its source and id have more than 512 bytes"),
        ({"data": None, "data_base64": "eyJ"}, "data_base64 is not base64"),
        ({"data_base64": "e30="}, "it has both data and data_base64"),
    ],
)
def test_what_breaks_the_specification_has_a_reason(change: dict[str, Any], reason: str) -> None:
    members = {name: value for name, value in (GOOD | {"data": {}} | change).items() if (name, value) != ("data", None)}
    with pytest.raises(NotACloudEvent, match=reason.replace("(", r"\(")):
        structured(orjson.dumps(members))


@pytest.mark.parametrize("text", [b"", b"[]", b"1", b"nope", b'{"a":' * 100_000, orjson.dumps(GOOD)])
def test_what_is_no_event_at_all(text: bytes) -> None:
    with pytest.raises(NotACloudEvent):
        structured(text)

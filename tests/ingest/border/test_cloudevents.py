"""CloudEvents as JSON and as headers."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from ingest.border.cloudevents import NotACloudEvent, binary, structured

GOOD: dict[str, Any] = {"specversion": "1.0", "id": "a-1", "source": "/s", "type": "t"}


def test_the_data_is_kept_byte_for_byte() -> None:
    data = b'{"x": 0.12345678901234567890123 , "y":"\\u00e9"}'
    found = structured(b'{"specversion":"1.0", "data": %b ,"id":"a","source":"/s","type":"t"}' % data)
    assert found.payload == data
    assert found.event_id == "/s a"
    assert found.headers == (("ce_specversion", "1.0"), ("ce_id", "a"), ("ce_source", "/s"), ("ce_type", "t"))


def test_data_in_base64_and_attributes_that_are_no_text() -> None:
    more = {"data_base64": "eyJpZCI6MX0=", "tries": 3, "sampled": True, "subject": None}
    found = structured(orjson.dumps(GOOD | more | {"datacontenttype": "application/vnd.shop+json; v=1"}))
    assert found.payload == b'{"id":1}'
    assert dict(found.headers).items() >= {
        ("ce_tries", "3"), ("ce_sampled", "true"), ("content-type", "application/vnd.shop+json; v=1"),
    }  # fmt: skip
    assert "ce_subject" not in dict(found.headers)


def test_attributes_as_headers() -> None:
    found = binary(GOOD | {"time": "2026-03-01T10:00:00Z"}, b"anything")
    assert (found.payload, dict(found.headers)["ce_time"]) == (b"anything", "2026-03-01T10:00:00Z")


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

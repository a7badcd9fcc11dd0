"""The event stream format: the standard's own cases, those of web-platform-tests' eventsource, any cut of chunks."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingest.collectors.sse import EventStreamParser, ServerSentEvent

Event = ServerSentEvent

CASES: list[tuple[str, bytes, list[Event]]] = [
    ("the standard, first example", b"data: YHOO\ndata: +2\ndata: 10\n\n", [Event(b"YHOO\n+2\n10")]),
    (
        "the standard, ids and comments",
        b": test stream\n\ndata: first event\nid: 1\n\ndata:second event\nid\n\ndata:  third event\n",
        [Event(b"first event", id="1"), Event(b"second event", id="")],
    ),
    ("the standard, empty data", b"data\n\ndata\ndata\n\ndata:", [Event(b""), Event(b"\n")]),
    ("the standard, one space", b"data:test\n\ndata: test\n\n", [Event(b"test"), Event(b"test")]),
    ("only one space is taken off", b"data:  x\n\n", [Event(b" x")]),
    ("a byte order mark", b"\xef\xbb\xbfdata: 1\n\n\xef\xbb\xbfdata: 2\n\ndata: 3\n\n", [Event(b"1"), Event(b"3")]),
    ("two byte order marks", b"\xef\xbb\xbf\xef\xbb\xbfdata: 1\n\ndata: 2\n\n", [Event(b"2")]),
    ("CR, LF and CRLF", b"data: a\rdata: b\r\ndata: c\n\r\n", [Event(b"a\nb\nc")]),
    ("CR alone ends lines", b"data: a\r\rdata: b\r\r", [Event(b"a"), Event(b"b")]),
    ("types", b"event: add\ndata: 1\n\nevent:\ndata: 2\n\ndata: 3\n\n", [Event(b"1", "add"), Event(b"2"), Event(b"3")]),
    ("a type without data is forgotten", b"event: add\n\ndata: 1\n\n", [Event(b"1")]),
    ("an unknown field", b"data: a\nfoo: b\n data: c\ndata : d\nDATA: e\n\n", [Event(b"a")]),
    ("a comment within", b"data: a\n:data: b\ndata: c\n\n", [Event(b"a\nc")]),
    ("a colon in the value", b"data: a:b\n\n", [Event(b"a:b")]),
    ("an id stays", b"id: 7\ndata: a\n\ndata: b\n\n", [Event(b"a", id="7"), Event(b"b", id="7")]),
    ("an id without data counts", b"id: 7\n\ndata: b\n\n", [Event(b"b", id="7")]),
    ("an id with NUL does not", b"id: 7\ndata: a\n\nid: 8\0\ndata: b\n\n", [Event(b"a", id="7"), Event(b"b", id="7")]),
    ("an id of another script", "id: …é\ndata: a\n\n".encode(), [Event(b"a", id="…é")]),
    ("NUL in data", b"data: a\0b\n\n", [Event(b"a\0b")]),
    ("bytes that are no UTF-8 stay", b"data: \xff\n\n", [Event(b"\xff")]),
    ("cut off at the end", b"data: a\n\ndata: b\n", [Event(b"a")]),
    ("empty lines", b"\n\n\ndata: a\n\n\n", [Event(b"a")]),
]


@pytest.mark.parametrize(("stream", "expected"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_cases(stream: bytes, expected: list[Event]) -> None:
    assert EventStreamParser().feed(stream) == expected
    parser = EventStreamParser()
    assert [event for byte in stream for event in parser.feed(bytes([byte]))] == expected, "byte by byte"


@settings(max_examples=30)
@given(st.sampled_from([case[1] for case in CASES]), st.lists(st.integers(0, 80), max_size=6))
def test_chunks_do_not_matter(stream: bytes, cuts: list[int]) -> None:
    whole = EventStreamParser().feed(stream)
    places = sorted({min(cut, len(stream)) for cut in cuts} | {0, len(stream)})
    parser = EventStreamParser()
    pieces = [stream[a:b] for a, b in pairwise(places)]
    assert [event for piece in pieces for event in parser.feed(piece)] == whole


@settings(max_examples=30)
@given(st.lists(st.binary(max_size=40), max_size=8))
def test_rubbish_raises_nothing(chunks: list[bytes]) -> None:
    parser = EventStreamParser(max_bytes=16)
    for chunk in chunks:
        assert all(len(event.data) <= 16 for event in parser.feed(chunk))


def test_retry() -> None:
    parser = EventStreamParser()
    parser.feed(b"retry: 3000\nretry: 1x\nretry:\nretry: -1\n")
    assert parser.retry_ms == 3000
    parser.feed(b"retry:50\n")
    assert parser.retry_ms == 50


def test_the_id_of_the_connection_before_stays_in_force() -> None:
    parser = EventStreamParser("41")
    assert parser.feed(b"data: a\n\nid: 42\ndata: b\n\n") == [Event(b"a", id="41"), Event(b"b", id="42")]
    assert parser.last_id == "42"


def test_what_is_too_large_is_passed_over_and_named() -> None:
    parser = EventStreamParser(max_bytes=10)
    found = parser.feed(b"data: 12345\ndata: 678901\nid: 1\n\ndata: 12345678901\n\n: " + b"x" * 50 + b"\ndata: b\n\n")
    assert found == [Event(b"", id="1", oversize=True), Event(b"", id="1", oversize=True), Event(b"b", id="1")]
    assert parser.feed(b"data: " + b"y" * 100) == []
    assert parser.feed(b"y" * 100) == []
    assert parser.feed(b"\n\ndata: c\n\n") == [Event(b"", id="1", oversize=True), Event(b"c", id="1")]

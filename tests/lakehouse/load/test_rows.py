"""Envelopes of loaded rows: what a collector's border would have given them."""

from __future__ import annotations

import json
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from ingest.border import admission as border
from ingest.border.admission import Border
from lakehouse.contract.envelope import fingerprint
from lakehouse.contract.pipeline import Source, Template
from lakehouse.load.rows import KEPT_BYTES, MAX_ID_BYTES, FilePosition, Sealer, Segment, render, short_digest
from tests.lakehouse.load.offers import SOURCE

plain = st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False) | st.text(max_size=8)
value = plain | st.lists(plain, max_size=2) | st.dictionaries(st.sampled_from("ab"), plain, max_size=2)
event = st.dictionaries(st.sampled_from(["merchant", "offer", "version", "x%s"]), value, max_size=4)
payload = event.map(lambda found: json.dumps(found).encode()) | st.binary(max_size=12) | st.just(b"[1]")


def sealed(source: Source, rows: list[bytes], refused: dict[int, str] | None = None, done: FilePosition | None = None):
    sealer = Sealer(source, tenant="t1", node="loader-9")
    part = sealer.seal("f.csv", done or FilePosition("f" * 32), Segment(list(rows), refused or {}, 77), 5_000_000)
    return part, sealer.rows([part])


def test_the_limits_are_those_of_the_border() -> None:
    assert (MAX_ID_BYTES, KEPT_BYTES) == (border.MAX_ID_BYTES, border.KEPT_BYTES)


@settings(max_examples=60)
@given(st.lists(payload, max_size=5), st.sampled_from(["", "{merchant}", "{offer.a}:{version}"]))
def test_a_row_gets_the_envelope_that_a_collector_gives(rows: list[bytes], key: str) -> None:
    source = replace(SOURCE, key=key, max_event_bytes=60)
    at_border = Border(source, tenant="t1", collector="loader-9", clock=lambda: 5_000_000_000)
    part, table = sealed(source, rows)
    for number, (row, loaded) in enumerate(zip(rows, table.to_pylist(), strict=True)):
        admitted = at_border.admit(row)
        if not admitted.envelope.event_id.startswith("~"):
            assert loaded["event_id"] == admitted.envelope.event_id
            assert loaded["key"] == admitted.key
        else:
            named = part.after.first and short_digest(f"{part.after.first}/{number}")
            assert loaded["event_id"] == (f"~{named}" if named else f"~{'f' * 32}/{number}")
        assert loaded["reject"] == admitted.envelope.reject
        assert loaded["payload"] == admitted.payload
        assert loaded["fingerprint"] == admitted.envelope.fingerprint == fingerprint(admitted.payload)
        assert (loaded["source"], loaded["tenant"], loaded["collector"]) == ("offers", "t1", "loader-9")
    assert (part.after.rows, part.after.offset) == (len(rows), 77)


@settings(max_examples=60)
@given(event, st.sampled_from(["{merchant}", "a%{offer}-{version}%", "{merchant}{merchant}", "{x.y}"]))
def test_the_quick_template_is_the_template(fields: dict[str, object], text: str) -> None:
    assert render(Template(text))(fields) == Template(text).render(fields)


def test_coordinates_cannot_be_those_of_kafka() -> None:
    part, table = sealed(SOURCE, [b"{}", b"x"], {1: "broken"}, FilePosition("ab" * 16, rows=10, rejects=3))
    assert table["topic"].to_pylist() == ["file:" + "ab" * 16] * 2
    assert table["offset"].to_pylist() == [10, 11]
    assert table["partition"].to_pylist() == [0, 0]
    assert table["origin"].to_pylist() == ["f.csv"] * 2
    assert table["suspect"].to_pylist() == [True, True]
    assert table["headers"].to_pylist() == [[], []]
    assert table["reject"].to_pylist()[1] == "broken"
    assert (part.after.rows, part.after.rejects) == (12, 5)


def test_an_id_that_is_too_long_is_refused() -> None:
    long = json.dumps({"merchant": "é" * 300, "offer": "o", "version": 1}).encode()
    _, table = sealed(SOURCE, [long])
    assert table["reject"].to_pylist() == ["the event id is longer than 512 bytes"]

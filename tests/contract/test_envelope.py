"""The envelope in Kafka headers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lakehouse.contract.envelope import HEADER_NAMES, WEIGHT, Envelope, EnvelopeError, fingerprint, new_event_id

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
envelopes = st.builds(
    Envelope,
    event_id=texts,
    source=texts,
    tenant=texts,
    received_at=st.integers(0, 2**62),
    collector=texts,
    fingerprint=st.binary().map(fingerprint),
    suspect=st.booleans(),
    reject=st.none() | texts,
)
EXAMPLE = Envelope("e1", "rsvps", "default", 1, "n1", fingerprint(b"x"))


@given(envelopes, st.lists(st.tuples(texts.filter(lambda name: name not in HEADER_NAMES), st.binary())))
def test_there_and_back_among_other_headers(envelope: Envelope, others: list[tuple[str, bytes]]) -> None:
    assert Envelope.from_headers([*others, *envelope.to_headers(), *others]) == envelope


def test_only_known_names_are_written() -> None:
    weighed = ((WEIGHT, "10.0"),)
    full = Envelope("e", "s", "t", 1, "n", fingerprint(b""), suspect=True, reject="because", extra=weighed)
    assert [name for name, _ in full.to_headers()] == list(HEADER_NAMES)
    assert {"suspect", "reject"}.isdisjoint(name for name, _ in EXAMPLE.to_headers())


@pytest.mark.parametrize("name", ["id", "source", "tenant", "received_at", "collector", "fingerprint"])
def test_a_missing_header_is_named(name: str) -> None:
    headers = [header for header in EXAMPLE.to_headers() if header[0] != name]
    with pytest.raises(EnvelopeError, match=f"'{name}' is missing"):
        Envelope.from_headers(headers)


@pytest.mark.parametrize("bad", [("received_at", b"soon"), ("received_at", b""), ("id", b"\xff")])
def test_a_header_of_another_form(bad: tuple[str, bytes]) -> None:
    with pytest.raises(EnvelopeError, match="cannot be read"):
        Envelope.from_headers([*EXAMPLE.to_headers(), bad])


def test_the_last_of_two_headers_counts() -> None:
    assert Envelope.from_headers([*EXAMPLE.to_headers(), ("id", b"e2")]).event_id == "e2"


@given(st.binary(), st.binary())
def test_fingerprints_are_equal_where_payloads_are(a: bytes, b: bytes) -> None:
    assert (fingerprint(a) == fingerprint(b)) == (a == b)
    assert len(fingerprint(a)) == 32


def test_given_ids_are_marked_and_differ() -> None:
    ids = {new_event_id() for _ in range(1000)}
    assert len(ids) == 1000
    assert all(len(name) == 33 and name.startswith("~") for name in ids)

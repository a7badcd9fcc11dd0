"""What the Kafka clients share."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from ingest.publish.seam import Headers
from lakehouse.contract.envelope import Envelope

ENVELOPES = st.builds(
    Envelope,
    event_id=st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    source=st.sampled_from(["clicks", "rsvps"]),
    tenant=st.sampled_from(["default", "acme"]),
    received_at=st.integers(1, 2),
    collector=st.sampled_from(["n1", "n2"]),
    fingerprint=st.sampled_from(["a", "b"]),
    suspect=st.booleans(),
    reject=st.none() | st.just("bad"),
    extra=st.sampled_from([(), (("weight", "2.0"),)]),
)


@given(st.lists(ENVELOPES, max_size=8))
@settings(max_examples=30)
def test_headers_of_one_after_the_other_are_those_of_each(envelopes: list[Envelope]) -> None:
    headers = Headers()
    for envelope in envelopes:
        assert headers.of(envelope) == envelope.to_headers()

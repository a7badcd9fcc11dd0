"""What the Kafka clients share."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from ingest.kafka.publisher import Headers, OutcomeQueue, SendOutcome
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


async def test_the_event_loop_is_woken_by_the_batch() -> None:
    batches: list[Sequence[SendOutcome]] = []
    outcomes = OutcomeQueue(asyncio.get_running_loop(), batches.append)
    came = [SendOutcome(None, 0, n) for n in range(500)]  # type: ignore[arg-type]

    def put_all() -> None:
        for outcome in came:
            outcomes.put(outcome)

    client = threading.Thread(target=put_all)
    client.start()
    client.join()  # the loop is busy meanwhile
    await asyncio.sleep(0)
    assert [list(batch) for batch in batches] == [came]
    put_all()
    await asyncio.sleep(0)
    assert [len(batch) for batch in batches] == [500, 500]

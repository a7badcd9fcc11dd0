"""The first step of a two-step collection: payloads are taken in unread and go to ``TOPIC.raw``.

A front node has no business logic, so that it is fast, rarely changes, and can stand behind a load balancer in any
number. :mod:`ingest.refine` reads ``TOPIC.raw`` in a consumer group of its own, to be scaled apart, validates and
enriches, and writes the source's topic. An event's id is given here, by chance or from its place in the upstream; where
the source names an id in the payload, that one takes its place in the second step. Order is kept within a stream
upstream; of events by HTTP only where a client waits for one acknowledgement before it sends the next to the same node
and the source has one partition.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ingest.border import KEPT_BYTES, Admitted, Border, Refusal, repeatable_id
from lakehouse.contract.envelope import Envelope, fingerprint, new_event_id
from lakehouse.contract.pipeline import Pipeline, Source

RAW_SUFFIX = ".raw"
RAW_PLACE = "raw"  # an extra header of a refined event: where it stood in the raw topic


def raw_topic(source: Source) -> str:
    """Where the front node puts the source's payloads."""
    return source.topic + RAW_SUFFIX


def front_pipeline(pipeline: Pipeline) -> Pipeline:
    """The pipeline as a front node sees it: no templates, no schema, no answers, the raw topics."""
    return dataclasses.replace(pipeline, sources={name: front_source(s) for name, s in pipeline.sources.items()})


def front_source(source: Source) -> Source:
    """The source as a front node sees it."""
    return dataclasses.replace(
        source,
        topic=raw_topic(source),
        schema="",
        event_id="",
        key="",
        required=(),
        expectations={},
        respond="",
        answer=None,
        enrich={},
        latest_topic=False,
    )


class FrontBorder(Border):
    """Lets every payload through that is not too large; looks into none."""

    def admit(
        self,
        payload: bytes,
        *,
        suspect: bool = False,
        origin: str | None = None,
        tenant: str | None = None,
        max_bytes: int | None = None,
    ) -> Admitted:
        """The payload with an envelope; arguments are those of :meth:`Border.admit`."""
        limit = min(self.source.max_event_bytes, max_bytes or self.source.max_event_bytes)
        refusal = None
        if len(payload) > limit:
            reason = f"the event has {len(payload)} bytes, more than the {limit} that are allowed"
            refusal = Refusal(reason, 413, "too-large")
            payload = payload[:KEPT_BYTES]
        event_id = new_event_id() if origin is None else repeatable_id(origin, payload)
        envelope = Envelope(
            event_id,
            self.source.name,
            tenant or self._tenant,
            self._clock() // 1000,
            self._collector,
            fingerprint(payload),
            suspect,
            None if refusal is None else refusal.reason,
        )
        # A stream upstream's order is kept: its lane is the key.
        key = event_id if origin is None else origin.rpartition("#")[0]
        return Admitted(envelope, key.encode(), payload, refusal)

    def admit_all(
        self, payloads: Sequence[bytes], *, tenant: str | None = None, max_bytes: int | None = None
    ) -> list[Admitted]:
        """Each of them by :meth:`admit`."""
        return [self.admit(payload, tenant=tenant, max_bytes=max_bytes) for payload in payloads]

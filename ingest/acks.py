"""What has become of the event behind an acknowledgement token.

A token carries the event's coordinates (source, tenant, event id, time), so that any node can answer for it, also after
a restart: from memory while the event is recent, else from the bronze table.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from ingest.events import Fate, LoggedEvent
from ingest.front import RAW_SUFFIX
from ingest.lakestate import Coordinates, LakeState
from ingest.publish import Outcome
from ingest.tokens import Token
from lakehouse.contract.envelope import Envelope

REMEMBERED = 100_000


class RecentEvents:
    """The newest events and where they are, bounded; older ones are found in the lake.

    Args:
        topics: topic of each source.
        size: events remembered.
    """

    def __init__(self, topics: dict[str, str], size: int = REMEMBERED) -> None:
        self._topics = topics
        self._size = size
        self._events: OrderedDict[tuple[str, str, str], Fate] = OrderedDict()
        self._waiting: dict[tuple[str, str, str], asyncio.Future[None]] = {}

    def logged(self, envelope: Envelope) -> Fate:
        """An event was appended to the log; its fate from now on."""
        key = (envelope.source, envelope.tenant, envelope.event_id)
        fate = self._events.get(key)  # a repeated event keeps the place of the first
        if fate is None:
            fate = self._events[key] = Fate(envelope.reject)
            if len(self._events) > self._size:
                self._events.popitem(last=False)
        return fate

    def logged_all(self, events: Sequence[LoggedEvent]) -> None:
        """Events were appended to the log; each knows its fate from now on."""
        remembered, size = self._events, self._size
        for event in events:
            envelope = event.envelope
            key = (envelope.source, envelope.tenant, envelope.event_id)
            fate = remembered.get(key)
            if fate is None:
                fate = remembered[key] = Fate(envelope.reject)
            event.fate = fate
        while len(remembered) > size:
            remembered.popitem(last=False)

    def known(self, outcome: Outcome) -> None:
        """Kafka has an event, or refuses it for good."""
        envelope = outcome.event.envelope
        found = outcome.event.fate or self._events.get((envelope.source, envelope.tenant, envelope.event_id))
        if found is None:
            return
        if outcome.error:
            found.failed = outcome.error
        elif not found.topic:
            found.topic = self._topics[envelope.source]
            found.partition, found.offset = outcome.partition, outcome.offset
        if self._waiting:
            waiting = self._waiting.pop((envelope.source, envelope.tenant, envelope.event_id), None)
            if waiting is not None and not waiting.done():
                waiting.set_result(None)

    async def decided(self, token: Token) -> None:
        """Return when Kafka has the token's event or refuses it for good; at once where nothing is remembered."""
        found = self.get(token)
        if found is None or found.topic or found.failed:
            return
        key = (token.source, token.tenant, token.event_id)
        future = self._waiting.setdefault(key, asyncio.get_running_loop().create_future())
        await asyncio.shield(future)  # one waiter that is cancelled must not cancel it for the others

    def get(self, token: Token) -> Fate | None:
        """What is remembered of the token's event."""
        return self._events.get((token.source, token.tenant, token.event_id))


@dataclass(frozen=True, slots=True)
class AckState:
    """What has become of an event.

    Attributes:
        state: ``logged``, ``queued``, ``in_bronze``, ``in_product``, ``rejected`` or ``unknown``.
        coordinates: where it is in Kafka, once it is.
        products: products whose current version holds it, with that version.
        reason: why it was rejected.
    """

    state: str
    coordinates: Coordinates | None = None
    products: dict[str, int] | None = None
    reason: str | None = None


def ack_state(token: Token, recent: RecentEvents, lake: LakeState, products: Sequence[str]) -> AckState:
    """What has become of the token's event; reads the lake, so call it from a thread.

    Args:
        token: of the event.
        recent: this node's memory.
        lake: the tables.
        products: names of the products of its source.
    """
    remembered = recent.get(token)
    if remembered is not None and remembered.failed:
        return AckState("rejected", reason=remembered.failed)
    coordinates = _coordinates(remembered)
    reject = remembered.reject if remembered else None
    if remembered is None:
        found = lake.find_event(token.source, token.tenant, token.event_id, token.received_at)
        if found is None:
            return AckState("unknown")
        coordinates, reject = found.coordinates, found.reject
    if coordinates is not None and coordinates.topic.endswith(RAW_SUFFIX):  # the first step of two
        refined = lake.find_refined(token.source, coordinates, token.received_at)
        if refined is None or refined.coordinates is None:
            return AckState("queued", coordinates)
        coordinates, reject = refined.coordinates, refined.reject
        token = dataclasses.replace(token, event_id=refined.event_id)
    if reject is None and (remembered is None or coordinates is not None):
        reject = lake.quarantine_reason(token.source, token.tenant, token.event_id)
    if reject is not None:
        return AckState("rejected", coordinates, reason=reject)
    if coordinates is None:
        return AckState("in_bronze" if remembered is None else "logged")
    held = {name: version for name in products if (version := lake.product_version(name, coordinates)) is not None}
    if held:
        return AckState("in_product", coordinates, held)
    if remembered is None or lake.in_bronze(token.source, coordinates):
        return AckState("in_bronze", coordinates)
    return AckState("queued", coordinates)


def _coordinates(fate: Fate | None) -> Coordinates | None:
    """Where Kafka has the event, if it is known."""
    return Coordinates(fate.topic, fate.partition, fate.offset) if fate is not None and fate.topic else None

"""Answers computed from an event: the rows of a product for the event's key, once the product holds the event.

1. Kafka acknowledges the event: its offset is known.
2. The product commits a version whose ``through`` covers that offset; one watch a product tells everybody who waits.
3. The rows of the event's key are read from that version or a newer one.

Nothing of this holds a thread while it waits. The key of a recent event is remembered; of an older one, or of one that
another node took, it is made from the payload in bronze.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import orjson

from ingest.acks import RecentEvents, ack_state
from ingest.errors import TooManyWaiters
from ingest.lakestate import Coordinates, LakeState
from ingest.productrows import Found, ProductRows
from ingest.tokens import Token
from ingest.watch import Watch
from lakehouse.contract.collector import AnswerSpec
from lakehouse.contract.pipeline import Source
from lakehouse.contract.source import Template
from lakehouse.contract.tomlfile import duration_ms

REMEMBERED = 100_000
_BRONZE_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of waiting for an answer.

    Attributes:
        product: that answers.
        found: its rows; None where the event was refused, or the time is over.
        refused: why the event counts in no product; empty where it does.
    """

    product: str
    found: Found | None = None
    refused: str = ""

    def body(self, token: str) -> bytes:
        """The JSON that a sender gets."""
        assert self.found is not None
        return self.found.json(token=token, product=self.product)


class Answers:
    """Waits for the answers of every source that has some.

    Args:
        source_of: the source of a name, or None.
        recent: this node's memory of events.
        lake: the tables' logs.
        rows: the tables' rows.
        watch: follows the products.
        max_waiters: senders that wait at a time.
    """

    def __init__(
        self,
        source_of: Callable[[str], Source | None],
        recent: RecentEvents,
        lake: LakeState,
        rows: ProductRows,
        watch: Watch,
        *,
        max_waiters: int,
    ) -> None:
        self._source_of = source_of
        self._recent = recent
        self._lake = lake
        self._rows = rows
        self._watch = watch
        self._most = max_waiters
        self._keys: OrderedDict[tuple[str, str, str], dict[str, str]] = OrderedDict()
        self.waiters = 0

    def source(self, name: str) -> Source | None:
        """The source of this name, if it is collected here."""
        return self._source_of(name)

    def spec(self, source: str) -> AnswerSpec | None:
        """What the source answers, or None."""
        found = self._source_of(source)
        return found.answer if found is not None else None

    def remember(self, token: Token, payload: bytes) -> None:
        """Keep the key of an event that was just taken."""
        spec = self.spec(token.source)
        key = answer_key(spec, payload) if spec is not None else None
        if key is not None:
            self._keys[_place(token)] = key
            if len(self._keys) > REMEMBERED:
                self._keys.popitem(last=False)

    @asynccontextmanager
    async def seat(self) -> AsyncIterator[None]:
        """A place to wait in.

        Raises:
            TooManyWaiters: all are taken.
        """
        if self.waiters >= self._most:
            raise TooManyWaiters(self._most)
        self.waiters += 1
        try:
            yield
        finally:
            self.waiters -= 1

    async def wait(self, token: Token, timeout_s: float | None = None) -> Answer | None:
        """The answer to the token's event, or None where its source gives none.

        Args:
            timeout_s: the longest to wait; None: what the source says; 0: only what is there now.
        """
        spec = self.spec(token.source)
        if spec is None:
            return None
        if timeout_s is None:
            timeout_s = duration_ms(spec.timeout) / 1000
        if timeout_s <= 0:
            return await self._now(token, spec)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                return await self._answer(token, spec)
        return Answer(spec.product)

    async def _now(self, token: Token, spec: AnswerSpec) -> Answer:
        state = await asyncio.to_thread(ack_state, token, self._recent, self._lake, [spec.product])
        if state.reason is not None:
            return Answer(spec.product, refused=state.reason)
        if not state.products:
            return Answer(spec.product)
        return await self._read(token, spec)

    async def _answer(self, token: Token, spec: AnswerSpec) -> Answer:
        at = await self._coordinates(token)
        if isinstance(at, str):
            return Answer(spec.product, refused=at)
        await self._watch.holds(spec.product, at)
        # Judged after the product has it: an event that fails its schema is in quarantine by the same batch or soon.
        reason = await asyncio.to_thread(self._lake.quarantine_reason, token.source, token.tenant, token.event_id)
        if reason is not None:
            return Answer(spec.product, refused=reason)
        return await self._read(token, spec)

    async def _coordinates(self, token: Token) -> Coordinates | str:
        """Where the event is in Kafka, or why it will never be."""
        await self._recent.decided(token)
        while True:
            state = await asyncio.to_thread(ack_state, token, self._recent, self._lake, [])
            if state.reason is not None:
                return state.reason
            if state.coordinates is not None:
                return state.coordinates
            await asyncio.sleep(_BRONZE_POLL_S)  # taken by another node: bronze will tell

    async def _read(self, token: Token, spec: AnswerSpec) -> Answer:
        key = self._keys.get(_place(token)) or await asyncio.to_thread(self._key_from_bronze, token, spec)
        if key is None:
            return Answer(spec.product, refused="the event has no value for the key of its answer")
        return Answer(spec.product, await asyncio.to_thread(self._rows.where, spec.product, key))

    def _key_from_bronze(self, token: Token, spec: AnswerSpec) -> dict[str, str] | None:
        event = self._lake.find_event(token.source, token.tenant, token.event_id, token.received_at)
        return answer_key(spec, event.payload) if event is not None and event.payload is not None else None


def answer_key(spec: AnswerSpec, payload: bytes) -> dict[str, str] | None:
    """The key of an event's answer by column, or None where the event lacks a field of it."""
    try:
        fields: Any = orjson.loads(payload)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(fields, Mapping):
        return None
    found = {column: Template(text).render(fields) for column, text in spec.key.items()}
    return {column: value for column, value in found.items() if value is not None} if all(found.values()) else None


def _place(token: Token) -> tuple[str, str, str]:
    return token.source, token.tenant, token.event_id

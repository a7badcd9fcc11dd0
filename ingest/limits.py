"""What a sender may do: which key it shows, how fast it sends, how many connections it has.

All of it is decided on the event loop, in memory and without waiting; each node counts for itself.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from ingest.errors import EventRefused
from ingest.keys import ApiKey, KeyRing
from lakehouse.contract.pipeline import Pipeline, Product, Source
from lakehouse.contract.rates import TokenBucket

MOST_INCOMING_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sends, as far as the border is concerned.

    Attributes:
        key: shown by the sender, or None where none is asked for.
        tenant: that the events belong to; None: the node's.
        max_event_bytes: below the source's limit; None: the source's.
    """

    key: ApiKey | None = None
    tenant: str | None = None
    max_event_bytes: int | None = None


ANYBODY = Caller()


class Gate:
    """Keys, rates and connections of one node.

    Args:
        keys: of the node; where there are any, one is asked of every sender.
        max_connections: at a time, altogether.
        rejects_per_s: refused events that are kept of each source.
        clock: seconds, monotonic.

    Attributes:
        refused: requests that were refused before their events were looked at, by source and code.
        not_kept: refused events that were counted only, by source.
        connections: open now.
        reserved: bytes of bodies that are coming in.
    """

    def __init__(
        self,
        keys: KeyRing | None = None,
        *,
        max_connections: int = 20_000,
        rejects_per_s: int = 1_000,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._keys = keys
        self._max_connections = max_connections
        self._rejects_per_s = rejects_per_s
        self._clock = clock
        self._buckets: dict[tuple[str, str], TokenBucket] = {}
        self._callers: dict[str, Caller] = {}
        self._held: Counter[tuple[str, str]] = Counter()
        self.refused: Counter[tuple[str, str]] = Counter()
        self.not_kept: Counter[str] = Counter()
        self.connections = 0
        self.reserved = 0

    # --- who

    def admit(self, source: Source, presented: str | None) -> Caller:
        """Who presents this key to the source.

        Raises:
            EventRefused: 401 without a good key where one is asked for, 403 where it does not reach to the source.
        """
        if self._keys is None or not self._keys.required:
            return ANYBODY
        key = self.key(presented)
        if key.sources and source.name not in key.sources:
            raise EventRefused(f"this key may not send to {source.name!r}", 403, code="forbidden")
        caller = self._callers.get(key.id)
        if caller is None or caller.key is not key:  # a new reading of the file makes new keys
            caller = self._callers[key.id] = Caller(key, key.tenant or None, key.max_event_bytes or None)
        return caller

    def show(self, product: Product, pipeline: Pipeline, presented: str | None) -> None:
        """Whether this key sees the product: it does if it may send to every source that the product derives from.

        Raises:
            EventRefused: as by :meth:`admit`.
        """
        for name in (product.source, product.right):
            if name:
                self.admit(pipeline.sources[name], presented)

    def key(self, presented: str | None) -> ApiKey:
        """The key that was presented.

        Raises:
            EventRefused: 401, it is none.
        """
        key = self._keys.find(presented) if self._keys is not None and presented else None
        if key is None:
            detail = "this key is not known" if presented else "show a key: Authorization: Bearer KEY"
            raise EventRefused(detail, 401, code="unauthorized")
        return key

    @property
    def keys_required(self) -> bool:
        """Whether senders have to show a key."""
        return self._keys is not None and self._keys.required

    # --- how fast

    def spend(self, source: Source, caller: Caller, events: int) -> None:
        """Take so many events from the source's allowance and the key's: from both, or from none.

        Raises:
            EventRefused: 429 with the time to come back.
        """
        now = self._clock()
        asked = []
        if source.max_rate:
            asked.append(self._bucket(("source", source.name), source.max_rate, f"source {source.name!r}", now))
        if caller.key is not None and caller.key.rate:
            asked.append(self._bucket(("key", caller.key.id), caller.key.rate, "this key", now))
        for bucket in asked:
            bucket.take(events, now)

    def _bucket(self, whose: tuple[str, str], rate: int, name: str, now: float) -> TokenBucket:
        """An allowance from which something may be taken."""
        bucket = self._buckets.get(whose)
        if bucket is None or bucket.rate != rate:
            bucket = self._buckets[whose] = TokenBucket(rate, now)
        if wait := bucket.wait(now):
            raise EventRefused(
                f"{name} takes {rate} events a second", 429, code="too-fast", retry_after=max(1, math.ceil(wait))
            )
        return bucket

    def keep_reject(self, source: str) -> bool:
        """Whether one more refused event of the source is kept; else it is counted here."""
        now = self._clock()
        bucket = self._buckets.get(("rejects", source))
        if bucket is None:
            bucket = self._buckets["rejects", source] = TokenBucket(self._rejects_per_s, now)
        if self._rejects_per_s and not bucket.take(1, now):
            return True
        self.not_kept[source] += 1
        return False

    # --- how many

    def connect(self) -> bool:
        """Count a new connection; False where there are too many."""
        if self.connections >= self._max_connections:
            return False
        self.connections += 1
        return True

    def disconnect(self, held: frozenset[tuple[str, str]]) -> None:
        """A connection has ended.

        Args:
            held: what it took by :meth:`hold`.
        """
        self.connections -= 1
        self.release(held)

    def hold(self, source: Source, caller: Caller, held: frozenset[tuple[str, str]]) -> frozenset[tuple[str, str]]:
        """Count a connection towards the source's limit and the key's; once for each of them.

        Args:
            source: sent to.
            caller: who sends.
            held: what the connection has taken so far.

        Returns:
            what it has taken now.

        Raises:
            EventRefused: 429, too many connections.
        """
        wanted = []
        if source.max_connections:
            wanted.append((("source", source.name), source.max_connections))
        if caller.key is not None and caller.key.connections:
            wanted.append((("key", caller.key.id), caller.key.connections))
        new = [(whose, most) for whose, most in wanted if whose not in held]
        for whose, most in new:
            if self._held[whose] >= most:
                raise EventRefused(
                    f"no more than {most} connections at a time for this {whose[0]}",
                    429,
                    code="too-many-connections",
                    retry_after=1,
                )
        for whose, _ in new:
            self._held[whose] += 1
        return held | {whose for whose, _ in new} if new else held

    def reserve(self, size: int) -> None:
        """Room in memory for a body that is coming in; give it back with :meth:`free`.

        Raises:
            EventRefused: 503, too much is coming in already.
        """
        if self.reserved + size > MOST_INCOMING_BYTES:
            raise EventRefused("too much is coming in", 503, code="busy", retry_after=1)
        self.reserved += size

    def free(self, size: int) -> None:
        """The body is there, or will not come."""
        self.reserved -= size

    def release(self, held: frozenset[tuple[str, str]]) -> None:
        """Give back what was taken by :meth:`hold`."""
        for whose in held:
            self._held[whose] -= 1
            if not self._held[whose]:
                del self._held[whose]

"""Access control of senders: keys, event rates and connections.

Every decision is made on the event loop, in memory and without waiting. Each node counts for itself. Keys are in a file
of the form that :mod:`lakehouse.contract.access` describes.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ingest.errors import RequestRefused
from lakehouse.contract.access import Key, KeyFile, KeyRing, StateManager, TokenBucket
from lakehouse.contract.errors import ConfigError
from lakehouse.contract.lake import Lake
from lakehouse.contract.pipeline import Pipeline, Product, Source
from lakehouse.contract.settings import Settings

MOST_INCOMING_BYTES = 256 * 1024 * 1024


_RIGHTS = ("hash", "tenant", "sources")


@dataclass(frozen=True, slots=True, repr=False)
class ApiKey(Key):
    """A sender's key, see :class:`~lakehouse.contract.access.Key`; its rate is in events a second.

    Attributes:
        sources: it may send to these; empty: all.
        max_event_bytes: limit below the source's; 0: the source's.
    """

    sources: tuple[str, ...] = ()
    max_event_bytes: int = 0

    def __post_init__(self) -> None:
        Key.__post_init__(self)
        if self.max_event_bytes < 0:
            raise ConfigError("a limit is not negative", key="keys", remedy="Write 0 for no limit")


ANONYMOUS = ApiKey("0" * 64)
"""Who sends where no key is required."""


class SenderGate:
    """Keys, rates and connections of one node.

    Args:
        keys: of the node; if there are any, every sender must show one.
        rejects_per_s: refused events kept per source and second.
        clock: seconds, monotonic.

    Attributes:
        refused: requests refused before their events were read, by source and code.
        not_kept: refused events that were only counted, by source.
        reserved: bytes of incoming bodies.
    """

    def __init__(
        self,
        keys: KeyRing[ApiKey] | None = None,
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
        self._held: Counter[tuple[str, str]] = Counter()
        self.refused: Counter[tuple[str, str]] = Counter()
        self.not_kept: Counter[str] = Counter()
        self.connections = 0
        self.reserved = 0

    # --- keys

    def admit(self, source: Source, presented: str | None) -> ApiKey:
        """The sender's key, or :data:`ANONYMOUS`. Raises RequestRefused: 401, missing or unknown; 403, for others."""
        if self._keys is None or not self._keys.required:
            return ANONYMOUS
        key = self.key(presented)
        if key.sources and source.name not in key.sources:
            raise RequestRefused(f"this key may not send to {source.name!r}", 403, code="forbidden")
        return key

    def show(self, product: Product, pipeline: Pipeline, presented: str | None) -> ApiKey:
        """The sender's key, if it may send to every source of the product. Raises RequestRefused."""
        sender = self.admit(pipeline.sources[product.source], presented)
        if product.right:
            self.admit(pipeline.sources[product.right], presented)
        return sender

    def key(self, presented: str | None) -> ApiKey:
        """The key that was presented. Raises RequestRefused: 401, the key is missing or unknown."""
        key = self._keys.find(presented) if self._keys is not None and presented else None
        if key is None:
            detail = "this key is not known" if presented else "show a key: Authorization: Bearer KEY"
            raise RequestRefused(detail, 401, code="unauthorized")
        return key

    def stands(self, admitted: ApiKey | None) -> bool:
        """Whether a connection may go on with the key that it was admitted with; None: it showed none."""
        if not self.keys_required or self._keys is None:
            return True
        now = self._keys.get(admitted.id) if admitted is not None else None
        return now is not None and all(getattr(now, each) == getattr(admitted, each) for each in _RIGHTS)

    @property
    def keys_required(self) -> bool:
        return self._keys is not None and self._keys.required

    # --- rates

    def spend(self, source: Source, sender: ApiKey, events: int) -> None:
        """Take this many events from the allowances of source and key: both or none. Raises RequestRefused: 429."""
        now = self._clock()
        asked = []
        if source.max_rate:
            asked.append(self._bucket(("source", source.name), source.max_rate, f"source {source.name!r}", now))
        if sender.rate:
            asked.append(self._bucket(("key", sender.id), sender.rate, "this key", now))
        for bucket in asked:
            bucket.take(events, now)

    def _bucket(self, whose: tuple[str, str], rate: int, name: str, now: float) -> TokenBucket:
        """An allowance that is not used up."""
        bucket = self._buckets.get(whose)
        if bucket is None or bucket.rate != rate:
            bucket = self._buckets[whose] = TokenBucket(rate, now)
        if wait := bucket.wait(now):
            raise RequestRefused(
                f"{name} takes {rate} events a second", 429, code="too-fast", retry_after=max(1, math.ceil(wait))
            )
        return bucket

    def keep_reject(self, source: str) -> bool:
        """Whether one more refused event of the source is kept; otherwise it is counted here."""
        now = self._clock()
        bucket = self._buckets.get(("rejects", source))
        if bucket is None:
            bucket = self._buckets["rejects", source] = TokenBucket(self._rejects_per_s, now)
        if self._rejects_per_s and not bucket.take(1, now):
            return True
        self.not_kept[source] += 1
        return False

    # --- connections and memory

    def connect(self) -> bool:
        """Count a new connection; False if there are too many."""
        if self.connections >= self._max_connections:
            return False
        self.connections += 1
        return True

    def disconnect(self, held: frozenset[tuple[str, str]]) -> None:
        """Count the end of a connection and release what it took by :meth:`hold`."""
        self.connections -= 1
        self.release(held)

    def hold(self, source: Source, sender: ApiKey, held: frozenset[tuple[str, str]]) -> frozenset[tuple[str, str]]:
        """Count a connection towards the limits of the source and of the key, once each. Raises RequestRefused: 429."""
        wanted = []
        if source.max_connections:
            wanted.append((("source", source.name), source.max_connections))
        if sender.connections:
            wanted.append((("key", sender.id), sender.connections))
        if not wanted:
            return held
        new = [(whose, most) for whose, most in wanted if whose not in held]
        for whose, most in new:
            if self._held[whose] >= most:
                raise RequestRefused(
                    f"no more than {most} connections at a time for this {whose[0]}",
                    429,
                    code="too-many-connections",
                    retry_after=1,
                )
        for whose, _ in new:
            self._held[whose] += 1
        return held | {whose for whose, _ in new} if new else held

    def reserve(self, size: int) -> None:
        """Reserve memory for an incoming body, until :meth:`free`. Raises RequestRefused: 503, too much is incoming."""
        if self.reserved + size > MOST_INCOMING_BYTES:
            raise RequestRefused("too much is coming in", 503, code="busy", retry_after=1)
        self.reserved += size

    def free(self, size: int) -> None:
        self.reserved -= size

    def release(self, held: frozenset[tuple[str, str]]) -> None:
        """Return what :meth:`hold` took."""
        for whose in held:
            self._held[whose] -= 1
            if not self._held[whose]:
                del self._held[whose]


def keys_path(settings: Settings) -> Path:
    return Path(settings.collect.keys) if settings.collect.keys else Lake.of(settings).state / "keys.toml"


def sender_keys(settings: Settings, manager: StateManager | None) -> KeyRing[ApiKey]:
    """The keys of a node; with a state manager the control plane says who may send, without one a key file."""
    if manager is None:
        return KeyRing(KeyFile(keys_path(settings), ApiKey))
    return KeyRing(manager.keys(ApiKey, "send"))

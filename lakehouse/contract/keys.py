"""Files of API keys, of collectors and of the server alike: who may send, who may read. Hashes only, never a key.

A key is ``mr_ID_SECRET``, the secret being 256 random bits. SHA-256 of it is kept: nothing slower is needed for a
secret that cannot be guessed. A running process reads its file again when it has changed, so that a revoked key ends
within :data:`RELOAD_S`. A tier says what its keys may do by a dataclass of its own below :class:`Key`.
:class:`TokenBucket` says how fast somebody may go.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import ipaddress
import logging
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from lakehouse.contract.errors import ConfigError
from lakehouse.contract.storage import Stamp, locked, stamp_of, write_whole
from lakehouse.contract.tomlfile import build, read_toml, toml_text

logger = logging.getLogger(__name__)

RELOAD_S = 1.0
_PREFIX = "mr"
_NOBODY = hashlib.sha256(b"").hexdigest()


@dataclass(frozen=True, slots=True, repr=False)
class Key:
    """What is kept of any key.

    Attributes:
        hash: SHA-256 of the whole key, hexadecimal.
        name: whose it is, for people.
        tenant: that it belongs to; empty: the process's own.
        rate: events or requests a second, on each process; 0: no limit of its own.
        connections: at a time, on each process; 0: no limit of its own.
        created: when it was made, ISO 8601.
        id: the public part of the key.
        until: end of its life, seconds since the epoch; 0: none.
    """

    hash: str
    name: str = ""
    tenant: str = ""
    rate: int = 0
    connections: int = 0
    created: str = ""
    id: str = ""
    until: float = field(default=0.0, kw_only=True)

    def __post_init__(self) -> None:
        if min(self.rate, self.connections, self.until) < 0:
            raise ConfigError("a limit is not negative", key="keys", remedy="Write 0 for no limit")
        if len(self.hash) != 64:
            raise ConfigError("not a SHA-256 in hexadecimal", key="hash", remedy="Make keys with: millrace key new")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.id}, {self.name!r})"


K = TypeVar("K", bound=Key)


class KeySource(Protocol[K]):
    """Where a running process takes its keys from. Its methods do not wait.

    Attributes:
        required: whether a key has to be shown although there is none.
        reload_s: pause between two looks at the stamp.
    """

    required: bool
    reload_s: float

    def stamp(self) -> object:
        """Differs from the last one when the keys may have changed."""

    def read(self) -> dict[str, K]:
        """Keys by id. Raises ConfigError or OSError: they cannot be read."""


class KeyFile(Generic[K]):
    """One file of keys, ``[keys.ID]`` tables in TOML.

    Args:
        path: of the file; made, readable by its owner only, when the first key is.
    """

    required = False
    reload_s = RELOAD_S

    def __init__(self, path: Path, kind: type[K]) -> None:
        self.path = path
        self._kind = kind

    def __str__(self) -> str:
        return str(self.path)

    def stamp(self) -> Stamp | None:
        return stamp_of(self.path)

    def read(self) -> dict[str, K]:
        """Keys by id; none where there is no file. Raises ConfigError."""
        if not self.path.exists():
            return {}
        tables = read_toml(self.path)
        if unknown := tables.keys() - {"keys"}:
            raise ConfigError("unknown key", key=min(unknown), remedy="Known keys: keys", file=self.path)
        found: Any = tables.get("keys", {})
        if not isinstance(found, Mapping) or not all(isinstance(value, Mapping) for value in found.values()):
            raise ConfigError("not a table of keys", key="keys", remedy="[keys.ID]", file=self.path)
        return {
            name: dataclasses.replace(build(self._kind, values, file=self.path, at=f"keys.{name}"), id=name)
            for name, values in found.items()
        }

    def new(self, key: K) -> str:
        """Add a key with these properties; returns the key itself, which is nowhere else.

        Args:
            key: its ``hash``, ``id`` and ``created`` do not matter.
        """
        name = new_key_id()
        text = new_key(name)
        made = dataclasses.replace(
            key, id=name, hash=key_hash(text), created=datetime.now(UTC).isoformat(timespec="seconds")
        )
        with self._changing() as keys:
            keys[name] = made
        return text

    def revoke(self, name: str) -> K:
        """Take a key away. Raises ConfigError."""
        with self._changing() as keys:
            if name not in keys:
                known = f"Known: {', '.join(keys) or 'none'}"
                raise ConfigError(f"there is no key {name!r}", key="keys", remedy=known, file=self.path)
            return keys.pop(name)

    @contextmanager
    def _changing(self) -> Iterator[dict[str, K]]:
        """The keys, to be changed; written when the block ends, one process at a time."""
        with locked(self.path.with_name(f"{self.path.name}.lock")):
            keys = self.read()
            yield keys
            tables = [toml_text(_said(key), f"keys.{name}") for name, key in keys.items()]
            text = "".join(["# API keys: hashes, made and revoked with `millrace key`.\n", *tables])
            write_whole(self.path, text.encode(), 0o600, durable=True)


class KeyRing(Generic[K]):
    """The keys as a running process uses them.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, source: KeySource[K], clock: Callable[[], float] = time.monotonic) -> None:
        self._source = source
        self._clock = clock
        self._stamp = source.stamp()
        self._keys = source.read()
        self._asked = source.required or bool(self._keys)
        self._look_at = clock() + source.reload_s

    @property
    def required(self) -> bool:
        """Whether a key has to be shown: there is one, or was when the process started."""
        self._reload()
        return self._asked

    def find(self, presented: str) -> K | None:
        """The key that was presented, or None."""
        self._reload()
        parts = presented.split("_", 2)
        key = self._keys.get(parts[1]) if len(parts) == 3 else None
        same = hmac.compare_digest(key_hash(presented), key.hash if key is not None else _NOBODY)
        return _living(key) if same else None

    def get(self, name: str) -> K | None:
        """The key of an id, where the id itself is proof enough: a ticket that we signed, something kept for a key."""
        self._reload()
        return _living(self._keys.get(name))

    def _reload(self) -> None:
        now = self._clock()
        if now < self._look_at:
            return
        self._look_at = now + self._source.reload_s
        try:
            stamp = self._source.stamp()
            if stamp == self._stamp:
                return
            self._keys = self._source.read()
        except ConfigError as error:
            self._stamp = stamp  # said once: it is read again when it has changed
            logger.error("the keys stay as they were: %s", error)
            return
        except OSError as error:
            logger.error("the keys stay as they were, until the file can be read: %s", error)
            return
        self._stamp = stamp
        self._asked = self._asked or bool(self._keys)  # the last key revoked does not open the door to everybody
        logger.info("%s: %d keys", self._source, len(self._keys))


def _living(key: K | None) -> K | None:
    return None if key is not None and key.until and key.until <= time.time() else key


def new_key(name: str) -> str:
    """A new key with this id."""
    return f"{_PREFIX}_{name}_{secrets.token_urlsafe(32)}"


def new_key_id() -> str:
    return secrets.token_hex(6)


def key_hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _said(key: Key) -> dict[str, Any]:
    values = dataclasses.asdict(key)
    return {name: value for name, value in values.items() if name != "id" and value not in ("", 0, (), {}, False)}


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address, or ``localhost``."""
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return host == "localhost"


class TokenBucket:
    """Lets ``rate`` things a second through, and as many at once as come in a second.

    A batch that is larger passes when the bucket is not empty, and leaves a debt: so that a rate below the size of a
    batch does not refuse it for ever.

    Args:
        now: seconds, monotonic.
    """

    __slots__ = ("_left", "_then", "rate")

    def __init__(self, rate: float, now: float) -> None:
        self.rate = rate
        self._left = float(rate)
        self._then = now

    def take(self, count: int, now: float) -> float:
        """Take so many; 0, or the seconds after which it is worth another try (then none were taken)."""
        wait = self.wait(now)
        if not wait:
            self._left -= count
        return wait

    def wait(self, now: float) -> float:
        """0 where something may be taken, else the seconds after which it is worth another try."""
        self._left = min(self.rate, self._left + (now - self._then) * self.rate)
        self._then = now
        return max(0.001, -self._left / self.rate) if self._left <= 0 else 0.0

"""API keys of collectors: who may send what. The file is of the kind that :mod:`lakehouse.contract.keys` describes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lakehouse.contract.errors import ConfigError
from lakehouse.contract.keys import RELOAD_S, Key, KeyFile
from lakehouse.contract.keys import KeyRing as AnyKeyRing
from lakehouse.contract.lake import Lake
from lakehouse.contract.settings import Settings

__all__ = ["RELOAD_S", "ApiKey", "KeyRing", "keys_path", "new_key", "read_keys", "revoke_key"]


@dataclass(frozen=True, slots=True, repr=False)
class ApiKey(Key):
    """What is kept of a sender's key: see :class:`~lakehouse.contract.keys.Key`; its rate is events a second.

    Attributes:
        sources: that it may send to; empty: all.
        max_event_bytes: of an event, below the source's limit; 0: the source's.
    """

    sources: tuple[str, ...] = ()
    max_event_bytes: int = 0

    def __post_init__(self) -> None:
        Key.__post_init__(self)
        if self.max_event_bytes < 0:
            raise ConfigError("a limit is not negative", key="keys", remedy="Write 0 for no limit")


def keys_path(settings: Settings) -> Path:
    """The file of the keys."""
    return Path(settings.collect.keys) if settings.collect.keys else Lake(settings.lake).state / "keys.toml"


def read_keys(path: Path) -> dict[str, ApiKey]:
    """Keys by id; see :meth:`~lakehouse.contract.keys.KeyFile.read`."""
    return KeyFile(path, ApiKey).read()


def new_key(path: Path, key: ApiKey) -> str:
    """Add a key; see :meth:`~lakehouse.contract.keys.KeyFile.new`."""
    return KeyFile(path, ApiKey).new(key)


def revoke_key(path: Path, name: str) -> ApiKey:
    """Take a key away; see :meth:`~lakehouse.contract.keys.KeyFile.revoke`."""
    return KeyFile(path, ApiKey).revoke(name)


class KeyRing(AnyKeyRing[ApiKey]):
    """The keys as a node uses them; see :class:`lakehouse.contract.keys.KeyRing`.

    Args:
        path: of the file.
        clock: seconds, monotonic.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(KeyFile(path, ApiKey), clock)

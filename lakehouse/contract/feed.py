"""Feeds of the pipeline model: files that the batch loader fetches by URL."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from lakehouse.contract.checks import at_least, duration, one_of
from lakehouse.contract.errors import ConfigError
from lakehouse.contract.tomlfile import duration_ms

FEED_FORMATS = ("auto", "csv", "tsv", "jsonl", "parquet")
LOADER = "loader-1"
"""Id of a loader that was given none."""
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")


def metrics_file(node: str) -> str:
    """Name of the file below ``_millrace/run`` in which a loader keeps what it counts."""
    return "loader.prom" if node == LOADER else f"loader-{node}.prom"


@dataclass(frozen=True, slots=True)
class FeedSpec:
    """One file that is pulled: ``[[sources.NAME.feeds]]``.

    Attributes:
        url: ``http`` or ``https``; asked for with the ETag or date of the last time.
        name: unique among the source's feeds; empty: the last part of the URL's path.
        every: pause between two looks.
        format: one of :data:`FEED_FORMATS`; gzip is told by the first bytes.
        sla: how long after a new file was met its rows must be in bronze; empty: no such promise.
        timeout: the longest that one download may take.
        max_bytes: a larger file is refused.
        private: whether the address may be a private one (this machine, the local network).
    """

    url: str
    name: str = ""
    every: str = "15 minutes"
    format: str = "auto"
    sla: str = ""
    timeout: str = "10 minutes"
    max_bytes: int = 10_000_000_000
    private: bool = False

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"{self.url!r} is no http address", key="url", remedy="Write https://HOST/PATH")
        if parts.username or parts.password:
            raise ConfigError("the address has a password in it", key="url", remedy="Use an address that needs none")
        one_of("format", self.format, FEED_FORMATS)
        duration("every", self.every)
        duration("timeout", self.timeout)
        if self.sla:
            duration("sla", self.sla)
        at_least("max_bytes", self.max_bytes, 1)
        if not self.name:
            object.__setattr__(self, "name", parts.path.rstrip("/").rpartition("/")[2].lower() or "feed")
        if not _NAME.fullmatch(self.name):
            raise ConfigError(f"{self.name!r} is no name", key="name", remedy="Give name = … of [a-z0-9._-]")

    @property
    def every_s(self) -> float:
        """The pause in seconds."""
        return duration_ms(self.every) / 1000

    @property
    def timeout_s(self) -> float:
        """The longest download in seconds."""
        return duration_ms(self.timeout) / 1000

    @property
    def sla_s(self) -> float | None:
        """The SLA in seconds, or None."""
        return duration_ms(self.sla) / 1000 if self.sla else None

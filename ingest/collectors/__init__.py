"""Collectors: the contract of all kinds, and the registry of the kinds that ship with Millrace.

A collector takes events from somewhere: ``run`` receives until cancelled, ``status`` tells the state of its upstream. A
*position* is the index of the next message to read. A kind is a callable ``(spec, context) -> Collector`` and a line in
:data:`KINDS`. A pipeline names any other kind as ``module:function``. The kind ``http`` is missing here because the
node's own port takes it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from ingest.intake import Intake
from lakehouse.contract.errors import ConfigError
from lakehouse.contract.pipeline.source import CollectorSpec

KINDS: Mapping[str, str] = {
    "websocket": "ingest.collectors.upstream:WebSocketCollector",
    "sse": "ingest.collectors.upstream:SseCollector",
    "lines": "ingest.collectors.upstream:LinesCollector",
    "udp": "ingest.collectors.udp:UdpCollector",
}


@dataclass(frozen=True, slots=True)
class Gap:
    """A time without a connection to an upstream that cannot resume.

    Attributes:
        since: time of the last message before it, microseconds since the epoch.
        until: time of the next connection.
    """

    since: int
    until: int
    reason: str


@dataclass(frozen=True, slots=True)
class UpstreamStatus:
    """The state of one upstream.

    Attributes:
        url: its address, without secrets.
        position: index of the next message, or None.
        cursor: the upstream's id of the last message (Last-Event-ID), or None.
        counts: further counts of this kind, such as lost datagrams.
        ended: why it is not connected; empty while it is.
    """

    lane: str
    url: str
    connected: bool
    position: int | None
    gaps: tuple[Gap, ...]
    gap_count: int
    cursor: str | None = None
    counts: Mapping[str, int] = field(default_factory=dict)
    ended: str = ""


class Collector(Protocol):
    """Takes events from somewhere."""

    async def run(self) -> None:
        """Receive until cancelled; survives every error of the upstream."""

    def status(self) -> UpstreamStatus:
        """The state of its upstream now."""

    def close(self) -> None:
        """Release what it bound when it was made. It is not running."""


@dataclass(frozen=True, slots=True)
class CollectorContext:
    """What a node gives a collector.

    Attributes:
        url: of its upstream, from the pipeline or the command line.
        backoff_max_s: longest pause before a reconnect.
    """

    intake: Intake
    url: str
    backoff_max_s: float


def make_collector(spec: CollectorSpec, context: CollectorContext) -> Collector:
    """Make the collector that a pipeline declares.

    Raises:
        ConfigError: its kind cannot be imported, or refuses its options.
    """
    module, _, name = KINDS.get(spec.kind, spec.kind).partition(":")
    try:
        build: Callable[[CollectorSpec, CollectorContext], Collector] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"the collector kind {spec.kind!r} cannot be imported: {error}",
            key=f"sources.{context.intake.border.source.name}.collectors",
            remedy="Name an importable module:function(spec, context)",
        ) from None
    return build(spec, context)

"""Collectors, one kind of upstream a module.

A kind is a module with a function ``build(spec, place) -> Collector`` and a line in :data:`KINDS`; one that is not ours
is named as ``module:function`` in the pipeline and needs no line. (``http`` is not here: the node's own port takes it.)
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ingest.source import Collector, Intake
from lakehouse.contract.collector import CollectorSpec
from lakehouse.contract.errors import ConfigError

KINDS: Mapping[str, str] = {
    "websocket": "ingest.collectors.websocket:build",
    "sse": "ingest.collectors.sse:build",
    "lines": "ingest.collectors.lines:build",
    "udp": "ingest.collectors.udp:build",
}


@dataclass(frozen=True, slots=True)
class Place:
    """What a collector gets from its node.

    Attributes:
        intake: where its events go.
        url: of its upstream: the pipeline's, or what the command line says instead.
        backoff_max_s: the longest pause before a reconnect.
    """

    intake: Intake
    url: str
    backoff_max_s: float


def make_collector(spec: CollectorSpec, place: Place) -> Collector:
    """The collector that a pipeline declares; it does nothing before it is run.

    Raises:
        ConfigError: its kind cannot be imported, or refuses its options.
    """
    module, _, name = KINDS.get(spec.kind, spec.kind).partition(":")
    try:
        build: Callable[[CollectorSpec, Place], Collector] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"the collector kind {spec.kind!r} cannot be imported: {error}",
            key=f"sources.{place.intake.border.source.name}.collectors",
            remedy="Name an importable module:function(spec, place)",
        ) from None
    return build(spec, place)

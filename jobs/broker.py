"""Which broker a command uses, and the topics it must have."""

from __future__ import annotations

import time

from ingest import publish
from ingest.broker import EmbeddedBroker
from ingest.errors import BrokerUnavailable
from lakehouse.contract.errors import EnvironmentProblem
from lakehouse.contract.lake import Lake
from lakehouse.contract.pipeline import Pipeline
from lakehouse.contract.settings import Settings


def embedded(settings: Settings, *, die_with_parent: bool = False) -> EmbeddedBroker:
    """The lake's own broker, whether it runs or not."""
    folder = Lake(settings.lake).broker()
    return EmbeddedBroker(folder, heap_mb=settings.kafka.heap_mb, die_with_parent=die_with_parent)


def resolve_bootstrap(settings: Settings) -> str:
    """``host:port`` of the broker that the settings name, else of the lake's embedded one.

    Raises:
        EnvironmentProblem: neither is there.
    """
    if settings.kafka.bootstrap:
        return settings.kafka.bootstrap
    try:
        return embedded(settings).bootstrap
    except EnvironmentProblem as error:
        raise EnvironmentProblem(
            str(error.problem), f"Run: millrace kafka start --lake {settings.lake}; or set MILLRACE_KAFKA=host:port"
        ) from None


def ensure_topics(pipeline: Pipeline, bootstrap: str, *, timeout_s: float = 60.0) -> None:
    """Create the pipeline's topics where they are absent, waiting for the broker.

    Raises:
        EnvironmentProblem: the broker did not answer in time.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            publish.ensure_topics(bootstrap, list(pipeline.sources.values()))
            return
        except BrokerUnavailable as error:
            if time.monotonic() > deadline:
                raise EnvironmentProblem(str(error), "Is it running? millrace kafka status") from None
            time.sleep(0.5)

"""``/metrics`` of a process that has no HTTP of its own, on the loopback address."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated

import typer
from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector, start_http_server
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from lakehouse.contract.errors import EnvironmentProblem

HOST = "127.0.0.1"

MetricsPortOption = Annotated[
    int | None,
    typer.Option(help="Port of /metrics on the loopback address; 0: any free one.", min=0, show_default="none"),
]


class Counts(Collector):
    """A counter by source, read from a mapping when somebody scrapes.

    Args:
        name: of the metric, without ``_total``.
        text: what it counts.
        counts: by source.
    """

    def __init__(self, name: str, text: str, counts: Callable[[], Mapping[str, int]]) -> None:
        self._name = name
        self._text = text
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        """The one family."""
        family = CounterMetricFamily(self._name, self._text, labels=["source"])
        for source, count in dict(self._counts()).items():
            family.add_metric([source], count)
        yield family


@contextmanager
def metrics_server(port: int | None, *collectors: Collector, setting: str = "--metrics-port") -> Iterator[str]:
    """Serve what the collectors and the process tell, meanwhile; gives the URL.

    Args:
        port: 0: any free one; None: nothing is served, and the URL is empty.
        collectors: beside those of the process itself.
        setting: that names the port, for the error.

    Raises:
        EnvironmentProblem: the port is taken.
    """
    if port is None:
        yield ""
        return
    registry = CollectorRegistry()
    for own in (ProcessCollector, PlatformCollector, GCCollector):
        own(registry=registry)
    for collector in collectors:
        registry.register(collector)
    try:
        server, thread = start_http_server(port, HOST, registry)
    except OSError as error:
        raise EnvironmentProblem(
            f"cannot listen on {HOST}:{port}: {error.strerror}",
            f"Stop what holds the port, or give {setting} another (0: any free one)",
        ) from None
    try:
        yield f"http://{HOST}:{server.server_port}/metrics"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

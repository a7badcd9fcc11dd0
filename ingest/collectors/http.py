"""The HTTP side of a collecting node: ``POST /v1/SOURCE`` takes events, and the node tells its state.

=============================  ====================================================================================
``application/json``           an object is one event; of an array each element is an event
``application/x-ndjson``       one event a line
``application/cloudevents…``   a CloudEvent, or with ``-batch`` an array of them; headers ``ce-…`` make any body one
=============================  ====================================================================================

Each event is kept byte for byte. The answer comes when the events are safe: 202 with ``{"token"}`` for one event, with
``{"tokens", "rejected": [{"index", "code", "detail"}]}`` for many. Errors are problem documents (RFC 9457) whose
``type`` names the kind: docs/guide/collecting.md lists them. A refused event is kept too (quarantine) and has a token.

:mod:`ingest.collectors.wire` takes most requests, those that are plain, below the web server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, Protocol
from urllib.parse import parse_qsl, unquote

import uvicorn
from deltalake.exceptions import DeltaError
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector as MetricCollector
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from ingest import intake
from ingest.answers.interests import Demand
from ingest.answers.respond import Responder, json_response, lake_away, refuse, unavailable
from ingest.border.access import ApiKey, SenderGate
from ingest.border.admission import Shedder
from ingest.collectors import UpstreamStatus
from ingest.collectors.wire import CollectorHttpProtocol
from ingest.delivery import KafkaDelivery
from ingest.errors import IngestError, RequestRefused
from ingest.intake import BATCHED, STRUCTURED, RequestIntake, first_key, presented_key
from ingest.log.message_log import MessageLog
from ingest.log.segments import SourceLane
from lakehouse.contract.access import KeyRing, is_loopback
from lakehouse.contract.errors import ConfigError
from lakehouse.contract.listen import QuietServer, listen, url_of
from lakehouse.contract.settings import CollectSettings

REQUEST_TIMEOUT_S = 20.0  # for head and body; a slow phone sends an event in less
_CHECK_S = 1.0  # between two checks of the time limits


def make_app(
    requests: RequestIntake, stats: NodeStats, responder: Responder, demand: Demand | None = None
) -> Starlette:
    """The ASGI application: events off the hot path, answers, demand, and the state of the node."""

    async def healthz(_: Request) -> Response:
        return json_response({"alive": True})

    async def readyz(_: Request) -> Response:
        reason = requests.not_ready()
        left, of = stats.replay
        progress = {"replay": {"left": left, "of": of}} if left else {}
        return unavailable(reason, **progress) if reason else json_response({"ready": True})

    async def metrics(request: Request) -> Response:
        _guard(request, requests.gate)
        return Response(generate_latest(stats.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def show_stats(request: Request) -> Response:
        _guard(request, requests.gate)
        return json_response(stats.stats())

    return Starlette(
        routes=[
            *responder.routes,
            *([] if demand is None else [Route("/v1/demand/{source}", demand.answer, methods=["GET"])]),
            Route("/v1/stats", show_stats, methods=["GET"]),
            Route("/v1/{source}", EventsEndpoint(requests, responder)),
            Route("/healthz", healthz),
            Route("/readyz", readyz),
            Route("/metrics", metrics),
        ],
        exception_handlers={IngestError: _refused, OSError: lake_away, DeltaError: lake_away},
    )


def _guard(request: Request, gate: SenderGate) -> None:
    """If senders need keys, show what the node counts to keys and to its own machine only."""
    if not gate.keys_required or (request.client is not None and is_loopback(request.client.host)):
        return
    gate.key(first_key(request.headers.raw))


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, IngestError)
    return refuse(error)


def check_exposure(settings: CollectSettings, keys: KeyRing[ApiKey]) -> None:
    """Refuse to listen on a public address without keys.

    Raises:
        ConfigError: the address is public, and there are no keys.
    """
    if not (is_loopback(settings.host) or keys.required or settings.allow_anonymous):
        raise ConfigError(
            f"{settings.host} is reached from elsewhere, and there are no API keys",
            key="collect.host",
            remedy="Make one with `millrace key new`, or set collect.allow_anonymous = true",
        )


class HttpServer:
    """uvicorn on a bound socket, in the running event loop, without its own signal handlers.

    Args:
        app: serves everything except plain requests with events.
        ws: makes the protocol of a WebSocket connection; None: there are none.
    """

    def __init__(self, app: Starlette, requests: RequestIntake, settings: CollectSettings, *, ws: Any = None) -> None:
        self._socket = listen(settings.host, settings.port, "collect")
        self.url = url_of(self._socket)
        self._settings = settings
        self.expired = 0  # requests that took too long to come in
        config = uvicorn.Config(
            app,
            http=partial(CollectorHttpProtocol, requests),  # type: ignore[arg-type]
            ws=ws or "none",
            lifespan="off",
            access_log=False,
            log_config=None,
            server_header=False,
            date_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=5,
        )
        self._server = QuietServer(config)

    async def serve(self) -> None:
        """Serve until :meth:`stop`."""
        watch = asyncio.create_task(self._watch())
        try:
            await self._server.serve(sockets=[self._socket])
        finally:
            watch.cancel()

    async def _watch(self) -> None:
        """Cut off slow and idle connections, all with one timer."""
        request_s, idle_s = REQUEST_TIMEOUT_S, self._settings.idle_timeout_s
        while True:
            await asyncio.sleep(min(_CHECK_S, request_s / 4))
            for connection in list(self._server.server_state.connections):
                if isinstance(connection, CollectorHttpProtocol):
                    self.expired += connection.expire(request_s, idle_s)

    def stop(self) -> None:
        """Take no more requests and finish those in progress."""
        self._server.should_exit = True


class EventsEndpoint:
    """The ASGI application of ``POST /v1/{source}``; the application turns its errors into answers."""

    def __init__(self, requests: RequestIntake, responder: Responder) -> None:
        self._requests = requests
        self._responder = responder

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = await self._take(scope, receive)
        await answer(scope, receive, send)

    async def _take(self, scope: Scope, receive: Receive) -> Response:
        if scope["method"] != "POST":
            raise RequestRefused("events are sent with POST", 405)
        kind, length, key = _headers(scope)
        attributes = _attributes(scope) if kind not in (STRUCTURED, BATCHED) else None
        if attributes is not None and not kind:  # then its data is JSON
            kind = intake.JSON
        way, sender = self._requests.enter(scope["path_params"]["source"], kind, length, key)
        source, gate = way.border.source, self._requests.gate
        query = dict(parse_qsl(scope["query_string"].decode("latin-1")))
        callback = self._responder.check(source, query) if source.respond else ""
        reserved = length or intake.MAX_BODY_BYTES
        gate.reserve(reserved)
        try:
            body = await _body(receive)
        finally:
            gate.free(reserved)
        held = gate.hold(source, sender, frozenset())
        try:
            taken = self._requests.take(way, sender, kind, body, attributes)
            if query.get("ack") == "none":  # one way: answered before it is durable, even if refused
                return Response(status_code=202)
            for group in taken.groups:
                await group.wait()
        finally:
            gate.release(held)
        if taken.error is not None:
            raise taken.error
        if source.respond and len(taken.events) == 1 and not taken.events[0].shed:
            return await self._responder.respond(source, taken.events[0], callback)
        return Response(taken.answer, 202, media_type=intake.JSON if taken.answer else None)


def _headers(scope: Scope) -> tuple[str, int, str | None]:
    """Content type, length of the body (0: unknown) and key."""
    kind, length, key = "", 0, None
    for name, value in scope["headers"]:
        if name == b"content-type":
            kind = value.decode("latin-1").partition(";")[0].strip().lower()
        elif name == b"content-length" and value.isdigit():
            length = int(value)
        elif name == b"content-encoding" and value.lower() != b"identity":
            raise RequestRefused("send the body as it is, without a content encoding", 415, code="content-encoding")
        else:
            key = presented_key(name, value) or key
    return kind, length, key


def _attributes(scope: Scope) -> dict[str, str] | None:
    """Attributes of a CloudEvent in binary mode; None if the request has none."""
    found = {
        name[3:].decode("latin-1"): unquote(value.decode("latin-1"))
        for name, value in scope["headers"]
        if name.startswith(b"ce-")
    }
    return found or None


async def _body(receive: Receive) -> bytes:
    chunks: list[bytes] = []
    size, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise RequestRefused("the request was cut off", 400)
        chunk, more = message.get("body", b""), message.get("more_body", False)
        size += len(chunk)
        if size > intake.MAX_BODY_BYTES:
            raise RequestRefused(f"the body has more than {intake.MAX_BODY_BYTES} bytes", 413, code="body-too-large")
        chunks.append(chunk)
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


# --- metrics

_COUNTERS: tuple[tuple[str, str, Callable[[SourceLane], int]], ...] = (
    ("received", "Events taken from upstreams and senders", lambda lane: lane.received),
    ("acknowledged", "Events that are durable in the message log", lambda lane: lane.durable),
    ("rejected", "Events refused at the border and kept for quarantine", lambda lane: lane.rejected),
    ("published", "Events that Kafka has acknowledged", lambda lane: lane.published),
    ("shed", "Events dropped by load shedding", lambda lane: lane.shed),
    ("failed", "Events that Kafka will never take", lambda lane: lane.failed),
    ("gaps", "Reconnects to an upstream that cannot resume", lambda lane: lane.gaps),
)


class CollectedSources(Protocol):
    """What a node collects; it may change at any time. ``shedders``: by source, of sources that may shed events."""

    @property
    def names(self) -> Sequence[str]: ...

    @property
    def shedders(self) -> Mapping[str, Shedder]: ...

    def statuses(self) -> Iterable[UpstreamStatus]: ...


class NodeStats(MetricCollector):
    """Counts of one node, cumulative over restarts: ``/v1/stats`` as JSON and ``/metrics`` for Prometheus.

    They are read from the log's lanes on request. The hot path only observes one histogram value a commit group.

    Args:
        requests: its gate, and whether it is ready.
    """

    def __init__(
        self, node: str, log: MessageLog, delivery: KafkaDelivery, sources: CollectedSources, requests: RequestIntake
    ) -> None:
        self._node = node
        self._log = log
        self._delivery = delivery
        self._sources = sources
        self._requests = requests
        self._gate = requests.gate
        self.registry = CollectorRegistry()
        self.registry.register(self)
        commits = Histogram(
            "millrace_collector_commit_seconds",
            "Time from a group's first event until the group is durable",
            registry=self.registry,
            buckets=(0.002, 0.005, 0.0075, 0.01, 0.02, 0.05, 0.1, 0.5, 1, 5),
        )
        log.observe(commits.observe)

    @property
    def replay(self) -> tuple[int, int]:
        """Events of an earlier run that are still to be sent to Kafka, and their initial number."""
        return self._delivery.to_replay, self._log.recovery.to_replay

    def stats(self) -> dict[str, Any]:
        """The document of ``/v1/stats``."""
        upstreams = list(self._sources.statuses())
        recovery = self._log.recovery
        return {
            "node": self._node,
            "ready": not self._requests.not_ready(),
            "sources": {name: self._source(name, upstreams) for name in self._sources.names},
            "log": {
                "bytes": self._log.used,
                "limit": self._log.limit,
                "full": self._log.full,
                "segments": self._log.segment_count,
                "problem": self._log.problem,
                "in_flight": self._delivery.in_flight,
            },
            "recovery": {
                "clean": recovery.clean,
                "replayed": recovery.to_replay,
                "torn_bytes": recovery.torn_bytes,
                "corrupt": [str(item) for item in recovery.corrupt],
                "torn": str(recovery.torn or ""),
            },
        }

    def _source(self, name: str, upstreams: Sequence[UpstreamStatus]) -> dict[str, Any]:
        lanes = [lane for lane in self._log.lanes() if lane.source == name]
        of_lane = {lane.name for lane in lanes}
        return {
            **{counter: sum(value(lane) for lane in lanes) for counter, _, value in _COUNTERS},
            "in_log": sum(lane.in_log for lane in lanes),
            "not_kept": self._gate.not_kept[name],
            "refused_requests": {code: n for (source, code), n in self._gate.refused.items() if source == name},
            "shed_share": self._sources.shedders[name].share if name in self._sources.shedders else 0.0,
            "upstreams": [_upstream(status) for status in upstreams if status.lane in of_lane],
        }

    def collect(self) -> Iterator[Metric]:
        lanes, upstreams, gate = self._log.lanes(), list(self._sources.statuses()), self._gate
        by_lane = ("source", "lane")
        for name, text, value in _COUNTERS:
            yield _counter(name, text, by_lane, [((lane.source, lane.name), value(lane)) for lane in lanes])
        in_log = [((lane.source, lane.name), lane.in_log) for lane in lanes]
        yield _gauge("in_log", "Events that Kafka has not acknowledged", by_lane, in_log)
        connected = [((status.lane,), status.connected) for status in upstreams]
        yield _gauge("upstream_connected", "Whether the upstream is connected", ("lane",), connected)
        counts = [((status.lane, what), n) for status in upstreams for what, n in status.counts.items()]
        yield _gauge("upstream_count", "Further counts of this kind of collector", ("lane", "what"), counts)
        shares = [((name,), shedder.share) for name, shedder in self._sources.shedders.items()]
        yield _gauge("shed_share", "Share of events shed now", ("source",), shares)
        refused = list(gate.refused.items())
        yield _counter("refused_requests", "Requests refused as a whole, not kept", ("source", "code"), refused)
        not_kept = [((source,), n) for source, n in gate.not_kept.items()]
        yield _counter("not_kept", "Refused events that were only counted", ("source",), not_kept)
        yield _gauge("connections", "Open HTTP connections", (), [((), gate.connections)])
        yield _gauge("log_bytes", "Bytes of the message log", (), [((), self._log.used)])
        yield _gauge("log_limit_bytes", "Limit of the message log", (), [((), self._log.limit)])
        yield _gauge("ready", "Whether the node is ready", (), [((), not self._requests.not_ready())])

    def describe(self) -> Iterable[Metric]:
        """Nothing: names must be known without collecting, which needs a running node."""
        return ()


def _family(
    kind: type[CounterMetricFamily] | type[GaugeMetricFamily],
    name: str,
    text: str,
    labels: Sequence[str],
    values: Iterable[tuple[tuple[str, ...], float]],
) -> Metric:
    family = kind(f"millrace_collector_{name}", text, labels=labels)
    for label_values, value in values:
        family.add_metric(label_values, float(value))
    return family


_counter, _gauge = partial(_family, CounterMetricFamily), partial(_family, GaugeMetricFamily)


def _upstream(status: UpstreamStatus) -> dict[str, Any]:
    return {name: value for name, value in asdict(status).items() if value or name != "counts"}

"""The serving process, put together: hub, tails, HTTP routes, subscribers; one port, one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import resource
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from functools import cache, partial
from typing import Any

from starlette.applications import Starlette

from lakehouse.contract.access import state_manager
from lakehouse.contract.errors import ConfigError
from lakehouse.contract.lake import Lake
from lakehouse.contract.listen import listen, serve_until, url_of, uvicorn_config
from lakehouse.contract.pipeline import Pipeline
from lakehouse.contract.pipeline.demand import LOOK_S, DemandNote, Want, sources_of
from lakehouse.contract.pipeline.folder import PipelineFiles
from lakehouse.contract.pipeline.tenants import border_of
from lakehouse.contract.settings import ServeSettings, Settings
from serve.access import ReaderGate, make_gate, uses_tls
from serve.core.channel import ViewStream, channels_of
from serve.core.hub import Hub
from serve.core.position import lake_seal
from serve.core.ring import Link, deliver
from serve.http import routes
from serve.http.metrics import ServerCollector, ServerMetrics
from serve.http.rows import RowSource
from serve.push.sse import ServingHttpProtocol
from serve.push.websocket import WEBSOCKET, SubscriberWebSocket
from serve.sql.routes import Workers
from serve.tables.tables import Declarations, Tables, clock_ms, now_ms
from serve.webhooks.runner import WebhookFleet

log = logging.getLogger(__name__)

OTHER_FILES = 256  # tables, logs, workers, requests
_BEAT_S = 0.02
_AGAIN_S = 0.1  # after an unexpected failure
_ASKED_MS = 10_000  # who was refused because a table does not exist yet counts as its subscriber for so long


def allow_files(subscribers: int) -> int:
    """Raise the limit of open files as far as allowed, and return it.

    Warns if it is too low for so many subscribers.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = subscribers + OTHER_FILES
    with contextlib.suppress(ValueError, OSError):  # the hard limit may be beyond the kernel's
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    if soft != resource.RLIM_INFINITY and soft < wanted:
        log.warning(
            "%d files may be open, and serve.max_subscribers asks for %d: raise the hard limit (ulimit -Hn, "
            "LimitNOFILE= of a unit), or lower serve.max_subscribers",
            soft,
            wanted,
        )
    return soft


def make_app(settings: Settings, *, name: str = "") -> Starlette:
    """The ASGI application. Its lifespan runs the tails and the clock.

    Args:
        name: of one of several processes on a port.

    Raises:
        ConfigError: see :func:`serve.access.make_gate`; or the pipeline or a channel in it is wrong.
    """
    lake = Lake.of(settings)
    seal = lake_seal(lake.shared)
    manager = state_manager(settings)
    files = PipelineFiles.of(settings)
    pipeline = files.load()
    specs, border, sources = channels_of(pipeline), border_of(pipeline, settings.tenant), dict(pipeline.sources)
    gate = make_gate(settings, seal, border, manager)

    def declared() -> Declarations | None:
        changed = files.changed()
        try:
            sources.update({} if changed is None else changed.sources)
            return None if changed is None else (channels_of(changed), border_of(changed, settings.tenant).columns)
        except ConfigError as error:
            log.error("%s. Channels stay as they were", error)
            return None

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[dict[str, Any]]:
        work = asyncio.Event()
        hub = Hub(settings.serve, [WEBSOCKET], seal, work.set, specs)
        tables, workers = Tables(lake, hub, border, deliver, declared, sources), Workers(settings)
        rows = RowSource(hub, tables, workers)
        fleet = WebhookFleet(lake.state / "webhooks", hub, tables, gate, settings.serve)
        own = ServerCollector(hub, gate, workers, rows, fleet)
        metrics = ServerMetrics(lake.state / "run" / "metrics", name, own)
        kept = (partial(_run_clock, hub, settings.serve), partial(_run_work, hub, work), partial(_run_gate, gate))
        if manager is not None:
            await asyncio.to_thread(manager.start)
        demand = _tell_demand(hub, tables, lambda: files.pipeline)
        runs = [tables.run(), fleet.run(), demand, *map(_run_forever, kept), *([metrics.run()] if name else [])]
        tasks = [asyncio.create_task(run) for run in runs]
        try:
            yield {
                "hub": hub,
                "tables": tables,
                "metrics": metrics,
                "gate": gate,
                "settings": settings,
                "files": files,
                "rows": rows,
                "workers": workers,
                "fleet": fleet,
            }
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            rows.close()
            await workers.close()
            if manager is not None:
                await asyncio.to_thread(manager.stop)

    return Starlette(
        routes=routes.ROUTES,
        middleware=routes.middleware(settings.serve.origin_list),
        exception_handlers=routes.HANDLERS,
        lifespan=lifespan,
    )


async def run_server(
    settings: Settings,
    *,
    ready: Callable[[str], None] | None = None,
    stop: asyncio.Event | None = None,
    alone: bool = False,
    name: str = "",
) -> None:
    """Serve until ``stop`` is set. Run it in a uvloop loop; at the end subscribers get close code 1001.

    Args:
        ready: called with the base URL, e.g. ``http://127.0.0.1:8400``, once connections are taken.
        stop: ends the server; None: only cancelling does.
        alone: the process is only this server: its garbage collector and its limit of open files may be set.
        name: of one of several processes that share the port, which report each other's metrics. Empty: the only one.

    Raises:
        EnvironmentProblem: the address cannot be bound.
        ConfigError: keys, origins or certificate cannot be used, or everybody could read everything.
    """
    if alone:
        allow_files(settings.serve.max_subscribers)
    tls = uses_tls(settings.serve)
    app = make_app(settings, name=name)
    listener = listen(settings.serve.host, settings.serve.port, "serve", shared=bool(name))
    config = uvicorn_config(app, settings.serve, http=ServingHttpProtocol, ws=SubscriberWebSocket)
    url = url_of(listener, tls=tls)

    def up() -> None:
        if alone:
            _tune_gc()
        if ready is not None:
            ready(url)

    try:
        await serve_until(stop or asyncio.Event(), config, listener, up)
    finally:
        if alone:
            gc.unfreeze()  # else DuckDB reports its own types as leaked when the interpreter ends


def _tune_gc() -> None:
    """Keep the garbage collector away from objects that live as long as the process, and from what a commit allocates
    for a thousand filters. With 10,000 subscribers each full collection took 65 ms.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 100)


async def _run_forever(run: partial[Coroutine[Any, Any, None]]) -> None:
    """Run a background task for ever: an unexpected failure is logged, then it starts again."""
    while True:
        try:
            await run()
        except Exception:
            log.exception("%s failed, and goes on", run.func.__name__)
            await asyncio.sleep(_AGAIN_S)


async def _run_gate(gate: ReaderGate) -> None:
    """Close connections whose key was revoked."""
    while True:
        await asyncio.sleep(1.0)
        gate.sweep()


async def _run_work(hub: Hub, some: asyncio.Event) -> None:
    """Do long work in slices of a few milliseconds, so that a large snapshot delays no change by more."""
    while True:
        if not hub.working:
            some.clear()
            await some.wait()
        deliver(hub.work(clock_ms()))
        await asyncio.sleep(0)


async def _run_clock(hub: Hub, settings: ServeSettings) -> None:
    """Tick. Tell the hub whose write buffer has shrunk: a slow reader may take long to drain it."""
    pause = max(0.02, min(settings.heartbeat_ms, settings.slow_after_ms, settings.cut_after_ms) / 5_000)
    buffered: dict[Link, int] = {}
    while True:
        due = clock_ms() + pause * 1000
        while (left := (due - clock_ms()) / 1000) > 0:
            await asyncio.sleep(min(left, _BEAT_S) if hub.beating else left)
            if hub.beating:
                deliver(hub.beat(clock_ms(), now_ms()))
        now = clock_ms()
        sizes = {subscriber: subscriber.link.buffered() for subscriber in hub.waiting()}
        for subscriber, size in sizes.items():
            if size < buffered.get(subscriber.link, 0) and hub.heard_from(subscriber, now):
                subscriber.link.pump()
        buffered = {subscriber.link: size for subscriber, size in sizes.items()}
        deliver(hub.tick(now, now_ms()))


async def _tell_demand(hub: Hub, tables: Tables, pipeline: Callable[[], Pipeline]) -> None:
    """Tell collectors what the subscribers of this process want.

    Nothing is taken back at the end: the subscribers may be about to connect to another process.
    """
    note, failed = DemandNote(tables.lake), False

    def tell(followed: Iterable[tuple[str, ViewStream]], asked: Iterable[tuple[str, str]]) -> None:
        declared, reads = pipeline(), tables.reads
        sources = cache(lambda table: sources_of(table, declared, reads))
        wants = {Want(tenant, source) for tenant, table in asked for source in sources(table)}
        for tenant, stream in followed:
            column, values = stream.pinned or ("", frozenset(("",)))
            of_table = sources(stream.channel.name)
            wants.update(Want(tenant, source, column, value) for source in of_table for value in values)
        note.tell(frozenset(wants))

    while True:
        late = clock_ms() - _ASKED_MS
        for asked in [asked for asked, at in tables.asked.items() if at < late]:
            del tables.asked[asked]
        try:
            await asyncio.to_thread(tell, list(hub.followed), list(tables.asked))
            failed = False
        except Exception:  # tried again; what was said holds as long as the lease
            if not failed:
                log.exception("collectors cannot be told what subscribers want")
            failed = True
        await asyncio.sleep(LOOK_S)

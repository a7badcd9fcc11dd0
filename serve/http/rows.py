"""A table's rows over HTTP: ``GET /v1/tables/NAME``, as they are, or with ``as_of`` as they were.

Current rows come from memory. The entity tag is the position: ``If-None-Match`` gives 304 at no cost. ``max-age`` is
what is left of the usual pause between commits. Older versions are read from the Delta log and the files of that
version, as long as the table keeps them. A subscription can go on from the position of either answer.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Hashable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from heapq import merge
from itertools import islice
from pathlib import Path
from typing import Any, Generic, TypeVar

import orjson
from starlette.requests import Request
from starlette.responses import Response

from lakehouse.contract.channel import EVERYTHING, ChannelSpec
from lakehouse.contract.deltalog import DeltaLog, TableGone, TableUnreadable
from lakehouse.contract.lake import CommitFacts
from lakehouse.contract.rows import Key, Row
from serve.core.channel import SLICE_ROWS, Channel, live_view, opened_view
from serve.core.hub import Hub
from serve.core.model import SubscribeRequest, TableInfo, in_order
from serve.core.position import Position, Seal
from serve.core.values import encode_rows, to_json
from serve.errors import FilterError, PositionExpired, RequestError, SqlError
from serve.push.request import admitted, invalid, problem, query_of, subscription_of, whole_number
from serve.tables.reader import AsOf, TableReader, parse_as_of, version_at
from serve.tables.state import TableState
from serve.tables.tables import Tables, now_ms
from serve.views.aggregate import AggregateView
from serve.views.view import SubscriberView, filter_errors
from serve.views.visibility import NOT_SERVED, view_of

K = TypeVar("K", bound=Hashable)

CACHE_BYTES = 33_554_432
ENTRY_BYTES = 256  # overhead of an entry


MAX_LIMIT = 100_000
_AT_ONCE = 4  # bodies built at a time; others wait
_EXTRA = frozenset({"limit", "as_of"})
GONE = 4410
_KEPT = 4  # older versions in memory: a page asks for the same one several times


class ByteCache(Generic[K]):
    """A least-recently-used cache bounded by ``most`` bytes; no answer takes more than a quarter of it."""

    def __init__(self, most: int = CACHE_BYTES) -> None:
        self._most = most
        self._bodies: OrderedDict[K, bytes] = OrderedDict()
        self._bytes = 0

    def get(self, key: K) -> bytes | None:
        body = self._bodies.get(key)
        if body is not None:
            self._bodies.move_to_end(key)
        return body

    def put(self, key: K, body: bytes) -> None:
        if key in self._bodies or len(body) > self._most // 4:
            return
        self._bodies[key] = body
        self._bytes += len(body) + ENTRY_BYTES
        while self._bytes > self._most:
            self._bytes -= len(self._bodies.popitem(last=False)[1]) + ENTRY_BYTES


class Bodies(ByteCache[tuple[Position, int | None]]):
    """Cached answers: many ask for the same between two commits."""

    def __init__(self) -> None:
        super().__init__()
        self.slots = asyncio.Semaphore(_AT_ONCE)


async def rows(request: Request) -> Response:
    """``GET /v1/tables/NAME[?limit=&where=&columns=&select=&as_of=]``: as the principal may see them."""
    hub: Hub = request.state.hub
    name: str = request.path_params["name"]
    query = query_of(request.url.query)
    limit = whole_number(query["limit"], "limit", 1, MAX_LIMIT) if "limit" in query else None
    wanted = subscription_of({**query, "table": name}, hub.seal, also=_EXTRA)
    if wanted.position is not None or wanted.window or wanted.conflate:
        raise invalid("bad_request", "rows of one version are asked for without from, window and conflate")
    principal = admitted(request)
    principal.check_table(name)
    try:
        if "as_of" in query:
            return await _older(request, wanted, query["as_of"], limit)
        return await _current(request, wanted, limit)
    except FilterError as error:
        raise invalid("bad_filter", str(error)) from None


async def _current(request: Request, wanted: SubscribeRequest, limit: int | None) -> Response:
    hub: Hub = request.state.hub
    tables: Tables = request.state.tables
    bodies: Bodies = request.state.bodies
    await tables.wait_for(wanted.table)
    channel = hub.channels.get(wanted.table)
    if channel is None:
        return problem(409, _why_not(tables, wanted.table), "not_served")
    view = hub.view_of(wanted.table, admitted(request), wanted)
    headers = _headers(hub, channel, _position(channel, view))
    if _matches(request.headers.get("if-none-match", ""), headers["ETag"]):
        return Response(status_code=304, headers=headers)
    async with bodies.slots:
        position = _position(channel, view)
        body = bodies.get((position, limit))
        if body is None:
            with filter_errors(view):
                body = await _body(hub, channel, view, limit)
            bodies.put((position, limit), body)
    return Response(body, headers=_headers(hub, channel, position), media_type="application/json")


async def _older(request: Request, wanted: SubscribeRequest, as_of: str, limit: int | None) -> Response:
    hub: Hub = request.state.hub
    tables: Tables = request.state.tables
    history: History = request.state.history
    try:
        moment = parse_as_of(as_of)
    except SqlError as error:
        raise invalid("bad_request", str(error)) from None
    found = await asyncio.to_thread(tables.lake.find, wanted.table)
    spec = hub.streams.specs.get(wanted.table, EVERYTHING)
    if not spec.served:
        raise RequestError(4409, "not_served", NOT_SERVED)
    guard = admitted(request).condition(wanted.table)
    body = await history.body(found.path, moment, VersionRequest(wanted, guard, limit, hub.seal, spec))
    headers = {"Cache-Control": "private, no-cache", "Vary": "Authorization"}
    return Response(body, headers=headers, media_type="application/json")


def _why_not(tables: Tables, name: str) -> str:
    """Why an existing table is not in memory. Raises UnknownTable."""
    if known := tables.problems.get(name):
        return known
    table = tables.lake.find(name)
    return f"{table.layer} table {name!r} is not kept in memory; query it with SQL"


def _position(channel: Channel, view: SubscriberView) -> Position:
    return Position(channel.state.table.table_id, channel.state.version, 0, view.id)


def _headers(hub: Hub, channel: Channel, position: Position) -> dict[str, str]:
    return {
        "ETag": f'"{hub.seal.token(position)}"',
        "Cache-Control": _cache_control(channel, now_ms()),
        "Vary": "Authorization",
    }


def _cache_control(channel: Channel, now: int) -> str:
    """Expected life of an answer: what is left of the usual pause between commits."""
    if channel.interval_ms is None:
        return "private, no-cache"
    left = channel.interval_ms - (now - channel.state.facts.committed_at)
    return f"private, max-age={int(left / 1000)}" if left >= 1_000 else "private, no-cache"


def _matches(header: str, tag: str) -> bool:
    """RFC 9110, 13.1.2: any of the tags listed, compared weakly."""
    return header.strip() == "*" or tag in [each.strip().removeprefix("W/") for each in header.split(",")]


async def _body(hub: Hub, channel: Channel, view: SubscriberView, limit: int | None) -> bytes:
    """Current rows, built in slices so that others get their turn."""
    state = channel.state
    facts, position = state.facts, _position(channel, view)
    stream = channel.streams.get(view.id)
    if stream is not None and stream.opened:
        live = stream.live
    else:
        live = live_view(view, state)
        if isinstance(live, AggregateView):
            for _ in live.opening(list(state.rows.values())):
                await asyncio.sleep(0)
    table, source = live.table, live.source(state.rows)
    runs: list[list[tuple[Key, Row]]] = []
    for start in range(0, len(source), SLICE_ROWS):
        runs.append(sorted(live.rows(source[start : start + SLICE_ROWS]), key=_by_key))
        if start:
            await asyncio.sleep(0)
    ordered = islice(merge(*runs, key=_by_key), limit)
    texts: list[bytes] = []
    while some := [row for _, row in islice(ordered, SLICE_ROWS)]:
        texts += encode_rows(table.columns, some)
        if len(texts) > SLICE_ROWS:
            await asyncio.sleep(0)
    return to_json(_content(hub.seal, view, table, position, facts, texts))


def _by_key(pair: tuple[Key, Row]) -> tuple[object, ...]:
    return in_order(pair[0])


class History:
    """Reads older versions, ``at_once`` at a time; twice as many more wait."""

    def __init__(self, at_once: int) -> None:
        self._at_once = at_once
        self._busy = 0
        self._slots = asyncio.Semaphore(at_once)
        self._threads = ThreadPoolExecutor(at_once, thread_name_prefix="history")
        self._states: OrderedDict[tuple[Path, int, tuple[int, int]], TableState] = OrderedDict()

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def body(self, folder: Path, moment: AsOf, wanted: VersionRequest) -> bytes:
        """The answer for one version. Raises RequestError: it is gone, the filter is refused, or too many ask."""
        if self._busy >= 3 * self._at_once:
            raise RequestError(RequestError.FULL, "busy", "too many older versions are being read; ask again")
        self._busy += 1
        try:
            async with self._slots:
                loop = asyncio.get_running_loop()
                return await loop.run_in_executor(self._threads, self._made, folder, moment, wanted)
        except (PositionExpired, TableGone) as gone:
            raise RequestError(GONE, "expired", str(gone)) from None
        except TableUnreadable as error:
            raise invalid("not_served", str(error)) from None
        except FilterError as error:
            raise invalid("bad_filter", str(error)) from None
        finally:
            self._busy -= 1

    def _made(self, folder: Path, moment: AsOf, wanted: VersionRequest) -> bytes:
        state = self._state(folder, version_at(folder, moment))
        with filter_errors(wanted.view(state)):
            return wanted.body(state)

    def _state(self, folder: Path, version: int) -> TableState:
        stamp = DeltaLog(folder).stamp(version)
        state = None if stamp is None else self._states.get((folder, version, stamp))
        if state is None:
            state = TableReader(folder).load(version)
            if stamp is not None:
                self._states[folder, version, stamp] = state
            while len(self._states) > _KEPT:
                self._states.popitem(last=False)
        return state


@dataclass(frozen=True, slots=True)
class VersionRequest:
    """A request for one version.

    Attributes:
        request: filter, columns or aggregate.
        guard: the principal's condition.
        limit: rows at most; None: all.
        seal: writes positions.
        spec: the declared channel.
    """

    request: SubscribeRequest
    guard: str
    limit: int | None
    seal: Seal
    spec: ChannelSpec = EVERYTHING

    def body(self, state: TableState) -> bytes:
        """The answer; it blocks. Raises FilterError if the filter does not fit the table as it was."""
        view = self.view(state)
        live = opened_view(view, state)
        table = live.table
        ordered = sorted(live.rows(live.source(state.rows)), key=lambda pair: in_order(pair[0]))[: self.limit]
        texts = encode_rows(table.columns, (row for _, row in ordered))
        position = Position(table.table_id, state.version, 0, view.id)
        content = _content(self.seal, view, table, position, state.facts, texts)
        return to_json(content | {"version": state.version})

    def view(self, state: TableState) -> SubscriberView:
        """The view. Raises FilterError if the filter does not fit the table as it was."""
        return view_of(state.table, self.request, self.guard, self.spec)


def _content(
    seal: Seal, view: SubscriberView, table: TableInfo, position: Position, facts: CommitFacts, rows: list[bytes]
) -> dict[str, Any]:
    return {
        "table": table.name,
        "key": table.key,
        "columns": table.columns,
        "position": seal.token(position),
        "position_lives_ms": table.retention_ms,
        **view.description,
        "rows": [orjson.Fragment(text) for text in rows],
        "through": facts.through,
        "committed_at": facts.committed_at,
    }

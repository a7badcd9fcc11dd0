"""A table's rows by plain HTTP: the latest, only if newer than what one has, and for how long it is worth keeping.

The entity tag is the position. ``If-None-Match`` with it gives 304 at no cost; ``Cache-Control: max-age`` is what is
left of the usual pause between commits. The position goes on over any other transport (``from=``).
"""

from __future__ import annotations

import asyncio
from heapq import merge
from itertools import islice

import orjson
from starlette.requests import Request
from starlette.responses import Response

from lakehouse.contract.rows import Key, Row
from serve.channel import SLICE_ROWS, Channel, live_view
from serve.errors import FilterError, RequestError
from serve.filters import View
from serve.filters.view import faults_of
from serve.hub import Hub
from serve.kept import Kept
from serve.live import AggregateView
from serve.model import in_order
from serve.position import Position
from serve.push import request as asked
from serve.push.problems import problem, refused
from serve.rows import encode_rows, to_json
from serve.tables import Tables, now_ms

MAX_LIMIT = 100_000
_AT_ONCE = 4  # bodies being made; the others wait their turn
_EXTRA = frozenset({"limit"})


class Bodies(Kept[tuple[Position, int | None]]):
    """The last bodies made: many ask for the same between two commits."""

    def __init__(self) -> None:
        super().__init__()
        self.slots = asyncio.Semaphore(_AT_ONCE)


async def rows(request: Request) -> Response:
    """A table's current rows, from memory, as the principal may see them and the query wants them.

    ``GET /v1/tables/NAME[?limit=&where=&columns=&select=]``
    """
    hub: Hub = request.state.hub
    tables: Tables = request.state.tables
    name: str = request.path_params["name"]
    try:
        query = asked.query_of(request.url.query)
        limit = asked.whole_number(query["limit"], "limit", 1, MAX_LIMIT) if "limit" in query else None
        wanted = asked.subscription({**query, "table": name}, hub.seal, also=_EXTRA)
        if wanted.position is not None or wanted.window or wanted.conflate:
            raise asked.bad("bad_request", "this is the table as it is now: no from, window or conflate")
        principal = asked.admitted(request)
        if not principal.may_read(name):
            raise RequestError(RequestError.NOT_FOUND, "no_such_table", f"no table {name!r} is served here")
        await tables.wait_for(name)
        channel = hub.channels.get(name)
        if channel is None:
            return problem(409, _why_not(tables, name), "not_served")
        view = hub.view_of(name, principal, wanted)
        headers = _headers(hub, channel, _position(channel, view))
        if _matches(request.headers.get("if-none-match", ""), headers["ETag"]):
            return Response(status_code=304, headers=headers)
        bodies: Bodies = request.state.bodies
        async with bodies.slots:
            position = _position(channel, view)
            body = bodies.get((position, limit))
            if body is None:
                with faults_of(view):
                    body = await _body(hub, channel, view, limit)
                bodies.put((position, limit), body)
        return Response(body, headers=_headers(hub, channel, position), media_type="application/json")
    except FilterError as error:
        return refused(asked.bad("bad_filter", str(error)))
    except RequestError as error:
        return refused(error)


def _why_not(tables: Tables, name: str) -> str:
    """Why a table that exists is not kept in memory.

    Raises:
        UnknownTable: it does not exist.
    """
    if known := tables.problems.get(name):
        return known
    table = tables.lake.find(name)
    return f"{table.layer} table {name!r} is not kept in memory; query it with SQL"


def _position(channel: Channel, view: View) -> Position:
    return Position(channel.state.table.table_id, channel.state.version, 0, view.id)


def _headers(hub: Hub, channel: Channel, position: Position) -> dict[str, str]:
    return {
        "ETag": f'"{hub.seal.token(position)}"',
        "Cache-Control": _cache_control(channel, now_ms()),
        "Vary": "Authorization",
    }


def _cache_control(channel: Channel, now: int) -> str:
    """For how long it will most likely not change: what is left of the usual pause between commits."""
    if channel.interval_ms is None:
        return "private, no-cache"
    left = channel.interval_ms - (now - channel.state.facts.committed_at)
    return f"private, max-age={int(left / 1000)}" if left >= 1_000 else "private, no-cache"


def _matches(header: str, tag: str) -> bool:
    """RFC 9110, 13.1.2: any of the tags listed, compared weakly."""
    return header.strip() == "*" or tag in [each.strip().removeprefix("W/") for each in header.split(",")]


async def _body(hub: Hub, channel: Channel, view: View, limit: int | None) -> bytes:
    """The rows at this moment, made in slices so that others have their turn."""
    state = channel.state
    facts, position = state.facts, _position(channel, view)
    feed = channel.feeds.get(view.id)
    if feed is not None and feed.opened:
        live = feed.live
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
    content = {
        "table": channel.name,
        "key": table.key,
        "columns": table.columns,
        "position": hub.seal.token(position),
        "position_lives_ms": table.retention_ms,
        **view.told,
        "rows": [orjson.Fragment(text) for text in texts],
        "through": facts.through,
        "committed_at": facts.committed_at,
    }
    return to_json(content)


def _by_key(pair: tuple[Key, Row]) -> tuple[object, ...]:
    return in_order(pair[0])

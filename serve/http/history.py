"""What changed in a table between two versions or times: ``GET /v1/history/NAME``, page by page.

A page is rebuilt from the Delta log by the code that replays for subscribers (:class:`serve.tables.tables.Replay`), so
it has the same ``change`` messages, under the same filter and the same rights. A subscription can go on from its
position. Its size, and the versions that are read for it, are bounded: a rare filter gives empty pages, not slow ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import quote, urlencode

import orjson
from starlette.requests import Request
from starlette.responses import Response

from lakehouse.contract.deltalog import DeltaLog, TableGone
from lakehouse.contract.pipeline.product import EVERYTHING, ChannelSpec
from serve.core.channel import NOT_SERVED, view_of
from serve.core.messages import to_json
from serve.core.model import SubscribeRequest, TableInfo
from serve.core.position import Position, Seal
from serve.errors import FilterError, PositionExpired, RequestError, SqlError
from serve.http.rows import GONE, RowSource, is_known
from serve.push.request import admitted, invalid, problem, query_of, subscription_of, whole_number
from serve.tables.state import TableReader, parse_as_of, version_at
from serve.tables.tables import Replay
from serve.views.aggregate import AggregateView
from serve.views.view import RowsView, SubscriberView

NDJSON = "application/x-ndjson"
MAX_CHANGES = 1_000
MAX_VERSIONS = 1_000  # read for one page
_DEFAULT_CHANGES = 100
_PAGE_BYTES = 1_048_576
_EXTRA = frozenset({"since", "until", "limit"})


@dataclass(frozen=True, slots=True)
class _Span:
    """What of a table's history is asked for.

    Attributes:
        table: as the view shows it now.
        view: what of it is seen.
        start: the position behind which the page begins.
        until: the last version.
    """

    table: TableInfo
    view: SubscriberView
    start: Position
    until: int


async def history(request: Request) -> Response:
    """What changed between two versions or times: ``?since=&until=&from=&where=&columns=&select=&limit=``"""
    source: RowSource = request.state.rows
    seal, principal, name = source.hub.seal, admitted(request), request.path_params["name"]
    query = query_of(request.url.query)
    limit = whole_number(query.get("limit", str(_DEFAULT_CHANGES)), "limit", 1, MAX_CHANGES)
    wanted = subscription_of({**query, "table": name}, seal, also=_EXTRA)
    if wanted.window or wanted.conflate:
        raise invalid("bad_request", "a history has no window and is not conflated")
    if ("since" in query) == (wanted.position is not None):
        raise invalid("bad_request", "give since, a version or a time, or from, the next of an answer")
    principal.check_table(name)
    spec = source.hub.specs.get(name, EVERYTHING)
    if not spec.served:
        raise RequestError(4409, "not_served", NOT_SERVED)
    guard = principal.condition(name)
    reader = source.tables.reader((await asyncio.to_thread(source.tables.lake.find, name)).path)
    try:
        span = await source.read_log(lambda: _span(reader, wanted, query, spec, guard))
        lines = NDJSON in request.headers.get("accept", "")
        tag = f'"{seal.token(span.start)}.{span.until}.{limit}{".lines" if lines else ""}"'
        headers = {"ETag": tag, "Cache-Control": "private, no-cache", "Vary": "Authorization, Accept"}
        if is_known(request, tag):
            return Response(status_code=304, headers=headers)
        changes, reached = await source.read_log(lambda: _page(reader, span, seal, limit))
    except FilterError as error:
        raise invalid("bad_filter", str(error)) from None
    except RequestError as error:
        if error.close != GONE:
            raise
        remedy = f"GET /v1/tables/{quote(name)} gives the rows now, and a position to go on from"
        return problem(410, error.detail, error.code, remedy=remedy)
    following = seal.token(reached) if reached.version < span.until or reached.ordinal else None
    if following is not None:
        again = {key: text for key, text in query.items() if key != "since"} | {"from": following, "until": span.until}
        headers["Link"] = f'</v1/history/{quote(name)}?{urlencode(again)}>; rel="next"'
    if lines:
        return Response(b"".join(change + b"\n" for change in changes), headers=headers, media_type=NDJSON)
    content = {
        "table": name,
        "key": span.table.key,
        "columns": span.table.columns,
        "position": seal.token(reached),
        "until": span.until,
        "changes": [orjson.Fragment(change) for change in changes],
        "next": following,
    }
    return Response(to_json(content), headers=headers, media_type="application/json")


def _span(
    reader: TableReader, wanted: SubscribeRequest, query: Mapping[str, str], spec: ChannelSpec, guard: str
) -> _Span:
    """It blocks. Raises RequestError, FilterError, TableGone and TableUnreadable."""
    table, log = reader.info(), DeltaLog(reader.folder)
    view = view_of(table, wanted, guard, spec)
    newest = log.newest()
    until = min(_version(log, query["until"], newest), newest) if "until" in query else newest
    start = wanted.position or Position(table.table_id, _version(log, query["since"], newest), 0, view.id)
    if start.table_id != table.table_id:
        raise TableGone(reader.folder.name, "the position is of another table of this name")
    if start.view != view.id:
        raise invalid("bad_position", "the position is of another filter or other columns")
    if start.version > until:
        raise invalid("bad_request", f"it ends at version {until}, before version {start.version}, where it begins")
    return _Span((AggregateView if view.select else RowsView)(view, table).table, view, start, until)


def _version(log: DeltaLog, text: str, newest: int) -> int:
    """The version that ``since`` or ``until`` names; before the table's creation it is 0, which has no rows."""
    try:
        moment = parse_as_of(text)
    except SqlError as error:
        raise invalid("bad_request", str(error)) from None
    if moment.version is not None and moment.version > newest:
        raise invalid("bad_request", f"there is no version {moment.version} yet; the newest is {newest}")
    try:
        return version_at(log.table, moment)
    except PositionExpired:
        if log.oldest() == 0:
            return 0
        raise


def _page(reader: TableReader, span: _Span, seal: Seal, limit: int) -> tuple[list[bytes], Position]:
    """Changes that have rows, and the position behind the last version read. It blocks."""
    replay = Replay(reader, span.start, span.view, seal)
    changes: list[bytes] = []
    size, reached = 0, span.start
    last = min(span.until, span.start.version + MAX_VERSIONS)
    while reached.version < last:
        for message in replay.next_chunk(last).messages:
            assert message.position is not None
            reached = message.position
            if message.rows or message.deletes:
                changes.append(message.body)
                size += len(message.body)
            if len(changes) == limit or size >= _PAGE_BYTES:
                return changes, reached
    return changes, reached

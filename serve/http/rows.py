"""A table over HTTP: its rows, ``GET /v1/tables/NAME``, with ``as_of`` as they were; the rows of a key,
``GET /v1/tables/NAME/KEY``; and what changed between two versions or times, ``GET /v1/history/NAME``, page by page.

Current rows come from memory, where tails *refresh them ahead*. The entity tag is the position: ``If-None-Match`` gives
304 at no cost. ``max-age`` is what is left of the usual pause between commits. A look-up by key is one in a dictionary,
by the first columns of a key one in an index.

What is not in memory is *read through*. Older versions come from the Delta log and the files of that version, as long
as the table keeps them. An event of bronze is found by its id by a SQL worker, and the answer is cached until the table
has a new version. docs/guide/serving.md explains these terms.

A page of history is rebuilt from the Delta log by the code that replays for subscribers
(:class:`serve.tables.tables.Replay`): the same ``change`` messages, under the same filter and the same rights. Its size
and the versions that are read for it are bounded: a rare filter gives empty pages, not slow ones.

A subscription can go on from the position of any answer.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Generator, Hashable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, TypeVar
from urllib.parse import quote, unquote_to_bytes, urlencode

import orjson
from sqlglot import exp
from starlette.requests import Request
from starlette.responses import Response

from lakehouse.contract.deltalog import DeltaLog, TableGone, TableUnreadable
from lakehouse.contract.pipeline.product import EVERYTHING, ChannelSpec
from lakehouse.contract.rows import Key, Row
from lakehouse.contract.sql import BOOL, DATE, DECIMAL, FLOAT, INT, TEXT, TIMESTAMP
from lakehouse.contract.sql.closures import as_date, as_timestamp, kind_of
from lakehouse.contract.storage import LakePath, Stamp
from serve.core.channel import NOT_SERVED, Channel, LiveView, live_view, opened_view, rows_in_order, view_of
from serve.core.hub import Hub
from serve.core.messages import encode_rows, to_json
from serve.core.model import Principal, SubscribeRequest, TableInfo, in_order
from serve.core.position import Position, Seal
from serve.core.view import RowsView, SubscriberView, filter_errors
from serve.errors import FilterError, PositionExpired, RequestError, SqlError
from serve.push.request import admitted, invalid, problem, query_of, subscription_of, whole_number
from serve.sql.routes import Workers
from serve.tables.state import AsOf, TableReader, TableState, parse_as_of, version_at
from serve.tables.tables import BRONZE, Replay, Tables, now_ms

_T = TypeVar("_T")

CACHE_BYTES = 33_554_432
ENTRY_BYTES = 256  # overhead of an entry
MAX_LIMIT = 100_000  # rows of a table
MAX_ROWS = 1_000  # rows of a look-up
EVENT_ID = "event_id"
GONE = 4410
_AT_ONCE = 4  # bodies built at a time; others wait
_READ_THROUGH_BYTES = 8_388_608
_LONGEST_ID = 256  # longer ids are not cached
_STEP = 5_000  # keys indexed before others get their turn: 2 ms
_VIEWS = 1_024
_UNCACHED = {"Cache-Control": "private, no-cache", "Vary": "Authorization"}
NDJSON = "application/x-ndjson"
MAX_CHANGES = 1_000  # of a page of history
MAX_VERSIONS = 1_000  # read for one page
_DEFAULT_CHANGES = 100
_PAGE_BYTES = 1_048_576


class ByteCache:
    """A least-recently-used cache bounded by ``most`` bytes; no answer takes more than a quarter of it."""

    def __init__(self, most: int = CACHE_BYTES) -> None:
        self._most = most
        self._bodies: OrderedDict[Hashable, bytes] = OrderedDict()
        self._bytes = 0

    def get(self, key: Hashable) -> bytes | None:
        body = self._bodies.get(key)
        if body is not None:
            self._bodies.move_to_end(key)
        return body

    def put(self, key: Hashable, body: bytes) -> None:
        if key in self._bodies or len(body) > self._most // 4:
            return
        self._bodies[key] = body
        self._bytes += len(body) + ENTRY_BYTES
        while self._bytes > self._most:
            self._bytes -= len(self._bodies.popitem(last=False)[1]) + ENTRY_BYTES


class RowSource:
    """Where the rows of answers come from: the hub's tables in memory, the log of the others, workers for bronze."""

    def __init__(self, hub: Hub, tables: Tables, workers: Workers) -> None:
        self.hits = self.misses = 0  # of the cache of events that were read through
        self.tables = tables
        self.hub = hub
        self._workers = workers
        self._bodies = ByteCache()  # many ask for the same between two commits
        self._slots = asyncio.Semaphore(_AT_ONCE)
        self._indexes: dict[tuple[str, int], PrefixIndex] = {}
        self._views: OrderedDict[tuple[str, bytes], tuple[TableInfo, RowsView]] = OrderedDict()
        self._read = ByteCache(_READ_THROUGH_BYTES)
        self._at_once = hub.settings.max_sql
        self._reading = 0  # older versions
        self._threads = ThreadPoolExecutor(self._at_once, thread_name_prefix="history")

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    # Current rows

    async def current(self, channel: Channel, view: SubscriberView, limit: int | None) -> tuple[bytes, Position]:
        """The rows now as an answer, and their position. Raises FilterError."""
        async with self._slots:
            state, position = channel.state, channel.state.position(view.id)
            body = self._bodies.get((position, limit))
            if body is None:
                stream = channel.streams.get(view.id)
                live = stream.live if stream is not None and stream.opened else None
                with filter_errors(view):
                    for content in _answer(view, state, self.hub.seal, limit, live):
                        if content is None:
                            await asyncio.sleep(0)
                        else:
                            body = to_json(content)
                assert body is not None
                self._bodies.put((position, limit), body)
        return body, position

    async def by_key(self, channel: Channel, prefix: Key, view: SubscriberView) -> list[tuple[Key, Row]]:
        """Rows whose key begins with ``prefix``, as the view shows them, in key order."""
        table, rows = channel.state.table, channel.state.rows
        if len(prefix) == len(table.key):
            keys = {prefix}
        else:
            index = self._indexes.get((table.name, len(prefix)))
            if index is None or not index.of(channel):
                index = self._indexes[table.name, len(prefix)] = PrefixIndex(channel, len(prefix))
            await index.caught_up()
            keys, rows = index.keys(prefix), channel.state.rows
        pairs = [(key, rows[key]) for key in keys if key in rows]
        return sorted(self.live(channel, view).rows(pairs), key=lambda pair: in_order(pair[0]))

    def live(self, channel: Channel, view: SubscriberView) -> RowsView:
        """The view at work on the table as it is."""
        table = channel.state.table
        known = self._views.get((table.name, view.id))
        if known is None or known[0] is not table:
            while len(self._views) >= _VIEWS:
                self._views.popitem(last=False)
            known = self._views[table.name, view.id] = table, RowsView(view, table)
        return known[1]

    # Read through

    async def event(self, name: str, event_id: str, principal: Principal) -> bytes:
        """Rows of an event in a table that is not in memory, as JSON, at most :data:`MAX_ROWS`. Raises RequestError."""
        folder = (await asyncio.to_thread(self.tables.lake.find, name)).path
        version, stamp = await asyncio.to_thread(_newest, folder)
        key = name, event_id, principal.condition(name), version, stamp
        if (known := self._read.get(key)) is not None:
            self.hits += 1
            return known
        self.misses += 1
        wanted = exp.EQ(this=exp.column(EVENT_ID, quoted=True), expression=exp.Literal.string(event_id))
        statement = exp.select("*").from_(exp.to_identifier(name, quoted=True)).where(wanted)
        found = await self._workers.run(statement.sql("duckdb"), principal, rows=MAX_ROWS)
        if len(event_id) <= _LONGEST_ID:
            self._read.put(key, found.body)
        return found.body

    async def older(self, wanted: SubscribeRequest, as_of: str, guard: str, limit: int | None) -> bytes:
        """The rows of a version as an answer. Raises UnknownTable; RequestError as :meth:`read_log`; FilterError."""
        moment = _moment(as_of)
        reader, spec = await self.stored(wanted.table)

        def read() -> bytes:
            state = reader.load(version_at(reader.folder, moment))
            view = view_of(state.table, wanted, guard, spec)
            with filter_errors(view):
                content = next(each for each in _answer(view, state, self.hub.seal, limit) if each is not None)
            return to_json(content | {"version": state.version})

        return await self.read_log(read)

    async def stored(self, name: str) -> tuple[TableReader, ChannelSpec]:
        """The reader of a table, and its declared channel. Raises UnknownTable; RequestError if it has no channel."""
        reader = self.tables.reader((await asyncio.to_thread(self.tables.lake.find, name)).path)
        spec = self.hub.specs.get(name, EVERYTHING)
        if not spec.served:
            raise RequestError(4409, "not_served", NOT_SERVED)
        return reader, spec

    async def read_log(self, read: Callable[[], _T]) -> _T:
        """Run a function that reads a table's log, in a thread of its own. Raises RequestError: the versions are gone,
        the table has no rows by key, or too many ask.
        """
        if self._reading >= 3 * self._at_once:
            raise RequestError(RequestError.FULL, "busy", "too many older versions are being read; ask again")
        self._reading += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, read)
        except (PositionExpired, TableGone) as gone:
            raise RequestError(GONE, "expired", str(gone)) from None
        except TableUnreadable as error:
            raise invalid("not_served", str(error)) from None
        finally:
            self._reading -= 1


def _answer(
    view: SubscriberView, state: TableState, seal: Seal, limit: int | None, live: LiveView | None = None
) -> Generator[dict[str, Any] | None, None, None]:
    """The answer, after a None for each slice of the work."""
    position, facts = state.position(view.id), view.facts(state.facts)
    if live is None:
        live = yield from opened_view(view, state)
    table = live.table
    rows = yield from rows_in_order(live, state.rows, limit)
    yield {
        "table": table.name,
        "key": table.key,
        "columns": table.columns,
        "position": seal.token(position),
        "position_lives_ms": table.retention_ms,
        **view.description,
        "rows": [orjson.Fragment(text) for _, text in rows],
        "through": facts.through,
        "committed_at": facts.committed_at,
    }


class PrefixIndex:
    """Keys of a table by their first ``width`` columns. It catches up with the table when asked, in steps."""

    def __init__(self, channel: Channel, width: int) -> None:
        self._table_id = channel.state.table.table_id
        self._channel = channel
        self._width = width
        self._version = -1
        self._keys: dict[Key, set[Key]] = {}
        self._turn = asyncio.Lock()

    def of(self, channel: Channel) -> bool:
        """Whether it belongs to this table, not to one that it replaced."""
        return self._channel is channel and self._table_id == channel.state.table.table_id

    def keys(self, prefix: Key) -> set[Key]:
        return self._keys.get(prefix, set())

    async def caught_up(self) -> None:
        """Return when it is as new as the table."""
        if self._version == self._channel.state.version:
            return
        async with self._turn:
            while self._version != self._channel.state.version:
                changes = self._channel.since(self._version) if self._version >= 0 else None
                if changes is None:
                    await self._build()
                for change in changes or ():
                    for key in change.deletes:
                        self.keys(key[: self._width]).discard(key)
                    for key, _ in change.keyed():
                        self._keys.setdefault(key[: self._width], set()).add(key)
                    self._version = change.version

    async def _build(self) -> None:
        self._version = -1  # callers wait meanwhile
        self._keys.clear()
        version = self._channel.state.version
        for count, key in enumerate(list(self._channel.state.rows), 1):
            self._keys.setdefault(key[: self._width], set()).add(key)
            if count % _STEP == 0:
                await asyncio.sleep(0)
        self._version = version  # later changes come from the channel's recent ones


async def rows(request: Request) -> Response:
    """A table's rows, by ETag only if newer: ``?where=&columns=&select=&limit=&as_of=``"""
    source: RowSource = request.state.rows
    hub, principal, name = source.hub, admitted(request), request.path_params["name"]
    query = query_of(request.url.query)
    limit = whole_number(query["limit"], "limit", 1, MAX_LIMIT) if "limit" in query else None
    wanted = subscription_of({**query, "table": name}, hub.seal, also=frozenset({"limit", "as_of"}))
    if wanted.position is not None or wanted.window or wanted.conflate:
        raise invalid("bad_request", "rows of one version are asked for without from, window and conflate")
    principal.check_table(name)
    try:
        if "as_of" in query:
            body = await source.older(wanted, query["as_of"], principal.condition(name), limit)
            return Response(body, headers=_UNCACHED, media_type="application/json")
        await source.tables.wait_for(name)
        channel = hub.channels.get(name)
        if channel is None:
            raise await asyncio.to_thread(_not_in_memory, source.tables, name)
        view = hub.view_of(name, principal, wanted)
        headers = _headers(hub, channel, channel.state.position(view.id))
        if is_known(request, headers["ETag"]):
            return Response(status_code=304, headers=headers)
        body, position = await source.current(channel, view, limit)
        return Response(body, headers=_headers(hub, channel, position), media_type="application/json")
    except FilterError as error:
        raise invalid("bad_filter", str(error)) from None


async def row(request: Request) -> Response:
    """The rows of a key or of its first columns, percent-encoded, with commas: ``?where=&columns=&limit=``"""
    source: RowSource = request.state.rows
    hub, principal, name = source.hub, admitted(request), request.path_params["name"]
    query = query_of(request.scope["query_string"].decode("latin-1"))
    limit = whole_number(query.get("limit", str(MAX_ROWS)), "limit", 1, MAX_ROWS)
    wanted = subscription_of({**query, "table": name}, hub.seal, also=frozenset({"limit"}))
    if wanted.position is not None or wanted.window or wanted.conflate or wanted.select:
        raise invalid("bad_request", "a look-up takes where, columns and limit")
    principal.check_table(name)
    parts = _parts(request)
    bronze = name in source.tables.sources
    if not bronze:
        await source.tables.wait_for(name)
    channel = None if bronze else hub.channels.get(name)
    content: dict[str, Any]
    if channel is None:
        if (await asyncio.to_thread(source.tables.lake.find, name)).layer != BRONZE:
            raise await asyncio.to_thread(_not_in_memory, source.tables, name)
        if len(parts) != 1 or query:
            raise invalid("bad_request", f"{name} is not in memory: its events are found by their {EVENT_ID} only")
        body = await source.event(name, parts[0], principal)
        found: Any = [] if body == b"[]" else orjson.Fragment(body)
        content = {"table": name, "key": [EVENT_ID], "rows": found}
    else:
        view = hub.view_of(name, principal, wanted)
        pairs = (await source.by_key(channel, _key(channel.state.table, parts), view))[:limit]
        table = source.live(channel, view).table
        content = {
            "table": name,
            "key": table.key,
            "position": hub.seal.token(channel.state.position(view.id)),
            "rows": [orjson.Fragment(text) for text in encode_rows(table.columns, (each for _, each in pairs))],
            "committed_at": channel.state.facts.committed_at,
        }
    if not content["rows"]:
        raise RequestError(RequestError.NOT_FOUND, "no_such_row", "there is no row of this key")
    return Response(to_json(content), headers=_UNCACHED, media_type="application/json")


def _not_in_memory(tables: Tables, name: str) -> RequestError:
    """Why an existing table is not in memory. Raises UnknownTable."""
    layer = tables.lake.find(name).layer
    why = tables.problems.get(name) or f"{layer} table {name!r} is not kept in memory; query it with SQL"
    return RequestError(4409, "not_served", why)


def is_known(request: Request, tag: str) -> bool:
    """Whether the client has what this entity tag names (RFC 9110, 13.1.2: any of the tags listed, compared weakly)."""
    known = request.headers.get("if-none-match", "")
    return known.strip() == "*" or tag in [each.strip().removeprefix("W/") for each in known.split(",")]


def _headers(hub: Hub, channel: Channel, position: Position) -> dict[str, str]:
    tag = f'"{hub.seal.token(position)}"'
    return {"ETag": tag, "Cache-Control": cache_control(channel, now_ms()), "Vary": "Authorization"}


def cache_control(channel: Channel, now: int) -> str:
    """Expected life of an answer: what is left of the usual pause between commits."""
    if channel.interval_ms is None:
        return "private, no-cache"
    left = channel.interval_ms - (now - channel.state.facts.committed_at)
    return f"private, max-age={int(left / 1000)}" if left >= 1_000 else "private, no-cache"


def _newest(folder: LakePath) -> tuple[int, Stamp | None]:
    log = DeltaLog(folder)
    version = log.newest()
    return version, log.stamp(version)


def _parts(request: Request) -> list[str]:
    raw: bytes = request.scope["raw_path"]
    text = raw.split(b"?", 1)[0].split(b"/", 4)[4]
    if b"/" in text:
        raise invalid("bad_request", "write a slash in a key as %2F, a comma as %2C")
    try:
        return [unquote_to_bytes(part).decode() for part in text.split(b",")]
    except UnicodeDecodeError:
        raise invalid("bad_request", "the key is not UTF-8") from None


def _key(table: TableInfo, parts: list[str]) -> Key:
    """The first columns of a key, from text. Raises RequestError if there are too many or one has the wrong kind."""
    if len(parts) > len(table.key):
        raise invalid("bad_request", f"the key has {len(table.key)} columns: {', '.join(table.key)}")
    values = []
    for column, text in zip(table.key, parts, strict=False):
        kind = kind_of(table.types[table.columns.index(column)])
        try:
            values.append(_READ[kind](text))
        except (ValueError, KeyError, ArithmeticError, FilterError):
            raise invalid("bad_request", f"{text[:80]!r} is no {kind}, which {column} is") from None
    return tuple(values)


_READ: Mapping[str, Callable[[str], Any]] = {
    TEXT: str,
    INT: int,
    FLOAT: float,
    DECIMAL: Decimal,
    TIMESTAMP: as_timestamp,
    DATE: as_date,
    BOOL: {"true": True, "false": False}.__getitem__,
}


@dataclass(frozen=True, slots=True)
class _Span:
    """What of a table's history is asked for."""

    table: TableInfo  # as the view shows it now
    view: SubscriberView  # what of it is seen
    start: Position  # the position behind which the page begins
    until: int  # the last version


async def history(request: Request) -> Response:
    """What changed between two versions or times: ``?since=&until=&from=&where=&columns=&select=&limit=``"""
    source: RowSource = request.state.rows
    seal, principal, name = source.hub.seal, admitted(request), request.path_params["name"]
    query = query_of(request.url.query)
    limit = whole_number(query.get("limit", str(_DEFAULT_CHANGES)), "limit", 1, MAX_CHANGES)
    wanted = subscription_of({**query, "table": name}, seal, also=frozenset({"since", "until", "limit"}))
    if wanted.window or wanted.conflate:
        raise invalid("bad_request", "a history has no window and is not conflated")
    if ("since" in query) == (wanted.position is not None):
        raise invalid("bad_request", "give since, a version or a time, or from, the next of an answer")
    principal.check_table(name)
    guard = principal.condition(name)
    reader, spec = await source.stored(name)
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
    return _Span(live_view(view, table).table, view, start, until)


def _version(log: DeltaLog, text: str, newest: int) -> int:
    """The version that ``since`` or ``until`` names; before the table's creation it is 0, which has no rows."""
    moment = _moment(text)
    if moment.version is not None and moment.version > newest:
        raise invalid("bad_request", f"there is no version {moment.version} yet; the newest is {newest}")
    try:
        return version_at(log.table, moment)
    except PositionExpired:
        if log.oldest() == 0:
            return 0
        raise


def _moment(text: str) -> AsOf:
    try:
        return parse_as_of(text)
    except SqlError as error:
        raise invalid("bad_request", str(error)) from None


def _page(reader: TableReader, span: _Span, seal: Seal, limit: int) -> tuple[list[bytes], Position]:
    """Changes that have rows, and the position behind the last version read. It blocks."""
    replay = Replay(reader, span.start, span.view, seal)
    changes: list[bytes] = []
    size, reached = 0, span.start
    last = min(span.until, span.start.version + MAX_VERSIONS)
    while reached.version < last:
        for message in replay.next_chunk(last):
            assert message.position is not None
            reached = message.position
            if message.rows or message.deletes:
                changes.append(message.body)
                size += len(message.body)
            if len(changes) == limit or size >= _PAGE_BYTES:
                return changes, reached
    return changes, reached

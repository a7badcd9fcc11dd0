"""Point look-ups: ``GET /v1/tables/NAME/KEY``, the rows of a key or of its first columns.

Products are in memory, *refreshed ahead* by their tails: a look-up is one in a dictionary. Other tables, bronze, are
*read through*: a SQL worker finds the event by its id, and the answer is cached until the table has a new version.
docs/serving.md explains these terms.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any
from urllib.parse import unquote_to_bytes

import orjson
from sqlglot import exp
from starlette.requests import Request
from starlette.responses import Response

from lakehouse.contract.deltalog import DeltaLog
from lakehouse.contract.rows import Key, Row
from lakehouse.contract.sql import BOOL, DATE, DECIMAL, FLOAT, INT, TEXT, TIMESTAMP
from lakehouse.contract.sql.closures import as_date, as_timestamp, kind_of
from serve.core.channel import Channel
from serve.core.hub import Hub
from serve.core.model import TableInfo, in_order
from serve.core.position import Position
from serve.core.values import encode_rows, to_json
from serve.errors import FilterError, RequestError
from serve.http.rows import ByteCache
from serve.push.request import admitted, invalid, query_of, subscription_of, whole_number
from serve.security.access import Principal
from serve.sql.pool import Workers
from serve.tables.tables import Tables
from serve.views.view import RowsView, SubscriberView

MAX_ROWS = 1_000
EVENT_ID = "event_id"
_READ_THROUGH_BYTES = 8_388_608
_LONGEST_ID = 256  # longer ids are not cached
_STEP = 5_000  # keys indexed before others get their turn: 2 ms
_VIEWS = 1_024
_EXTRA = frozenset({"limit"})
_NO_ROWS = b"[]"


class Lookups:
    """Finds rows by key: in memory by indexes, made when first needed, or by reading through.

    Args:
        hub: where rows are.
        tables: waits for tables.
        workers: read what is not in memory.

    Attributes:
        hits, misses: of the cache of what was read through.
    """

    def __init__(self, hub: Hub, tables: Tables, workers: Workers) -> None:
        self.hits = 0
        self.misses = 0
        self._hub = hub
        self._tables = tables
        self._workers = workers
        self._indexes: dict[tuple[str, int], PrefixIndex] = {}
        self._views: OrderedDict[tuple[str, bytes], tuple[TableInfo, RowsView]] = OrderedDict()
        self._read: ByteCache[tuple[str, str, str, int, tuple[int, int] | None]] = ByteCache(_READ_THROUGH_BYTES)

    async def rows(self, channel: Channel, prefix: Key, view: SubscriberView) -> list[tuple[Key, Row]]:
        """Rows whose key begins with ``prefix``, as the view shows them, in key order."""
        state, table = channel.state, channel.state.table
        if len(prefix) == len(table.key):
            row = state.rows.get(prefix)
            pairs = [] if row is None else [(prefix, row)]
        else:
            index = self._indexes.get((table.name, len(prefix)))
            if index is None or not index.of(channel):
                index = self._indexes[table.name, len(prefix)] = PrefixIndex(channel, len(prefix))
            await index.caught_up()
            pairs = [(key, channel.state.rows[key]) for key in index.keys(prefix) if key in channel.state.rows]
        return sorted(self._live(channel, view).rows(pairs), key=lambda pair: in_order(pair[0]))

    def _live(self, channel: Channel, view: SubscriberView) -> RowsView:
        table = channel.state.table
        known = self._views.get((table.name, view.id))
        if known is None or known[0] is not table:
            while len(self._views) >= _VIEWS:
                self._views.popitem(last=False)
            known = self._views[table.name, view.id] = table, RowsView(view, table)
        return known[1]

    def seen(self, channel: Channel, view: SubscriberView) -> TableInfo:
        """Columns of a view."""
        return self._live(channel, view).table

    async def read_through(self, name: str, event_id: str, principal: Principal) -> bytes:
        """Rows of an event in a table that is not in memory, as JSON, at most :data:`MAX_ROWS`. Raises RequestError."""
        folder = (await asyncio.to_thread(self._tables.lake.find, name)).path
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
                    continue
                for change in changes:
                    for key in change.deletes:
                        self._drop(key)
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

    def _drop(self, key: Key) -> None:
        held = self._keys.get(key[: self._width])
        if held is not None:
            held.discard(key)
            if not held:
                del self._keys[key[: self._width]]


async def row(request: Request) -> Response:
    """``GET /v1/tables/NAME/KEY[?where=&columns=&limit=]``: KEY is values with commas between, each percent-encoded."""
    hub: Hub = request.state.hub
    lookups: Lookups = request.state.lookups
    tables: Tables = request.state.tables
    name: str = request.path_params["name"]
    principal = admitted(request)
    query = query_of(request.scope["query_string"].decode("latin-1"))
    limit = whole_number(query.get("limit", str(MAX_ROWS)), "limit", 1, MAX_ROWS)
    wanted = subscription_of({**query, "table": name}, hub.seal, also=_EXTRA)
    if wanted.position is not None or wanted.window or wanted.conflate or wanted.select:
        raise invalid("bad_request", "a look-up takes where, columns and limit")
    principal.check_table(name)
    parts = _parts(request)
    await tables.wait_for(name)
    channel = hub.channels.get(name)
    if channel is None:
        return await _read_through(lookups, tables, name, parts, principal, plain=not query)
    view = hub.view_of(name, principal, wanted)
    found = (await lookups.rows(channel, _key(channel.state.table, parts), view))[:limit]
    if not found:
        raise RequestError(RequestError.NOT_FOUND, "no_such_row", "there is no row of this key")
    state, seen = channel.state, lookups.seen(channel, view)
    content = {
        "table": name,
        "key": seen.key,
        "position": hub.seal.token(Position(state.table.table_id, state.version, 0, view.id)),
        "rows": [orjson.Fragment(text) for text in encode_rows(seen.columns, (each for _, each in found))],
        "committed_at": state.facts.committed_at,
    }
    headers = {"Cache-Control": "private, no-cache", "Vary": "Authorization"}
    return Response(to_json(content), headers=headers, media_type="application/json")


async def _read_through(
    lookups: Lookups, tables: Tables, name: str, parts: list[str], principal: Principal, *, plain: bool
) -> Response:
    table = await asyncio.to_thread(tables.lake.find, name)
    if table.layer != "bronze":
        raise RequestError(4409, "not_served", tables.problems.get(name, f"{name} is not kept in memory"))
    if len(parts) != 1 or not plain:
        raise invalid("bad_request", f"of {name}, which is not in memory, events are found by their {EVENT_ID} only")
    body = await lookups.read_through(name, parts[0], principal)
    if body == _NO_ROWS:
        raise RequestError(RequestError.NOT_FOUND, "no_such_row", "there is no row of this key")
    content = {"table": name, "key": [EVENT_ID], "rows": orjson.Fragment(body)}
    headers = {"Cache-Control": "private, no-cache", "Vary": "Authorization"}
    return Response(to_json(content), headers=headers, media_type="application/json")


def _newest(folder: Path) -> tuple[int, tuple[int, int] | None]:
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

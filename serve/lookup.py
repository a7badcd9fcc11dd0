"""Point look-ups: ``GET /v1/tables/NAME/KEY``, the rows of one key, or of the first columns of it.

Products are in memory, *refreshed ahead* by their tails: a look-up is a dictionary's. Tables that are not, bronze, are
*read through*: the SQL workers find the event by its id, and the answer is kept until the table has a new version. The
rest of the caching words in docs/serving.md.
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
from serve.channel import Channel
from serve.errors import FilterError, RequestError
from serve.filters.kinds import BOOL, DATE, DECIMAL, FLOAT, INT, TEXT, TIMESTAMP, as_date, as_timestamp, kind_of
from serve.filters.view import RowsView, View
from serve.hub import Hub
from serve.kept import Kept
from serve.model import TableInfo, in_order
from serve.position import Position
from serve.principal import Principal
from serve.push import request as asked
from serve.rows import encode_rows, to_json
from serve.sql.pool import Workers
from serve.tables import Tables

MAX_ROWS = 1_000
EVENT_ID = "event_id"
_READ_THROUGH_BYTES = 8_388_608
_LONGEST_ID = 256  # of those that are kept
_STEP = 5_000  # keys that an index takes in before others have their turn: 2 ms
_VIEWS = 1_024
_EXTRA = frozenset({"limit"})
_NO_ROWS = b"[]"


class Lookups:
    """Indexes by the first columns of keys, made when they are first asked for; and what was read through.

    Args:
        hub: where rows are.
        tables: waits for tables.
        workers: read what is not in memory.

    Attributes:
        hits, misses: of look-ups that were read through.
    """

    def __init__(self, hub: Hub, tables: Tables, workers: Workers) -> None:
        self.hits = 0
        self.misses = 0
        self._hub = hub
        self._tables = tables
        self._workers = workers
        self._indexes: dict[tuple[str, int], Index] = {}
        self._views: OrderedDict[tuple[str, bytes], tuple[TableInfo, RowsView]] = OrderedDict()
        self._read: Kept[tuple[str, str, str, int, tuple[int, int] | None]] = Kept(_READ_THROUGH_BYTES)

    async def rows(self, channel: Channel, prefix: Key, view: View) -> list[tuple[Key, Row]]:
        """The rows whose key begins so, as the view shows them, in the order of their keys."""
        state, table = channel.state, channel.state.table
        if len(prefix) == len(table.key):
            row = state.rows.get(prefix)
            pairs = [] if row is None else [(prefix, row)]
        else:
            index = self._indexes.get((table.name, len(prefix)))
            if index is None or not index.of(channel):
                index = self._indexes[table.name, len(prefix)] = Index(channel, len(prefix))
            await index.caught_up()
            pairs = [(key, channel.state.rows[key]) for key in index.keys(prefix) if key in channel.state.rows]
        return sorted(self._live(channel, view).rows(pairs), key=lambda pair: in_order(pair[0]))

    def _live(self, channel: Channel, view: View) -> RowsView:
        table = channel.state.table
        known = self._views.get((table.name, view.id))
        if known is None or known[0] is not table:
            while len(self._views) >= _VIEWS:
                self._views.popitem(last=False)
            known = self._views[table.name, view.id] = table, RowsView(view, table)
        return known[1]

    def seen(self, channel: Channel, view: View) -> TableInfo:
        """The columns that a view has."""
        return self._live(channel, view).table

    async def read_through(self, name: str, event_id: str, principal: Principal) -> bytes:
        """The rows as JSON, at most :data:`MAX_ROWS`, of an event in a table that is not in memory.

        Raises:
            RequestError: the table has no event ids, or the workers are busy.
        """
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


class Index:
    """Keys of a table by their first columns; catches up with the table when it is asked, and is made in steps.

    Args:
        channel: the table.
        width: how many columns of the key.
    """

    def __init__(self, channel: Channel, width: int) -> None:
        self._table_id = channel.state.table.table_id
        self._channel = channel
        self._width = width
        self._version = -1
        self._keys: dict[Key, set[Key]] = {}
        self._turn = asyncio.Lock()

    def of(self, channel: Channel) -> bool:
        """Whether it is of this table as it is now, and not of one that was there before."""
        return self._channel is channel and self._table_id == channel.state.table.table_id

    def keys(self, prefix: Key) -> set[Key]:
        """Those that begin so."""
        return self._keys.get(prefix, set())

    async def caught_up(self) -> None:
        """Returns when it is as new as the table."""
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
        self._version = -1  # whoever asks meanwhile waits
        self._keys.clear()
        version = self._channel.state.version
        for count, key in enumerate(list(self._channel.state.rows), 1):
            self._keys.setdefault(key[: self._width], set()).add(key)
            if count % _STEP == 0:
                await asyncio.sleep(0)
        self._version = version  # what came meanwhile is taken in from the channel's recent changes

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
    principal = asked.admitted(request)
    query = asked.query_of(request.scope["query_string"].decode("latin-1"))
    limit = asked.whole_number(query.get("limit", str(MAX_ROWS)), "limit", 1, MAX_ROWS)
    wanted = asked.subscription({**query, "table": name}, hub.seal, also=_EXTRA)
    if wanted.position is not None or wanted.window or wanted.conflate or wanted.select:
        raise asked.bad("bad_request", "a look-up takes where, columns and limit")
    if not principal.may_read(name):
        raise RequestError(RequestError.NOT_FOUND, "no_such_table", f"no table {name!r} is served here")
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
        raise asked.bad("bad_request", f"of {name}, which is not in memory, events are found by their {EVENT_ID} only")
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
        raise asked.bad("bad_request", "write a slash in a key as %2F, a comma as %2C")
    try:
        return [unquote_to_bytes(part).decode() for part in text.split(b",")]
    except UnicodeDecodeError:
        raise asked.bad("bad_request", "the key is not UTF-8") from None


def _key(table: TableInfo, parts: list[str]) -> Key:
    """The first columns of a key from their texts.

    Raises:
        RequestError: there are too many, or a text is not of its column's kind.
    """
    if len(parts) > len(table.key):
        raise asked.bad("bad_request", f"the key has {len(table.key)} columns: {', '.join(table.key)}")
    values = []
    for column, text in zip(table.key, parts, strict=False):
        kind = kind_of(table.types[table.columns.index(column)])
        try:
            values.append(_READ[kind](text))
        except (ValueError, KeyError, ArithmeticError, FilterError):
            raise asked.bad("bad_request", f"{text[:80]!r} is no {kind}, which {column} is") from None
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

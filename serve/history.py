"""A table as it was: ``GET /v1/tables/NAME?as_of=VERSION|TIME``, with the filters that every other way has.

Read from the Delta log and the files of that version, for as long as the table keeps them. The answer's position is
that of the version, so that a subscription goes on from there.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import orjson
from starlette.requests import Request
from starlette.responses import Response

from lakehouse.contract.channel import EVERYTHING, ChannelSpec
from lakehouse.contract.deltalog import DeltaLog, TableGone, TableUnreadable
from serve.channel import live_view
from serve.errors import FilterError, PositionExpired, QueryError, RequestError
from serve.filters.view import View, faults_of
from serve.hub import Hub
from serve.live import AggregateView
from serve.model import in_order
from serve.moment import Moment, moment_of, version_at
from serve.position import Position, Seal
from serve.push import request as asked
from serve.push.etag import MAX_LIMIT
from serve.reader import TableReader
from serve.rows import encode_rows, to_json
from serve.shown import NOT_SERVED, view_of
from serve.state import TableState
from serve.subscriber import SubscribeRequest
from serve.tables import Tables

GONE = 4410
_KEPT = 4  # states of older versions in memory: a page asks for the same one several times
_EXTRA = frozenset({"limit", "as_of"})


class History:
    """Older versions, a few at a time.

    Args:
        at_once: how many are read at a time; twice as many more wait their turn.
    """

    def __init__(self, at_once: int) -> None:
        self._at_once = at_once
        self._busy = 0
        self._slots = asyncio.Semaphore(at_once)
        self._threads = ThreadPoolExecutor(at_once, thread_name_prefix="history")
        self._states: OrderedDict[tuple[Path, int, tuple[int, int]], TableState] = OrderedDict()

    def close(self) -> None:
        """Nobody asks any more."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def body(self, folder: Path, moment: Moment, wanted: Wanted) -> bytes:
        """A version as a principal may see it and wants it.

        Raises:
            RequestError: it is gone, the filter is refused, or too many ask at a time.
        """
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
            raise asked.bad("not_served", str(error)) from None
        except FilterError as error:
            raise asked.bad("bad_filter", str(error)) from None
        finally:
            self._busy -= 1

    def _made(self, folder: Path, moment: Moment, wanted: Wanted) -> bytes:
        state = self._state(folder, version_at(folder, moment))
        with faults_of(wanted.view(state)):
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
class Wanted:
    """What is asked of a version.

    Attributes:
        request: filter, columns or aggregate.
        guard: the principal's condition.
        limit: rows at most; None: all.
        seal: writes positions.
        spec: what is declared of the table's channel.
    """

    request: SubscribeRequest
    guard: str
    limit: int | None
    seal: Seal
    spec: ChannelSpec = EVERYTHING

    def body(self, state: TableState) -> bytes:
        """The answer. Blocking.

        Raises:
            FilterError: the filter does not fit the table as it was.
        """
        view = self.view(state)
        live = live_view(view, state)
        if isinstance(live, AggregateView):
            for _ in live.opening(state.rows.values()):
                pass
        table = live.table
        ordered = sorted(live.rows(live.source(state.rows)), key=lambda pair: in_order(pair[0]))[: self.limit]
        texts = encode_rows(table.columns, (row for _, row in ordered))
        content = {
            "table": table.name,
            "key": table.key,
            "columns": table.columns,
            "version": state.version,
            "position": self.seal.token(Position(table.table_id, state.version, 0, view.id)),
            "position_lives_ms": table.retention_ms,
            **view.told,
            "rows": [orjson.Fragment(text) for text in texts],
            "through": state.facts.through,
            "committed_at": state.facts.committed_at,
        }
        return to_json(content)

    def view(self, state: TableState) -> View:
        """What is seen of it.

        Raises:
            FilterError: the filter does not fit the table as it was.
        """
        return view_of(state.table, self.request, self.guard, self.spec)


async def rows(request: Request) -> Response:
    """``GET /v1/tables/NAME?as_of=[&limit=&where=&columns=&select=]``."""
    hub: Hub = request.state.hub
    tables: Tables = request.state.tables
    history: History = request.state.history
    name: str = request.path_params["name"]
    principal = asked.admitted(request)
    query = asked.query_of(request.url.query)
    limit = asked.whole_number(query["limit"], "limit", 1, MAX_LIMIT) if "limit" in query else None
    wanted = asked.subscription({**query, "table": name}, hub.seal, also=_EXTRA)
    if wanted.position is not None or wanted.window or wanted.conflate:
        raise asked.bad("bad_request", "this is the table as it was: no from, window or conflate")
    try:
        moment = moment_of(query["as_of"])
    except QueryError as error:
        raise asked.bad("bad_request", str(error)) from None
    if not principal.may_read(name):
        raise RequestError(RequestError.NOT_FOUND, "no_such_table", f"no table {name!r} is served here")
    found = await asyncio.to_thread(tables.lake.find, name)
    spec = hub.feeds.specs.get(name, EVERYTHING)
    if not spec.served:
        raise RequestError(4409, "not_served", NOT_SERVED)
    body = await history.body(found.path, moment, Wanted(wanted, principal.condition(name), limit, hub.seal, spec))
    headers = {"Cache-Control": "private, no-cache", "Vary": "Authorization"}
    return Response(body, headers=headers, media_type="application/json")

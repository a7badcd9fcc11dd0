"""Demand as devices hear it: whether somebody is interested in what they would publish.

A device names its source, and may say what is the same in all of its events: a subscriber whose filter asks for other
values is not interested in this device. It asks on ``/v1/stream`` (:mod:`ingest.answers.stream`), or by HTTP:

================================================  ===============================================================
``GET /v1/demand/SOURCE?COLUMN=VALUE&…``          ``{"demand": SOURCE, "wanted": true}`` or ``false``
``…&wanted=false&wait=SECONDS``                   the same as soon as it is not ``false``, or when the time is over
================================================  ===============================================================
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from starlette.requests import Request
from starlette.responses import Response

from ingest.answers.respond import MAX_WAIT_S, json_response, seconds_of
from ingest.errors import RequestRefused
from ingest.intake import RequestIntake, first_key
from lakehouse.contract.lake import Lake
from lakehouse.contract.pipeline.demand import LEASE_S, LOOK_S, DemandBoard, DemandNote, Want

logger = logging.getLogger(__name__)

_MAX_ABOUT = 16  # columns


@dataclass(eq=False, slots=True)
class Asked:
    """What a device asks.

    Attributes:
        source: that it publishes to.
        tenant: of its events.
        about: values of its events by column, as the tables that derive from the source have them.
        tell: called when the answer is known, and whenever it changes.
        wanted: the answer; None: not known yet.
    """

    source: str
    tenant: str
    about: Mapping[str, str]
    tell: Callable[[Asked], None]
    wanted: bool | None = None


class Demand:
    """What devices of a node ask, and what is wanted by the notes of all processes of the lake.

    A device hears of subscribers of its own tenant and of the operator. While the notes cannot be read for longer than
    a lease, everything counts as wanted: nothing that somebody waits for is held back.

    Args:
        requests: keys, and the sources that can be asked for: those that take events by HTTP.
        home: the tenant of senders without one.
        own: returns what subscribers of the node itself want.
    """

    def __init__(self, lake: Lake, requests: RequestIntake, home: str, own: Callable[[], frozenset[Want]]) -> None:
        self._requests = requests
        self._home = home
        self._board = DemandBoard(lake)
        self._note = DemandNote(lake)
        self._own = own
        self._pause_s = lake.pause_s(LOOK_S)
        self._asked: set[Asked] = set()
        self._new: list[Asked] = []
        self._wants: frozenset[Want] | None = None
        self._wanted: dict[tuple[str, str], _Wanted] | None = None  # by tenant and source; None: not known
        self._read_at = float("-inf")

    def ask(self, source: str, key: str | None, about: object, tell: Callable[[Asked], None]) -> Asked:
        """Answer a device, from now on until :meth:`forget`.

        Args:
            key: that it shows.

        Raises:
            RequestRefused: there is no such source for it, or what it says of its events is malformed.
        """
        intake = self._requests.intakes.get(source)
        if intake is None:
            raise RequestRefused(f"there is no source {source!r} that takes events here", 404, code="unknown-source")
        sender = self._requests.gate.admit(intake.border.source, key)
        if not isinstance(about, dict) or not all(isinstance(value, str | int) for value in about.values()):
            raise RequestRefused("about is an object of texts or whole numbers", 400)
        if len(about) > _MAX_ABOUT:
            raise RequestRefused(f"about names {_MAX_ABOUT} columns at most", 413)
        values = {column: str(value) for column, value in about.items()}
        asked = Asked(source, sender.tenant or self._home, values, tell)
        self._asked.add(asked)
        self._new.append(asked)
        return asked

    def forget(self, asked: Asked) -> None:
        """A device is gone, or asks something else."""
        self._asked.discard(asked)

    async def answer(self, request: Request) -> Response:
        """Answer one request of a device."""
        about = dict(request.query_params)
        wait_s, known = seconds_of(about.pop("wait", "0")), about.pop("wanted", "")
        some = asyncio.Event()
        asked = self.ask(request.path_params["source"], first_key(request.headers.raw), about, lambda _: some.set())
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(MAX_WAIT_S):
                    await some.wait()
                if known == str(asked.wanted).lower():
                    some.clear()
                    async with asyncio.timeout(wait_s):
                        await some.wait()
        finally:
            self.forget(asked)
        response = json_response({"demand": asked.source, "wanted": asked.wanted is not False})
        response.headers["Cache-Control"] = "no-store"
        return response

    async def run(self) -> None:
        """Follow what is wanted, until cancelled."""
        failed = False
        while True:
            try:
                await asyncio.to_thread(self._note.tell, self._own())
                if self._asked:  # else nobody needs it
                    wants = await asyncio.to_thread(self._board.read)
                    self._read_at = time.monotonic()
                    self._tell(wants)
                failed = False
            except Exception:  # tried again
                if not failed:
                    logger.exception("what subscribers want cannot be read")
                failed = True
                if time.monotonic() - self._read_at > LEASE_S:
                    self._tell(None)
            await asyncio.sleep(self._pause_s)

    def _tell(self, wants: frozenset[Want] | None) -> None:
        new, self._new = self._new, []
        if wants != self._wants or wants is None:
            self._wants, self._wanted, new = wants, None if wants is None else _by_source(wants), list(self._asked)
        for asked in new:
            wanted = self._is_wanted(asked)
            if asked in self._asked and asked.wanted is not wanted:
                asked.wanted = wanted
                asked.tell(asked)

    def _is_wanted(self, asked: Asked) -> bool:
        if self._wanted is None:
            return True
        found = [self._wanted.get((tenant, asked.source)) for tenant in {asked.tenant, ""}]
        return any(wanted is not None and wanted.covers(asked.about) for wanted in found)


@dataclass(slots=True)
class _Wanted:
    whole: bool = False
    columns: dict[str, set[str]] = field(default_factory=dict)

    def covers(self, about: Mapping[str, str]) -> bool:
        """Whether somebody may want events with these values."""
        return self.whole or any(
            column not in about or about[column] in values for column, values in self.columns.items()
        )


def _by_source(wants: Iterable[Want]) -> dict[tuple[str, str], _Wanted]:
    found: dict[tuple[str, str], _Wanted] = {}
    for want in wants:
        wanted = found.setdefault((want.tenant, want.source), _Wanted())
        if want.column:
            wanted.columns.setdefault(want.column, set()).add(want.value)
        else:
            wanted.whole = True
    return found

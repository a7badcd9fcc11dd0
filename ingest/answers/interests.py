"""What clients are interested in: keys of products that subscribers follow, and the demand that devices hear of.

A device publishes while somebody is interested in its events. It names its source, and may say what is the same in all
of its events: a subscriber whose filter asks for other values is not interested in this device. It asks on
``/v1/stream`` (:mod:`ingest.answers.stream`), or by HTTP:

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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from ingest.answers.respond import MAX_WAIT_S, json_response, seconds_of
from ingest.answers.tables import ProductTables, TenantRows
from ingest.errors import RequestRefused
from ingest.intake import RequestIntake, first_key
from lakehouse.contract.lake import Lake
from lakehouse.contract.pipeline.demand import LEASE_S, LOOK_S, DemandBoard, DemandNote, Want

logger = logging.getLogger(__name__)

_RETRY_S = 1.0
_MAX_ABOUT = 16  # columns

Key = tuple[str, ...]
S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class KeyState:
    """The rows of a key as a JSON array, and the version of the product in which they last changed."""

    version: int
    rows: bytes


@dataclass(slots=True)
class _WantedKey(Generic[S]):
    subscribers: set[S] = field(default_factory=set)
    state: KeyState | None = None


class Interests(Generic[S]):
    """Which subscriber wants which keys of which product, and what it was told last. No I/O.

    A key's state is its latest rows; states between two reads are skipped. So a slow subscriber costs a set of keys,
    not a queue. A subscriber is anything hashable.
    """

    def __init__(self) -> None:
        self._wanted: dict[TenantRows, dict[Key, _WantedKey[S]]] = {}
        self._by: dict[S, dict[TenantRows, frozenset[Key]]] = {}

    def want(self, subscriber: S, part: TenantRows, keys: Iterable[Key]) -> frozenset[Key]:
        """Replace the keys that a subscriber wants of a product. Returns the new ones among them."""
        new = frozenset(keys)
        mine = self._by.setdefault(subscriber, {})
        old = mine.pop(part, frozenset())
        wanted = self._wanted.setdefault(part, {})
        for key in old - new:
            wanted[key].subscribers.discard(subscriber)
            if not wanted[key].subscribers:
                del wanted[key]
        for key in new - old:
            wanted.setdefault(key, _WantedKey()).subscribers.add(subscriber)
        if new:
            mine[part] = new
        if not wanted:
            del self._wanted[part]
        if not mine:
            del self._by[subscriber]
        return new - old

    def gone(self, subscriber: S) -> None:
        for part in list(self._by.get(subscriber, ())):
            self.want(subscriber, part, ())

    def wanted(self, part: TenantRows) -> frozenset[Key]:
        """The keys of a product that any subscriber wants."""
        return frozenset(self._wanted.get(part, ()))

    def count(self, subscriber: S) -> int:
        """Number of keys that a subscriber wants, over all products."""
        return sum(len(keys) for keys in self._by.get(subscriber, {}).values())

    def state(self, part: TenantRows, key: Key) -> KeyState | None:
        """The state of a wanted key, if it has been read."""
        wanted = self._wanted.get(part, {}).get(key)
        return None if wanted is None else wanted.state

    def updated(self, part: TenantRows, version: int, rows: Mapping[Key, bytes]) -> dict[S, list[Key]]:
        """Take the rows of keys in a version. Returns the changed keys by subscriber."""
        keys = self._wanted.get(part, {})
        changed: dict[S, list[Key]] = {}
        for key, body in rows.items():
            wanted = keys.get(key)
            if wanted is None or (wanted.state is not None and wanted.state.rows == body):
                continue
            wanted.state = KeyState(version, body)
            for subscriber in wanted.subscribers:
                changed.setdefault(subscriber, []).append(key)
        return changed


class ProductFollower(Generic[S]):
    """Follows the products that subscribers want, with one task a product, and tells subscribers of changed keys.

    The node reads the tables itself instead of relaying from a server: subscribers want the latest rows of keys, which
    needs neither filters nor positions; one watch a product serves every connection; and collecting continues without a
    server. docs/guide/collecting.md weighs the alternatives.
    """

    def __init__(
        self, interests: Interests[S], tables: ProductTables, tell: Callable[[S, TenantRows, Sequence[Key]], None]
    ) -> None:
        self._tell = tell
        self._interests = interests
        self._rows = tables.rows
        self._watch = tables.watch
        self._tasks: dict[TenantRows, asyncio.Task[None]] = {}
        self._asked: dict[TenantRows, asyncio.Event] = {}

    def follow(self, part: TenantRows) -> None:
        """Read the product now, because new keys of it are wanted, and follow it from here on."""
        self._asked.setdefault(part, asyncio.Event()).set()
        if part not in self._tasks:
            self._tasks[part] = asyncio.create_task(self._follow(part), name=f"follow {part.product}")

    def width(self, part: TenantRows) -> int | None:
        """Most values in a key of the product; None if it is not followed, or has not been read yet."""
        return self._rows.width(part.product) if part in self._tasks else None

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow(self, part: TenantRows) -> None:
        asked = self._asked[part]
        try:
            while keys := self._interests.wanted(part):
                asked.clear()
                version = -1
                try:
                    version, rows = await asyncio.to_thread(self._rows.by_keys, part, keys)
                except RequestRefused as error:
                    if error.status != 404:  # wait for a product that does not exist yet
                        logger.warning("%s is not followed: %s", part.product, error)
                        return
                except Exception:  # subscribers of other products are not affected
                    logger.exception("the rows of %s cannot be read", part.product)
                    await asyncio.sleep(_RETRY_S)
                    continue
                else:
                    for subscriber, changed in self._interests.updated(part, version, rows).items():
                        self._tell(subscriber, part, changed)
                await self._until_newer(part, version, asked)
        finally:
            del self._tasks[part]
            del self._asked[part]

    async def _until_newer(self, part: TenantRows, version: int, asked: asyncio.Event) -> None:
        newer = asyncio.create_task(self._watch.newer(part.product, version))
        wanted = asyncio.create_task(asked.wait())
        try:
            await asyncio.wait((newer, wanted), return_when=asyncio.FIRST_COMPLETED)
        finally:
            newer.cancel()
            wanted.cancel()


@dataclass(eq=False, slots=True)
class Asked:
    """What a device asks.

    Attributes:
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
        self._wanted: dict[tuple[str, str], dict[str, set[str]]] | None = None  # see _by_source; None: not known
        self._read_at = float("-inf")

    def ask(self, source: str, key: str | None, about: object, tell: Callable[[Asked], None]) -> Asked:
        """Answer a device that shows ``key``, from now on until :meth:`forget`.

        Raises RequestRefused: there is no such source for it, or what it says of its events is malformed.
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
        return any(
            not column or column not in asked.about or asked.about[column] in values
            for tenant in {asked.tenant, ""}
            for column, values in self._wanted.get((tenant, asked.source), {}).items()
        )


def _by_source(wants: Iterable[Want]) -> dict[tuple[str, str], dict[str, set[str]]]:
    """Wanted values by column, by tenant and source; an empty column: all events are wanted."""
    found: dict[tuple[str, str], dict[str, set[str]]] = {}
    for want in wants:
        found.setdefault((want.tenant, want.source), {}).setdefault(want.column, set()).add(want.value)
    return found

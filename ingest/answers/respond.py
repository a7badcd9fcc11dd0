"""Request/response by HTTP: answers computed from an event, look-ups by key, and pushed answers.

====================================  ==============================================================================
``POST /v1/SOURCE``                   one event, of a source with ``respond``:

                                      ``sync``: 200 with the answer; 504 with the token after the time limit

                                      ``half_async``: 202 with the token and ``Location: /v1/answers/TOKEN``, where the
                                      sender waits

                                      ``full_async``: the same; with ``?callback=URL`` the answer is POSTed there
``GET /v1/answers/TOKEN[?wait=S]``    200 with the answer; 202 before it exists; 422 if the event was refused
``GET /v1/lookup/PRODUCT/KEY[/KEY]``  the product's rows of this key; ``?COLUMN=VALUE`` works instead of the path
====================================  ==============================================================================

An answer is the rows of a product for the event's key, once the product holds the event:

1. Kafka acknowledges the event: its offset is known.
2. The product commits a version whose ``through`` covers that offset. One watch a product wakes everyone who waits.
3. The rows of the event's key are read from that version or a newer one.

Waiting holds no thread. The key of a recent event is remembered; for an older event, or one that another node took, it
is computed from the payload in bronze. A callback goes only to a ``host:port`` in ``callback_hosts``, never follows a
redirect, and is tried three times. A callback is on disk before its sender has the token, so that a node which ends or
crashes makes it after its next start.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from ingest.answers.acks import AckState, RecentEvents, Token, ack_state
from ingest.answers.tables import Coordinates, FoundRows, ProductTables
from ingest.border.admission import Admitted
from ingest.errors import RETRY_AFTER_S, IngestError, RequestRefused, problem_body
from ingest.intake import RequestIntake, first_key
from lakehouse.contract.pipeline import Pipeline, Source
from lakehouse.contract.pipeline.source import AnswerSpec, Template
from lakehouse.contract.storage import is_away, write_whole
from lakehouse.contract.tomlfile import duration_ms

logger = logging.getLogger(__name__)

MAX_WAIT_S = 60.0
KEYS_REMEMBERED = 100_000
_BRONZE_POLL_S = 0.1
_CALLBACK_TRIES = 3
_CALLBACK_S = 5.0
_MOST_CALLBACKS = 1_000
_JSON_TYPE = "application/json"


class Responder:
    """Serves acknowledgements, answers, look-ups and callbacks.

    Args:
        pipeline: its products with a channel can be looked up; another one may be set at any time.
        pending: folder of the callbacks that are still to be made.
    """

    def __init__(self, answers: Answers, pipeline: Pipeline, requests: RequestIntake, pending: Path) -> None:
        self._pending = pending
        self._requests = requests
        self._answers = answers
        self._rows = answers.tables.rows
        self.pipeline = pipeline
        self._callbacks: set[asyncio.Task[None]] = set()

    @property
    def routes(self) -> list[BaseRoute]:
        return [
            Route("/v1/acks/{token}", self._ack, methods=["GET"]),
            Route("/v1/answers/{token}", self._fetch, methods=["GET"]),
            Route("/v1/lookup/{product}", self._lookup, methods=["GET"]),
            Route("/v1/lookup/{product}/{key:path}", self._lookup, methods=["GET"]),
        ]

    def check(self, source: Source, query: Mapping[str, str]) -> str:
        """Check the callback that a request asks for, before its event is taken; returns it, or empty.

        Raises RequestRefused: the source pushes no answers, not to this address, or too many are pending.
        """
        callback = query.get("callback", "")
        if callback:
            if source.respond != "full_async" or source.answer is None:
                raise RequestRefused(f"source {source.name!r} pushes no answers", 400)
            refuse_callback(source.answer, callback)
            if len(self._callbacks) >= _MOST_CALLBACKS:
                raise _too_many_waiters(_MOST_CALLBACKS)
        return callback

    async def respond(self, source: Source, event: Admitted, callback: str) -> Response:
        """The response to an event that was taken and passed the border."""
        envelope = event.envelope
        token = Token(envelope.source, envelope.tenant, envelope.event_id, envelope.received_at)
        text = self._requests.signer.sign(envelope).decode()
        self._answers.remember(token, event.payload)
        if source.respond == "sync":
            async with self._answers.seat():
                return _response(await self._answers.wait(token), text, late=504)
        if callback:
            name = blake2b(f"{text} {callback}".encode(), digest_size=16).hexdigest()
            file = self._pending / f"{name}.json"
            kept = orjson.dumps({"token": text, "callback": callback})
            await asyncio.to_thread(write_whole, file, kept, 0o600)
            self._push(token, text, callback, file)
        response = json_response({"token": text, "answer": f"/v1/answers/{text}"}, 202)
        response.headers["Location"] = f"/v1/answers/{text}"
        return response

    def resume(self) -> None:
        """Make the callbacks that an earlier run still had to make."""
        for file in sorted(self._pending.glob("*.json")):
            try:
                kept = orjson.loads(file.read_bytes())
                text, callback = str(kept["token"]), str(kept["callback"])
                token = self._requests.signer.open(text)
                source = self._answers.source_of(token.source)
                if source is None:
                    raise RequestRefused(f"source {token.source!r} is not collected any more", 404)
                self.check(source, {"callback": callback})
            except (OSError, ValueError, TypeError, KeyError, RequestRefused) as error:
                logger.warning("a callback of an earlier run is not made: %s", error)
                file.unlink(missing_ok=True)
                continue
            self._push(token, text, callback, file)

    async def close(self) -> None:
        """Cancel pending callbacks; the next run makes them."""
        for task in self._callbacks:
            task.cancel()
        await asyncio.gather(*self._callbacks, return_exceptions=True)

    async def _ack(self, request: Request) -> Response:
        token = self._requests.signer.open(request.path_params["token"])
        products = [product.name for product in self.pipeline.products_of(token.source)]
        state = await self._answers.state(token, products)
        found = {name: value for name, value in dataclasses.asdict(state).items() if value is not None}
        found |= found.pop("coordinates", {})
        return json_response({"event_id": token.event_id, "source": token.source} | found)

    async def _fetch(self, request: Request) -> Response:
        text = request.path_params["token"]
        token = self._requests.signer.open(text)  # the token is the permission
        source = self._answers.source_of(token.source)
        if source is None or not source.respond:
            raise RequestRefused(f"source {token.source!r} gives no answers", 404)
        wait_s = 0.0 if source.respond == "full_async" else None
        if "wait" in request.query_params:
            wait_s = seconds_of(request.query_params["wait"])
        async with self._answers.seat():
            return _response(await self._answers.wait(token, wait_s), text, late=202)

    async def _lookup(self, request: Request) -> Response:
        product = request.path_params["product"]
        key = [part for part in request.path_params.get("key", "").split("/") if part]
        columns = dict(request.query_params)
        declared = self.pipeline.products.get(product)
        if declared is None or not declared.channel:
            raise RequestRefused(f"there is no product {product!r} to be looked up", 404)
        sender = self._requests.gate.show(declared, self.pipeline, first_key(request.headers.raw))
        seen = self._rows.seen_by(sender.tenant, product)
        if bool(key) == bool(columns):
            raise RequestRefused("give the key in the path, or columns in the query", 400)
        if key:
            found = await asyncio.to_thread(self._rows.by_key, seen, key)
        else:
            found = await asyncio.to_thread(self._rows.where, seen, columns)
        if not found.rows:
            raise RequestRefused(f"{product} has no row of this key", 404, version=found.version)
        return Response(found.json(product=product), media_type=_JSON_TYPE, headers={"ETag": f'"{found.version}"'})

    def _push(self, token: Token, text: str, callback: str, file: Path) -> None:
        task = asyncio.create_task(self._call_back(token, text, callback, file))
        self._callbacks.add(task)
        task.add_done_callback(self._callbacks.discard)

    async def _call_back(self, token: Token, text: str, callback: str, file: Path) -> None:
        response = _response(await self._answers.wait(token), text, late=504)
        headers = {"Content-Type": response.media_type or _JSON_TYPE, "User-Agent": "millrace"}
        async with httpx.AsyncClient(timeout=_CALLBACK_S, follow_redirects=False, trust_env=False) as client:
            for attempt in range(_CALLBACK_TRIES):
                try:
                    got = await client.post(callback, content=bytes(response.body), headers=headers)
                    problem_text = f"it answers {got.status_code}"
                    if got.status_code < 300:
                        break
                except httpx.HTTPError as error:
                    problem_text = f"{type(error).__name__}: {error}"
                await asyncio.sleep(0.2 * 4**attempt)
            else:
                logger.warning("an answer could not be pushed to %s: %s", urlsplit(callback).netloc, problem_text)
        await asyncio.to_thread(file.unlink, missing_ok=True)


def refuse_callback(spec: AnswerSpec, url: str) -> None:
    """Raise :class:`RequestRefused` unless the pipeline names the host and port of this address."""
    parts = urlsplit(url)
    try:
        port = parts.port or {"http": 80, "https": 443}.get(parts.scheme, 0)
    except ValueError:
        port = 0
    if parts.scheme not in ("http", "https") or parts.username is not None or not port:
        raise RequestRefused("a callback is an http or https address without a user", 400)
    if f"{parts.hostname}:{port}" not in spec.callback_hosts:
        raise RequestRefused(f"answers are not pushed to {parts.hostname}:{port}", 403)


def _response(answer: EventAnswer | None, token: str, *, late: int) -> Response:
    if answer is None:
        return refuse(RequestRefused("this source gives no answers", 404, token=token))
    if answer.refused:
        return refuse(RequestRefused(answer.refused, 422, token=token))
    if answer.found is not None:
        return Response(answer.found.json(token=token, product=answer.product), media_type=_JSON_TYPE)
    place = f"/v1/answers/{token}"
    if late == 202:
        response = json_response({"token": token, "answer": place}, 202)
        response.headers["Retry-After"] = "1"
    else:
        response = refuse(RequestRefused(f"{answer.product} does not hold the event yet", late, token=token))
    response.headers["Location"] = place
    return response


def json_response(value: object, status: int = 200) -> Response:
    return Response(orjson.dumps(value), status, media_type=_JSON_TYPE)


def refuse(error: IngestError) -> Response:
    """The problem document of an error (RFC 9457)."""
    status, body, headers = problem_body(error)
    return Response(body, status, dict(headers), "application/problem+json")


def unavailable(detail: str, **members: Any) -> Response:
    """503 with the time to retry."""
    return refuse(RequestRefused(detail, 503, code="not-ready", retry_after=RETRY_AFTER_S, **members))


async def lake_away(_: Request, error: Exception) -> Response:
    """The answer to what needs the lake while its object store is away; other errors go on."""
    if not is_away(error):
        raise error
    return unavailable("the object store of the lake does not answer; events are taken and safe meanwhile")


def _too_many_waiters(most: int) -> RequestRefused:
    text = f"{most} senders are waiting for an answer, which is the limit"
    return RequestRefused(text, 503, code="too-many-waiters", retry_after=RETRY_AFTER_S)


def seconds_of(text: str) -> float:
    """The time that a request says it waits. Raises RequestRefused."""
    try:
        seconds = float(text)
    except ValueError:
        raise RequestRefused(f"wait={text!r} is no number of seconds", 400) from None
    if not 0 <= seconds <= MAX_WAIT_S:
        raise RequestRefused(f"wait is between 0 and {MAX_WAIT_S:.0f} seconds", 400)
    return seconds


@dataclass(frozen=True, slots=True)
class EventAnswer:
    """Result of waiting for an answer.

    Attributes:
        product: that answers.
        found: its rows; None if the event was refused or the time limit has passed.
        refused: why the event counts in no product, or empty.
    """

    product: str
    found: FoundRows | None = None
    refused: str = ""


class Answers:
    """Waits for the answers of all sources that give some; ``max_waiters`` senders may wait at a time."""

    def __init__(
        self,
        source_of: Callable[[str], Source | None],
        recent: RecentEvents,
        tables: ProductTables,
        max_waiters: int,
    ) -> None:
        self.source_of = source_of
        self.tables = tables
        self._recent = recent
        self._most = max_waiters
        self._keys: OrderedDict[tuple[str, str, str], dict[str, str]] = OrderedDict()
        self.waiters = 0

    async def state(self, token: Token, products: Sequence[str]) -> AckState:
        """What became of the token's event; ``products`` are those of its source that matter."""
        return await asyncio.to_thread(ack_state, token, self._recent, self.tables.state, products)

    def _spec(self, source: str) -> AnswerSpec | None:
        found = self.source_of(source)
        return found.answer if found is not None else None

    def remember(self, token: Token, payload: bytes) -> None:
        """Keep the key of an event that was just taken."""
        spec = self._spec(token.source)
        key = answer_key(spec, payload) if spec is not None else None
        if key is not None:
            self._keys[token.identity] = key
            if len(self._keys) > KEYS_REMEMBERED:
                self._keys.popitem(last=False)

    @asynccontextmanager
    async def seat(self) -> AsyncIterator[None]:
        """Hold one of the places for waiting senders. Raises RequestRefused: all are taken."""
        if self.waiters >= self._most:
            raise _too_many_waiters(self._most)
        self.waiters += 1
        try:
            yield
        finally:
            self.waiters -= 1

    async def wait(self, token: Token, timeout_s: float | None = None) -> EventAnswer | None:
        """The answer to the token's event within ``timeout_s`` (None: the source's limit), or None for no answers."""
        spec = self._spec(token.source)
        if spec is None:
            return None
        if timeout_s is None:
            timeout_s = duration_ms(spec.timeout) / 1000
        if timeout_s <= 0:
            return await self._now(token, spec)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                return await self._answer(token, spec)
        return EventAnswer(spec.product)

    async def _now(self, token: Token, spec: AnswerSpec) -> EventAnswer:
        state = await self.state(token, [spec.product])
        if state.reason is not None:
            return EventAnswer(spec.product, refused=state.reason)
        if not state.products:
            return EventAnswer(spec.product)
        return await self._read(token, spec)

    async def _answer(self, token: Token, spec: AnswerSpec) -> EventAnswer:
        while True:
            try:
                return await self._found(token, spec)
            except Exception as error:
                if not is_away(error):
                    raise
                await asyncio.sleep(_BRONZE_POLL_S)

    async def _found(self, token: Token, spec: AnswerSpec) -> EventAnswer:
        at = await self._coordinates(token)
        if isinstance(at, str):
            return EventAnswer(spec.product, refused=at)
        await self.tables.watch.holds(spec.product, at)
        # Checked last: an event that fails its schema is quarantined by the same batch, or soon after.
        reason = await asyncio.to_thread(
            self.tables.state.quarantine_reason, token.source, token.tenant, token.event_id
        )
        if reason is not None:
            return EventAnswer(spec.product, refused=reason)
        return await self._read(token, spec)

    async def _coordinates(self, token: Token) -> Coordinates | str:
        """The event's place in Kafka, or why it will never have one."""
        await self._recent.decided(token)
        while True:
            state = await self.state(token, [])
            if state.reason is not None:
                return state.reason
            if state.coordinates is not None:
                return state.coordinates
            await asyncio.sleep(_BRONZE_POLL_S)  # taken by another node: wait for bronze

    async def _read(self, token: Token, spec: AnswerSpec) -> EventAnswer:
        key = self._keys.get(token.identity) or await asyncio.to_thread(self._key_from_bronze, token, spec)
        if key is None:
            return EventAnswer(spec.product, refused="the event has no value for the key of its answer")
        seen = self.tables.rows.seen_by(token.tenant, spec.product)
        return EventAnswer(spec.product, await asyncio.to_thread(self.tables.rows.where, seen, key))

    def _key_from_bronze(self, token: Token, spec: AnswerSpec) -> dict[str, str] | None:
        event = self.tables.state.find_event(token.source, token.tenant, token.event_id, token.received_at)
        return answer_key(spec, event.payload) if event is not None and event.payload is not None else None


def answer_key(spec: AnswerSpec, payload: bytes) -> dict[str, str] | None:
    """The key of an event's answer by column; None if the event lacks a field of it."""
    try:
        fields: Any = orjson.loads(payload)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(fields, Mapping):
        return None
    found = {column: Template(text).render(fields) for column, text in spec.key.items()}
    return {column: value for column, value in found.items() if value is not None} if all(found.values()) else None

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
redirect, and is tried three times.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx
import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from ingest.answers.acks import RecentEvents, Token, ack_state
from ingest.answers.tables import Coordinates, FoundRows, LakeState, ProductRows, ProductWatch
from ingest.border.admission import Admitted
from ingest.collectors.http import problem, refuse
from ingest.errors import EventRefused, LookupRefused, TooManyWaiters
from ingest.intake import RequestIntake, first_key
from lakehouse.contract.collector import AnswerSpec
from lakehouse.contract.pipeline import Pipeline, Source
from lakehouse.contract.source import Template
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
    """Serves answers, look-ups and callbacks.

    Args:
        answers: waits for answers.
        rows: serves look-ups.
        pipeline: its products with a channel can be looked up.
        requests: signs tokens and checks keys.
    """

    def __init__(self, answers: Answers, rows: ProductRows, pipeline: Pipeline, requests: RequestIntake) -> None:
        self._requests = requests
        self._answers = answers
        self._rows = rows
        self._pipeline = pipeline
        self._callbacks: set[asyncio.Task[None]] = set()

    @property
    def routes(self) -> list[BaseRoute]:
        return [
            Route("/v1/answers/{token}", self._fetch, methods=["GET"]),
            Route("/v1/lookup/{product}", self._lookup, methods=["GET"]),
            Route("/v1/lookup/{product}/{key:path}", self._lookup, methods=["GET"]),
        ]

    def check(self, source: Source, query: Mapping[str, str]) -> str:
        """Check the callback that a request asks for, before its event is taken; returns it, or empty.

        Raises:
            EventRefused: the source pushes no answers, or not to this address.
            TooManyWaiters: too many callbacks are pending.
        """
        callback = query.get("callback", "")
        if callback:
            if source.respond != "full_async" or source.answer is None:
                raise EventRefused(f"source {source.name!r} pushes no answers", 400)
            refuse_callback(source.answer, callback)
            if len(self._callbacks) >= _MOST_CALLBACKS:
                raise TooManyWaiters(_MOST_CALLBACKS)
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
            self._push(token, text, callback)
        body = {"token": text, "answer": f"/v1/answers/{text}"}
        return Response(orjson.dumps(body), 202, {"Location": body["answer"]}, _JSON_TYPE)

    async def close(self) -> None:
        """Cancel pending callbacks."""
        for task in self._callbacks:
            task.cancel()
        await asyncio.gather(*self._callbacks, return_exceptions=True)

    async def _fetch(self, request: Request) -> Response:
        text = request.path_params["token"]
        token = self._requests.signer.open(text)  # the token is the permission
        source = self._answers.source(token.source)
        if source is None or not source.respond:
            return problem(404, f"source {token.source!r} gives no answers")
        try:
            wait_s = _wait_s(request.query_params.get("wait"), source)
            async with self._answers.seat():
                return _response(await self._answers.wait(token, wait_s), text, late=202)
        except TooManyWaiters as error:
            return refuse(error)
        except ValueError as error:
            return problem(400, str(error))

    async def _lookup(self, request: Request) -> Response:
        product = request.path_params["product"]
        key = [part for part in request.path_params.get("key", "").split("/") if part]
        columns = dict(request.query_params)
        try:
            declared = self._pipeline.products.get(product)
            if declared is None or not declared.channel:
                raise LookupRefused(f"there is no product {product!r} to be looked up", 404)
            self._requests.gate.show(declared, self._pipeline, first_key(request.headers.raw))
            if bool(key) == bool(columns):
                raise LookupRefused("give the key in the path, or columns in the query", 400)
            if key:
                found = await asyncio.to_thread(self._rows.by_key, product, key)
            else:
                found = await asyncio.to_thread(self._rows.where, product, columns)
        except LookupRefused as error:
            return problem(error.status, error.reason)
        if not found.rows:
            return problem(404, f"{product} has no row of this key", version=found.version)
        return Response(found.json(product=product), media_type=_JSON_TYPE, headers={"ETag": f'"{found.version}"'})

    def _push(self, token: Token, text: str, callback: str) -> None:
        task = asyncio.create_task(self._call_back(token, text, callback))
        self._callbacks.add(task)
        task.add_done_callback(self._callbacks.discard)

    async def _call_back(self, token: Token, text: str, callback: str) -> None:
        answer = await self._answers.wait(token)
        response = _response(answer, text, late=504)
        headers = {"Content-Type": response.media_type or _JSON_TYPE, "User-Agent": "millrace"}
        async with httpx.AsyncClient(timeout=_CALLBACK_S, follow_redirects=False, trust_env=False) as client:
            for attempt in range(_CALLBACK_TRIES):
                try:
                    got = await client.post(callback, content=bytes(response.body), headers=headers)
                    if got.status_code < 300:
                        return
                    problem_text = f"it answers {got.status_code}"
                except httpx.HTTPError as error:
                    problem_text = f"{type(error).__name__}: {error}"
                await asyncio.sleep(0.2 * 4**attempt)
        logger.warning("an answer could not be pushed to %s: %s", urlsplit(callback).netloc, problem_text)


def refuse_callback(spec: AnswerSpec, url: str) -> None:
    """Raise :class:`EventRefused` unless the pipeline names the host and port of this address."""
    parts = urlsplit(url)
    try:
        port = parts.port or {"http": 80, "https": 443}.get(parts.scheme, 0)
    except ValueError:
        port = 0
    if parts.scheme not in ("http", "https") or parts.username is not None or not port:
        raise EventRefused("a callback is an http or https address without a user", 400)
    if f"{parts.hostname}:{port}" not in spec.callback_hosts:
        raise EventRefused(f"answers are not pushed to {parts.hostname}:{port}", 403)


def _response(answer: EventAnswer | None, token: str, *, late: int) -> Response:
    if answer is None:
        return problem(404, "this source gives no answers", token=token)
    if answer.refused:
        return problem(422, answer.refused, token=token)
    if answer.found is not None:
        return Response(answer.body(token), media_type=_JSON_TYPE)
    place = f"/v1/answers/{token}"
    if late == 202:
        body = orjson.dumps({"token": token, "answer": place})
        return Response(body, 202, {"Location": place, "Retry-After": "1"}, _JSON_TYPE)
    return problem(late, f"{answer.product} does not hold the event yet", headers={"Location": place}, token=token)


def _wait_s(text: str | None, source: Source) -> float | None:
    """How long to wait: the query's time, else 0 (``full_async``) or None for the source's limit."""
    if text is None:
        return 0.0 if source.respond == "full_async" else None
    try:
        seconds = float(text)
    except ValueError:
        raise ValueError(f"wait={text!r} is no number of seconds") from None
    if not 0 <= seconds <= MAX_WAIT_S:
        raise ValueError(f"wait is between 0 and {MAX_WAIT_S:.0f} seconds")
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

    def body(self, token: str) -> bytes:
        assert self.found is not None
        return self.found.json(token=token, product=self.product)


class Answers:
    """Waits for the answers of all sources that give some.

    Args:
        source_of: the source with this name, or None.
        recent: memory of this node.
        lake: progress of the tables.
        rows: rows of the tables.
        watch: follows the products.
        max_waiters: senders that may wait at a time.
    """

    def __init__(
        self,
        source_of: Callable[[str], Source | None],
        recent: RecentEvents,
        lake: LakeState,
        rows: ProductRows,
        watch: ProductWatch,
        *,
        max_waiters: int,
    ) -> None:
        self._source_of = source_of
        self._recent = recent
        self._lake = lake
        self._rows = rows
        self._watch = watch
        self._most = max_waiters
        self._keys: OrderedDict[tuple[str, str, str], dict[str, str]] = OrderedDict()
        self.waiters = 0

    def source(self, name: str) -> Source | None:
        """The source with this name, if it is collected here."""
        return self._source_of(name)

    def spec(self, source: str) -> AnswerSpec | None:
        """What the source answers, or None."""
        found = self._source_of(source)
        return found.answer if found is not None else None

    def remember(self, token: Token, payload: bytes) -> None:
        """Keep the key of an event that was just taken."""
        spec = self.spec(token.source)
        key = answer_key(spec, payload) if spec is not None else None
        if key is not None:
            self._keys[_event_key(token)] = key
            if len(self._keys) > KEYS_REMEMBERED:
                self._keys.popitem(last=False)

    @asynccontextmanager
    async def seat(self) -> AsyncIterator[None]:
        """Hold one of the places for waiting senders.

        Raises:
            TooManyWaiters: all are taken.
        """
        if self.waiters >= self._most:
            raise TooManyWaiters(self._most)
        self.waiters += 1
        try:
            yield
        finally:
            self.waiters -= 1

    async def wait(self, token: Token, timeout_s: float | None = None) -> EventAnswer | None:
        """The answer to the token's event; None if its source gives none.

        Args:
            timeout_s: longest wait; None: the source's limit; 0: do not wait.
        """
        spec = self.spec(token.source)
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
        state = await asyncio.to_thread(ack_state, token, self._recent, self._lake, [spec.product])
        if state.reason is not None:
            return EventAnswer(spec.product, refused=state.reason)
        if not state.products:
            return EventAnswer(spec.product)
        return await self._read(token, spec)

    async def _answer(self, token: Token, spec: AnswerSpec) -> EventAnswer:
        at = await self._coordinates(token)
        if isinstance(at, str):
            return EventAnswer(spec.product, refused=at)
        await self._watch.holds(spec.product, at)
        # Checked last: an event that fails its schema is quarantined by the same batch, or soon after.
        reason = await asyncio.to_thread(self._lake.quarantine_reason, token.source, token.tenant, token.event_id)
        if reason is not None:
            return EventAnswer(spec.product, refused=reason)
        return await self._read(token, spec)

    async def _coordinates(self, token: Token) -> Coordinates | str:
        """The event's place in Kafka, or why it will never have one."""
        await self._recent.decided(token)
        while True:
            state = await asyncio.to_thread(ack_state, token, self._recent, self._lake, [])
            if state.reason is not None:
                return state.reason
            if state.coordinates is not None:
                return state.coordinates
            await asyncio.sleep(_BRONZE_POLL_S)  # taken by another node: wait for bronze

    async def _read(self, token: Token, spec: AnswerSpec) -> EventAnswer:
        key = self._keys.get(_event_key(token)) or await asyncio.to_thread(self._key_from_bronze, token, spec)
        if key is None:
            return EventAnswer(spec.product, refused="the event has no value for the key of its answer")
        return EventAnswer(spec.product, await asyncio.to_thread(self._rows.where, spec.product, key))

    def _key_from_bronze(self, token: Token, spec: AnswerSpec) -> dict[str, str] | None:
        event = self._lake.find_event(token.source, token.tenant, token.event_id, token.received_at)
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


def _event_key(token: Token) -> tuple[str, str, str]:
    return token.source, token.tenant, token.event_id

"""Request/response by HTTP: the three styles of answering a sender, look-ups by key, and pushed answers.

====================================  ==============================================================================
``POST /v1/SOURCE``                   of a source with ``respond``, one event:

                                      ``sync``: 200 with the answer; 504 with the token when the time is over

                                      ``half_async``: 202 with the token and ``Location: /v1/answers/TOKEN``, where the
                                      sender waits

                                      ``full_async``: the same; or ``?callback=URL`` has the answer POSTed there
``GET /v1/answers/TOKEN[?wait=S]``    200 with the answer; 202 when it is not there yet; 422 when the event was refused
``GET /v1/lookup/PRODUCT/KEY[/KEY]``  the product's rows of this key; ``?COLUMN=VALUE`` instead of the path also goes
====================================  ==============================================================================

A callback goes only to a ``host:port`` that the pipeline names (``callback_hosts``), never follows a redirect, and is
tried three times.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from urllib.parse import urlsplit

import httpx
import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from ingest.answers import Answer, Answers
from ingest.border import Admitted
from ingest.collectors.door import Door, presented_key
from ingest.collectors.http import problem
from ingest.errors import EventRefused, LookupRefused, TooManyWaiters
from ingest.productrows import ProductRows
from ingest.tokens import Token
from lakehouse.contract.collector import AnswerSpec
from lakehouse.contract.pipeline import Pipeline, Source

logger = logging.getLogger(__name__)

MAX_WAIT_S = 60.0
_CALLBACK_TRIES = 3
_CALLBACK_S = 5.0
_MOST_CALLBACKS = 1_000
_JSON = "application/json"


class Responder:
    """Answers senders.

    Args:
        answers: waits for them.
        rows: for look-ups.
        pipeline: its products may be looked up where they have a channel.
        door: signs tokens, and knows who may ask.
    """

    def __init__(self, answers: Answers, rows: ProductRows, pipeline: Pipeline, door: Door) -> None:
        self._door = door
        self._answers = answers
        self._rows = rows
        self._pipeline = pipeline
        self._callbacks: set[asyncio.Task[None]] = set()

    @property
    def routes(self) -> list[BaseRoute]:
        """``/v1/answers`` and ``/v1/lookup``."""
        return [
            Route("/v1/answers/{token}", self._fetch, methods=["GET"]),
            Route("/v1/lookup/{product}", self._lookup, methods=["GET"]),
            Route("/v1/lookup/{product}/{key:path}", self._lookup, methods=["GET"]),
        ]

    def check(self, source: Source, query: Mapping[str, str]) -> str:
        """Before the event is taken: the callback it asks for, or empty.

        Raises:
            EventRefused: there may be none, or not this one.
            TooManyWaiters: nobody may wait any more.
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
        text = self._door.signer.sign(envelope).decode()
        self._answers.remember(token, event.payload)
        if source.respond == "sync":
            async with self._answers.seat():
                return _response(await self._answers.wait(token), text, late=504)
        if callback:
            self._push(token, text, callback)
        body = {"token": text, "answer": f"/v1/answers/{text}"}
        return Response(orjson.dumps(body), 202, {"Location": body["answer"]}, _JSON)

    async def close(self) -> None:
        """Give up callbacks that are under way."""
        for task in self._callbacks:
            task.cancel()
        await asyncio.gather(*self._callbacks, return_exceptions=True)

    async def _fetch(self, request: Request) -> Response:
        text = request.path_params["token"]
        token = self._door.signer.open(text)  # the token is the permission
        source = self._answers.source(token.source)
        if source is None or not source.respond:
            return problem(404, f"source {token.source!r} gives no answers")
        try:
            wait_s = _wait_s(request.query_params.get("wait"), source)
            async with self._answers.seat():
                return _response(await self._answers.wait(token, wait_s), text, late=202)
        except TooManyWaiters as error:
            return problem(503, str(error), code="too-many-waiters", headers={"Retry-After": "1"})
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
            shown = (presented_key(name, value) for name, value in request.headers.raw)
            self._door.gate.show(declared, self._pipeline, next((key for key in shown if key), None))
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
        return Response(found.json(product=product), media_type=_JSON, headers={"ETag": f'"{found.version}"'})

    def _push(self, token: Token, text: str, callback: str) -> None:
        task = asyncio.create_task(self._call_back(token, text, callback))
        self._callbacks.add(task)
        task.add_done_callback(self._callbacks.discard)

    async def _call_back(self, token: Token, text: str, callback: str) -> None:
        answer = await self._answers.wait(token)
        response = _response(answer, text, late=504)
        headers = {"Content-Type": response.media_type or _JSON, "User-Agent": "millrace"}
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
    """Pass only an address whose host and port the pipeline names.

    Raises:
        EventRefused: any other.
    """
    parts = urlsplit(url)
    try:
        port = parts.port or {"http": 80, "https": 443}.get(parts.scheme, 0)
    except ValueError:
        port = 0
    if parts.scheme not in ("http", "https") or parts.username is not None or not port:
        raise EventRefused("a callback is an http or https address without a user", 400)
    if f"{parts.hostname}:{port}" not in spec.callback_hosts:
        raise EventRefused(f"answers are not pushed to {parts.hostname}:{port}", 403)


def _response(answer: Answer | None, token: str, *, late: int) -> Response:
    if answer is None:
        return problem(404, "this source gives no answers", token=token)
    if answer.refused:
        return problem(422, answer.refused, token=token)
    if answer.found is not None:
        return Response(answer.body(token), media_type=_JSON)
    place = f"/v1/answers/{token}"
    if late == 202:
        body = orjson.dumps({"token": token, "answer": place})
        return Response(body, 202, {"Location": place, "Retry-After": "1"}, _JSON)
    return problem(late, f"{answer.product} does not hold the event yet", headers={"Location": place}, token=token)


def _wait_s(text: str | None, source: Source) -> float | None:
    """How long to wait: what is asked for, else not at all (``full_async``) or what the source says."""
    if text is None:
        return 0.0 if source.respond == "full_async" else None
    try:
        seconds = float(text)
    except ValueError:
        raise ValueError(f"wait={text!r} is no number of seconds") from None
    if not 0 <= seconds <= MAX_WAIT_S:
        raise ValueError(f"wait is between 0 and {MAX_WAIT_S:.0f} seconds")
    return seconds

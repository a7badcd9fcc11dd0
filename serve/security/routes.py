"""``POST /v1/tickets``: a short-lived ticket for the streams of a browser's page."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from serve.push import request as asked
from serve.rows import to_json
from serve.security.gate import Gate
from serve.security.tickets import LIVES_S


async def new_ticket(request: Request) -> Response:
    """A ticket with the rights of the key that asks: ``?ticket=`` on one address, within its life."""
    access = request.state.access
    if not isinstance(access, Gate):
        raise asked.bad("bad_request", "no tickets are needed here")
    content = {"ticket": access.ticket(asked.admitted(request)), "lives_s": LIVES_S}
    return Response(to_json(content), 201, headers={"Cache-Control": "no-store"}, media_type="application/json")


ROUTES: list[BaseRoute] = [Route("/v1/tickets", new_ticket, methods=["POST"])]

"""A subscriber's request, read from an address's query or an object: one meaning on all transports."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qs, urlsplit

from starlette.requests import Request

from serve.errors import PositionError, RequestError
from serve.filters.parse import MAX_LENGTH
from serve.position import Position, Seal
from serve.principal import Access, Credentials, OpenAccess, Principal
from serve.subscriber import SubscribeRequest

PARAMETERS = frozenset({"table", "from", "where", "columns", "select", "conflate", "window"})
"""What a subscription takes; a transport may take more. The README of it is docs/protocol.md."""

TICKET = "ticket"
"""Parameter that stands for a key (:mod:`serve.security.tickets`); any address may have it."""

_MAX_QUERY = 16_384
_TRUTH = {"": False, "0": False, "false": False, "1": True, "true": True}


def query_of(text: str) -> dict[str, str]:
    """An address's query as names and values, each name once.

    Raises:
        RequestError: a name comes twice, or it is too long.
    """
    if not text:
        return {}
    if len(text) > _MAX_QUERY:
        raise bad("bad_request", f"the query has more than {_MAX_QUERY} characters")
    try:
        values = parse_qs(text, keep_blank_values=True, max_num_fields=64)
    except ValueError:
        raise bad("bad_request", "the query has too many parameters") from None
    if twice := [name for name, given in values.items() if len(given) > 1]:
        raise bad("bad_request", f"given more than once: {', '.join(sorted(twice))}")
    return {name: given[0] for name, given in values.items() if name != TICKET}


def subscription(query: Mapping[str, str], seal: Seal, *, also: frozenset[str] = frozenset()) -> SubscribeRequest:
    """The request.

    Args:
        query: names and values, see :data:`PARAMETERS`.
        seal: reads positions.
        also: names that the transport reads itself.

    Raises:
        RequestError: a parameter is unknown, missing or wrong.
    """
    if unknown := query.keys() - PARAMETERS - also:
        raise bad("bad_request", f"unknown parameters: {', '.join(sorted(unknown))}")
    table = query.get("table", "")
    if not table:
        raise bad("bad_request", "give a table")
    if query.get("from") == "":
        raise bad("bad_position", "from is empty")
    texts = {name: query.get(name, "") for name in ("where", "columns", "select")}
    if long := [name for name, text in texts.items() if len(text) > MAX_LENGTH]:
        raise bad("bad_filter", f"{', '.join(long)}: more than {MAX_LENGTH} characters")
    return SubscribeRequest(
        table,
        position_of(query["from"], seal) if "from" in query else None,
        texts["where"],
        columns_of(texts["columns"]),
        texts["select"],
        truth(query.get("conflate", ""), "conflate"),
        whole_number(query.get("window", "0"), "window"),
    )


def position_of(token: str, seal: Seal) -> Position:
    """A position that a client handed in.

    Raises:
        RequestError: it is none of this lake's.
    """
    try:
        return seal.parse(token)
    except PositionError as error:
        raise bad("bad_position", str(error)) from None


def columns_of(text: str) -> tuple[str, ...]:
    """Names of columns, separated by commas."""
    return tuple(name for name in (part.strip() for part in text.split(",")) if name)


def truth(text: str, name: str) -> bool:
    """A switch.

    Raises:
        RequestError: neither 1 nor 0.
    """
    if text.lower() not in _TRUTH:
        raise bad("bad_request", f"{name} is 1 or 0")
    return _TRUTH[text.lower()]


def whole_number(text: str, name: str, least: int = 0, most: int = 1_000_000) -> int:
    """A number.

    Raises:
        RequestError: it is none, or out of bounds.
    """
    if not text.isascii() or not text.isdecimal() or len(text) > 9 or not least <= int(text) <= most:
        raise bad("bad_request", f"{name} is a whole number from {least} to {most}")
    return int(text)


def texts_of(content: Any) -> dict[str, str]:
    """An object from a message as a query: texts, numbers, truth values; columns may be a list.

    Raises:
        RequestError: it is no object of such.
    """
    if not isinstance(content, dict):
        raise bad("bad_message", "an object is wanted")
    found = {}
    for name, value in content.items():
        if isinstance(value, list) and all(isinstance(each, str) for each in value):
            found[name] = ",".join(value)
        elif isinstance(value, bool):
            found[name] = "1" if value else "0"
        elif isinstance(value, (str, int)):
            found[name] = str(value)
        elif value is not None:
            raise bad("bad_message", f"{name} is neither text nor a number")
    return found


def admitted(request: Request) -> Principal:
    """Who makes an HTTP request.

    Raises:
        RequestError: nobody that may come in.
    """
    known: Principal | None = getattr(request.state, "principal", None)  # serve.security.door was asked already
    if known is not None:
        return known
    access: Access = getattr(request.state, "access", None) or OpenAccess()
    headers = {name.lower(): value for name, value in request.headers.items()}
    return access.admit(Credentials(headers, request.url.query, peer_of(request)))


def peer_of(request: Request) -> str:
    """The other side of an HTTP request."""
    return f"{request.client.host}:{request.client.port}" if request.client else "?"


def bad(code: str, detail: str) -> RequestError:
    """A request that is at fault itself."""
    return RequestError(RequestError.BAD_REQUEST, code, detail)


def credentials(headers: Mapping[str, str], path: str, peer: str) -> Credentials:
    """What a connection shows."""
    return Credentials(headers, urlsplit(path).query, peer)

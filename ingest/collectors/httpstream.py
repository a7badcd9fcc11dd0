"""The connection of the HTTP stream clients (SSE, JSON lines). Errors of httpx are translated only here."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import httpx

from ingest.errors import UpstreamEnded
from lakehouse.contract.errors import ConfigError

CONNECT_S = 10.0
SILENCE_S = 120.0  # an upstream that says nothing for so long, no comment either, is taken for gone


@asynccontextmanager
async def open_stream(
    url: str, headers: Mapping[str, str], *, kinds: tuple[str, ...]
) -> AsyncIterator[AsyncIterator[bytes]]:
    """The body of a GET as it comes; what is not asked for is not read from the socket.

    Args:
        url: of the upstream; redirects are followed.
        headers: of the request.
        kinds: content types that are taken.

    Raises:
        UpstreamEnded: it does not answer, answers something else than 200 and one of the types, or breaks off.
    """
    timeout = httpx.Timeout(CONNECT_S, read=SILENCE_S)
    try:
        async with (
            httpx.AsyncClient(timeout=timeout, follow_redirects=True, max_redirects=5) as client,
            client.stream("GET", url, headers=_bytes({"Accept-Encoding": "identity", **headers})) as answer,
        ):
            kind = answer.headers.get("content-type", "").partition(";")[0].strip().lower()
            if answer.status_code != 200:
                raise UpstreamEnded(f"it answers {answer.status_code} {answer.reason_phrase}")
            if kind not in kinds:
                raise UpstreamEnded(f"it answers {kind or 'without a content type'}, not {kinds[0]}")
            yield answer.aiter_bytes()
    except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError) as error:
        raise UpstreamEnded(f"{type(error).__name__}: {error}") from None


def _bytes(headers: Mapping[str, str]) -> dict[bytes, bytes]:
    """In UTF-8: a Last-Event-ID may be any text."""
    return {name.encode(): value.encode() for name, value in headers.items()}


def request_headers(declared: Mapping[str, str], *, source: str) -> dict[str, str]:
    """The headers a pipeline declares; ``$NAME`` is taken from the environment, so that no secret is in a file.

    Raises:
        ConfigError: a variable is not set.
    """
    found: dict[str, str] = {"User-Agent": "millrace"}
    for name, value in declared.items():
        if value.startswith("$"):
            if value[1:] not in os.environ:
                raise ConfigError(
                    f"header {name} needs the variable {value[1:]}",
                    key=f"sources.{source}.collectors",
                    remedy=f"Set {value[1:]} in the environment",
                )
            value = os.environ[value[1:]]
        found[name] = value
    return found

"""One attempt to deliver: a signed POST (Standard Webhooks 1.0) to an address that webhooks may call.

Without a check, whoever may add a webhook could make the server talk to what only the server reaches. So the name is
resolved once for each attempt, every address that it has is checked, and the connection goes to a checked address: a
name that answers otherwise the second time gains nothing. Redirects are not followed.
"""

from __future__ import annotations

import asyncio
import base64
import hmac
import socket
import ssl
import time
from collections.abc import Mapping
from typing import Self
from urllib.parse import SplitResult, urlsplit

import httpx

from lakehouse.contract.access import is_public
from serve.errors import ServeError

_MAX_URL = 2_048
_REST_BYTES, _REST_S = 65_536, 1.0


class ForbiddenTarget(ServeError):
    """An address that webhooks may not call."""


def checked_url(text: str) -> SplitResult:
    """A URL's parts, the host in IDNA and lower case. Raises ForbiddenTarget."""
    if len(text) > _MAX_URL or any(ord(char) <= 32 or ord(char) == 127 for char in text):
        raise ForbiddenTarget("the URL is too long, or has spaces or control characters in it")
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError as error:
        raise ForbiddenTarget(f"no URL: {error}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ForbiddenTarget("the URL is http:// or https:// with a host")
    if parts.username is not None or parts.password is not None:
        raise ForbiddenTarget("the URL has a user or a password in it; requests are signed instead")
    if parts.fragment or port == 0:
        raise ForbiddenTarget("the URL has a fragment, or port 0")
    try:
        host = httpx.URL(scheme=parts.scheme, host=parts.hostname).raw_host.decode()
    except httpx.InvalidURL as error:
        raise ForbiddenTarget(str(error)) from None
    host = f"[{host}]" if ":" in host else host
    return parts._replace(netloc=host if port is None else f"{host}:{port}")


async def target_of(url: str, *, private: bool) -> tuple[str, str, str]:
    """Resolve a URL's host now. With ``private`` any address is allowed.

    Returns:
        The URL with the address in place of the name; the header ``host`` with that name; and the name that the
        certificate is checked against.

    Raises:
        ForbiddenTarget: it has no address, or one that is not on the public internet.
    """
    parts = checked_url(url)
    assert parts.hostname is not None
    port = parts.port or (443 if parts.scheme == "https" else 80)
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ForbiddenTarget(f"{parts.hostname} has no address: {error}") from None
    addresses = [str(entry[4][0]) for entry in found]
    for address in addresses:
        if not private and not is_public(address):
            raise ForbiddenTarget(f"{parts.hostname} is {address}, which is not on the public internet")
    if not addresses:
        raise ForbiddenTarget(f"{parts.hostname} has no address")
    address = addresses[0]
    netloc = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
    return parts._replace(netloc=netloc).geturl(), parts.netloc, parts.hostname


def secret_text(key: bytes) -> str:
    """The form in which a secret is shown: ``whsec_`` and base64."""
    return "whsec_" + base64.b64encode(key).decode()


def signature(key: bytes, ident: str, timestamp: int, body: bytes) -> str:
    """``v1,`` and base64 of HMAC-SHA-256 over ``id.timestamp.body``."""
    signed = b".".join((ident.encode(), str(timestamp).encode(), body))
    return "v1," + base64.b64encode(hmac.digest(key, signed, "sha256")).decode()


class WebhookCaller:
    """Makes requests to one URL. Use it as a context manager, which closes its connection.

    The connection is kept for the next request. It is kept by address, and one made for another name of it has checked
    another certificate: so a caller is for a single URL.

    Args:
        private: whether any address may be called.
        trust: whose certificates are good.
    """

    def __init__(self, timeout_s: float, *, private: bool, trust: ssl.SSLContext) -> None:
        self._private = private
        self._client = httpx.AsyncClient(
            verify=trust,
            timeout=timeout_s,
            follow_redirects=False,
            trust_env=False,
            limits=httpx.Limits(max_connections=1),
        )
        self._timeout_s = timeout_s

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def post(
        self, url: str, key: bytes, ident: str, kind: str, body: bytes, extra: Mapping[str, str] | None = None
    ) -> tuple[int, str]:
        """One attempt, with ``extra`` headers; failures of the other side are outcomes, not exceptions.

        Returns:
            The answer's status, 0 without one; and what went wrong, empty if the message was taken (2xx).
        """
        try:
            async with asyncio.timeout(self._timeout_s):
                target, host, name = await target_of(url, private=self._private)
                now = int(time.time())
                headers = {
                    "host": host,
                    "content-type": "application/json",
                    "user-agent": "millrace-webhooks",
                    "webhook-id": ident,
                    "webhook-timestamp": str(now),
                    "webhook-signature": signature(key, ident, now, body),
                    "millrace-event": kind,
                    **(extra or {}),
                }
                extensions = {"sni_hostname": name}
                request = self._client.build_request(
                    "POST", target, content=body, headers=headers, extensions=extensions
                )
                response = await self._client.send(request, stream=True)
        except ForbiddenTarget as error:
            return 0, str(error)
        except TimeoutError:
            return 0, f"no answer within {self._timeout_s:g} s"
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
            return 0, f"{type(error).__name__}: {error}"[:300]
        await _finish(response)
        status = response.status_code
        return status, "" if 200 <= status < 300 else f"it answered {status}"


async def _finish(response: httpx.Response) -> None:
    """Read the rest of the answer, so that the connection can be used again; close it if the answer is long."""
    left = _REST_BYTES
    try:
        async with asyncio.timeout(_REST_S):
            async for some in response.aiter_raw():
                left -= len(some)
                if left < 0:
                    break
    except (httpx.HTTPError, TimeoutError):
        pass  # the outcome is known already
    finally:
        await response.aclose()

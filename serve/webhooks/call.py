"""One attempt to deliver: a signed POST (Standard Webhooks 1.0) to an address that webhooks may call.

Without a check, whoever may add a webhook could make the server talk to what only the server reaches. So the name is
resolved once for each attempt, every address that it has is checked, and the connection goes to a checked address: a
name that answers otherwise the second time gains nothing. Redirects are not followed.
"""

from __future__ import annotations

import asyncio
import base64
import hmac
import ipaddress
import socket
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self
from urllib.parse import SplitResult, urlsplit

import httpx

from serve.errors import ServeError

_MAX_URL = 2_048
_SHARED = ipaddress.ip_network("64:ff9b::/96")  # NAT64: checked as the IPv4 address within
_REST_BYTES, _REST_S = 65_536, 1.0


class ForbiddenTarget(ServeError):
    """An address that webhooks may not call."""


@dataclass(frozen=True, slots=True)
class CallTarget:
    """Where one request goes.

    Attributes:
        url: with the address in place of the name.
        host: header with that name.
        name: that the certificate is checked against.
    """

    url: str
    host: str
    name: str


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


async def target_of(url: str, *, private: bool) -> CallTarget:
    """Resolve a URL's host now. With ``private`` any address is allowed.

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
    return CallTarget(parts._replace(netloc=netloc).geturl(), parts.netloc, parts.hostname)


def is_public(text: str) -> bool:
    """Whether an address is on the public internet: not loopback, private, link-local, shared or reserved."""
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return False
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour or (address.teredo or (None, None))[1]
        if inner is None and address in _SHARED:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(str(inner))
    return address.is_global and not address.is_multicast and not address.is_reserved


@dataclass(frozen=True, slots=True)
class CallOutcome:
    """How an attempt ended.

    Attributes:
        status: of the answer; 0 without an answer.
        error: empty if it was taken (2xx).
        gone: the receiver wants no more (410).
        ms: duration.
    """

    status: int
    error: str
    gone: bool = False
    ms: int = 0


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
    ) -> CallOutcome:
        """One attempt, with ``extra`` headers; failures of the other side are outcomes, not exceptions."""
        began = time.monotonic()
        try:
            async with asyncio.timeout(self._timeout_s):
                target = await target_of(url, private=self._private)
                now = int(time.time())
                headers = {
                    "host": target.host,
                    "content-type": "application/json",
                    "user-agent": "millrace-webhooks",
                    "webhook-id": ident,
                    "webhook-timestamp": str(now),
                    "webhook-signature": signature(key, ident, now, body),
                    "millrace-event": kind,
                    **(extra or {}),
                }
                extensions = {"sni_hostname": target.name}
                request = self._client.build_request(
                    "POST", target.url, content=body, headers=headers, extensions=extensions
                )
                response = await self._client.send(request, stream=True)
        except ForbiddenTarget as error:
            return CallOutcome(0, str(error), ms=_since(began))
        except TimeoutError:
            return CallOutcome(0, f"no answer within {self._timeout_s:g} s", ms=_since(began))
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
            return CallOutcome(0, f"{type(error).__name__}: {error}"[:300], ms=_since(began))
        await _finish(response)
        status = response.status_code
        taken = 200 <= status < 300
        return CallOutcome(status, "" if taken else f"it answered {status}", status == 410, _since(began))


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


def _since(began: float) -> int:
    return int((time.monotonic() - began) * 1000)

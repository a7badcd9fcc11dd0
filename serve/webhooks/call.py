"""One attempt: a signed POST (Standard Webhooks 1.0: ``webhook-id``, ``webhook-timestamp``, ``webhook-signature``)."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hmac
import secrets
import ssl
import time
from dataclasses import dataclass
from typing import Self

import httpx

from serve.webhooks.guard import Forbidden, target_of

_PREFIX = "whsec_"
_SECRET_BYTES = 32
_REST_BYTES, _REST_S = 65_536, 1.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an attempt ended.

    Attributes:
        status: of the answer; 0: there was none.
        error: empty: it was taken (2xx).
        gone: the receiver wants no more (410).
        ms: it took.
    """

    status: int
    error: str
    gone: bool = False
    ms: int = 0


def new_secret() -> str:
    """A secret of ours."""
    return _PREFIX + base64.b64encode(secrets.token_bytes(_SECRET_BYTES)).decode()


def secret_key(secret: str) -> bytes:
    """The bytes that a secret stands for.

    Raises:
        ValueError: it is not ``whsec_`` and base64 of 24 to 64 bytes.
    """
    try:
        key = base64.b64decode(secret.removeprefix(_PREFIX), validate=True)
    except binascii.Error:
        key = b""
    if not secret.startswith(_PREFIX) or not 24 <= len(key) <= 64:
        raise ValueError("a secret is whsec_ and base64 of 24 to 64 bytes")
    return key


def signature(secret: str, ident: str, timestamp: int, body: bytes) -> str:
    """``v1,`` and base64 of HMAC-SHA-256 over ``id.timestamp.body``."""
    signed = b".".join((ident.encode(), str(timestamp).encode(), body))
    return "v1," + base64.b64encode(hmac.digest(secret_key(secret), signed, "sha256")).decode()


class Caller:
    """Makes requests. Leave it as a context manager: its connections are closed then.

    Args:
        timeout_s: of one attempt, altogether.
        private: whether any address may be called.
        trust: whose certificates are good.
        keeps: whether a connection stays open for the next request. Only for who calls a single URL: connections are
            kept by address, and one that was made for another name of it has shown another certificate.
    """

    def __init__(self, timeout_s: float, *, private: bool, trust: ssl.SSLContext, keeps: bool = False) -> None:
        self._private = private
        self._client = httpx.AsyncClient(
            verify=trust,
            timeout=timeout_s,
            follow_redirects=False,
            trust_env=False,
            limits=httpx.Limits(max_connections=100, max_keepalive_connections=int(keeps)),
        )
        self._timeout_s = timeout_s

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def post(self, url: str, secret: str, ident: str, kind: str, body: bytes) -> Outcome:
        """One attempt; never raises for what the other side does."""
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
                    "webhook-signature": signature(secret, ident, now, body),
                    "millrace-event": kind,
                }
                extensions = {"sni_hostname": target.name}
                request = self._client.build_request(
                    "POST", target.url, content=body, headers=headers, extensions=extensions
                )
                response = await self._client.send(request, stream=True)
        except Forbidden as error:
            return Outcome(0, str(error), ms=_since(began))
        except TimeoutError:
            return Outcome(0, f"no answer within {self._timeout_s:g} s", ms=_since(began))
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
            return Outcome(0, f"{type(error).__name__}: {error}"[:300], ms=_since(began))
        await _finish(response)
        status = response.status_code
        taken = 200 <= status < 300
        return Outcome(status, "" if taken else f"it answered {status}", status == 410, _since(began))


async def _finish(response: httpx.Response) -> None:
    """Pass over what else the answer says, so that the connection serves again; where that is long, close it."""
    left = _REST_BYTES
    try:
        async with asyncio.timeout(_REST_S):
            async for some in response.aiter_raw():
                left -= len(some)
                if left < 0:
                    break
    except (httpx.HTTPError, TimeoutError):
        pass  # whether it was taken is known
    finally:
        await response.aclose()


def _since(began: float) -> int:
    return int((time.monotonic() - began) * 1000)

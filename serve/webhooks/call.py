"""One attempt: a signed POST (Standard Webhooks 1.0: ``webhook-id``, ``webhook-timestamp``, ``webhook-signature``)."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hmac
import secrets
import time
from dataclasses import dataclass

import httpx

from serve.webhooks.guard import Forbidden, target_of

_PREFIX = "whsec_"
_SECRET_BYTES = 32


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
    """Makes requests.

    Args:
        timeout_s: of one attempt, altogether.
        private: whether any address may be called.
    """

    def __init__(self, timeout_s: float, *, private: bool) -> None:
        self._private = private
        self._client = httpx.AsyncClient(
            timeout=timeout_s, follow_redirects=False, trust_env=False, limits=httpx.Limits(max_connections=100)
        )
        self._timeout_s = timeout_s

    async def close(self) -> None:
        """No more."""
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
                async with self._client.stream(
                    "POST", target.url, content=body, headers=headers, extensions=extensions
                ) as response:
                    status = response.status_code  # what the answer's body says is of no interest
        except Forbidden as error:
            return Outcome(0, str(error), ms=_since(began))
        except TimeoutError:
            return Outcome(0, f"no answer within {self._timeout_s:g} s", ms=_since(began))
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            return Outcome(0, f"{type(error).__name__}: {error}"[:300], ms=_since(began))
        taken = 200 <= status < 300
        return Outcome(status, "" if taken else f"it answered {status}", status == 410, _since(began))


def _since(began: float) -> int:
    return int((time.monotonic() - began) * 1000)

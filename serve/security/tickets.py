"""Tickets: what a browser shows instead of a key where it can send no header, because addresses end up in logs.

A ticket says which key it was made for, and for how long it is good; it is signed with the lake's key, so any server
process takes it. A process takes each ticket once.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import secrets
import struct
import time
from collections.abc import Callable

LIVES_S = 30
_HEAD = struct.Struct(">Q12s")  # good until, seconds since the epoch; nonce
_MAC_BYTES = 16
_MAX_CHARS = 400


class Tickets:
    """Makes and takes tickets.

    Args:
        key: secret of the lake, for tickets alone.
        clock: seconds since the epoch.
    """

    def __init__(self, key: bytes, clock: Callable[[], float] = time.time) -> None:
        self._key = key
        self._clock = clock
        self._taken: dict[bytes, float] = {}  # in the order in which they were taken; none for longer than it lives

    def __repr__(self) -> str:
        return "Tickets(…)"

    def new(self, key_id: str) -> str:
        """A ticket for whoever has this key."""
        body = _HEAD.pack(int(self._clock()) + LIVES_S, secrets.token_bytes(12)) + key_id.encode()
        return base64.urlsafe_b64encode(self._mac(body) + body).rstrip(b"=").decode()

    def take(self, text: str) -> str | None:
        """The id of the key that it was made for; None: it is none of ours, too old, or was shown before."""
        if len(text) > _MAX_CHARS:
            return None
        try:
            data = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
        except (binascii.Error, ValueError):
            return None
        mac, body = data[:_MAC_BYTES], data[_MAC_BYTES:]
        if len(body) < _HEAD.size or not hmac.compare_digest(mac, self._mac(body)):
            return None
        until, nonce = _HEAD.unpack_from(body)
        now = self._clock()
        for old in [each for each, end in self._taken.items() if end < now]:
            del self._taken[old]
        if until < now or nonce in self._taken:
            return None
        self._taken[nonce] = until
        return body[_HEAD.size :].decode()

    def _mac(self, body: bytes) -> bytes:
        return hmac.digest(self._key, body, "sha256")[:_MAC_BYTES]

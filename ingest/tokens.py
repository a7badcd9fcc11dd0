"""Acknowledgement tokens: the coordinates of an event, signed, so that nobody can ask for the events of others.

The key lies in the lake's state, readable by its owner only; every node of the lake uses the same, so that any node
can answer for any token. The signature is keyed BLAKE2b (RFC 7693, 2.9) of 128 bits: one pass, where HMAC needs two.
"""

from __future__ import annotations

import binascii
import hashlib
import hmac
import os
import secrets
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import orjson

from ingest.errors import BadToken
from lakehouse.contract.envelope import Envelope
from lakehouse.contract.errors import EnvironmentProblem

KEY_BYTES = 32
_MAC_BYTES = 16
_TO_URL = bytes.maketrans(b"+/", b"-_")
_FROM_URL = bytes.maketrans(b"-_", b"+/")
_MAX_CHARS = 4_096  # source, tenant and id are bounded, and so are tokens
_BLANKS = (b"", b"  ", b" ")  # by what is left over of the length


@dataclass(frozen=True, slots=True)
class Token:
    """What an acknowledgement token says.

    Attributes:
        source: name of the source.
        tenant: whose event it is.
        event_id: of the event.
        received_at: microseconds since the epoch.
    """

    source: str
    tenant: str
    event_id: str
    received_at: int


class Signer:
    """Makes and reads tokens.

    Args:
        key: secret of the lake, :data:`KEY_BYTES` bytes.
    """

    def __init__(self, key: bytes) -> None:
        self._keyed = hashlib.blake2b(key=key, digest_size=_MAC_BYTES)  # copied for each token

    @classmethod
    def of_lake(cls, state: Path) -> Signer:
        """The signer with the key in ``state/ack.key``, which is made where it is absent; any number of nodes at once.

        Raises:
            EnvironmentProblem: others may read the key, or it is not one.
        """
        return cls(_shared_key(state / "ack.key"))

    def __repr__(self) -> str:
        return "Signer(key=…)"

    def sign(self, envelope: Envelope) -> bytes:
        """The token of an event, safe in URLs."""
        return self.sign_all((envelope,))[2:-2]

    def sign_all(self, envelopes: Iterable[Envelope]) -> bytes:
        """The tokens of events, as a JSON array of texts."""
        tokens: list[bytes] = []
        dumps, base64, keyed = orjson.dumps, binascii.b2a_base64, self._keyed.copy
        for envelope in envelopes:
            body = dumps((envelope.source, envelope.tenant, envelope.event_id, envelope.received_at))
            body += _BLANKS[(_MAC_BYTES + len(body)) % 3]  # JSON may end with them, and base64 then needs no padding
            mac = keyed()
            mac.update(body)
            tokens.append(base64(mac.digest() + body, newline=False))
        return b'["%b"]' % b'","'.join(tokens).translate(_TO_URL)

    def open(self, text: str) -> Token:
        """What a token says.

        Raises:
            BadToken: it is none of this lake's.
        """
        if len(text) > _MAX_CHARS:
            raise BadToken(text)
        try:
            coded = text.encode("ascii").translate(_FROM_URL)
            data = binascii.a2b_base64(coded + b"=" * (-len(coded) % 4), strict_mode=True)
            mac, body = data[:_MAC_BYTES], data[_MAC_BYTES:]
            if not hmac.compare_digest(mac, self._mac(body)):
                raise BadToken(text)
            source, tenant, event_id, received_at = orjson.loads(body)
        except ValueError:  # of base64 and ASCII; what bears the signature is JSON of ours
            raise BadToken(text) from None
        return Token(source, tenant, event_id, received_at)

    def _mac(self, body: bytes) -> bytes:
        mac = self._keyed.copy()
        mac.update(body)
        return mac.digest()


def _shared_key(path: Path) -> bytes:
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
        handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(handle, "wb") as file:
            file.write(secrets.token_bytes(KEY_BYTES))
            file.flush()
            os.fsync(handle)
        with suppress(FileExistsError):  # another node was faster: its key is the lake's
            os.link(draft, path)
        draft.unlink()
    if path.stat().st_mode & 0o077:
        raise EnvironmentProblem(f"others may read the key {path}", f"chmod 600 {path}")
    key = path.read_bytes()
    if len(key) != KEY_BYTES:
        raise EnvironmentProblem(f"{path} is not a key of {KEY_BYTES} bytes", "Remove it; tokens given out end with it")
    return key

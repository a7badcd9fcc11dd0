"""A position: how far a subscriber is, as opaque, signed text that any server process on the lake can read."""

from __future__ import annotations

import base64
import binascii
import hmac
import re
import struct
import uuid
from dataclasses import dataclass
from functools import lru_cache

from lakehouse.contract.storage import LakePath, shared_secret
from serve.errors import RequestError

WHOLE = bytes(8)
"""The view of one who has the whole table."""

KEY_FILE = "position.key"
_FORMAT = struct.Struct(">BQI8s")
_UUID, _TEXT = 3, 4  # forms of the table id
_TOKEN = re.compile(r"[A-Za-z0-9_-]+")
_MAX_LENGTH = 300
_TAG_BYTES = 12  # of HMAC-SHA-256, truncated as RFC 2104, section 5 allows (not less than 80 bits)
_KEY_BYTES = 32
_WRITTEN_KEPT = 4_096


@dataclass(frozen=True, slots=True, order=True)
class Position:
    """Everything of the table up to ``version``, and the first ``ordinal`` messages of the next version.

    A commit that fits one message takes a subscriber from (id, V, 0) to (id, V + 1, 0); one that takes three messages
    goes by (id, V, 1) and (id, V, 2). Positions of one table and view compare in the order of delivery.
    """

    table_id: str  # id in the Delta metadata; a rebuilt table has another
    version: int
    ordinal: int = 0  # messages of the next version that were delivered already
    view: bytes = WHOLE  # 8 bytes that identify the view: rows held under one filter are no start for another

    def at(self, version: int, ordinal: int = 0) -> Position:
        return Position(self.table_id, version, ordinal, self.view)


class Seal:
    """Writes positions as signed text and reads them back, with a key that all server processes of a lake share.

    The signature prevents clients from making the server load versions that it never handed out, and tells a damaged
    position from an old one.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._signer = hmac.new(key, digestmod="sha256")
        # Cached: the next message starts from where the last one ended. Several threads use it.
        self._written = lru_cache(_WRITTEN_KEPT)(self._text)

    def __repr__(self) -> str:
        return "Seal(…)"

    def derived(self, purpose: bytes) -> bytes:
        """A secret for one purpose, shared by all server processes of the lake."""
        return hmac.digest(self._key, b"millrace " + purpose, "sha256")

    def token(self, position: Position) -> str:
        """Opaque text: URL-safe base64, unpadded, of form, version, ordinal, view, table id and signature."""
        return self._written(position)

    def parse(self, token: str) -> Position:
        """The position that :meth:`token` wrote. Raises RequestError for anything else, or for another lake's."""
        try:
            raw = self.opened(token)
        except ValueError as error:
            raise _no_position(token, str(error)) from None
        if len(raw) <= _FORMAT.size:
            raise _no_position(token, "it is too short")
        form, version, ordinal, view = _FORMAT.unpack_from(raw)
        return Position(_unpacked(token, form, raw[_FORMAT.size :]), version, ordinal, view)

    def sealed(self, raw: bytes) -> str:
        """Bytes and their signature in URL-safe base64, unpadded."""
        return base64.urlsafe_b64encode(raw + self._tag(raw)).rstrip(b"=").decode()

    def opened(self, token: str) -> bytes:
        """The bytes that :meth:`sealed` was given. Raises ValueError for anything else."""
        if not _TOKEN.fullmatch(token) or len(token) > _MAX_LENGTH:
            raise ValueError("it is not URL-safe base64 of a sensible length")
        try:
            signed = base64.b64decode(token + "=" * (-len(token) % 4), altchars=b"-_", validate=True)
        except binascii.Error:
            raise ValueError("it is not URL-safe base64") from None
        raw, tag = signed[:-_TAG_BYTES], signed[-_TAG_BYTES:]
        if not hmac.compare_digest(tag, self._tag(raw)):
            raise ValueError("its signature is not of this lake")
        return raw

    def _text(self, position: Position) -> str:
        form, ident = _packed(position.table_id)
        return self.sealed(_FORMAT.pack(form, position.version, position.ordinal, position.view) + ident)

    def _tag(self, raw: bytes) -> bytes:
        signer = self._signer.copy()  # half the cost of starting from the key
        signer.update(raw)
        return signer.digest()[:_TAG_BYTES]


def lake_seal(state: LakePath) -> Seal:
    """The seal of a lake; the first server process on it makes the key.

    Args:
        state: the lake's folder for everything that is not a table; the key in it is readable by its owner only.

    Raises:
        EnvironmentProblem: the key can be neither read nor made.
    """
    return Seal(shared_secret(state / KEY_FILE, _KEY_BYTES))


def _no_position(token: str, problem: str) -> RequestError:
    return RequestError(RequestError.BAD_REQUEST, "bad_position", f"{token[:80]!r} is not a position: {problem}")


@lru_cache(1_024)
def _packed(table_id: str) -> tuple[int, bytes]:
    try:  # the Delta protocol says GUID but does not enforce it
        ident = uuid.UUID(table_id)
    except ValueError:
        return _TEXT, table_id.encode()
    return (_UUID, ident.bytes) if str(ident) == table_id else (_TEXT, table_id.encode())


def _unpacked(token: str, form: int, ident: bytes) -> str:
    if form == _UUID and len(ident) == 16:
        return str(uuid.UUID(bytes=ident))
    if form == _TEXT:
        try:
            return ident.decode()
        except UnicodeDecodeError:
            pass
    raise _no_position(token, "its table id cannot be read")

"""A position: how far a subscriber is, as an opaque text that any server process on the same lake understands."""

from __future__ import annotations

import base64
import binascii
import re
import struct
import uuid
from dataclasses import dataclass

from serve.errors import PositionError

_FORMAT = struct.Struct(">BQI")
_UUID, _TEXT = 1, 2  # forms of the table id
_TOKEN = re.compile(r"[A-Za-z0-9_-]+")
_MAX_LENGTH = 200


@dataclass(frozen=True, slots=True, order=True)
class Position:
    """Everything of the table up to ``version``, and the first ``ordinal`` messages of the version after it.

    A commit whose change fits one message takes a subscriber from (id, V, 0) to (id, V + 1, 0); one that takes three
    goes by (id, V, 1) and (id, V, 2). Positions of one table compare in the order of delivery.

    Attributes:
        table_id: id in the Delta table's metadata; a rebuilt table has another.
        version: Delta version.
        ordinal: messages of the next version that were delivered already.
    """

    table_id: str
    version: int
    ordinal: int = 0

    def token(self) -> str:
        """The opaque text: URL-safe base64 without padding."""
        form, ident = _packed(self.table_id)
        return base64.urlsafe_b64encode(_FORMAT.pack(form, self.version, self.ordinal) + ident).rstrip(b"=").decode()

    @classmethod
    def parse(cls, token: str) -> Position:
        """The position that :meth:`token` wrote.

        Raises:
            PositionError: it is something else.
        """
        if not _TOKEN.fullmatch(token) or len(token) > _MAX_LENGTH:
            raise PositionError(token, "it is not URL-safe base64 of a sensible length")
        try:
            raw = base64.b64decode(token + "=" * (-len(token) % 4), altchars=b"-_", validate=True)
        except binascii.Error:
            raise PositionError(token, "it is not URL-safe base64") from None
        if len(raw) <= _FORMAT.size:
            raise PositionError(token, "it is too short")
        form, version, ordinal = _FORMAT.unpack_from(raw)
        return cls(_unpacked(token, form, raw[_FORMAT.size :]), version, ordinal)


def _packed(table_id: str) -> tuple[int, bytes]:
    try:  # the Delta protocol says GUID, and holds nobody to it
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
    raise PositionError(token, "its table id cannot be read")

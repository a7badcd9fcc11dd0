"""The event stream format of server-sent events, without I/O: bytes in, events out.

After the HTML standard (WHATWG, 9.2.6 "Interpreting an event stream"): a byte order mark at the start is passed over;
lines end with CR, LF or CRLF; a line that starts with a colon is a comment; ``data`` lines are joined by LF; an ``id``
stays in force until the next one and is ignored where it holds NUL; ``retry`` counts where it is all digits; an event
without ``data`` is none; what stands at the end without an empty line after it is dropped.

Data stays bytes: an event is kept as it came, also where it is not UTF-8, and the border judges it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_LINE_END = re.compile(rb"\r\n|\n|\r")
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class ServerSentEvent:
    """One event.

    Attributes:
        data: lines joined by LF.
        type: ``message`` where the stream names none.
        id: last event id, or empty.
        oversize: the data was longer than the bound, and is not here.
    """

    data: bytes
    type: str = "message"
    id: str = ""
    oversize: bool = False


class EventStreamParser:
    """Feeds on chunks of a stream.

    Args:
        last_id: last event id of the connection before, which stays in force.
        max_bytes: bound of an event's data and of a line.

    Attributes:
        retry_ms: the pause before a reconnect that the stream asked for, or None.
        last_id: the id in force after the last whole event.
    """

    def __init__(self, last_id: str = "", *, max_bytes: int = 16 * 1024 * 1024) -> None:
        self.retry_ms: int | None = None
        self.last_id = last_id
        self._max = max_bytes
        self._begun = False
        self._after_cr = False
        self._head = b""  # of the stream, while it may be a byte order mark
        self._rest: list[bytes] = []  # of a line
        self._rest_bytes = 0
        self._cut = False  # the line is too long: its end is passed over
        self._id = last_id
        self._type = b""
        self._data: list[bytes] = []
        self._data_bytes = 0
        self._oversize = False

    def feed(self, chunk: bytes) -> list[ServerSentEvent]:
        """The events that this chunk completes."""
        chunk = self._without_bom(chunk)
        if self._after_cr and chunk:
            self._after_cr = False
            chunk = chunk.removeprefix(b"\n")  # the LF of a CRLF that two chunks share
        found: list[ServerSentEvent] = []
        at = 0
        for end in _LINE_END.finditer(chunk):
            event = self._line(self._whole(chunk[at : end.start()]))
            if event is not None:
                found.append(event)
            at = end.end()
        if chunk.endswith(b"\r"):
            self._after_cr = True
        self._keep(chunk[at:])
        return found

    def _without_bom(self, chunk: bytes) -> bytes:
        if self._begun:
            return chunk
        chunk, self._head = self._head + chunk, b""
        if len(chunk) < len(_BOM) and _BOM.startswith(chunk):
            self._head = chunk
            return b""
        self._begun = True
        return chunk.removeprefix(_BOM)

    def _keep(self, piece: bytes) -> None:
        if self._rest_bytes + len(piece) > self._max:
            self._cut = True
            self._rest = self._rest or [piece[:6]]  # enough to tell which field it is
            return
        if piece:
            self._rest.append(piece)
            self._rest_bytes += len(piece)

    def _whole(self, piece: bytes) -> bytes:
        """The line that ends with this piece."""
        if not self._rest and not self._cut and len(piece) <= self._max:
            return piece
        self._keep(piece)
        line = b"".join(self._rest)
        if self._cut:
            self._oversize |= line.startswith(b"data")
            line = b":"
        self._rest, self._rest_bytes, self._cut = [], 0, False
        return line

    def _line(self, line: bytes) -> ServerSentEvent | None:
        if not line:
            return self._dispatch()
        field, colon, value = line.partition(b":")
        if colon and not field:
            return None
        value = value.removeprefix(b" ")
        if field == b"data":
            self._data_bytes += len(value) + 1
            if self._data_bytes > self._max + 1:
                self._oversize, self._data = True, []
            else:
                self._data.append(value)
        elif field == b"event":
            self._type = value
        elif field == b"id":
            if b"\0" not in value:
                self._id = value.decode("utf-8", "replace")
        elif field == b"retry" and value.isdigit():
            self.retry_ms = int(value[:12])
        return None

    def _dispatch(self) -> ServerSentEvent | None:
        self.last_id = self._id
        data, kind, oversize = self._data, self._type, self._oversize
        self._data, self._data_bytes, self._type, self._oversize = [], 0, b"", False
        if oversize:
            return ServerSentEvent(b"", kind.decode("utf-8", "replace") or "message", self.last_id, oversize=True)
        joined = b"\n".join(data)
        # The standard drops an event whose data buffer is empty: no data line at all. One empty line makes "\n".
        if not data:
            return None
        return ServerSentEvent(joined, kind.decode("utf-8", "replace") or "message", self.last_id)

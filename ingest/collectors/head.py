"""Heads of HTTP requests that are plain: strictly read, or not at all."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from ingest.collectors.door import presented_key

HEAD_END = b"\r\n\r\n"
MAX_HEAD_BYTES = 16_384
_BEGIN = b"POST /v1/"
_LINE = re.compile(rb"POST /v1/([A-Za-z0-9_]{1,63}) HTTP/1\.1")
_HEADER = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([\x21-\x7e](?:[\x20-\x7e\t]*[\x21-\x7e])?)?[ \t]*")
_PLAIN = frozenset(
    b"host user-agent accept accept-encoding accept-language content-type content-length authorization x-api-key "
    b"origin referer cache-control pragma traceparent x-request-id".split()
)
_KEEP_ALIVE = (b"keep-alive", b"")


@dataclass(frozen=True, slots=True)
class Head:
    """What the head of a plain request says.

    Attributes:
        source: from the path.
        kind: content type without parameters, in small letters.
        length: of the body.
        key: API key shown, or None.
    """

    source: str
    kind: str
    length: int
    key: str | None


@lru_cache(maxsize=4_096)
def parse_head(head: bytes) -> Head | None:
    """The head of a plain request (without the empty line), or None where it is anything else."""
    line, *lines = head.split(b"\r\n")
    target = _LINE.fullmatch(line)
    if target is None:
        return None
    found: dict[bytes, bytes] = {}
    for text in lines:
        match = _HEADER.fullmatch(text)
        if match is None:
            return None
        name, value = match[1].lower(), match[2] or b""
        if name in found:
            return None
        if name == b"connection":
            if value.lower() not in _KEEP_ALIVE:
                return None
        elif name not in _PLAIN:
            return None
        found[name] = value
    length = found.get(b"content-length", b"")
    if b"host" not in found or not length.isdigit() or len(length) > 10:
        return None
    kind = found.get(b"content-type", b"").decode("latin-1").partition(";")[0].strip().lower()
    keys = [key for name, value in found.items() if (key := presented_key(name, value)) is not None]
    return Head(target[1].decode(), kind, int(length), keys[-1] if keys else None)


def may_be_plain(buffer: bytearray, at: int) -> bool:
    """Whether the first bytes of a request that is not there in whole could be the beginning of a plain one."""
    return _BEGIN.startswith(bytes(buffer[at : at + len(_BEGIN)]))

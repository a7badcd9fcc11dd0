"""Parts of a JSON text as they stand there, byte for byte.

Reading a value and writing it anew changes it: a number keeps what a double holds of it, white space and escapes go. So
what is a part of a message but an event of its own is cut out. The text has been read as JSON before: here only what
opens and closes is looked for, a match of a regular expression each, and in C whatever stands in between.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import orjson

_STRING = rb'"(?:[^"\\]++|\\.)*+"'
_BRACKET = re.compile(rb'(?:[^"\[\]{}]++|' + _STRING + rb")*+([\[\]{}])", re.DOTALL)  # up to the next, and it
_TEXT = re.compile(_STRING, re.DOTALL)
_PLAIN = re.compile(rb"[^\s,\]}]++")  # a number, true, false, null
_GAP = re.compile(rb"[\s,:]*+")


def elements(text: bytes) -> Iterator[bytes]:
    """The elements of an array.

    Args:
        text: valid JSON, an array.
    """
    at = _gap(text, text.index(b"[") + 1)
    while text[at : at + 1] != b"]":
        end = _end(text, at)
        yield text[at:end]
        at = _gap(text, end)


def member(text: bytes, name: str) -> bytes:
    """The value of a name, of several the last, as parsers have it; ``null`` where there is none.

    Args:
        text: valid JSON, an object.
        name: of the member.
    """
    found, plain = b"null", orjson.dumps(name)
    at = _gap(text, text.index(b"{") + 1)
    while text[at : at + 1] != b"}":
        end = _end(text, at)
        key, at = text[at:end], _gap(text, end)
        end = _end(text, at)
        if key == plain or (b"\\" in key and orjson.loads(key) == name):
            found = text[at:end]
        at = _gap(text, end)
    return found


def _gap(text: bytes, at: int) -> int:
    """Where the next value, or the end of what it is in, begins."""
    match = _GAP.match(text, at)
    return match.end() if match is not None else at


def _end(text: bytes, at: int) -> int:
    """Where the value that begins here ends."""
    opens = text[at]
    if opens not in b"[{":
        match = (_TEXT if opens == ord('"') else _PLAIN).match(text, at)
        assert match is not None, "the text is valid JSON"
        return match.end()
    depth = 0
    for match in _BRACKET.finditer(text, at):
        depth += 1 if match[1] in b"[{" else -1
        if depth == 0:
            return match.end()
    raise AssertionError("the text is valid JSON")

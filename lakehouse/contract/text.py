"""Text and JSON of senders, in words; and names that ought to be known."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

JSON_NAMES: Mapping[type, str] = {
    list: "an array",
    str: "a string",
    int: "a number",
    float: "a number",
    bool: "a boolean",
    type(None): "null",
}


def nearest(word: str, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    """The known word that was probably meant; empty if none is near."""
    return next(iter(difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)), "")


def did_you_mean(word: str, known: Iterable[str], others: str = "There are") -> str:
    """The remedy for an unknown name: the nearest known one, or all of them after ``others``."""
    known = list(known)
    near = nearest(word, known)
    return f"Did you mean {near!r}?" if near else f"{others}: {', '.join(known) or 'none'}"


def is_utf8(text: bytes) -> bool:
    """Whether the bytes are UTF-8, as a text message of a WebSocket has to be (RFC 6455, section 8.1)."""
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True

"""Text and JSON of senders, in words."""

from __future__ import annotations

from collections.abc import Mapping

JSON_NAMES: Mapping[type, str] = {
    list: "an array",
    str: "a string",
    int: "a number",
    float: "a number",
    bool: "a boolean",
    type(None): "null",
}


def is_utf8(text: bytes) -> bool:
    """Whether the bytes are UTF-8, as a text message of a WebSocket has to be (RFC 6455, section 8.1)."""
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True

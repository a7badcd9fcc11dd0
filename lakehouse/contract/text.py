"""Bytes that ought to be text."""

from __future__ import annotations


def is_utf8(text: bytes) -> bool:
    """Whether the bytes are UTF-8, as a text message of a WebSocket has to be (RFC 6455, section 8.1)."""
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True

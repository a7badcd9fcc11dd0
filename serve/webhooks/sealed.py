"""Signing secrets as they are stored: encrypted if ``serve.webhook_key`` names a key file, else as they are.

Signatures need the secret itself, so a hash will not do. A key beside the database would protect only against theft of
the database alone; so the key file may be anywhere, on another disk or as a mounted secret. Each of its lines is a
Fernet key (AES-128-CBC with HMAC-SHA256): the first encrypts, all decrypt, so that a key can be replaced.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from lakehouse.contract.errors import ConfigError

SETTING = "serve.webhook_key"
_MARK = "fernet:"


class SecretSealer(Protocol):
    """Encrypts secrets for the store."""

    def seal(self, secret: str) -> str:
        """The form that is stored."""

    def open(self, kept: str) -> str:
        """The secret. Raises ConfigError if its key is missing."""

    def is_current(self, kept: str) -> bool:
        """Whether this is the form that would be stored now."""


class PlainSealer:
    """Stores secrets as they are."""

    def seal(self, secret: str) -> str:
        return secret

    def open(self, kept: str) -> str:
        if kept.startswith(_MARK):
            raise ConfigError(
                "webhooks' secrets are encrypted, and no file of keys is named",
                key=SETTING,
                remedy="Name the file that they were encrypted with",
            )
        return kept

    def is_current(self, kept: str) -> bool:
        return True


class EncryptedSealer:
    """Stores secrets encrypted with the first of some Fernet keys."""

    def __init__(self, keys: list[bytes]) -> None:
        from cryptography.fernet import Fernet, MultiFernet

        self._newest = Fernet(keys[0])
        self._all = MultiFernet([Fernet(key) for key in keys])

    def __repr__(self) -> str:
        return "EncryptedSealer(…)"

    def seal(self, secret: str) -> str:
        return _MARK + self._newest.encrypt(secret.encode()).decode()

    def open(self, kept: str) -> str:
        from cryptography.fernet import InvalidToken

        if not kept.startswith(_MARK):
            return kept  # stored before there was a key
        try:
            return self._all.decrypt(kept.removeprefix(_MARK).encode()).decode()
        except InvalidToken:
            raise ConfigError(
                "a webhook's secret was encrypted with another key", key=SETTING, remedy="Add that key as a line"
            ) from None

    def is_current(self, kept: str) -> bool:
        from cryptography.fernet import InvalidToken

        if not kept.startswith(_MARK):
            return False
        try:
            self._newest.decrypt(kept.removeprefix(_MARK).encode())
        except InvalidToken:
            return False
        return True


def sealer_of(path: str) -> SecretSealer:
    """The sealer for a setting. If the key file is absent it is made, with a new key.

    Args:
        path: the key file; empty: secrets are stored as they are.

    Raises:
        ConfigError: the file cannot be used, or the library is not installed.
    """
    if not path:
        return PlainSealer()
    try:
        from cryptography.fernet import Fernet
    except ImportError:
        remedy = "pip install millrace[secure], or leave the setting empty"
        raise ConfigError("the library cryptography is not installed", key=SETTING, remedy=remedy) from None
    file = Path(path)
    try:
        with suppress(FileExistsError):  # another process made it
            _make(file, Fernet.generate_key())
        if file.stat().st_mode & 0o077:
            raise ConfigError(f"others may read {path}", key=SETTING, remedy=f"chmod 600 {path}")
        return EncryptedSealer(file.read_bytes().split())
    except OSError as error:
        raise ConfigError(f"{path} cannot be used: {error.strerror}", key=SETTING) from None
    except (ValueError, IndexError):
        remedy = "Each line is 32 bytes in URL-safe base64; remove the file and a key is made"
        raise ConfigError(f"{path} holds no Fernet keys", key=SETTING, remedy=remedy) from None


def _make(file: Path, key: bytes) -> None:
    """Write a new file, whole or not at all. Raises FileExistsError."""
    if file.exists():
        return
    draft = file.with_name(f"{file.name}.{os.getpid()}.new")
    handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(handle, "wb") as out:
            out.write(key + b"\n")
            out.flush()
            os.fsync(handle)
        os.link(draft, file)
    finally:
        draft.unlink()

"""Checks that several parts of the pipeline model share."""

from __future__ import annotations

from lakehouse.contract.errors import ConfigError
from lakehouse.contract.tomlfile import duration_ms


def one_of(key: str, value: str, allowed: tuple[str, ...]) -> None:
    """Refuse a value that is not among the allowed ones."""
    if value not in allowed:
        raise ConfigError(f"{value!r} is not known", key=key, remedy=f"Use one of: {', '.join(allowed)}")


def duration(key: str, value: str) -> None:
    """Refuse a text that is not a duration."""
    try:
        duration_ms(value)
    except ValueError as error:
        raise ConfigError(str(error), key=key) from None

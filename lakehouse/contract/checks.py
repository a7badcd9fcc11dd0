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


def between(key: str, value: int, low: int, high: int) -> None:
    """Refuse a number outside of ``low`` to ``high``."""
    if not low <= value <= high:
        raise ConfigError(f"must be between {low} and {high}", key=key)


def at_least(key: str, value: int, low: int) -> None:
    """Refuse a number below ``low``."""
    if value < low:
        raise ConfigError(f"must be at least {low}", key=key)

"""Alerts of the pipeline model: a condition over a product's rows, with hysteresis."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lakehouse.contract.errors import ConfigError
from lakehouse.contract.tomlfile import duration_ms


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a condition must hold before it counts: a number of versions, or a duration of the product's own time.

    Attributes:
        versions: versions of the product in a row, the first included; 1: at once.
        ms: milliseconds by the product's clock, see :attr:`Alert.time`.
    """

    versions: int = 1
    ms: int = 0

    @classmethod
    def read(cls, key: str, value: object) -> Patience:
        """From TOML: a whole number of versions, or a duration such as ``"30 seconds"``.

        Raises:
            ConfigError: it is neither.
        """
        if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= 1_000_000:
            return cls(versions=value)
        if isinstance(value, str):
            try:
                return cls(ms=duration_ms(value))
            except ValueError as error:
                raise ConfigError(str(error), key=key) from None
        raise ConfigError(f"{value!r} is no patience", key=key, remedy='Give versions (3) or a duration ("30 seconds")')

    def over(self, versions: int, ms: int) -> bool:
        """Whether a condition that has held for so long counts."""
        return versions >= self.versions and ms >= self.ms


@dataclass(frozen=True, slots=True)
class Alert:
    """A condition over a product: one row in ``alerts`` for each key, pushed when it is raised and when it is cleared.

    Attributes:
        product: whose rows are looked at, each version of it: a product or a view.
        when: SQL condition over the product's columns that raises the alert.
        clear: SQL condition that clears it; empty: ``when`` is not true. A row that is gone clears it too.
        hold_raise: ``for`` in TOML: how long ``when`` must hold (versions or a duration).
        hold_clear: ``hold`` in TOML: how long ``clear`` must hold.
        by: columns that tell one alert from another; empty: the product's key. Where several rows have one key, the
            alert is raised when any of them meets ``when``, and cleared when all of them meet ``clear``.
        value: SQL expression of a number that the alert carries: the largest of the rows that meet ``when``, else of
            all rows of the key.
        time: timestamp column whose newest value is the clock for durations; empty: when the newest event that the
            version holds came in.
        name: key of the table in the TOML file.
    """

    product: str
    when: str
    clear: str = ""
    hold_raise: Any = field(default=1, metadata={"key": "for"})
    hold_clear: Any = field(default=1, metadata={"key": "hold"})
    by: tuple[str, ...] = ()
    value: str = ""
    time: str = ""
    name: str = ""

    def __post_init__(self) -> None:
        if not self.when.strip():
            raise ConfigError("an alert needs a condition", key="when", remedy="Write e.g. when = 'count > 100'")
        Patience.read("for", self.hold_raise)
        Patience.read("hold", self.hold_clear)

    @property
    def patience(self) -> tuple[Patience, Patience]:
        """To raise, and to clear."""
        return Patience.read("for", self.hold_raise), Patience.read("hold", self.hold_clear)

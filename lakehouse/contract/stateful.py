"""Keys of products that remember: sessions, windows by count, drift and joins; and how a product's rows come and go."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from lakehouse.contract.checks import at_least, duration, one_of
from lakehouse.contract.errors import ConfigError
from lakehouse.contract.tomlfile import duration_ms

STATEFUL = ("sessions", "count_window", "drift", "join")
"""Operators whose rows are a state that later events go on from."""

DETECTORS: dict[str, dict[str, float]] = {
    "adwin": {"delta": 0.002, "clock": 32, "max_buckets": 5, "min_window_length": 5, "grace_period": 10},
    "page_hinkley": {"min_instances": 30, "delta": 0.005, "threshold": 50.0, "alpha": 0.9999},
    "kswin": {"alpha": 0.005, "window_size": 100, "stat_size": 30, "seed": 1},
}
"""Detectors of drift, and their parameters with the values they have by default."""

TAKEN_BY: dict[str, tuple[str, ...]] = {
    "gap": ("sessions",),
    "size": ("count_window",),
    "aggregates": ("sessions", "count_window"),
    "value": ("drift",),
    "detector": ("drift",),
    "parameters": ("drift",),
    "right": ("join",),
    "on": ("join",),
    "within": ("join",),
    "kind": ("join",),
    "match": ("join",),
}
"""Key of the TOML table to the operators that it says something to."""

_COLUMN = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,62}")


@dataclass(frozen=True, slots=True, kw_only=True)
class StatefulKeys:
    """What a product may say beside :class:`~lakehouse.contract.product.Product`'s own keys.

    Attributes:
        gap: a session ends when nothing came for so long (``sessions``).
        size: events of a window (``count_window``).
        aggregates: column to Spark SQL aggregate over the rows of a session or window; ``count``, ``count_if``,
            ``sum``, ``min`` and ``max`` can be kept up to date.
        value: the numeric column that is watched (``drift``).
        detector: one of :data:`DETECTORS`.
        parameters: of the detector; what is left out has the detector's default.
        right: the other source (``join``); ``source`` is the left one.
        on: columns that must be equal, ``name`` or ``left_name = right_name``.
        within: the right event happens at the left one's ``event_time`` or up to so long after it.
        kind: ``inner``, or ``left_outer``: a left event that has no right one stands alone until one comes.
        match: ``all`` pairs, or ``first``: of the right events that fit a left one the earliest alone.
        trigger: at most one commit in so long; empty: a commit whenever there is something new.
        retention: windows that began longer ago, counted back from the newest event, and sessions, windows by count and
            alarms that ended longer ago are removed, and not added to any more; empty: never.
    """

    gap: str = "30 minutes"
    size: int = 100
    aggregates: dict[str, str] = field(default_factory=dict, hash=False)
    value: str = ""
    detector: str = "adwin"
    parameters: dict[str, float] = field(default_factory=dict, hash=False)
    right: str = ""
    on: tuple[str, ...] = ()
    within: str = "10 minutes"
    kind: str = "inner"
    match: str = "all"
    trigger: str = ""
    retention: str = ""

    @property
    def gap_ms(self) -> int:
        """The gap in milliseconds."""
        return duration_ms(self.gap)

    @property
    def within_ms(self) -> int:
        """The join's bound in milliseconds."""
        return duration_ms(self.within)

    @property
    def trigger_ms(self) -> int:
        """The pause between two commits in milliseconds; 0: none."""
        return duration_ms(self.trigger) if self.trigger else 0

    @property
    def retention_ms(self) -> int | None:
        """The retention in milliseconds, or None."""
        return duration_ms(self.retention) if self.retention else None

    @property
    def columns_on(self) -> tuple[tuple[str, str], ...]:
        """Pairs of left and right column that must be equal."""
        return tuple(
            (left.strip(), right.strip() or left.strip())
            for left, _, right in (text.partition("=") for text in self.on)
        )

    def check_state(self, operator: str, storage: str) -> None:
        """Refuse keys that contradict each other.

        Raises:
            ConfigError: which, and what to write instead.
        """
        for key in ("gap", "within", "trigger", "retention"):
            text = getattr(self, key)
            if text:
                duration(key, text)
                at_least(key, duration_ms(text), 1)
        at_least("size", self.size, 1)
        one_of("detector", self.detector, tuple(DETECTORS))
        one_of("kind", self.kind, ("inner", "left_outer"))
        one_of("match", self.match, ("all", "first"))
        if operator in ("sessions", "count_window", "drift") and storage != "upsert":
            raise ConfigError(f"{operator} keeps no partial rows", key="storage", remedy="Leave it out")
        if operator in ("sessions", "count_window") and not self.aggregates:
            raise ConfigError(
                f"{operator} needs what to keep", key="aggregates", remedy="Add aggregates = { n = 'count(*)' }"
            )
        if operator == "drift":
            self._check_drift()
        if operator == "join":
            self._check_join()
        for name in self.aggregates:
            if not _COLUMN.fullmatch(name):
                raise ConfigError(f"{name!r} is no column name", key="aggregates", remedy="Use [A-Za-z_][A-Za-z0-9_]*")

    def _check_drift(self) -> None:
        if not self.value:
            raise ConfigError("drift needs the column it watches", key="value", remedy="Add value = '…'")
        known = DETECTORS[self.detector]
        for name in self.parameters:
            if name not in known:
                raise ConfigError(
                    f"{self.detector} has no parameter {name!r}",
                    key="parameters",
                    remedy=f"Parameters: {', '.join(known)}",
                )

    def _check_join(self) -> None:
        if not self.right:
            raise ConfigError("a join needs its other source", key="right", remedy="Add right = '…'")
        if not self.on:
            raise ConfigError("a join needs the columns that must be equal", key="on", remedy="Add on = ['…']")
        for left, right in self.columns_on:
            for column in (left, right):
                if not _COLUMN.fullmatch(column):
                    raise ConfigError(
                        f"{column!r} is no column name", key="on", remedy="Write 'name' or 'left_name = right_name'"
                    )

"""Load shedding in the pipeline model: which events of a source may be left out when there are too many."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from lakehouse.contract.checks import duration, one_of
from lakehouse.contract.errors import ConfigError
from lakehouse.contract.tomlfile import duration_ms

MODES = ("random", "semantic")
_TEST = re.compile(r"\s*([A-Za-z_][\w.]*)\s*(?:(=|!=|<=|>=|<|>|in)\s*(.+?)\s*)?", re.DOTALL)
_COMPARE: Mapping[str, Callable[[Any, Any], bool]] = {
    "=": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
    "in": lambda a, b: a in b,
}


@dataclass(frozen=True, slots=True)
class KeepTest:
    """A test of one field of the payload, such as ``amount >= 100``, ``kind in ["buy", "pay"]`` or ``member.vip``.

    Attributes:
        path: of the field; dots descend into objects.
        operator: ``=``, ``!=``, ``<``, ``<=``, ``>``, ``>=`` or ``in``; empty: the field is there and neither null,
            false, 0 nor empty.
        value: what it is compared with.
    """

    path: tuple[str, ...]
    operator: str = ""
    value: Any = None

    @classmethod
    def read(cls, text: str) -> KeepTest:
        """From TOML: ``PATH``, or ``PATH OPERATOR VALUE`` with a JSON value (text in single quotes is taken too).

        Raises:
            ValueError: it is neither.
        """
        match = _TEST.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is no test of a field")
        path = tuple(match[1].split("."))
        if not match[2]:
            return cls(path)
        value = match[3]
        if len(value) >= 2 and value[0] == value[-1] == "'":
            value = json.dumps(value[1:-1])
        try:
            found = json.loads(value)
        except ValueError:
            raise ValueError(f"{match[3]} is no JSON value") from None
        if (match[2] == "in") != isinstance(found, list) or isinstance(found, dict):
            raise ValueError(f"{match[2]} does not go with {match[3]}")
        return cls(path, match[2], found)

    def holds(self, payload: Mapping[str, Any]) -> bool:
        """Whether a parsed payload passes; a field that is absent, or of another kind, does not."""
        value: Any = payload
        for step in self.path:
            value = value.get(step) if isinstance(value, Mapping) else None
        if not self.operator:
            return bool(value)
        if value is None:
            return False
        try:
            return _COMPARE[self.operator](value, self.value)
        except TypeError:
            return False


@dataclass(frozen=True)
class ShedSpec:
    """``[sources.NAME.shed]``: at least one of ``on_events``, ``on_bytes`` and ``on_age`` switches it on.

    Attributes:
        mode: ``random`` (any event may go) or ``semantic`` (those that pass a test of ``keep`` never go).
        share: of the events that may go, the part that does while it is on.
        keep: tests of the payload's fields, for ``semantic``.
        on_events: on when so many of the source's events wait for Kafka in the message log; 0: never.
        on_bytes: on when the node's message log is this large; 0: never.
        on_age: on when the node's oldest event that Kafka has not acknowledged came in so long ago; empty: never.
        off: off again when each of these is below this part of what switched it on …
        hold: … for so long.
    """

    mode: str = "random"
    share: float = 0.9
    keep: tuple[str, ...] = ()
    on_events: int = 0
    on_bytes: int = 0
    on_age: str = ""
    off: float = 0.5
    hold: str = "2 seconds"

    def __post_init__(self) -> None:
        one_of("mode", self.mode, MODES)
        if not 0 < self.share < 1:
            raise ConfigError("must be more than 0 and less than 1", key="share", remedy="0.9 leaves one in ten")
        if not 0 <= self.off < 1:
            raise ConfigError("must be from 0 to below 1", key="off")
        if bool(self.keep) != (self.mode == "semantic"):
            raise ConfigError(
                "keep goes with mode = 'semantic'",
                key="keep",
                remedy="Name what is always kept, or use mode = 'random'",
            )
        for index, text in enumerate(self.keep):
            try:
                KeepTest.read(text)
            except ValueError as error:
                remedy = 'Write e.g. amount >= 100, or kind in ["buy"]'
                raise ConfigError(str(error), key=f"keep[{index}]", remedy=remedy) from None
        duration("hold", self.hold)
        if self.on_age:
            duration("on_age", self.on_age)
        if self.on_events < 0 or self.on_bytes < 0:
            raise ConfigError("must not be negative", key="on_events" if self.on_events < 0 else "on_bytes")
        if not (self.on_events or self.on_bytes or self.on_age):
            raise ConfigError("nothing switches it on", key="on_events", remedy="Set on_events, on_bytes or on_age")

    @cached_property
    def tests(self) -> tuple[KeepTest, ...]:
        """The tests of ``keep``."""
        return tuple(KeepTest.read(text) for text in self.keep)

    @property
    def on_age_ms(self) -> int:
        """``on_age`` in milliseconds; 0: never."""
        return duration_ms(self.on_age) if self.on_age else 0

    @property
    def hold_ms(self) -> int:
        """``hold`` in milliseconds."""
        return duration_ms(self.hold)

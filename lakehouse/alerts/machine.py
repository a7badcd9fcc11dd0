"""When an alert is raised and cleared: hysteresis over the versions of a product; no I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lakehouse.contract.alerts import Patience


@dataclass(frozen=True, slots=True)
class Seen:
    """What one version says of one key.

    Attributes:
        when: any of its rows meets the condition.
        clear: all of them meet the condition that clears.
        value: the number to tell.
    """

    when: bool
    clear: bool
    value: float | None = None


GONE = Seen(when=False, clear=True)


@dataclass(frozen=True, slots=True)
class Streak:
    """A condition that holds and does not count yet.

    Attributes:
        versions: for so many versions in a row.
        since: since when, ms since the epoch by the product's clock.
    """

    versions: int
    since: int


@dataclass(frozen=True, slots=True)
class Turn:
    """A key whose alert was raised or cleared at a version."""

    key: str
    raised: bool
    since: int
    value: float | None


@dataclass
class Machine:
    """One alert's memory; no I/O.

    Attributes:
        raised: keys whose alert stands.
        streaks: keys on their way to the other state.
    """

    to_raise: Patience
    to_clear: Patience
    raised: set[str] = field(default_factory=set)
    streaks: dict[str, Streak] = field(default_factory=dict)

    def look(self, found: Mapping[str, Seen], clock: int) -> list[Turn]:
        """Take in a version; returns what there is to say, in order of the keys.

        Args:
            found: every key that the version has; of a key that is not in it any more all rows are gone.
            clock: ms since the epoch by the product's clock.
        """
        turns = []
        for key in sorted(found.keys() | self.raised | self.streaks.keys()):
            seen = found.get(key, GONE)
            up = key not in self.raised
            if not (seen.when if up else seen.clear):
                self.streaks.pop(key, None)
                continue
            before = self.streaks.get(key)
            streak = Streak(before.versions + 1, before.since) if before else Streak(1, clock)
            patience = self.to_raise if up else self.to_clear
            if not patience.over(streak.versions, clock - streak.since):
                self.streaks[key] = streak
                continue
            self.streaks.pop(key, None)
            (self.raised.add if up else self.raised.discard)(key)
            turns.append(Turn(key, up, streak.since, seen.value))
        return turns


def joined(one: Seen | None, other: Seen) -> Seen:
    """What several rows of one key say together: raised by any, cleared by all."""
    if one is None:
        return other
    if one.when != other.when:
        value = one.value if one.when else other.value
    else:
        value = max((v for v in (one.value, other.value) if v is not None), default=None)
    return Seen(one.when or other.when, one.clear and other.clear, value)

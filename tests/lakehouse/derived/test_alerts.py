"""The memory of an alert, without tables: those are in queries/test_derive.py."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lakehouse.contract.errors import ConfigError
from lakehouse.contract.pipeline.folder import Alert, Patience
from lakehouse.derived.alerts import AlertMachine, KeyVerdict

RAISE, BETWEEN, CLEAR = KeyVerdict(True, False), KeyVerdict(False, False), KeyVerdict(False, True)
BOTH = KeyVerdict(True, True)
LOOKS = st.lists(st.dictionaries(st.sampled_from("ab"), st.sampled_from([RAISE, BETWEEN, CLEAR, BOTH])), max_size=25)


def turns(machine: AlertMachine, looks: list[dict[str, KeyVerdict]]) -> list[tuple[int, str, bool]]:
    return [(n, turn.key, turn.raised) for n, found in enumerate(looks) for turn in machine.look(found, n * 1000)]


def expected(looks: list[dict[str, KeyVerdict]], up: int, down: int) -> list[tuple[int, str, bool]]:
    """By looking back at each version over the whole past of each key."""
    found: list[tuple[int, str, bool]] = []
    raised: dict[str, bool] = {}
    since: dict[str, int] = {}  # the version of the last turn
    for n in range(len(looks)):
        for key in "ab":
            state, need = raised.get(key, False), down if raised.get(key, False) else up
            past = [looks[i].get(key, CLEAR) for i in range(since.get(key, -1) + 1, n + 1)][-need:]
            cleared = range(since[key], n) if not state and key in since else ()
            if cleared and all(looks[i].get(key, CLEAR).when for i in cleared):
                continue  # the condition has held ever since it was cleared
            if len(past) == need and all(seen.clear if state else seen.when for seen in past):
                raised[key], since[key] = not state, n
                found.append((n, key, not state))
    return found


@settings(max_examples=30)
@given(LOOKS, st.integers(1, 4), st.integers(1, 4))
def test_it_is_said_when_a_condition_has_held_so_many_versions_in_a_row(
    looks: list[dict[str, KeyVerdict]], up: int, down: int
) -> None:
    assert turns(AlertMachine(Patience(up), Patience(down)), looks) == expected(looks, up, down)


@settings(max_examples=30)
@given(LOOKS, st.integers(0, 5))
def test_a_duration_of_so_many_seconds_is_so_many_versions_and_one_at_one_a_second(
    looks: list[dict[str, KeyVerdict]], seconds: int
) -> None:
    by_time = AlertMachine(Patience(ms=1000 * seconds), Patience(ms=1000 * seconds))
    by_versions = AlertMachine(Patience(seconds + 1), Patience(seconds + 1))
    assert turns(by_time, looks) == turns(by_versions, looks)


@settings(max_examples=30)
@given(LOOKS, st.integers(1, 4), st.integers(0, 24))
def test_what_it_knows_is_all_that_a_restart_needs(looks: list[dict[str, KeyVerdict]], patience: int, cut: int) -> None:
    whole = AlertMachine(Patience(patience), Patience(patience))
    said = [whole.look(found, n) for n, found in enumerate(looks)]
    first = AlertMachine(Patience(patience), Patience(patience))
    again = [first.look(found, n) for n, found in enumerate(looks[:cut])]
    known = set(first.raised), dict(first.streaks), set(first.spent)
    second = AlertMachine(first.to_raise, first.to_clear, *known)
    again += [second.look(found, n + len(looks[:cut])) for n, found in enumerate(looks[cut:])]
    assert again == said


def test_conditions_that_hold_together_do_not_flap() -> None:
    machine = AlertMachine(Patience(), Patience())
    looks = [{"a": seen} for seen in (BOTH, BOTH, BOTH, RAISE, CLEAR, BOTH, RAISE)]
    assert turns(machine, looks) == [(0, "a", True), (1, "a", False), (5, "a", True)]


@pytest.mark.parametrize(
    ("when", "clear", "refused"),
    [
        ("x > 3150", "x > 3170", True),
        ("x > 3150", "(x <= 3151.5)", True),
        ("x > 10", "x < 11", False),  # of integers
        ("x >= 10", "x < 11", True),
        ("x > 10", "x <= 10", False),
        ("x >= 10", "10 >= x", True),
        ("-5 > x", "x > -3", False),
        ("x < -5", "-8 > x", True),
        ("x = 1", "x = 2", False),
        ("abs(x) > 3", "abs(x) > 4", True),
        ("x > 3", "y > 3", False),
        ("x > 3", "x > 4 AND y", False),  # not plain: it does not flap all the same
    ],
)
def test_pairs_that_make_no_sense_are_refused(when: str, clear: str, refused: bool) -> None:
    with pytest.raises(ConfigError, match="can be true together") if refused else nullcontext():
        Alert(product="p", when=when, clear=clear)


def test_keys_that_say_nothing_take_no_room() -> None:
    machine = AlertMachine(Patience(2), Patience(1))
    machine.look({str(n): CLEAR if n % 2 else RAISE for n in range(100)}, 0)
    assert len(machine.streaks) == 50
    machine.look({}, 0)
    assert (machine.raised, machine.streaks) == (set(), {})

"""The memory of an alert, without tables: those are in queries/test_derive.py."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from lakehouse.contract.pipeline.folder import Patience
from lakehouse.derived.alerts import AlertMachine, KeyVerdict

RAISE, BETWEEN, CLEAR = KeyVerdict(True, False), KeyVerdict(False, False), KeyVerdict(False, True)
LOOKS = st.lists(st.dictionaries(st.sampled_from("ab"), st.sampled_from([RAISE, BETWEEN, CLEAR])), max_size=25)


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
    second = AlertMachine(first.to_raise, first.to_clear, set(first.raised), dict(first.streaks))
    again += [second.look(found, n + len(looks[:cut])) for n, found in enumerate(looks[cut:])]
    assert again == said


def test_keys_that_say_nothing_take_no_room() -> None:
    machine = AlertMachine(Patience(2), Patience(1))
    machine.look({str(n): CLEAR if n % 2 else RAISE for n in range(100)}, 0)
    assert len(machine.streaks) == 50
    machine.look({}, 0)
    assert (machine.raised, machine.streaks) == (set(), {})

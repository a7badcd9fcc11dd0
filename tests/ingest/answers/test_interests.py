"""Who wants what, without I/O."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from ingest.answers.interests import Interests, Key
from ingest.answers.tables import TenantRows

PARTS = [TenantRows("p"), TenantRows("p", (("tenant", "acme"),))]
KEYS: list[Key] = [("a",), ("b",), ("c",)]


class Model(RuleBasedStateMachine):
    """Interests against a plain model of them."""

    def __init__(self) -> None:
        super().__init__()
        self.interests: Interests[str] = Interests()
        self.wanted: dict[tuple[str, TenantRows], set[Key]] = {}
        self.states: dict[tuple[TenantRows, Key], bytes] = {}
        self.version = 0

    @rule(who=st.sampled_from("xyz"), product=st.sampled_from(PARTS), keys=st.sets(st.sampled_from(KEYS)))
    def want(self, who: str, product: TenantRows, keys: set[Key]) -> None:
        new = self.interests.want(who, product, keys)
        assert new == keys - self.wanted.get((who, product), set())
        self.wanted[who, product] = keys
        self._forget()

    @rule(who=st.sampled_from("xyz"))
    def gone(self, who: str) -> None:
        self.interests.gone(who)
        self.wanted = {place: keys for place, keys in self.wanted.items() if place[0] != who}
        self._forget()

    @rule(
        product=st.sampled_from(PARTS), rows=st.dictionaries(st.sampled_from(KEYS), st.sampled_from([b"[1]", b"[2]"]))
    )
    def updated(self, product: TenantRows, rows: dict[Key, bytes]) -> None:
        self.version += 1
        told = self.interests.updated(product, self.version, rows)
        expected = {
            who: {k for k in rows if k in keys and self.states.get((product, k)) != rows[k]}
            for (who, name), keys in self.wanted.items()
            if name == product
        }
        assert {who: set(keys) for who, keys in told.items()} == {who: keys for who, keys in expected.items() if keys}
        wanted = self.interests.wanted(product)
        self.states |= {(product, key): body for key, body in rows.items() if key in wanted}

    def _forget(self) -> None:
        alive = {(product, key) for (_, product), keys in self.wanted.items() for key in keys}
        self.states = {place: body for place, body in self.states.items() if place in alive}

    @invariant()
    def agrees(self) -> None:
        for product in PARTS:
            wanted = {key for (_, name), keys in self.wanted.items() if name == product for key in keys}
            assert self.interests.wanted(product) == wanted
            for key in KEYS:
                state = self.interests.state(product, key)
                assert (None if state is None else state.rows) == self.states.get((product, key))
        for who in "xyz":
            count = sum(len(keys) for (name, _), keys in self.wanted.items() if name == who)
            assert self.interests.count(who) == count


TestInterests = Model.TestCase
TestInterests.settings = settings(max_examples=20, stateful_step_count=20, deadline=None)


def test_nothing_is_left_of_those_who_have_gone() -> None:
    interests: Interests[str] = Interests()
    interests.want("x", "p", KEYS)
    interests.updated("p", 1, dict.fromkeys(KEYS, b"[]"))
    interests.gone("x")
    assert not interests._wanted
    assert not interests._by

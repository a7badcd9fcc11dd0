"""Rates, connections and keys, with a clock in the test's hand."""

from __future__ import annotations

import asyncio
import stat
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from ingest.answers import stream
from ingest.border import access
from ingest.border.access import (
    ANONYMOUS,
    ApiKey,
    SenderGate,
    TokenBucket,
    keys_path,
)
from ingest.errors import RequestRefused
from lakehouse.contract.access import RELOAD_S, KeyFile, KeyRing
from lakehouse.contract.errors import ConfigError
from lakehouse.contract.pipeline import Source
from tests.ingest.conftest import pipeline_of, settings_of, unready_node


def source(name: str = "clicks", **options: int) -> Source:
    return Source(topic="t", schema="id BIGINT", event_time="received_at", name=name, **options)  # type: ignore[arg-type]


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@settings(max_examples=30)
@given(st.integers(1, 1000), st.lists(st.tuples(st.floats(0, 3), st.integers(1, 300)), min_size=1, max_size=40))
def test_a_bucket_never_lets_more_through_than_its_rate(rate: int, tries: list[tuple[float, int]]) -> None:
    now, through = 0.0, 0
    bucket = TokenBucket(rate, now)
    largest = max(count for _, count in tries)
    for pause, count in tries:
        now += pause
        wait = bucket.take(count, now)
        assert wait >= 0
        if not wait:
            through += count
        assert through <= rate + rate * now + largest, "the rate, one second's burst, and one batch of debt"


def test_a_batch_larger_than_a_second_passes_and_leaves_a_debt() -> None:
    clock = Clock()
    gate = SenderGate(clock=clock)
    slow = source(max_rate=10)
    gate.spend(slow, ANONYMOUS, 50)
    with pytest.raises(RequestRefused) as refused:
        gate.spend(slow, ANONYMOUS, 1)
    assert (refused.value.status, refused.value.code, refused.value.retry_after) == (429, "too-fast", 4)
    clock.now += 4.2
    gate.spend(slow, ANONYMOUS, 1)
    gate.spend(source("others", max_rate=10), ANONYMOUS, 1)
    for _ in range(1000):
        gate.spend(source("free"), ANONYMOUS, 100)


def test_a_key_has_a_rate_of_its_own() -> None:
    gate = SenderGate(clock=Clock())
    sender = ApiKey("0" * 64, id="a", rate=5)
    for _ in range(6):
        gate.spend(source(), ApiKey("0" * 64, id="b"), 1)
    gate.spend(source(), sender, 5)
    with pytest.raises(RequestRefused, match="this key takes 5 events a second"):
        gate.spend(source(), sender, 1)


def test_what_one_allowance_refuses_is_not_taken_from_the_other() -> None:
    gate = SenderGate(clock=Clock())
    shared = source(max_rate=10)
    greedy = ApiKey("0" * 64, id="a", rate=1)
    gate.spend(shared, greedy, 1)
    for _ in range(50):
        with pytest.raises(RequestRefused, match="this key"):
            gate.spend(shared, greedy, 1)
    gate.spend(shared, ANONYMOUS, 9)
    with pytest.raises(RequestRefused, match="source 'clicks'"):
        gate.spend(shared, ApiKey("0" * 64, id="b", rate=1), 1)


def test_connections_are_counted_once_and_given_back() -> None:
    gate = SenderGate(max_connections=3)
    narrow = source(max_connections=2)
    held = []
    for _ in range(2):
        assert gate.connect()
        mine = gate.hold(narrow, ANONYMOUS, frozenset())
        assert gate.hold(narrow, ANONYMOUS, mine) is mine
        held.append(mine)
    assert gate.connect() and not gate.connect()
    with pytest.raises(RequestRefused, match="no more than 2 connections") as refused:
        gate.hold(narrow, ANONYMOUS, frozenset())
    assert refused.value.status == 429
    gate.hold(source("others"), ANONYMOUS, frozenset())
    gate.disconnect(held.pop())
    gate.hold(narrow, ANONYMOUS, frozenset())
    assert gate.connections == 2


def test_keys_are_asked_for_where_there_are_any(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    assert SenderGate(KeyRing(KeyFile(path, ApiKey))).admit(source(), None) is ANONYMOUS
    key = KeyFile(path, ApiKey).new(ApiKey("0" * 64, tenant="acme", sources=("clicks",), max_event_bytes=99))
    gate = SenderGate(KeyRing(KeyFile(path, ApiKey)))
    for shown in (None, "", "mr_x_y", key + "x"):
        with pytest.raises(RequestRefused) as refused:
            gate.admit(source(), shown)
        assert refused.value.status == 401
    sender = gate.admit(source(), key)
    assert (sender.tenant, sender.max_event_bytes) == ("acme", 99)
    assert gate.admit(source(), key) is sender
    with pytest.raises(RequestRefused) as refused:
        gate.admit(source("others"), key)
    assert (refused.value.status, refused.value.code) == (403, "forbidden")


def test_refused_events_are_kept_up_to_a_rate() -> None:
    clock = Clock()
    gate = SenderGate(rejects_per_s=10, clock=clock)
    assert [gate.keep_reject("clicks") for _ in range(15)].count(True) == 10
    assert gate.not_kept["clicks"] == 5
    clock.now += 1
    assert gate.keep_reject("clicks")
    assert not SenderGate(rejects_per_s=0).keep_reject("clicks")


def test_bodies_on_their_way_in_are_bounded() -> None:
    gate = SenderGate()
    gate.reserve(access.MOST_INCOMING_BYTES - 10)
    with pytest.raises(RequestRefused) as refused:
        gate.reserve(11)
    assert (refused.value.status, refused.value.code) == (503, "busy")
    gate.free(1)
    gate.reserve(11)


WANTED = ApiKey("0" * 64, name='The "roof"', tenant="acme", sources=("clicks",), rate=5, connections=2)


def test_a_key_is_known_by_its_hash_only(tmp_path: Path) -> None:
    path = tmp_path / "state" / "keys.toml"
    text = KeyFile(path, ApiKey).new(WANTED)
    assert text.split("_", 2)[2] not in path.read_text(), "the secret is nowhere"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    ring = KeyRing(KeyFile(path, ApiKey))
    found = ring.find(text)
    assert found is not None
    assert (found.name, found.tenant, found.sources, found.rate, found.connections) == (
        'The "roof"', "acme", ("clicks",), 5, 2,
    )  # fmt: skip
    assert found.id == text.split("_")[1]
    assert found.hash not in repr(found)
    for wrong in ("", "x", text[:-1], text + "x", f"mr_{found.id}_wrong", "mr__", "_".join(["mr", "other", "x"])):
        assert ring.find(wrong) is None


def test_keys_are_added_and_revoked_while_a_node_runs(tmp_path: Path) -> None:
    path, clock = tmp_path / "keys.toml", Clock()
    ring = KeyRing(KeyFile(path, ApiKey), clock)
    assert not ring.required and ring.find("mr_x_y") is None
    first = KeyFile(path, ApiKey).new(WANTED)
    assert ring.find(first) is None, "not looked at again so soon"
    clock.now += RELOAD_S
    assert ring.required and ring.find(first) is not None
    second = KeyFile(path, ApiKey).new(WANTED)
    revoked = KeyFile(path, ApiKey).revoke(first.split("_")[1])
    assert revoked.tenant == "acme"
    clock.now += RELOAD_S
    assert ring.find(first) is None
    assert ring.find(second) is not None
    KeyFile(path, ApiKey).revoke(second.split("_")[1])
    clock.now += RELOAD_S
    assert ring.required, "the last key revoked opens nothing"
    assert len(KeyFile(path, ApiKey).read()) == 0


def test_a_file_that_is_broken_while_a_node_runs_changes_nothing(tmp_path: Path) -> None:
    path, clock = tmp_path / "keys.toml", Clock()
    text = KeyFile(path, ApiKey).new(WANTED)
    ring = KeyRing(KeyFile(path, ApiKey), clock)
    path.write_text("[keys.a]\nhash = 5\n")
    clock.now += RELOAD_S
    assert ring.find(text) is not None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[keys.a]\nhash = 'short'\n", "SHA-256"),
        ("[keys.a]\n", "hash"),
        (f"[keys.a]\nhash = '{'0' * 64}'\nrates = 5\n", "rate"),
        (f"[keys.a]\nhash = '{'0' * 64}'\nrate = -5\n", "negative"),
        ("rubbish", "keys.toml"),
    ],
)
def test_a_file_that_is_wrong_is_named_at_start(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=says):
        KeyRing(KeyFile(path, ApiKey))


def test_no_such_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no key 'nobody'"):
        KeyFile(tmp_path / "keys.toml", ApiKey).revoke("nobody")


@pytest.mark.parametrize("end", ["revoked", "expired", "changed"])
async def test_a_key_that_ends_ends_its_connections(tmp_path: Path, end: str) -> None:
    settings = settings_of(tmp_path)
    pipeline = pipeline_of("t", "http")
    file = KeyFile(keys_path(settings), ApiKey)
    mine, other = (file.new(ApiKey("0" * 64)) for _ in range(2))
    async with unready_node(settings, pipeline) as url:
        address = url.replace("http", "ws") + stream.PATH
        async with (
            connect(address, additional_headers={"X-API-Key": mine}) as car,
            connect(address, additional_headers={"X-API-Key": other}) as stays,
        ):
            for one in (car, stays):
                await one.send('{"demand": "clicks"}')
                async with asyncio.timeout(60):
                    assert '"wanted":false' in str(await one.recv())
            until = time.time() + 2
            named = f"[keys.{mine.split('_')[1]}]"
            said = {"expired": f"until = {until}", "changed": 'sources = ["others"]'}
            if end == "revoked":
                file.revoke(mine.split("_")[1])
            else:
                file.path.write_text(file.path.read_text().replace(named, f"{named}\n{said[end]}"))
            with pytest.raises(ConnectionClosed) as closed:
                async with asyncio.timeout(60):
                    await car.recv()
            assert closed.value.rcvd is not None and closed.value.rcvd.code == 4401
            assert end != "expired" or time.time() >= until
            await (await stays.ping())

"""The hub without I/O: a link that only remembers, a clock that is a number."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pyarrow as pa
import pytest

from lakehouse.contract.lake import CommitFacts
from lakehouse.contract.settings import ServeSettings
from serve.core.hub import SILENT_MS, SLICE, SLICE_BYTES, Hub
from serve.core.messages import Message, change_messages
from serve.core.model import SubscribeRequest, TableChange, TableInfo
from serve.core.position import WHOLE, Position, Seal
from serve.core.ring import Outgoing, Subscriber
from serve.errors import RequestError
from serve.tables.state import TableState

TABLE = TableInfo("t", "id", ("k", "v"), ("k",), types=(pa.int64(), pa.int64()))
SEAL = Seal(b"a key of the test's own")
SETTINGS = ServeSettings(ring_frames=4, slow_after_ms=1_000, cut_after_ms=3_000, heartbeat_ms=500, max_subscribers=3)


class Lines:
    """A codec that a test can read: one JSON a line."""

    name = "lines"
    answers = True

    def frame(self, message: Message) -> bytes:
        return message.body + b"\n"

    def heartbeat(self, message: Message) -> bytes:
        return self.frame(message)


CODEC = Lines()


class Socket:
    """Takes what it is given, unless it is full."""

    def __init__(self) -> None:
        self.data = b""
        self.closed = 0

    def write(self, data: bytes) -> None:
        self.data += data

    def pump(self) -> None: ...

    def close(self, code: int, reason: str) -> None:
        self.closed = code

    def buffered(self) -> int:
        return 0

    async def drained(self) -> None: ...

    def messages(self) -> list[dict[str, Any]]:
        lines, self.data = self.data.splitlines(), b""
        return [json.loads(line) for line in lines]

    def kinds(self) -> list[str]:
        return [message["type"] for message in self.messages()]


class World:
    """A hub, one table, and commits to it."""

    def __init__(self, settings: ServeSettings = SETTINGS) -> None:
        self.hub = Hub(settings, [CODEC], SEAL)
        self.state = TableState(TABLE, 0, CommitFacts(0), {})
        self.now = 0.0
        assert self.hub.table_opened(self.state, "") == []

    def join(self, position: Position | None = None, **asked: Any) -> tuple[Subscriber, Socket, Position | None]:
        socket = Socket()
        subscriber = Subscriber(socket, CODEC)
        replay = self.hub.subscribed(subscriber, SubscribeRequest("t", position, **asked), self.now)
        self.pump(subscriber)
        return subscriber, socket, replay

    def pump(self, subscriber: Subscriber) -> None:
        while data := self.hub.data_to_send(subscriber):
            subscriber.link.write(data)

    def commit(self, value: Any = None) -> TableChange:
        version = self.state.version + 1
        row = (1, value if value is not None else version)
        before = {(1,): self.state.rows[(1,)]} if (1,) in self.state.rows else {}
        self.state.rows[(1,)] = row
        self.state.version = version
        self.state.facts = CommitFacts(version)
        change = TableChange(TABLE, version, (row,), (), self.state.facts, before)
        self.carry_out(self.hub.change_received(change, self.now))
        return change

    def tick(self, ms: float) -> None:
        self.now += ms
        self.carry_out(self.hub.tick(self.now, int(self.now)))

    def carry_out(self, deliveries: Iterable[Outgoing]) -> None:
        for delivery in deliveries:
            for subscriber in delivery.to:
                subscriber.link.write(delivery.data)
                if delivery.wake:
                    self.pump(subscriber)
                if delivery.close:
                    subscriber.link.close(delivery.close, delivery.reason)
                    self.hub.unsubscribed(subscriber)


def values(messages: list[dict[str, Any]]) -> list[Any]:
    return [message["upserts"][0]["v"] for message in messages]


def test_a_snapshot_then_changes() -> None:
    world = World()
    world.commit()
    _, socket, _ = world.join()
    [snapshot] = socket.messages()
    assert (snapshot["rows"], snapshot["first"], snapshot["last"]) == ([{"k": 1, "v": 1}], True, True)
    assert snapshot["position"] == SEAL.token(Position("id", 1))
    world.commit()
    world.commit()
    changes = socket.messages()
    assert values(changes) == [2, 3]
    assert [change["position"] for change in changes] == [SEAL.token(Position("id", v)) for v in (2, 3)]


def test_live_subscribers_get_the_same_bytes_object() -> None:
    world = World()
    first, _, _ = world.join()
    second, _, _ = world.join()
    change = TableChange(TABLE, 1, ((1, 7),), (), CommitFacts(1))
    world.state.version = 1
    [delivery] = world.hub.change_received(change, 0)
    assert set(delivery.to) == {first, second}
    assert delivery.data == b"".join(map(CODEC.frame, change_messages(change, SEAL, WHOLE)))


def test_a_paused_subscriber_gets_joined_slices_when_it_drains_and_others_notice_nothing() -> None:
    world = World()
    slow, slow_socket, _ = world.join()
    _, socket, _ = world.join()
    slow_socket.messages(), socket.messages()
    world.hub.paused(slow, world.now)
    for _ in range(3):
        world.commit()
    assert slow_socket.data == b""
    assert values(socket.messages()) == [1, 2, 3]
    world.hub.drained(slow, world.now)
    data = world.hub.data_to_send(slow)
    assert data.count(b"\n") == 3, "one write for all that it missed"
    slow.link.write(data)
    assert world.hub.data_to_send(slow) == b""
    world.commit()
    assert values(slow_socket.messages()) == [1, 2, 3, 4]


def test_one_that_falls_off_the_ring_is_told_and_gets_a_snapshot() -> None:
    world = World()
    slow, socket, _ = world.join()
    socket.messages()
    world.hub.paused(slow, world.now)
    for _ in range(6):
        world.commit()
    world.hub.drained(slow, world.now)
    world.pump(slow)
    expired, snapshot = socket.messages()
    assert (expired["type"], expired["reason"]) == ("expired", "lagged")
    assert snapshot["rows"] == [{"k": 1, "v": 6}]
    assert world.hub.counters.expired == {"log": 0, "lagged": 1, "filter": 0}
    world.commit()
    assert values(socket.messages()) == [7]


def test_a_snapshot_is_shared_and_the_ring_goes_on_from_it() -> None:
    world = World(ServeSettings(ring_frames=100))
    world.commit("x" * 10_000)
    world.join()
    snapshot = world.hub.channels["t"].streams[WHOLE].snapshot
    world.commit(2)
    _, socket, _ = world.join()
    assert world.hub.channels["t"].streams[WHOLE].snapshot is snapshot
    assert socket.kinds() == ["snapshot", "change"]
    world.commit("y" * 10_000)
    _, socket, _ = world.join()
    assert socket.kinds() == ["snapshot"], "too much has happened since: a new one"


def test_resume_is_a_cursor_into_the_ring() -> None:
    world = World()
    for _ in range(3):
        world.commit()
    _, socket, replay = world.join(Position("id", 1))
    assert replay is None
    messages = socket.messages()
    assert messages[0]["type"] == "resumed"
    assert messages[0]["position"] == SEAL.token(Position("id", 1))
    assert values(messages[1:]) == [2, 3]


def test_a_position_of_another_table_expires() -> None:
    world = World()
    _, socket, replay = world.join(Position("other", 0))
    assert replay is None
    assert [m["type"] for m in socket.messages()] == ["expired", "snapshot"]


def test_a_position_older_than_the_ring_is_replayed_and_fills_the_ring() -> None:
    world = World()
    changes = [world.commit() for _ in range(6)]
    subscriber, socket, replay = world.join(Position("id", 0))
    assert replay == Position("id", 0)
    assert socket.kinds() == ["resumed"]
    world.commit()
    assert socket.data == b"", "it is not live before its replay is through"
    rebuilt = [message for change in changes for message in change_messages(change, SEAL, WHOLE)]
    world.hub.replay_received(subscriber, replay, rebuilt[:1], 0)
    assert subscriber.replaying
    world.pump(subscriber)
    assert values(socket.messages()) == [1]
    world.hub.replay_received(subscriber, Position("id", 1), rebuilt[1:4], 0)
    assert not subscriber.replaying
    world.pump(subscriber)
    assert values(socket.messages()) == [2, 3, 4, 5, 6, 7]


def test_a_replay_that_fails_ends_in_a_snapshot() -> None:
    world = World()
    for _ in range(6):
        world.commit()
    subscriber, socket, _ = world.join(Position("id", 0))
    world.hub.replay_failed(subscriber, "cleaned up")
    world.pump(subscriber)
    resumed, expired, snapshot = socket.messages()
    assert (resumed["type"], expired["reason"], expired["detail"]) == ("resumed", "log", "cleaned up")
    assert snapshot["rows"] == [{"k": 1, "v": 6}]


def test_a_replaced_table_expires_all() -> None:
    world = World()
    world.commit()
    _, socket, _ = world.join()
    socket.messages()
    other = TableState(TableInfo("t", "new", ("k", "v"), ("k",)), 0, CommitFacts(9), {(9,): (9, 9)})
    world.carry_out(world.hub.table_opened(other, "rebuilt"))
    expired, snapshot = socket.messages()
    assert (expired["reason"], expired["detail"]) == ("log", "rebuilt")
    assert (snapshot["rows"], snapshot["position"]) == ([{"k": 9, "v": 9}], SEAL.token(Position("new", 0)))


def test_no_sign_of_reading_is_told_then_cut() -> None:
    world = World()
    _, socket, _ = world.join()
    good, good_socket, _ = world.join()
    socket.messages()
    world.tick(1)  # the ping that it will not answer
    for _ in range(4):
        world.hub.heard_from(good, world.now)
        world.commit()
        world.tick(400)
    messages = [message for message in socket.messages() if message["type"] == "slow"]
    assert len(messages) == 1, "told once"
    assert messages[0]["behind"] == 3
    assert messages[0]["behind_ms"] == 1_200
    assert messages[0]["cut_in_ms"] == 1_800
    for _ in range(5):
        world.hub.heard_from(good, world.now)
        world.tick(400)
    assert (socket.closed, good_socket.closed) == (4408, 0)
    assert "slow" not in good_socket.kinds()
    assert (world.hub.counters.slow, world.hub.counters.cut, world.hub.size) == (1, 1, 1)


def test_who_leaves_a_ping_unanswered_is_handed_nothing_until_it_answers() -> None:
    world = World(ServeSettings(heartbeat_ms=500, slow_after_ms=10**6, cut_after_ms=10**6))
    stopped, socket, _ = world.join()
    good, good_socket, _ = world.join()
    world.tick(1)  # the ping
    world.hub.heard_from(good, world.now)
    world.commit()
    assert values(socket.messages()[2:]) == [1], "it may be on its way to answer"
    world.tick(SILENT_MS)
    world.hub.heard_from(good, world.now)
    socket.messages(), good_socket.messages()
    world.commit()
    world.commit()
    assert (socket.data, world.hub.data_to_send(stopped)) == (b"", b"")
    assert values(good_socket.messages()) == [2, 3]
    world.tick(500)
    [beat] = socket.messages()
    assert (beat["type"], beat["behind"]) == ("heartbeat", 2), "it hears that there is more"
    assert not world.hub.heard_from(good, world.now)
    assert world.hub.heard_from(stopped, world.now), "it may have missed something"
    world.pump(stopped)
    world.commit()
    assert values(socket.messages()) == [2, 3, 4]


def test_a_silent_one_that_asks_for_another_filter_is_answered() -> None:
    world = World(ServeSettings(heartbeat_ms=500, slow_after_ms=10**6, cut_after_ms=10**6))
    silent, socket, _ = world.join()
    world.commit()
    world.tick(1)
    world.tick(SILENT_MS)
    assert silent.silent
    socket.messages()
    world.hub.refiltered(silent, SubscribeRequest("t", where="v > 0"), world.now)
    world.pump(silent)
    assert socket.kinds() == ["expired", "snapshot"]


def test_a_full_socket_that_moves_is_not_cut() -> None:
    world = World()
    slow, socket, _ = world.join()
    world.hub.paused(slow, world.now)
    for _ in range(20):
        world.tick(400)
        assert slow in list(world.hub.waiting())
        world.hub.heard_from(slow, world.now)
    assert socket.closed == 0


def test_slow_is_told_anew_after_it_had_caught_up() -> None:
    world = World()
    slow, socket, _ = world.join()
    for _ in range(2):
        world.hub.paused(slow, world.now)
        world.commit()
        world.tick(1_500)
        assert socket.kinds().count("slow") == 1
        world.hub.drained(slow, world.now)
        world.pump(slow)
        world.hub.heard_from(slow, world.now)
        assert socket.kinds() == ["change"]


def test_heartbeats_of_many_are_spread_and_each_has_one_a_round() -> None:
    world = World(ServeSettings(heartbeat_ms=1_000, cut_after_ms=10**9, slow_after_ms=10**9))
    joined = [world.join(where="v > 1" if number % 2 else "") for number in range(6 * SLICE)]
    sockets = [socket for _, socket, _ in joined]
    for socket in sockets:
        socket.messages()
    world.tick(1)
    some = sum(bool(socket.data) for socket in sockets)
    assert 0 < some <= SLICE < len(sockets)
    assert world.hub.beating
    left, gone, _ = next(each for each in joined if not each[1].data)
    world.hub.unsubscribed(left)
    beats = 0
    while world.hub.beating:
        beats += 1
        world.now += 100
        world.carry_out(world.hub.beat(world.now, int(world.now)))
        world.commit()
    assert beats <= 6, "within a half of the pause between heartbeats"
    got = [[message["type"] for message in socket.messages()].count("heartbeat") for socket in sockets]
    assert got == [0 if socket is gone else 1 for socket in sockets]


def test_heartbeats_say_how_far_one_is_behind_that_acknowledges() -> None:
    world = World()
    acking, acking_socket, _ = world.join()
    _, socket, _ = world.join()
    change = world.commit()
    world.commit()
    world.hub.acknowledged(acking, Position("id", change.version))
    acking_socket.messages(), socket.messages()
    world.tick(1)
    [beat] = acking_socket.messages()
    assert (beat["behind"], beat["position"], beat["at"]) == (1, SEAL.token(Position("id", 2)), 1)
    assert socket.messages()[0]["behind"] == 0
    world.tick(1_100)
    assert "slow" in acking_socket.kinds(), "it reads, and does not process"
    world.hub.acknowledged(acking, Position("other", 7))


def test_a_large_backlog_comes_in_slices() -> None:
    world = World()
    world.state.rows = {(k,): (k, "x" * 1_000) for k in range(1_000)}
    subscriber = Subscriber(Socket(), CODEC)
    world.hub.subscribed(subscriber, SubscribeRequest("t"), 0)
    parts = []
    while data := world.hub.data_to_send(subscriber):
        parts.append(data)
    messages = [json.loads(line) for line in b"".join(parts).splitlines()]
    assert len(messages) > 2
    assert all(len(part) < SLICE_BYTES + 300_000 for part in parts)
    assert [m["first"] for m in messages] == [True] + [False] * (len(messages) - 1)
    assert [m["last"] for m in messages] == [False] * (len(messages) - 1) + [True]
    assert [row["k"] for m in messages for row in m["rows"]] == list(range(1_000))


def test_refusals() -> None:
    world = World()
    for _ in range(3):
        world.join()
    with pytest.raises(RequestError) as full:
        world.join()
    with pytest.raises(RequestError) as unknown:
        world.hub.subscribed(Subscriber(Socket(), CODEC), SubscribeRequest("nope"), 0)
    assert (full.value.close, unknown.value.close) == (1013, 4404)
    assert (world.hub.size, world.hub.counters.refused) == (3, 1)


def test_one_that_has_gone_leaves_nothing_behind() -> None:
    world = World()
    subscriber, socket, _ = world.join()
    world.hub.unsubscribed(subscriber)
    world.hub.unsubscribed(subscriber)
    world.hub.paused(subscriber, 0)
    socket.messages()
    world.commit()
    assert (socket.data, world.hub.size, list(world.hub.waiting())) == (b"", 0, [])


def test_a_lagging_subscriber_that_conflates_gets_the_latest_of_each_key() -> None:
    world = World(ServeSettings(ring_frames=100))
    slow, socket, _ = world.join(conflate=True)
    _, other, _ = world.join()
    start = socket.messages()[0]["position"]
    world.hub.paused(slow, world.now)
    for _ in range(5):
        world.commit()
    world.hub.drained(slow, world.now)
    world.pump(slow)
    [merged] = socket.messages()
    changes = other.messages()[1:]
    assert len(changes) == 5
    assert (merged["upserts"], merged["merged"]) == ([{"k": 1, "v": 5}], 5)
    assert (merged["after"], merged["position"]) == (start, changes[-1]["position"])
    world.commit()
    assert "merged" not in socket.messages()[0], "one that keeps up gets every change"
    assert world.hub.counters.conflated == 1


def test_a_window_holds_changes_back_until_they_are_acknowledged() -> None:
    world = World(ServeSettings(ring_frames=3))
    held, socket, _ = world.join(window=2)
    socket.messages()
    for _ in range(3):
        world.commit()
    changes = socket.messages()
    assert values(changes) == [1, 2]
    assert world.hub.acknowledged(held, SEAL.parse(changes[0]["position"]))
    world.pump(held)
    assert values(socket.messages()) == [3]
    for _ in range(6):
        world.commit()
    assert socket.data == b"", "it is not told that it lags before it says that it has processed something"
    assert world.hub.acknowledged(held, Position("id", 3)), "although the ring holds that position no more"
    world.pump(held)
    assert socket.kinds() == ["expired", "snapshot"]


def test_a_filter_is_evaluated_once_and_dropped_when_nobody_uses_it() -> None:
    world = World(ServeSettings(max_filters=2, heartbeat_ms=10**9, cut_after_ms=10**9))
    one, socket, _ = world.join(where="v > 1")
    same, _, _ = world.join(where="(V > 1)")
    assert one.stream is same.stream
    world.commit()
    assert socket.messages()[-1]["upserts"] == []
    world.commit()
    assert socket.messages()[-1]["upserts"] == [{"k": 1, "v": 2}]
    world.join(where="v > 2")
    with pytest.raises(RequestError) as full:
        world.join(where="v > 3")
    assert full.value.code == "full"
    world.hub.unsubscribed(one), world.hub.unsubscribed(same)
    world.join(where="v > 3")  # takes the place of the one that nobody uses
    assert world.hub.filters() == 2
    for _ in range(2):
        world.tick(31_000)
    assert world.hub.filters() == 2, "these are in use"


def test_a_new_filter_is_served_from_a_little_while_ago_without_reading_files() -> None:
    world = World(ServeSettings(ring_frames=100))
    subscriber, socket, _ = world.join(where="v <> 2")
    position = SEAL.parse(socket.messages()[0]["position"])
    for _ in range(3):
        world.commit()
    live = socket.messages()
    world.hub.unsubscribed(subscriber)
    for _ in range(2):
        world.tick(31_000)
    assert world.hub.filters() == 0
    _, again, replay = world.join(position, where="v <> 2")
    assert replay is None
    assert again.messages()[1:] == live


def test_a_large_snapshot_is_made_in_slices_and_others_go_on_meanwhile() -> None:
    woken: list[bool] = []
    world = World(ServeSettings(ring_frames=100))
    world.hub._working = lambda: woken.append(True)
    world.state.rows = {(k,): (k, k) for k in range(5_000, 0, -1)}
    _, socket, _ = world.join(where="k <= 3")
    subscriber, large, _ = world.join()
    assert (socket.data, large.data) == (b"", b"")
    assert woken
    slices = 0
    while world.hub.working:
        world.carry_out(world.hub.work(world.now))
        slices += 1
        if slices == 3:
            world.commit(-1)
    assert slices > 10
    messages = large.messages()
    assert [m["type"] for m in messages if m["type"] != "snapshot"] == ["change"]
    rows = [row["k"] for m in messages[:-1] for row in m["rows"]]
    assert rows == list(range(1, 5_001)), "in the order of their keys"
    assert messages[-1]["after"] == messages[0]["position"]
    assert [m["type"] for m in socket.messages()] == ["snapshot", "change"]
    assert subscriber.live


def test_a_filter_that_the_table_outgrows_ends_its_subscriptions() -> None:
    world = World()
    _, socket, _ = world.join(where="v > 0")
    _, other, _ = world.join()
    narrow = TableInfo("t", "id", ("k",), ("k",), types=(pa.int64(),))
    world.state.table, world.state.version, world.state.rows = narrow, 1, {(1,): (1,)}
    change = TableChange(narrow, 1, ((1,),), (), CommitFacts(1), {}, TABLE)
    world.carry_out(world.hub.change_received(change, 0))
    assert (socket.messages()[-1]["code"], socket.closed) == ("bad_filter", 4400)
    assert other.messages()[-1]["upserts"] == [{"k": 1}]
    assert (world.hub.size, world.hub.filters()) == (1, 0)

"""The log at rest: the failed store, looking into a log, and sending failed events again through a real broker."""

from __future__ import annotations

import asyncio
import base64
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from ingest.broker import EmbeddedBroker
from ingest.kafka import KafkaPublisher, ensure_topics
from ingest.log.message_log import MessageLog
from ingest.log.recovery import Corrupt, FailedStore, failed, log_of, look, nodes, retry, transient
from ingest.log.segments import event_head
from jobs.cli import app
from lakehouse.contract.envelope import Envelope
from lakehouse.contract.errors import EnvironmentProblem
from lakehouse.contract.pipeline import Source
from lakehouse.contract.settings import KafkaSettings
from tests.ingest.conftest import append, consume, envelope

OpenLog = Callable[..., MessageLog]


def body(number: int) -> bytes:
    payload = f'{{"id":{number}}}'.encode()
    return event_head(0, None, envelope(number, payload), b"key") + payload


def test_events_come_back_with_their_reason(tmp_path: Path) -> None:
    store = FailedStore(tmp_path, "n1")
    assert (list(store), len(store), store.bytes) == ([], 0, 0)
    store.add(5, "rsvps", "too\nlarge", body(5))
    store.add(6, "rsvps", "also", body(6))
    store.add(5, "rsvps", "again", body(5))
    store.add_corrupt(Corrupt("1.seg", 77, b"\0rubbish"))
    again = FailedStore(tmp_path, "n1")
    assert len(again) == 3
    assert again.bytes == store.bytes == (tmp_path / "failed").stat().st_size
    first, second, raw = again
    assert (first.seq, first.reason, first.data) == (5, "too\nlarge", b'{"id":5}')
    assert first.event is not None
    assert first.event.envelope == envelope(5, b'{"id":5}')
    assert first.event.key == b"key"
    assert second.seq == 6
    assert (raw.reason, raw.event, raw.data) == (
        "1.seg: 8 bytes at 77 are corrupt: no event is missing",
        None,
        b"\0rubbish",
    )


def test_a_torn_write_is_cut_off(tmp_path: Path) -> None:
    store = FailedStore(tmp_path, "n1")
    store.add(1, "rsvps", "a", body(1))
    whole = store.bytes
    store.add(2, "rsvps", "b", body(2))
    os.truncate(tmp_path / "failed", store.bytes - 3)
    again = FailedStore(tmp_path, "n1")
    assert again.bytes == whole
    again.add(2, "rsvps", "b", body(2))
    assert [item.seq for item in again] == [1, 2]


def folder_of(log: MessageLog) -> Path:
    return log._folder


async def filled(open_log: OpenLog, *, failing: int) -> MessageLog:
    """Ten events: the first four acknowledged, then so many failed, the others under way."""
    log = open_log()
    lane = log.lane("rsvps/http/0", "rsvps")
    events = [append(log, lane, n) for n in range(10)]
    for event in events[4 : 4 + failing]:
        await log.fail(event, "the record is too large")
    log.acked(events[: 4 + failing], 5 + failing)
    assert events[-1].group is not None
    await events[-1].group.wait()
    return log


async def test_looking_changes_nothing_and_may_be_done_at_any_time(open_log: OpenLog) -> None:
    log = await filled(open_log, failing=2)
    log._append_mark()
    log._commit.flush_soon()
    await asyncio.sleep(0.1)
    folder = folder_of(log)
    before = {path: path.read_bytes() for path in folder.glob("*.seg")}
    view = look(folder)
    assert (view.running, view.transient, view.failed, view.lanes) == (True, 4, 2, {"rsvps/http/0": 4})
    assert view.reasons == {"the record is too large": 2}
    await log.close()
    view = look(folder)
    assert (view.running, view.clean, view.transient, view.damage) == (False, True, 4, [])
    assert before.keys() == dict.fromkeys(folder.glob("*.seg"), 0).keys()
    assert [item["event_id"] for item in transient(folder)] == ["e6", "e7", "e8", "e9"]
    assert [(item["event_id"], item["reason"], item["payload"][:2]) for item in failed(folder)] == [
        ("e4", "the record is too large", "4:"),
        ("e5", "the record is too large", "5:"),
    ]
    assert nodes(folder.parent) == ["log"]
    with pytest.raises(EnvironmentProblem, match="there are: log"):
        log_of(folder.parent, "other")


async def test_damage_is_named_by_lane_sequence_and_bytes(open_log: OpenLog) -> None:
    log = await filled(open_log, failing=0)
    folder = folder_of(log)
    events = [append(log, log.lane("rsvps/http/0", "rsvps"), n) for n in range(10, 20)]
    await log.close()
    with events[2].segment.path.open("r+b") as file:  # events 13 and 14 in one go
        file.seek(events[2].offset + 60)
        file.write(b"\xff" * 200)
    (text,) = look(folder).damage
    assert "events 13 to 14 of rsvps/http/0, LOST" in text
    assert f"{events[4].offset - events[2].offset} bytes at {events[2].offset}" in text
    again = open_log()
    assert str(again.recovery.corrupt[0]) == text
    await again.close()
    assert look(folder).damage == [text], "the failed store has it now, and it is said once"
    (item,) = failed(folder)
    assert item["kind"] == "damage" and "payload_base64" in item


@pytest.mark.broker
async def test_failed_events_are_sent_again_once(broker: EmbeddedBroker, open_log: OpenLog) -> None:
    topic = "retry"
    ensure_topics(broker.bootstrap, [Source(topic=topic, schema="", event_time="received_at", name="rsvps")])
    log = await filled(open_log, failing=3)
    folder = folder_of(log)

    def publisher() -> KafkaPublisher:
        return KafkaPublisher(KafkaSettings(bootstrap=broker.bootstrap), {"rsvps": topic})

    with pytest.raises(EnvironmentProblem, match="in use by process"):
        await retry(folder, publisher())
    await log.fail(append(log, log.lane("rsvps/http/0", "rsvps"), 77, size=5_000_000), "too large")
    await log.close()
    seen: list[tuple[int, int]] = []
    one = await retry(folder, publisher(), ids=["e5"])
    assert (one.sent, one.refused) == (1, {})
    found = await retry(folder, publisher(), progress=lambda done, of: seen.append((done, of)))
    assert found.sent == 2
    assert list(found.refused) == ["e77"] and "bytes, more than the" in found.refused["e77"]
    assert seen[-1] == (3, 3)
    records = await asyncio.to_thread(consume, broker.bootstrap, topic, 3)
    envelopes = [Envelope.from_headers(record.headers) for record in records]
    assert sorted(envelope.event_id for envelope in envelopes) == ["e4", "e5", "e6"]
    assert all(envelope.suspect for envelope in envelopes)
    assert [item["event_id"] for item in failed(folder)] == ["e77"]
    again = open_log()
    assert len(again.failed) == 1
    assert again.recovery.to_replay == 4, "what was under way is untouched"
    await again.close()


def test_the_commands(tmp_path: Path) -> None:
    def millrace(*words: str) -> Result:
        return CliRunner().invoke(app, [*words, "--lake", str(tmp_path)])

    assert millrace("log", "--json").stdout == "[]\n"
    missing = millrace("log", "collector-1")
    assert missing.exit_code == 1 and "no log of a node 'collector-1'" in str(missing.exception)
    key = json.loads(millrace("key", "new", "roof", "--source", "rsvps", "--rate", "5", "--json").stdout)["key"]
    (listed,) = json.loads(millrace("key", "ls", "--json").stdout)
    assert (listed["name"], listed["sources"], listed["rate"]) == ("roof", ["rsvps"], 5)
    assert key[-16:] not in str(listed)
    assert millrace("key", "revoke", listed["id"]).exit_code == 0
    assert millrace("key", "ls", "--json").stdout == "[]\n"


async def test_export_gives_back_every_byte(open_log: OpenLog, tmp_path: Path) -> None:
    log = open_log()
    lane = log.lane("rsvps/http/0", "rsvps")
    payloads = [b'{"id":1}', b"\xff\x00 no text", "Zoë".encode()]
    for n, payload in enumerate(payloads):
        event = log.append(lane, envelope(n, payload), b"k", payload)
        await log.fail(event, "why")
    folder = folder_of(log)
    log.acked([], log.next_seq)
    await log.close()
    # The log lies where a node's would.
    node = tmp_path / "lake" / "_millrace" / "log" / "n1"
    node.parent.mkdir(parents=True)
    folder.rename(node)
    place = ["--lake", str(tmp_path / "lake")]
    shown = CliRunner().invoke(app, ["log", "n1", "--json", *place])
    assert shown.exit_code == 0
    items = [json.loads(line) for line in shown.stdout.splitlines()]
    assert [
        base64.b64decode(item["payload_base64"]) if "payload_base64" in item else item["payload"].encode()
        for item in items
    ] == payloads
    assert {item["reason"] for item in items} == {"why"}
    (view,) = json.loads(CliRunner().invoke(app, ["log", "--json", *place]).stdout)
    assert (view["node"], view["failed"], view["reasons"]) == ("n1", 3, {"why": 3})

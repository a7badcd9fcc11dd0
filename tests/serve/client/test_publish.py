"""Publishing through a real collector and broker: what the client has logged arrives, once, whatever is killed."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

import orjson
import pyarrow as pa
import pytest
from deltalake import CommitProperties, write_deltalake

from ingest.border.access import ApiKey, keys_path
from ingest.broker import EmbeddedBroker
from jobs.local.stack import free_port
from lakehouse.contract.access import KeyFile
from lakehouse.contract.envelope import Envelope
from lakehouse.contract.lake import COMMIT_THROUGH, Lake
from serve.client import (
    ClientError,
    EventState,
    Publisher,
    PublisherOptions,
    Refused,
    SyncPublisher,
    Unauthorized,
)
from tests.chaos.rig import NODE
from tests.ingest.conftest import consume, eventually, pipeline_of, running_node, settings_of

ROOT = Path(__file__).parents[3]
SOON = {"longest_s": 0.2}
PROGRAM = """
import asyncio, sys
from serve.client import Publisher
async def main():
    url, path, first, last = sys.argv[1:]
    async with Publisher(url, "clicks", path, "id") as publisher:
        for number in range(int(first), int(last)):
            await publisher.publish({"id": number, "who": f"k{number % 3}"})
            print(number, flush=True)
        await publisher.settled()
asyncio.run(main())
"""


def click(number: int) -> dict[str, object]:
    return {"id": number, "who": "a"}


async def test_the_log_holds_events_while_there_is_no_collector(tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    for _ in range(2):  # the second run is given the same events once more
        async with Publisher(url, "clicks", tmp_path / "log", "id") as publisher:
            assert await publisher.publish(click(1), click(2)) == ["1", "2"]
            [made] = await publisher.publish({"who": "b"})
            assert len(made) == 36, "an event without an id gets one"
    async with Publisher(url, "clicks", tmp_path / "log", "id") as publisher:
        assert await publisher.waiting() == 4
    async with Publisher(url, "others", tmp_path / "log", "id", options=PublisherOptions(limit=2)) as publisher:
        await publisher.publish(click(1), click(2))
        with pytest.raises(TimeoutError):  # a full log holds up its application
            await asyncio.wait_for(publisher.publish(click(3)), 0.2)
        assert await publisher.waiting() == 2


async def test_a_file_that_is_no_log_is_named(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("something else, and long enough for a header" * 100)
    with pytest.raises(ClientError, match="log: file is not a database"):
        await Publisher("http://127.0.0.1:1", "clicks", tmp_path / "log", "id").__aenter__()
    with pytest.raises(ClientError, match="no state"):
        Publisher("http://127.0.0.1:1", "clicks", tmp_path / "log", "id", options=PublisherOptions("everywhere"))


@pytest.mark.broker
def test_every_logged_event_arrives_once_though_publisher_and_collector_are_killed(
    broker: EmbeddedBroker, tmp_path: Path
) -> None:
    port = free_port()
    node = [sys.executable, "-c", NODE, str(tmp_path / "lake"), broker.bootstrap, "client", str(port), "67108864", "0"]
    program = [sys.executable, "-c", PROGRAM, f"http://127.0.0.1:{port}", str(tmp_path / "log")]
    collector = subprocess.Popen(node, cwd=ROOT)
    number, logged = 0, 0
    try:
        for _ in range(3):
            publisher = subprocess.Popen([*program, str(number), "100000"], cwd=ROOT, stdout=subprocess.PIPE, text=True)
            assert publisher.stdout is not None
            for _ in range(40):
                logged = int(publisher.stdout.readline()) + 1
                if logged == number + 20:
                    collector.kill()
                    collector.wait()
                    collector = subprocess.Popen(node, cwd=ROOT)
            publisher.send_signal(signal.SIGKILL)
            rest = publisher.stdout.read().split()
            publisher.wait()
            publisher.stdout.close()
            number = logged = int(rest[-1]) + 1 if rest else logged
        last = subprocess.run([*program, str(number), str(number + 1)], cwd=ROOT, capture_output=True, timeout=120)
        assert last.returncode == 0, last.stderr
        found = consume(broker.bootstrap, "client", logged + 1)  # what is in the collector's log comes to Kafka
    finally:
        collector.kill()
        collector.wait()
    ids = [Envelope.from_headers(record.headers).event_id for record in found]
    payloads = {(event_id, record.value) for event_id, record in zip(ids, found, strict=True)}
    assert {str(each) for each in range(logged + 1)} <= set(ids)
    assert len(payloads) == len(set(ids)), "a copy has the id and the bytes of the first"


@pytest.mark.broker
async def test_what_becomes_of_events_is_followed(broker: EmbeddedBroker, tmp_path: Path) -> None:
    told: list[EventState] = []
    pipeline = pipeline_of("followed", "http")
    options = PublisherOptions("in_bronze", on_state=told.append, **SOON)
    async with (
        running_node(settings_of(tmp_path / "lake"), pipeline, broker.bootstrap) as url,
        Publisher(url, "clicks", tmp_path / "log", "id", options=options) as publisher,
        asyncio.timeout(60),
    ):
        await publisher.publish(click(1), {"id": 2}, click(3))
        await eventually(lambda: {state.event_id for state in told if state.state == "queued"} == {"1", "3"})
        assert await publisher.waiting() == 2, "they are in Kafka, and not yet where they should be"
        [(state, payload)] = await publisher.rejected()
        assert (state.event_id, orjson.loads(payload)) == ("2", {"id": 2})
        assert "key" in state.reason
        write_deltalake(
            Lake(tmp_path / "lake").bronze("clicks").path,
            pa.table({"event_id": ["1", "3"]}),
            commit_properties=CommitProperties(custom_metadata={COMMIT_THROUGH: '{"followed/0": 100}'}),
        )
        await publisher.settled()
        assert [state.state for state in told if state.event_id == "1"] == ["logged", "queued", "in_bronze"]
        await publisher.forget(["2"])
        assert await publisher.rejected() == []


@pytest.mark.broker
async def test_final_answers_are_raised_and_the_log_stays(broker: EmbeddedBroker, tmp_path: Path) -> None:
    settings = settings_of(tmp_path / "lake")
    key = KeyFile(keys_path(settings), ApiKey).new(ApiKey("0" * 64, "phone"))
    async with running_node(settings, pipeline_of("final", "http"), broker.bootstrap) as url, asyncio.timeout(60):
        for source, shown, kind in (("clicks", "mk_no_key", Unauthorized), ("nothing", key, Refused)):
            async with Publisher(url, source, tmp_path / "log", "id", key=shown) as publisher:
                await publisher.publish(click(1))
                with pytest.raises(kind):
                    await publisher.settled()
                with pytest.raises(kind):
                    await publisher.publish(click(2))
                assert await publisher.waiting() == 1

        def without_asyncio() -> None:
            with SyncPublisher(Publisher(url, "clicks", tmp_path / "log", "id", key=key)) as publisher:
                assert publisher.publish(click(2), {"id": 3}) == ["2", "3"]
                publisher.settled()
                assert [state.event_id for state, _ in publisher.rejected()] == ["3"]
                publisher.forget(["3"])
                assert publisher.rejected() == []

        await asyncio.to_thread(without_asyncio)
    found = await asyncio.to_thread(consume, broker.bootstrap, "final", 3)
    kept = sorted(
        (envelope.event_id, envelope.reject is None)
        for envelope in (Envelope.from_headers(one.headers) for one in found)
    )
    assert kept == [("1", True), ("2", True), ("3", False)]

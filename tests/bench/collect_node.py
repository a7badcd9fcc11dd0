"""The collector that ``make bench-collect`` measures, in a process of its own: log, delivery, HTTP; one source.

It is put together here, not by ``ingest.node``, because the benchmark also measures it without a log.
"""

from __future__ import annotations

import asyncio
import contextlib
import cProfile
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import uvloop

from ingest.answers.acks import RecentEvents, Signer
from ingest.answers.respond import Answers, Responder
from ingest.answers.tables import ProductTables
from ingest.border.access import SenderGate
from ingest.border.admission import Border
from ingest.collectors.http import HttpServer, NodeStats, make_app
from ingest.delivery import KafkaDelivery
from ingest.intake import Intake, RequestIntake
from ingest.kafka import KafkaPublisher
from ingest.log.message_log import MessageLog
from ingest.log.protocols import PROTOCOLS, HybridLogging
from ingest.log.segments import LogSegment
from ingest.node import calm_garbage_collector
from lakehouse.contract.lake import Lake
from lakehouse.contract.pipeline import CollectorSpec, Pipeline, Source
from lakehouse.contract.settings import CollectSettings, KafkaSettings

LOG_BYTES = 1 << 30


class NoLogging(HybridLogging):
    """Writes nothing: an event is acknowledged when Kafka has it, and what Kafka has not is lost with the process.

    Only here, to have something to measure against: everything else is the same.
    """

    @property
    def durable_seq(self) -> int:
        """As if it were on the disk: sending never waits for that."""
        return self._last_seq

    @durable_seq.setter
    def durable_seq(self, seq: int) -> None:
        pass

    def add(self, segment: LogSegment, chunks: list[bytes], size: int) -> int:
        """Counts the bytes."""
        offset = segment.size
        segment.size = segment.durable = offset + size
        return offset

    def _write(self) -> None:
        self._sealed.clear()

    def write_now(self) -> None:
        """Nothing."""

    def remove(self, segments: list[LogSegment]) -> None:
        """There are no files."""


PROTOCOLS["none"] = NoLogging


def source_of(topic: str) -> Source:
    """The benchmark's source: events of about 300 bytes with an id and a key."""
    return Source(
        topic=topic,
        schema="id BIGINT, who STRING, pad STRING",
        event_time="received_at",
        event_id="{id}",
        key="{who}",
        required=("id", "who"),
        collectors=(CollectorSpec("http"),),
        name="clicks",
    )


async def run(folder: Path, bootstrap: str, topic: str, protocol: str) -> None:
    """Serve until SIGTERM; the URL is printed when it is ready."""
    source = source_of(topic)
    topics = {"clicks": topic}
    publisher = KafkaPublisher(KafkaSettings(bootstrap=bootstrap, linger_ms=10), topics)
    log = MessageLog(folder / "log", "bench", limit=LOG_BYTES, protocol=protocol)
    recent = RecentEvents(topics)
    delivery = KafkaDelivery(log, publisher, recent.known)
    lane = log.lane("clicks/http/0", "clicks")
    intake = Intake(Border(source, tenant="default", collector="bench"), lane, log, delivery, recent)
    requests = RequestIntake({"clicks": intake}, lambda: log.problem, SenderGate(), Signer.of_lake(folder))
    sources = SimpleNamespace(names=["clicks"], shedders={}, statuses=list)
    pipeline = Pipeline({"clicks": source})
    answers = Answers(pipeline.sources.get, recent, ProductTables(Lake(folder), 0.02), 10)
    stats = NodeStats("bench", log, delivery, sources, requests)
    app = make_app(requests, stats, Responder(answers, pipeline, requests, folder / "callbacks"))
    settings = CollectSettings(port=0, protocol="hml" if protocol == "none" else protocol)
    server = HttpServer(app, requests, settings)
    await asyncio.to_thread(publisher.start, delivery.deliver)
    tasks = [asyncio.create_task(delivery.run()), asyncio.create_task(server.serve())]
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    print(server.url, flush=True)
    await stop.wait()
    server.stop()
    await asyncio.wait_for(delivery.drained(), 60)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.to_thread(publisher.close, 5.0)
    await log.close()


def main() -> None:
    """``collect_node FOLDER BOOTSTRAP TOPIC PROTOCOL CORE``."""
    folder, bootstrap, topic, protocol, core = sys.argv[1:6]
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, {int(core)})
    profile = cProfile.Profile() if os.environ.get("PROFILE") else None
    if profile is not None:
        profile.enable()
    calm_garbage_collector()
    uvloop.run(run(Path(folder), bootstrap, topic, protocol))
    if profile is not None:
        profile.dump_stats(os.environ["PROFILE"])


if __name__ == "__main__":
    main()

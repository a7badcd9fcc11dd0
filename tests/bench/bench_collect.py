"""What collecting costs: logging protocols side by side, HTTP on one core, and the Kafka client.

Everything is real and in one run: the embedded broker, a collector in a process of its own, a load client in another
(raw sockets; it only times the answers), the lake's disk. What was acknowledged is read back from the topics and
counted. The collector is held to one core (its Kafka client's threads with it), broker and load client to the other.

- *Protocols*: the same load against a collector without a log, with RBML, SBML and HML: events a second, the 99th
  percentile of the acknowledgement, CPU. The *overhead* of a protocol is what an event takes flat out, less that
  without a log, once in time and once in CPU; the figure is HML's overhead as a part of RBML's, the worse of the two.
- *HTTP*: one event a request (keep-alive, pipelined), and batches of 500 as NDJSON.
- *Publisher*: 100,000 events through the publisher alone.

Runs are repeated and the best of each is taken, since the machine has other things to do.

    python -m tests.bench.bench_collect [--quick] [--folder DIR]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kafka import KafkaConsumer, TopicPartition

from ingest.border.admission import Border
from ingest.broker import EmbeddedBroker
from ingest.delivery import KafkaDelivery
from ingest.kafka import KafkaPublisher, ensure_topics
from ingest.log.message_log import MessageLog
from ingest.node import calm_garbage_collector
from lakehouse.contract.envelope import Envelope
from lakehouse.contract.settings import KafkaSettings
from tests.bench.collect_load import event
from tests.bench.collect_node import source_of

PROTOCOLS = ("none", "rbml", "sbml", "hml")
BATCH = 500
DEPTH = 128  # requests of a connection under way: so many that nobody only waits for answers
COLLECTOR_CORE, OTHER_CORE = 0, 1


@dataclass(frozen=True, slots=True)
class Result:
    """One load on one collector.

    Attributes:
        events_per_s: acknowledged, from the first request to the last answer.
        events_per_core_s: acknowledged in a second of the collector's CPU, all threads.
        cpu_s_per_100k: its inverse, for 100,000 events.
        p50_ms: median time from a request to its answer.
        p99_ms: 99th percentile of it.
    """

    events_per_s: float
    events_per_core_s: float
    cpu_s_per_100k: float
    p50_ms: float
    p99_ms: float


class Collector:
    """A collector in a process of its own."""

    def __init__(self, folder: Path, bootstrap: str, topic: str, protocol: str) -> None:
        ensure_topics(bootstrap, [source_of(topic)])
        self._bootstrap = bootstrap
        self.topic = topic
        self.sent = 0
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.bench.collect_node", str(folder), bootstrap, topic, protocol,
             str(COLLECTOR_CORE)], stdout=subprocess.PIPE,
        )  # fmt: skip
        assert self._process.stdout is not None
        self._port = self._process.stdout.readline().decode().strip().rpartition(":")[2]

    def load(self, total: int, *, batch: int = 1, connections: int = 16, depth: int = 32, rate: float = 0) -> Result:
        """Send so many events; all of them must be acknowledged."""
        options = (self._port, connections, depth, total, batch, self.sent, rate, OTHER_CORE)
        cpu = _cpu_s(self._process.pid)
        said = subprocess.run(
            [sys.executable, "-m", "tests.bench.collect_load", *map(str, options)], stdout=subprocess.PIPE, check=True
        ).stdout
        cpu = _cpu_s(self._process.pid) - cpu
        found = json.loads(said)
        if found["refused"]:
            raise RuntimeError(f"{found['refused']} requests were refused")
        self.sent += total
        return Result(total / found["seconds"], total / cpu, cpu / total * 100_000, found["p50_ms"], found["p99_ms"])

    def stop(self) -> int:
        """End it when Kafka has everything; returns how many acknowledged events are not in the topic."""
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(120)
        assert self._process.stdout is not None
        self._process.stdout.close()
        return self.sent - len(ids_in(self._bootstrap, self.topic))


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def ids_in(bootstrap: str, topic: str) -> set[str]:
    """Ids of the events in a topic."""
    consumer = KafkaConsumer(bootstrap_servers=bootstrap, auto_offset_reset="earliest", metrics_enabled=False,
                             max_poll_records=10_000)  # fmt: skip
    try:
        partitions = [TopicPartition(topic, n) for n in sorted(consumer.partitions_for_topic(topic) or ())]
        consumer.assign(partitions)
        ends = consumer.end_offsets(partitions)
        found: set[str] = set()
        while any(consumer.position(p) < end for p, end in ends.items()):
            for records in consumer.poll(timeout_ms=1000).values():
                found.update(Envelope.from_headers(record.headers).event_id for record in records)
        return found
    finally:
        consumer.close()


async def _through_the_publisher(bootstrap: str, folder: Path, total: int) -> tuple[float, float]:
    """Events a second through a publisher alone, and CPU seconds for 100,000; then as many are in the topic."""
    topic = "publisher"
    ensure_topics(bootstrap, [source_of(topic)])
    publisher = KafkaPublisher(KafkaSettings(bootstrap=bootstrap, linger_ms=10), {"clicks": topic})
    log = MessageLog(folder / topic, "bench", limit=8 << 30, protocol="none")
    lane = log.lane("clicks/http/0", "clicks")
    border = Border(source_of(topic), tenant="default", collector="bench")
    admitted = [border.admit(event(number)) for number in range(total)]
    known = 0

    def count(_: Any) -> None:
        nonlocal known
        known += 1

    delivery = KafkaDelivery(log, publisher, count)
    await asyncio.to_thread(publisher.start, delivery.deliver)
    task = asyncio.create_task(delivery.run())
    started, cpu = time.perf_counter(), time.process_time()
    for number, item in enumerate(admitted):
        delivery.offer(log.append(lane, item.envelope, item.key, item.payload))
        if number % 500 == 0:
            await asyncio.sleep(0)
    await delivery.drained()
    took, cpu = time.perf_counter() - started, time.process_time() - cpu
    task.cancel()
    await asyncio.to_thread(publisher.close, 5.0)
    if (found := len(ids_in(bootstrap, topic))) != total or known != total:
        raise RuntimeError(f"{known} acknowledged, {found} in the topic, of {total}")
    return total / took, cpu / total * 100_000


def _best(results: Sequence[Result]) -> Result:
    return max(results, key=lambda found: found.events_per_s)


def _row(name: str, found: Result) -> None:
    print(
        f"{name:<28}{found.events_per_s:>10,.0f} {found.events_per_core_s:>13,.0f} {found.p50_ms:>8.1f} "
        f"{found.p99_ms:>8.1f} {found.cpu_s_per_100k:>10.2f}",
        flush=True,
    )


def protocols(folder: Path, bootstrap: str, events: int, repeat: int) -> tuple[dict[str, Result], int]:
    """The same load with each protocol, in turns; and how many acknowledged events were lost."""
    collectors = {}
    found: dict[str, list[Result]] = {name: [] for name in PROTOCOLS}
    lost = 0
    for turn in range(repeat):
        for name in PROTOCOLS:
            collectors[name] = Collector(folder / f"{name}{turn}", bootstrap, f"log-{name}-{turn}", name)
            # Those that stand still for the disk once an event get fewer of them, and the same window.
            count = events // 10 if name in ("rbml", "sbml") else events
            collectors[name].load(count // 10, depth=DEPTH)
            found[name].append(collectors[name].load(count, depth=DEPTH))
            lost += collectors[name].stop()
    return {name: _best(results) for name, results in found.items()}, lost


def run(folder: Path, quick: bool) -> dict[str, Any]:
    """All of it, printed as it comes; returns what the last line says."""
    repeat = 1 if quick else 3
    events = 10_000 if quick else 30_000
    broker = EmbeddedBroker(folder / "broker", heap_mb=512, die_with_parent=True)
    print(f"{'':<28}{'events/s':>10} {'events/core·s':>13} {'p50 ms':>8} {'p99 ms':>8} {'CPU s/100k':>10}")
    try:
        bootstrap = broker.start()
        if broker.pid is not None:
            for thread in Path(f"/proc/{broker.pid}/task").iterdir():
                os.sched_setaffinity(int(thread.name), {OTHER_CORE})
        by_protocol, lost = protocols(folder, bootstrap, events, repeat)
        for name, found in by_protocol.items():
            _row(f"log: {name}", found)
        collector = Collector(folder / "http", bootstrap, "http", "hml")
        collector.load(5_000)
        single = _best([collector.load(20_000 if quick else 60_000) for _ in range(repeat)])
        _row("HTTP, one event a request", single)
        size = 100_000 if quick else 300_000
        batch = _best([collector.load(size, batch=BATCH, connections=4, depth=2) for _ in range(repeat)])
        _row(f"HTTP, {BATCH} a request", batch)
        slow = collector.load(5_000 if quick else 10_000, connections=4, rate=1_000)
        _row("HTTP, 1,000 events/s", slow)
        lost += collector.stop()
        calm_garbage_collector()
        alone = asyncio.run(_through_the_publisher(bootstrap, folder, 20_000 if quick else 100_000))
        print(f"{'the publisher alone':<28}{alone[0]:>10,.0f} {'':>13} {'':>8} {'':>8} {alone[1]:>10.2f}")
    finally:
        broker.stop()
    overhead = {name: 1 / found.events_per_s - 1 / by_protocol["none"].events_per_s
                for name, found in by_protocol.items()}  # fmt: skip
    cpu = {name: (found.cpu_s_per_100k - by_protocol["none"].cpu_s_per_100k) / 100_000
           for name, found in by_protocol.items()}  # fmt: skip

    def of_rbml(name: str) -> float:
        return round(max(0.0, overhead[name] / overhead["rbml"], cpu[name] / cpu["rbml"]), 4)

    return {
        "hml_overhead_of_rbml": of_rbml("hml"),
        "sbml_overhead_of_rbml": of_rbml("sbml"),
        "overhead_us": {name: round(overhead[name] * 1e6, 1) for name in PROTOCOLS},
        "overhead_cpu_us": {name: round(cpu[name] * 1e6, 1) for name in PROTOCOLS},
        "http_single_s": round(single.events_per_s),
        "http_batch_s": round(batch.events_per_s),
        "http_single_core_s": round(single.events_per_core_s),
        "http_batch_core_s": round(batch.events_per_core_s),
        "core_at_1000_s": round(slow.cpu_s_per_100k / 100, 3),
        "publisher_s": round(alone[0]),
        "protocols": {
            name: {"events_s": round(found.events_per_s), "p99_ms": round(found.p99_ms, 1),
                   "cpu_s_per_100k": round(found.cpu_s_per_100k, 2)}
            for name, found in by_protocol.items()
        },
        "event_bytes": len(event(0)),
        "load": round(os.getloadavg()[0], 1),
        "lost": lost,
    }  # fmt: skip


def main() -> None:
    """Print the table, and one JSON object as the last line; exit status 1 where an acknowledged event was lost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer events, once each")
    parser.add_argument("--folder", type=Path, default=Path.cwd(), help="on the disk to be measured")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=options.folder, prefix=".bench-collect-"))
    try:
        found = run(folder, options.quick)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps(found))
    sys.exit(1 if found["lost"] else 0)


if __name__ == "__main__":
    main()

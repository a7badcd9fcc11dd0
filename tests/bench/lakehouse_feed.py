"""Puts made-up events on a topic with their envelope, as a collector does; a process of its own for bench_lakehouse.

``python -m tests.bench.lakehouse_feed --case meetup --kafka HOST:PORT --topic T --events N [--rate R] --out FILE``:
FILE gets a NumPy archive with ``partition``, ``offset``, ``sent_ms`` and ``id`` (a 64-bit hash of the event id) of each
event, and ``bytes``, the size of all payloads.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import time
import zlib

import numpy as np
from confluent_kafka import Consumer, Producer, TopicPartition

from ingest.border import Border
from lakehouse.contract.envelope import RECEIVED_AT
from lakehouse.contract.pipeline import load_pipeline
from tests.bench.lakehouse_cases import CASES

_BURST_S = 0.02
Record = tuple[bytes, bytes, list[tuple[str, bytes]]]  # payload, key, headers less the time of receipt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=sorted(CASES), required=True)
    parser.add_argument("--kafka", required=True)
    parser.add_argument("--topic", required=True)
    parser.add_argument("--events", type=int, required=True)
    parser.add_argument("--rate", type=float, default=0.0, help="events a second; 0: as fast as it goes")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", required=True)
    options = parser.parse_args()
    case = CASES[options.case]
    source = load_pipeline(case.pipeline).sources[case.source]
    border = Border(source, tenant="default", collector="bench")
    lines = case.lines(options.seed, int(time.time() * 1000), options.rate or 10_000.0)
    ids = np.zeros(options.events, dtype=np.uint64)

    def record(number: int, line: bytes) -> Record:
        event = border.admit(line)
        assert event.refusal is None, event.refusal
        digest = hashlib.blake2b(event.envelope.event_id.encode(), digest_size=8).digest()
        ids[number] = int.from_bytes(digest, "big")
        return event.payload, event.key, [h for h in event.envelope.to_headers() if h[0] != RECEIVED_AT]

    records = itertools.starmap(record, enumerate(itertools.islice(lines, options.events)))
    if options.rate:
        records = iter(list(records))  # made beforehand: making them must not slow the sending
    producer = Producer(
        {
            "bootstrap.servers": options.kafka,
            "acks": "all",
            "enable.idempotence": True,
            "linger.ms": 20,
            "compression.type": "lz4",
            "queue.buffering.max.messages": 200_000,
        }
    )
    count = len(producer.list_topics(options.topic).topics[options.topic].partitions)
    ends = [_end(options.kafka, options.topic, number) for number in range(count)]
    partition = np.zeros(options.events, dtype=np.int32)
    offset = np.zeros(options.events, dtype=np.int64)
    sent_ms = np.zeros(options.events)
    total = 0
    began = time.monotonic()
    stamp, now = (RECEIVED_AT, b""), 0.0
    for number, (payload, key, headers) in enumerate(records):
        if number % 64 == 0 or options.rate < 10_000:
            if options.rate and (ahead := began + number / options.rate - time.monotonic()) > 0:
                producer.poll(0)
                time.sleep(max(ahead, _BURST_S))
            now = time.time()
            stamp = (RECEIVED_AT, str(int(now * 1e6)).encode())
        place = zlib.crc32(key) % count
        headers.append(stamp)
        while True:
            try:
                producer.produce(options.topic, payload, key, place, headers=headers)
                break
            except BufferError:
                producer.poll(0.05)
        # An idempotent producer alone on its topic: offsets follow each other in the order of sending.
        partition[number], offset[number], sent_ms[number] = place, ends[place], now * 1000
        ends[place] += 1
        total += len(payload)
    producer.flush(120)
    assert ends == [_end(options.kafka, options.topic, number) for number in range(count)], "some were not delivered"
    np.savez(options.out, partition=partition, offset=offset, sent_ms=sent_ms, id=ids, bytes=total)


def _end(servers: str, topic: str, partition: int) -> int:
    """The offset behind the partition's last record."""
    consumer = Consumer({"bootstrap.servers": servers, "group.id": "lakehouse-feed"})
    try:
        return int(consumer.get_watermark_offsets(TopicPartition(topic, partition), timeout=30)[1])
    finally:
        consumer.close()


if __name__ == "__main__":
    main()

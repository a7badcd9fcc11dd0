"""Puts made-up RSVPs on a topic with their envelope, as a collector does; a process of its own for bench_lakehouse.

``python -m tests.bench.lakehouse_feed --kafka HOST:PORT --topic T --events N [--rate R] --out FILE``: FILE gets a
NumPy archive with ``partition``, ``offset``, ``sent_ms`` and ``id`` (a 64-bit hash of the event id) of each event.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import time
from typing import Any

import numpy as np
from confluent_kafka import Producer

from ingest.border import Border
from ingest.simulate.generator import generate
from lakehouse.contract.pipeline import load_pipeline
from lakehouse.contract.settings import load_settings

_BURST_S = 0.01


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kafka", required=True)
    parser.add_argument("--topic", required=True)
    parser.add_argument("--events", type=int, required=True)
    parser.add_argument("--rate", type=float, default=0.0, help="events a second; 0: as fast as it goes")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", required=True)
    options = parser.parse_args()
    source = load_pipeline(load_settings().pipeline_folder()).sources["rsvps"]
    border = Border(source, tenant="default", collector="bench")
    lines = generate(options.seed, int(time.time() * 1000), options.rate or 10_000.0)
    admitted = (border.admit(line) for line in itertools.islice(lines, options.events))
    if options.rate:
        admitted = iter(list(admitted))  # made beforehand: making them must not slow the sending
    producer = Producer(
        {
            "bootstrap.servers": options.kafka,
            "acks": "all",
            "enable.idempotence": True,
            "linger.ms": 20,
            "compression.type": "lz4",
            "queue.buffering.max.messages": 200_000,
            "partitioner": "murmur2_random",
        }
    )
    partition = np.zeros(options.events, dtype=np.int32)
    offset = np.full(options.events, -1, dtype=np.int64)
    sent_ms = np.zeros(options.events)
    ids = np.zeros(options.events, dtype=np.uint64)

    def delivered(number: int) -> Any:
        def note(error: Any, message: Any) -> None:
            if error is not None:
                raise RuntimeError(str(error))
            partition[number], offset[number] = message.partition(), message.offset()

        return note

    began = time.monotonic()
    for number, event in enumerate(admitted):
        if options.rate and (ahead := began + number / options.rate - time.monotonic()) > 0:
            producer.poll(0)
            time.sleep(max(ahead, _BURST_S))
        at = time.time()
        headers = [h for h in event.envelope.to_headers() if h[0] != "received_at"]
        headers.append(("received_at", str(int(at * 1e6)).encode()))
        sent_ms[number] = at * 1000
        digest = hashlib.blake2b(event.envelope.event_id.encode(), digest_size=8).digest()
        ids[number] = int.from_bytes(digest, "big")
        while True:
            try:
                producer.produce(
                    options.topic, event.payload, event.key, headers=headers, on_delivery=delivered(number)
                )
                break
            except BufferError:
                producer.poll(0.05)
        if number % 256 == 0:
            producer.poll(0)
    producer.flush(60)
    assert (offset >= 0).all(), "some were not delivered"
    np.savez(options.out, partition=partition, offset=offset, sent_ms=sent_ms, id=ids)


if __name__ == "__main__":
    main()

"""Puts made-up events on a topic with their envelope, as a collector does; a process of its own for bench_lakehouse.

``python -m tests.bench.lakehouse_feed --case meetup --kafka HOST:PORT --topic T --events N [--rate R] --out FILE``:
FILE gets a NumPy archive with ``partition``, ``offset``, ``sent_ms`` and ``id`` (a 64-bit hash of the event id) of each
event, and ``bytes``, the size of all payloads.

With a rate the record batches are made beforehand, as Kafka stores them; what is left to do when they are due is to
stamp them with the time and to write them to the broker's socket (:mod:`tests.bench.kafka_wire`). So 76,000 events a
second take a twentieth of a core from what is measured. The batches are not compressed.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import time
import zlib
from collections import defaultdict
from collections.abc import Iterator

import numpy as np

from ingest.border.admission import Border
from lakehouse.contract.envelope import RECEIVED_AT
from lakehouse.contract.pipeline import load_pipeline
from tests.bench.kafka_wire import Connection, RecordBatch
from tests.bench.lakehouse_cases import CASES

_TICK_S = 0.02  # between two requests, where there is a rate
_AT_ONCE = 4_000  # events of a request, where there is none
_NO_TIME = b"0" * 16  # microseconds since the epoch have 16 digits until the year 2286


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
    feed = Feed(options.case, options.events, options.rate, options.seed)
    with Connection(options.kafka, options.topic) as connection:
        requests = feed.requests(connection.partitions)
        if options.rate:
            requests = iter(list(requests))  # making them must not slow the sending
        began = time.monotonic()
        for due_s, batches in requests:
            if options.rate and (ahead := began + due_s - time.monotonic()) > 0:
                time.sleep(ahead)
            feed.sent(connection, batches)
    feed.note(options.out)


class Feed:
    """Events of a case in record batches, and notes of those that were sent.

    Args:
        case: one of :data:`CASES`.
        events: how many.
        rate: events a second; 0: none is set.
        seed: of the events.
    """

    def __init__(self, case: str, events: int, rate: float, seed: int) -> None:
        made = CASES[case]
        source = load_pipeline(made.pipeline).sources[made.source]
        self._border = Border(source, tenant="default", collector="bench")
        self._lines = itertools.islice(made.lines(seed, int(time.time() * 1000), rate or 10_000.0), events)
        self._rate = rate
        self._partition = np.zeros(events, dtype=np.int32)
        self._offset = np.zeros(events, dtype=np.int64)
        self._sent_ms = np.zeros(events)
        self._ids = np.zeros(events, dtype=np.uint64)
        self._bytes = 0

    def requests(self, partitions: int) -> Iterator[tuple[float, list[tuple[RecordBatch, list[int]]]]]:
        """When each request is due (seconds from the start), and its batches with the numbers of their events."""
        most = max(1, round(self._rate * _TICK_S)) if self._rate else _AT_ONCE
        numbered = enumerate(self._lines)
        while some := list(itertools.islice(numbered, most)):
            batches: dict[int, tuple[RecordBatch, list[int]]] = defaultdict(lambda: (RecordBatch(), []))
            for number, line in some:
                event = self._border.admit(line)
                assert event.refusal is None, event.refusal
                digest = hashlib.blake2b(event.envelope.event_id.encode(), digest_size=8).digest()
                self._ids[number] = int.from_bytes(digest, "big")
                place = zlib.crc32(event.key) % partitions
                self._partition[number] = place
                headers = [(n, _NO_TIME if n == RECEIVED_AT else v) for n, v in event.envelope.to_headers()]
                batch, numbers = batches[place]
                batch.add(event.key, event.payload, headers, _NO_TIME)
                numbers.append(number)
                self._bytes += len(event.payload)
            last = some[-1][0]
            yield (last / self._rate if self._rate else 0.0), [batches[place] for place in sorted(batches)]

    def sent(self, connection: Connection, batches: list[tuple[RecordBatch, list[int]]]) -> None:
        """Stamp and send a request's batches, wait until the broker has them, and note where they are."""
        now = time.time()
        stamp = str(int(now * 1e6)).encode()
        assert len(stamp) == len(_NO_TIME)
        places = [int(self._partition[numbers[0]]) for _, numbers in batches]
        data = [batch.stamped(int(now * 1000), stamp) for batch, _ in batches]
        offsets = connection.produce(dict(zip(places, data, strict=True)))
        for place, (_, numbers) in zip(places, batches, strict=True):
            self._offset[numbers] = np.arange(offsets[place], offsets[place] + len(numbers))
            self._sent_ms[numbers] = now * 1000

    def note(self, file: str) -> None:
        """Write down what was sent; see the module."""
        np.savez(
            file,
            partition=self._partition,
            offset=self._offset,
            sent_ms=self._sent_ms,
            id=self._ids,
            bytes=np.array(self._bytes),
        )


if __name__ == "__main__":
    main()

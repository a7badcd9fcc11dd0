"""Which local store should carry the message log? Four of them, side by side, at the same guarantee.

Every store gets the same 1.3 KB events in the same groups: a worker thread makes a group durable (one commit that has
reached the disk), and only then are its events acknowledged. Groups form as in the collector: one is sealed 5 ms after
its first event, and while a write runs the next ones gather. Events leave the store again 50 ms after that, as Kafka's
acknowledgements would make them. ``none`` is the same without a store: what the measuring itself costs.

Run: ``python -m tests.bench.bench_log_store [seconds a run] [folder]``. The last line is one JSON object.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sqlite3
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

import lmdb
from rocksdict import Options, Rdict, WriteBatch, WriteOptions

from ingest.log.protocols import SegmentPart, SegmentWriter
from ingest.log.segments import SEGMENT_MAGIC, LogSegment, frame_chunks

EVENT_BYTES = 1300
GROUP_S = 0.005
KAFKA_S = 0.05
WINDOW = 8192  # events that wait for their group at most, flat out
SEGMENT_BYTES = 16 * 1024 * 1024
RATES = (1_000, 20_000, 0)  # events a second; 0: flat out


class Store(Protocol):
    """What a message log needs of a store; called from one thread."""

    def write(self, first: int, events: Sequence[bytes], forget: int) -> None:
        """Make events ``first, first + 1, …`` durable; those before ``forget`` may go."""

    def close(self) -> None:
        """Let go of the files."""


class Nothing:
    def __init__(self, folder: Path) -> None: ...

    def write(self, first: int, events: Sequence[bytes], forget: int) -> None: ...

    def close(self) -> None: ...


class SqliteWal:
    def __init__(self, folder: Path) -> None:
        self._db = sqlite3.connect(folder / "log.db", isolation_level=None, check_same_thread=False)
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=FULL")  # NORMAL does not sync a commit
        self._db.execute("CREATE TABLE log (seq INTEGER PRIMARY KEY, body BLOB NOT NULL)")

    def write(self, first: int, events: Sequence[bytes], forget: int) -> None:
        self._db.execute("BEGIN")
        self._db.executemany("INSERT INTO log VALUES (?, ?)", enumerate(events, first))
        self._db.execute("DELETE FROM log WHERE seq < ?", (forget,))
        self._db.execute("COMMIT")

    def close(self) -> None:
        self._db.close()


class Lmdb:
    def __init__(self, folder: Path) -> None:
        self._env = lmdb.open(str(folder), map_size=4 << 30, metasync=True, sync=True)
        self._gone = 1

    def write(self, first: int, events: Sequence[bytes], forget: int) -> None:
        with self._env.begin(write=True) as transaction:
            for seq, event in enumerate(events, first):
                transaction.put(seq.to_bytes(8, "big"), event, append=True)
            for seq in range(self._gone, forget):
                transaction.delete(seq.to_bytes(8, "big"))
        self._gone = max(self._gone, forget)

    def close(self) -> None:
        self._env.close()


class RocksDb:
    def __init__(self, folder: Path) -> None:
        options = Options(raw_mode=True)
        options.create_if_missing(True)
        self._db = Rdict(str(folder / "db"), options)
        self._sync = WriteOptions()
        self._sync.sync = True
        self._gone = 1

    def write(self, first: int, events: Sequence[bytes], forget: int) -> None:
        batch = WriteBatch(raw_mode=True)
        for seq, event in enumerate(events, first):
            batch.put(seq.to_bytes(8, "big"), event)
        if forget > self._gone:
            batch.delete_range(self._gone.to_bytes(8, "big"), forget.to_bytes(8, "big"))
            self._gone = forget
        self._db.write(batch, self._sync)

    def close(self) -> None:
        self._db.close()


class SegmentLog:
    """The files of ``ingest.log``, written as ``ingest.log.protocols`` does."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files = SegmentWriter(folder)
        self._segments: deque[tuple[int, LogSegment]] = deque()  # with the sequence number after its last event
        self._active = LogSegment(1, folder / "1.seg")

    def write(self, first: int, events: Sequence[bytes], forget: int) -> None:
        parts: list[SegmentPart] = []
        seq = first
        segment = self._active
        if segment.size > SEGMENT_BYTES:
            self._segments.append((first, segment))
            segment = self._active = LogSegment(segment.number + 1, self._folder / f"{segment.number + 1}.seg")
        chunks = [] if segment.size else [SEGMENT_MAGIC]
        for event in events:
            chunks += frame_chunks(seq, event)
            seq += 1
        parts.append(SegmentPart(segment, segment.size, chunks))
        gone: list[LogSegment] = []
        while self._segments and self._segments[0][0] <= forget:
            gone.append(self._segments.popleft()[1])
        (size,) = self._files.write(parts, gone)
        segment.size += size

    def close(self) -> None:
        self._files.close()


STORES: dict[str, Callable[[Path], Store]] = {
    "none": Nothing,
    "sqlite-wal": SqliteWal,
    "lmdb": Lmdb,
    "rocksdb": RocksDb,
    "segments": SegmentLog,
}


@dataclass(frozen=True, slots=True)
class Result:
    """One store under one load.

    Attributes:
        store: its name.
        asked: events a second that came; 0: as many as it took.
        events_per_s: events a second that were acknowledged.
        p50_ms: median time from an event until it was acknowledged.
        p99_ms: 99th percentile of it.
        cpu_s_per_million: CPU seconds of the process for a million events.
        groups_per_s: commits a second.
        written_mb_per_s: what the process wrote to the disk, in 10⁶ bytes a second.
    """

    store: str
    asked: int
    events_per_s: float
    p50_ms: float
    p99_ms: float
    cpu_s_per_million: float
    groups_per_s: float
    written_mb_per_s: float


class Run:
    """Feeds one store for a while."""

    def __init__(self, store: Store, rate: int, seconds: float) -> None:
        self._store = store
        self._rate = rate
        self._seconds = seconds
        self._worker = ThreadPoolExecutor(1)
        self._pending: list[bytes] = []
        self._arrived: list[float] = []
        self._next = 1
        self._writing = False
        self._due = False
        self._kafka: deque[tuple[float, int]] = deque()
        self._forget = 1
        self._all = asyncio.Event()
        self.times: list[float] = []
        self.groups = 0

    async def go(self) -> None:
        loop = asyncio.get_running_loop()
        payload = os.urandom(EVENT_BYTES)
        start = loop.time()
        made = 0
        while (now := loop.time()) < start + self._seconds:
            due = int((now - start) * self._rate) - made if self._rate else WINDOW - (made - len(self.times))
            for _ in range(min(due, 256)):
                self._append(loop, payload)
                made += 1
            await asyncio.sleep(0.001 if self._rate else 0)
        while len(self.times) < made:
            self._all.clear()
            await self._all.wait()
        self._worker.shutdown()

    def _append(self, loop: asyncio.AbstractEventLoop, payload: bytes) -> None:
        if not self._pending:
            loop.call_later(GROUP_S, self._seal, loop)
        self._pending.append(payload)
        self._arrived.append(loop.time())

    def _seal(self, loop: asyncio.AbstractEventLoop) -> None:
        self._due = True
        if not self._writing:
            self._write(loop)

    def _write(self, loop: asyncio.AbstractEventLoop) -> None:
        events, self._pending = self._pending, []
        arrived, self._arrived = self._arrived, []
        if not events:
            self._due = False
            return
        first, self._next = self._next, self._next + len(events)
        now = loop.time()
        while self._kafka and self._kafka[0][0] < now:
            self._forget = self._kafka.popleft()[1]
        self._writing, self._due = True, False
        future = loop.run_in_executor(self._worker, self._store.write, first, events, self._forget)

        def written(done: asyncio.Future[None]) -> None:
            done.result()
            self._writing = False
            at = loop.time()
            self.groups += 1
            self._kafka.append((at + KAFKA_S, first + len(events)))
            self.times += [at - then for then in arrived]
            self._all.set()
            if self._due:
                self._write(loop)

        future.add_done_callback(written)


def measure(name: str, rate: int, seconds: float, below: Path) -> Result:
    """One store under one load, in a fresh folder."""
    folder = Path(tempfile.mkdtemp(dir=below))
    store = STORES[name](folder)
    run = Run(store, rate, seconds)
    wrote, cpu, started = _written(), time.process_time(), time.perf_counter()
    asyncio.run(run.go())
    took, cpu, wrote = time.perf_counter() - started, time.process_time() - cpu, _written() - wrote
    store.close()
    shutil.rmtree(folder)
    times = sorted(run.times)
    count = len(times)
    return Result(
        store=name,
        asked=rate,
        events_per_s=round(count / took),
        p50_ms=round(times[count // 2] * 1e3, 2),
        p99_ms=round(times[count * 99 // 100] * 1e3, 2),
        cpu_s_per_million=round(cpu / count * 1e6, 1),
        groups_per_s=round(run.groups / took),
        written_mb_per_s=round(wrote / took / 1e6, 1),
    )


def _written() -> int:
    """Bytes that this process has sent to the disk (Linux), else 0."""
    try:
        fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    except OSError:
        return 0
    return int(fields["write_bytes"])


def main(seconds: float = 2.0, below: Path | None = None) -> list[Result]:
    """All stores under all loads, printed as they come."""
    folder = Path(tempfile.mkdtemp(dir=below or Path.cwd(), prefix=".bench-log-"))
    results = []
    print("store        asked/s  events/s  p50 ms  p99 ms  CPU s/M groups/s    MB/s")
    try:
        for rate in RATES:
            for name in STORES:
                found = measure(name, rate, seconds, folder)
                results.append(found)
                print(
                    f"{found.store:<11} {found.asked or 'flat out':>8} {found.events_per_s:>9.0f} {found.p50_ms:>7.2f} "
                    f"{found.p99_ms:>7.2f} {found.cpu_s_per_million:>8.1f} {found.groups_per_s:>8.0f} "
                    f"{found.written_mb_per_s:>7.1f}",
                    flush=True,
                )
    finally:
        shutil.rmtree(folder)
    print(json.dumps({"event_bytes": EVENT_BYTES, "results": [asdict(found) for found in results]}))
    return results


if __name__ == "__main__":
    main(
        float(sys.argv[1]) if len(sys.argv) > 1 else 2.0,
        Path(sys.argv[2]) if len(sys.argv) > 2 else None,
    )

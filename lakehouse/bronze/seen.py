"""Which copy of an event counts: the first in bronze, by an index that is a pure function of bronze.

The index maps a dedupe key (16 bytes) to the coordinates of the first row that carries it. A row counts if and only if
the index holds that row's own coordinates, so judging a batch again (after a crash, or when Spark repeats it) gives
the same answer, and there is no horizon: an event is once for ever. Lost or damaged, it is rebuilt from bronze.
What was rejected: docs/decisions/0005.

:class:`RunIndex` is a log-structured merge tree (O'Neil et al., 1996): sorted runs, a journal, and the journal's
entries in memory. Each batch is appended, and nothing is written in place, however large the index is.
``index.json`` names the runs and the journal that belong to the index. Files that it does not name are what a crash
left of a change that was under way, and are removed. Runs of about one size are merged by a thread beside.

:class:`HorizonIndex` forgets an id that did not come again for a source's ``dedupe_horizon``. A row then counts if no
copy of it stands in bronze within the horizon before it, which :func:`lakehouse.batch.build` asks of bronze itself in
the same words. What the last batch was told is kept, because forgetting makes a second answer differ.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import struct
import threading
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path

import lmdb
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from lakehouse.bronze.runs import ENTRY_BYTES, Damaged, Entries, Run, merged, place_of
from lakehouse.contract.errors import crash_point
from lakehouse.contract.pipeline import Source
from lakehouse.contract.storage import sync_folder

log = logging.getLogger(__name__)

SPILL = 131_072  # entries in memory (6 MB) that become a run
LARGEST = 8 << 20  # entries of a run that is merged no further: 0.4 GB, a second or two of work
_TIER = 4  # runs of one size that are merged
_MANIFEST = "index.json"
_FRAME = struct.Struct("<4sIII")
_MAGIC = b"MRSJ"
_MAP_BYTES = 1 << 40  # address space, not disk: the file grows with what is in it
_TIME = struct.Struct(">q")
_COORDINATES = struct.Struct(">qqIq")  # bronze_at, place, partition, offset: sorts as bronze does
_PLACE_BYTES = _COORDINATES.size
_POSITION = b"\x00position"
_COPIES = b"\x00copies"

JUDGED = ("dedupe_key", "topic", "partition", "offset", "bronze_at")
"""Columns of conformed events that the index looks at."""


class SeenIndex(ABC):
    """First occurrences of one source's events. One thread enters; others may :meth:`copy` meanwhile.

    Args:
        folder: where its files lie; created where absent.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder

    @abstractmethod
    def position(self) -> str:
        """What was given to the last :meth:`judge`: how far in bronze the index is complete; empty for a new one."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def judge(self, rows: pa.Table, position: str) -> npt.NDArray[np.bool_]:
        """Enter a batch and tell for each row whether it is the copy that counts.

        Args:
            rows: columns :data:`JUDGED`.
            position: how far in bronze this batch reaches; durable together with the entries.
        """

    @abstractmethod
    def copy(self, folder: Path) -> str:
        """Copy the index as it is at a moment, while it may be written; returns the copy's position.

        Entries may be in the copy that its position does not cover yet: judged again they give the same answer.
        """

    @abstractmethod
    def close(self) -> None: ...


def seen_index(folder: Path, source: Source) -> SeenIndex:
    return HorizonIndex(folder, source.dedupe_horizon_ms * 1000) if source.dedupe_horizon_ms else RunIndex(folder)


class RunIndex(SeenIndex):
    """First occurrences of one source's events, for ever.

    Args:
        spill: entries in memory that become a run.
    """

    def __init__(self, folder: Path, spill: int = SPILL) -> None:
        super().__init__(folder)
        self._spill_at = spill
        self._lock = threading.RLock()  # of what the manifest says
        self._closing = False
        self._merger: threading.Thread | None = None
        self._position = ""
        self._recent: list[Entries] = []  # of the journal; each at least twice as large as the next
        self._runs: list[Run] = []  # oldest, and mostly largest, first
        self._number = 0  # of the newest file
        self._journal = self._open()
        self._tidy(self._journal.path.name)

    def position(self) -> str:
        return self._position

    def __len__(self) -> int:
        return sum(map(len, self._runs)) + sum(map(len, self._recent))

    def judge(self, rows: pa.Table, position: str) -> npt.NDArray[np.bool_]:
        entries = Entries.of(rows)
        order = entries.order()
        entries = entries.take(order)
        head = np.ones(len(entries), dtype=bool)  # of each key the first in bronze
        head[1:] = (entries.high[1:] != entries.high[:-1]) | (entries.low[1:] != entries.low[:-1])
        heads = entries.take(head)
        counted, known = self._look_up(heads)
        first = np.empty(len(entries), dtype=bool)
        first[order] = entries.same_rows(counted.take(np.cumsum(head) - 1))
        self._enter(position, heads.take(~known))
        return first

    def copy(self, folder: Path) -> str:
        """See :class:`SeenIndex`. Runs are never changed, so the copy shares their files where the disk can."""
        folder.mkdir(parents=True)
        with self._lock:
            for run in self._runs:
                try:
                    os.link(run.path, folder / run.path.name)
                except OSError:
                    shutil.copyfile(run.path, folder / run.path.name)
            (folder / self._journal.path.name).write_bytes(self._journal.bytes())
            shutil.copyfile(self.folder / _MANIFEST, folder / _MANIFEST)
            return self._position

    def close(self) -> None:
        """Close the files; a merge under way is left, and begun again another time."""
        self._closing = True
        if self._merger is not None:
            self._merger.join()
        self._journal.close()

    # --- looking

    def _look_up(self, wanted: Entries) -> tuple[Entries, npt.NDArray[np.bool_]]:
        """For each key the row that the index holds, and whether it holds one; else the row that was given."""
        found = Entries(*(column.copy() for column in wanted.columns))
        left = np.arange(len(wanted))
        with self._lock:
            parts: Sequence[Entries | Run] = (*self._recent, *self._runs)
        for part in parts:
            at = part.find(wanted.high[left], wanted.low[left])
            hit = at >= 0
            if hit.any():
                held = (part.entries if isinstance(part, Run) else part).take(at[hit])
                for column, value in zip(found.columns, held.columns, strict=True):
                    column[left[hit]] = value
                left = left[~hit]
        known = np.ones(len(wanted), dtype=bool)
        known[left] = False
        return found, known

    # --- entering

    def _enter(self, position: str, new: Entries) -> None:
        """Entries, sorted, of keys that the index does not hold."""
        self._journal.append(position, new)
        with self._lock:
            self._position = position
            self._remember(new)
        if sum(map(len, self._recent)) >= self._spill_at:
            self._spill()

    def _remember(self, new: Entries) -> None:
        if len(new):
            self._recent.append(new)
        while len(self._recent) > 1 and len(self._recent[-2]) < 2 * len(self._recent[-1]):
            self._recent[-2:] = [merged(self._recent[-2:])]

    def _spill(self) -> None:
        """The journal's entries become a run, and a new journal begins."""
        run = Run.write(self._name("run"), self._recent)
        assert run is not None
        crash_point("seen.after_run")
        with self._lock:
            journal = Journal(self._name("journal"))
            self._note([*self._runs, run], journal)
            former, self._journal = self._journal, journal
            self._runs.append(run)
            self._recent.clear()
        crash_point("seen.after_note")
        former.close()
        former.path.unlink()
        if self._merger is None or not self._merger.is_alive():
            self._merger = threading.Thread(target=self._merge, name="seen events", daemon=True)
            self._merger.start()

    def _merge(self) -> None:
        """Merge runs of one size while there are enough of them."""
        try:
            while (group := self._mergeable()) and not self._closing:
                run = Run.write(self._name("run"), [r.entries for r in group], lambda: self._closing)
                if run is None:
                    return
                with self._lock:
                    at = self._runs.index(group[0])
                    runs = [*self._runs[:at], run, *self._runs[at + len(group) :]]
                    self._note(runs, self._journal)
                    self._runs = runs
                for old in group:
                    old.path.unlink()
        except OSError:
            log.exception("%s: runs could not be merged; it is tried again with the next", self.folder)

    def _mergeable(self) -> list[Run]:
        """The first few runs in a row that are of about one size."""
        with self._lock:
            for at in range(len(self._runs) - _TIER + 1):
                group = self._runs[at : at + _TIER]
                sizes = [len(run) for run in group]
                if max(sizes) < _TIER * min(sizes) and sum(sizes) <= LARGEST:
                    return group
        return []

    # --- files

    def _open(self) -> Journal:
        """Read what is there; an index that is damaged begins anew, and is filled in from bronze."""
        try:
            noted = json.loads((self.folder / _MANIFEST).read_bytes())
            self._runs = [Run(self.folder / name) for name in noted["runs"]]
            journal = Journal(self.folder / noted["journal"])
            self._number, self._position = int(noted["number"]), str(noted["position"])
        except FileNotFoundError as error:
            if Path(str(error.filename)).name != _MANIFEST:
                log.warning("%s: %s; the index is made anew from bronze", self.folder, error)
            return self._begin()
        except (Damaged, OSError, ValueError, KeyError, TypeError) as error:
            log.warning("%s: %s; the index is made anew from bronze", self.folder, error)
            return self._begin()
        for position, entries in journal.read():
            self._position = position
            self._remember(entries)
        return journal

    def _begin(self) -> Journal:
        self._runs, self._number, self._position = [], 0, ""
        (self.folder / _MANIFEST).unlink(missing_ok=True)
        self._tidy("")
        journal = Journal(self._name("journal"))
        self._note([], journal)
        return journal

    def _name(self, kind: str) -> Path:
        with self._lock:
            self._number += 1
            return self.folder / f"{kind}-{self._number:08}"

    def _note(self, runs: Sequence[Run], journal: Journal) -> None:
        """What belongs to the index from now on, durably and at once."""
        named = {"runs": [run.path.name for run in runs], "journal": journal.path.name}
        noted = {**named, "number": self._number, "position": self._position}
        part = self.folder / f"{_MANIFEST}.part"
        with part.open("w", encoding="utf-8") as file:
            json.dump(noted, file)
            file.flush()
            os.fsync(file.fileno())
        part.rename(self.folder / _MANIFEST)
        try:
            sync_folder(self.folder)
        except OSError:
            log.exception("%s: the folder could not be made durable", self.folder)  # at worst the index is made anew

    def _tidy(self, journal: str) -> None:
        """Remove what is not, or no longer, of the index."""
        named = {journal, *(run.path.name for run in self._runs)}
        for kind in ("run-*", "journal-*"):
            for path in self.folder.glob(kind):
                if path.name not in named:
                    path.unlink(missing_ok=True)


class Journal:
    """What was entered since the last run was written, a frame for each batch, durable when it is appended.

    A frame: magic, checksum, bytes of the position, number of entries; the position; the entries. One that is torn (the
    machine stopped while it was written) ends the journal: its batch was never judged, and will be.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        self._size = 0

    def read(self) -> Iterator[tuple[str, Entries]]:
        """Position and entries of each batch; what is torn is cut off behind the last."""
        data = self.path.read_bytes()
        self._size = 0
        while (frame := _frame(data, self._size)) is not None:
            position, entries, self._size = frame
            yield position, entries
        os.ftruncate(self._handle, self._size)

    def append(self, position: str, entries: Entries) -> None:
        """Make a batch durable. Raises OSError: the disk refuses; the journal is as it was."""
        text = position.encode()
        body = text + entries.to_bytes()
        data = _FRAME.pack(_MAGIC, zlib.crc32(body), len(text), len(entries)) + body
        done = 0
        try:
            while done < len(data):
                done += os.pwrite(self._handle, memoryview(data)[done:], self._size + done)
            os.fdatasync(self._handle)
        except OSError:
            os.ftruncate(self._handle, self._size)
            raise
        self._size += len(data)

    def bytes(self) -> bytes:
        return os.pread(self._handle, self._size, 0)

    def close(self) -> None:
        os.close(self._handle)


def _frame(data: bytes, at: int) -> tuple[str, Entries, int] | None:
    """Position and entries of the frame here, and where the next begins; None: no whole frame."""
    if len(data) < at + _FRAME.size:
        return None
    magic, checksum, position_bytes, count = _FRAME.unpack_from(data, at)
    begin = at + _FRAME.size
    end = begin + position_bytes + count * ENTRY_BYTES
    if magic != _MAGIC or len(data) < end or zlib.crc32(memoryview(data)[begin:end]) != checksum:
        return None
    text = data[begin : begin + position_bytes].decode()
    return text, Entries.from_bytes(data[begin + position_bytes : end]), end


class HorizonIndex(SeenIndex):
    """First occurrences, each for as long as copies of it keep coming.

    An entry is the coordinates of the copy that counts, then ``bronze_at`` of the copy that came last. In LMDB: one
    writer, memory-mapped, survives kill -9; its commit is durable before the products' commits are made.

    Args:
        horizon: microseconds of ``bronze_at``.
    """

    def __init__(self, folder: Path, horizon: int) -> None:
        super().__init__(folder)
        # metasync off: an OS crash may undo the last commit, never damage the file; bronze then fills it in again.
        self._env = lmdb.open(
            str(folder), map_size=_MAP_BYTES, metasync=False, readahead=False, max_readers=16, max_dbs=1
        )
        self._horizon = horizon
        self._by_time = self._env.open_db(b"by time")

    def position(self) -> str:
        with self._env.begin() as txn:
            return bytes(txn.get(_POSITION, b"")).decode()

    def __len__(self) -> int:
        with self._env.begin() as txn:
            return int(txn.stat(self._by_time)["entries"])

    def judge(self, rows: pa.Table, position: str) -> npt.NDArray[np.bool_]:
        keys = rows["dedupe_key"].to_pylist()
        coordinates = _coordinates_of(rows)
        with self._env.begin(write=True) as txn:
            told = bytes(txn.get(_COPIES, b""))
            if position and txn.get(_POSITION) == position.encode():
                places = {told[i : i + _PLACE_BYTES] for i in range(0, len(told), _PLACE_BYTES)}
                return np.array([own not in places for own in coordinates], dtype=bool)
            first = np.zeros(len(keys), dtype=bool)
            for i in sorted(range(len(keys)), key=coordinates.__getitem__):
                first[i] = self._counts(txn, keys[i], coordinates[i])
            txn.put(_COPIES, b"".join(own for own, counts in zip(coordinates, first, strict=True) if not counts))
            txn.put(_POSITION, position.encode())
            if coordinates:
                self._forget(txn, _TIME.unpack_from(max(coordinates))[0] - self._horizon)
        return first

    def copy(self, folder: Path) -> str:
        position = self.position()  # first: the copy holds at least this much
        folder.mkdir(parents=True)
        self._env.copy(str(folder), compact=True)
        return position

    def close(self) -> None:
        self._env.close()

    def _counts(self, txn: lmdb.Transaction, key: bytes, own: bytes) -> bool:
        found = bytes(txn.get(key, b""))
        at = own[: _TIME.size]
        if not found:
            counts, entry = True, own + at
        else:
            place, last = found[:_PLACE_BYTES], found[_PLACE_BYTES:]
            counts = place == own or _TIME.unpack(last)[0] < _TIME.unpack(at)[0] - self._horizon
            entry = (own if counts else place) + max(last, at)
            txn.delete(last + key, db=self._by_time)
        txn.put(key, entry)
        txn.put(entry[_PLACE_BYTES:] + key, b"", db=self._by_time)
        return counts

    def _forget(self, txn: lmdb.Transaction, before: int) -> None:
        cursor = txn.cursor(self._by_time)
        while cursor.first():
            found = bytes(cursor.key())
            if _TIME.unpack_from(found)[0] >= before:
                return
            txn.delete(found[_TIME.size :])
            cursor.delete()


def _coordinates_of(rows: pa.Table) -> list[bytes]:
    """Each row's place in bronze as bytes that sort in bronze's order."""
    times = pc.cast(rows["bronze_at"], pa.int64()).to_pylist()
    topics = rows["topic"].to_pylist()
    places = {name: place_of(name) for name in set(topics)}
    pack = _COORDINATES.pack
    columns = (times, topics, rows["partition"].to_pylist(), rows["offset"].to_pylist())
    return [pack(at, places[topic], partition, offset) for at, topic, partition, offset in zip(*columns, strict=True)]

"""Which files are in bronze, and how far: an index that is a function of bronze.

Every commit of the loader names, in the same commit, the files whose rows it holds and where to read on. The ledger
(LMDB) is that, gathered: it follows bronze's log, so a crash between a commit and the ledger leaves nothing to be
mended. Bronze's log is kept for hours only: so the ledger also notes, before each commit, which files it is of, and
where the log no longer tells, it asks the rows of that commit's day. Lost altogether, it is filled in from all rows,
whose coordinates are (``file:FINGERPRINT``, 0, row number). Like the index of seen events (docs/decisions/0005).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import lmdb
import pyarrow.compute as pc
from deltalake import DeltaTable

from lakehouse.bronze.clock import COMMIT_LOAD
from lakehouse.contract.deltalog import DeltaLog, TableGone
from lakehouse.contract.lake import FILE_TOPIC as TOPIC
from lakehouse.contract.lake import Lake, TableRef

log = logging.getLogger(__name__)

_MAP_BYTES = 1 << 36  # address space, not disk
_POSITION, _INTENT = b"\x00position", b"\x00intent"


@dataclass(frozen=True, slots=True)
class Done:
    """How much of a file is in bronze.

    Attributes:
        file: fingerprint of its content.
        rows: rows that are in, rejected ones too; the next one has this number.
        rejects: of those, the ones refused.
        offset: where to read on, bytes of the unpacked text; -1: not known, count rows.
        ended: whether that is all of it.
    """

    file: str
    rows: int = 0
    rejects: int = 0
    offset: int = 0
    ended: bool = False

    def to_json(self) -> list[Any]:
        """As commits carry it."""
        return [self.file, self.rows, self.rejects, self.offset, int(self.ended)]

    @classmethod
    def from_json(cls, found: list[Any]) -> Done:
        """What :meth:`to_json` gave."""
        file, rows, rejects, offset, ended = found
        return cls(str(file), int(rows), int(rejects), int(offset), bool(ended))


class Ledger:
    """The loaded files of one bronze table. One instance a process.

    Args:
        lake: whose table it is.
        table: the bronze table; it must exist.
    """

    def __init__(self, lake: Lake, table: TableRef) -> None:
        folder = ledger_folder(lake, table.name)
        folder.mkdir(parents=True, exist_ok=True)
        self._log = DeltaLog(table.path)
        self._env = lmdb.open(str(folder), map_size=_MAP_BYTES, metasync=False, readahead=False, max_readers=256)

    def catch_up(self, delta: DeltaTable) -> None:
        """Take in what bronze's log holds beyond the ledger.

        Several loaders do so at the same time: whoever finds that the ledger has moved on meanwhile looks again.

        Args:
            delta: the bronze table at its newest version.
        """
        while not self._caught_up(delta):
            pass

    def _caught_up(self, delta: DeltaTable) -> bool:
        held = self._position()
        table_id, version = held
        if table_id == str(delta.metadata().id) and version > delta.version():
            delta.update_incremental()  # another loader has noted a commit that this one had not seen yet
        newest = (str(delta.metadata().id), delta.version())
        if held == newest:
            return True
        if table_id != newest[0] or version > newest[1]:
            return self._put(self._filled(delta), held, newest, clear=True)
        found: dict[str, Done] = {}
        for number in range(version + 1, newest[1] + 1):
            try:
                info = self._log.info(number)
            except TableGone:  # cleaned up: nothing of a loader's is in it, but for what was intended
                return self._put([*found.values(), *self._intended(delta)], held, newest)
            loaded = json.loads(info[COMMIT_LOAD])["files"] if COMMIT_LOAD in info else []
            found.update((done.file, done) for done in map(Done.from_json, loaded))
        return self._put(found.values(), held, newest)

    def intend(self, done: Iterable[Done], bronze_at: int) -> None:
        """Say what the commit that is about to be made will hold.

        Args:
            bronze_at: its time, microseconds since the epoch.
        """
        intent = {"bronze_at": bronze_at, "files": [one.to_json() for one in done]}
        with self._env.begin(write=True) as txn:
            txn.put(_INTENT, json.dumps(intent).encode())

    def note(self, done: Iterable[Done], delta: DeltaTable) -> None:
        """Enter what the commit that ``delta`` stands at holds; left to :meth:`catch_up` where more is missing."""
        table_id, version = str(delta.metadata().id), delta.version()
        if self._put(done, (table_id, version - 1), (table_id, version)):
            with self._env.begin(write=True) as txn:
                txn.delete(_INTENT)

    def get(self, file: str) -> Done:
        """How far the file of this fingerprint is."""
        with self._env.begin() as txn:
            found = txn.get(file.encode())
        return Done(file) if found is None else Done.from_json(json.loads(found))

    def close(self) -> None:
        """Close the files."""
        self._env.close()

    def __len__(self) -> int:
        with self._env.begin() as txn:
            own = sum(txn.get(key) is not None for key in (_POSITION, _INTENT))
            return int(txn.stat()["entries"]) - own

    def _position(self) -> tuple[str, int]:
        with self._env.begin() as txn:
            return _told(txn.get(_POSITION))

    def _put(
        self, done: Iterable[Done], held: tuple[str, int], newest: tuple[str, int], *, clear: bool = False
    ) -> bool:
        """Move from one table id and version to another; False where the ledger is not at the first any more."""
        with self._env.begin(write=True) as txn:
            if _told(txn.get(_POSITION)) != held:
                return False
            if clear:
                with txn.cursor() as cursor:
                    while cursor.first():
                        cursor.delete()
            for one in done:
                txn.put(one.file.encode(), json.dumps(one.to_json()).encode())
            txn.put(_POSITION, f"{newest[0]}/{newest[1]}".encode())
        return True

    def _intended(self, delta: DeltaTable) -> list[Done]:
        """What was about to be committed when a loader ended, where bronze has it."""
        with self._env.begin() as txn:
            text = txn.get(_INTENT)
        if text is None:
            return []
        intent = json.loads(text)
        done = [Done.from_json(item) for item in intent["files"]]
        day = datetime.fromtimestamp(intent["bronze_at"] / 1e6, UTC).date()
        rows = delta.to_pyarrow_dataset().to_table(
            columns=["topic", "offset"],
            filter=(pc.field("date") == day) & pc.field("topic").isin([TOPIC + one.file for one in done]),
        )
        there = set(zip(rows["topic"].to_pylist(), rows["offset"].to_pylist(), strict=True))
        return [one for one in done if not one.rows or (TOPIC + one.file, one.rows - 1) in there]

    def _filled(self, delta: DeltaTable) -> list[Done]:
        """From the rows: how many of each file are in. Whether that is all of it will show when the file is read."""
        rows = delta.to_pyarrow_dataset().to_table(
            columns=["topic", "offset", "reject"], filter=pc.starts_with(pc.field("topic"), TOPIC)
        )
        if not rows.num_rows:
            return []
        log.info("filling in the ledger of loaded files from %d rows of bronze", rows.num_rows)
        counted = rows.group_by("topic").aggregate([("offset", "max"), ("reject", "count")]).to_pylist()
        return [
            Done(row["topic"].removeprefix(TOPIC), row["offset_max"] + 1, row["reject_count"], -1) for row in counted
        ]


def _told(position: bytes | None) -> tuple[str, int]:
    """Id and version of the table, of the ledger's own entry."""
    table_id, _, version = bytes(position or b"/-1").decode().rpartition("/")
    return table_id, int(version)


def ledger_folder(lake: Lake, source: str) -> Path:
    """Where a source's ledger lies."""
    return lake.state / "loads" / source / "ledger"

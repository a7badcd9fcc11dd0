"""Loads files one after the other: reads, seals, and commits chunks of rows, a chunk behind the reading.

Large files are committed chunk by chunk, each with the place to go on from; small ones share a chunk. A file is
claimed while it is read, by a lock on a byte that its fingerprint names, so that several loaders on the same files
share the work; that rows count once does not depend on it (lakehouse.feeds.commit).
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from types import TracebackType
from typing import IO

import pyarrow as pa

from lakehouse.bronze.table import COLUMNS
from lakehouse.feeds.claims import Claims
from lakehouse.feeds.commit import Committer, at_table
from lakehouse.feeds.errors import BadFile, FileTaken
from lakehouse.feeds.files import FeedFile, Mark, fingerprint_of, format_of, mark_of
from lakehouse.feeds.ledger import Done
from lakehouse.feeds.model import FileReport, Job, Step, Tell
from lakehouse.feeds.readers import read
from lakehouse.feeds.rows import Part, Sealer

CHUNK_BYTES = 1 << 25
_JUDGED_FROM = 100  # rows, before a file is judged by its share of refused ones


class FileLoader:
    """Loads files of one job; a context manager. One instance a process.

    Args:
        job: what is to be done.
        tell: hears of every segment read and every file finished.
    """

    def __init__(self, job: Job, tell: Tell) -> None:
        self._job = job
        self._tell = tell
        self._sealer = Sealer(job.source, tenant=job.tenant, node=job.node)
        self._committer = None if job.trial else Committer(job.lake, job.source.name, self._sealer)
        self._claims = Claims(job)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="load-commit")
        self._chunk: list[Part] = []
        self._rows = self._bytes = 0
        self._ended: list[_Reading] = []  # read to the end, last rows in the chunk
        self._writing: Future[int] | None = None
        self._waiting: list[_Reading] = []  # read to the end, last rows being committed
        self._taken: set[str] = set()  # another loader was quicker
        self._met: dict[str, _Reading] = {}

    def __enter__(self) -> FileLoader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._writer.shutdown(cancel_futures=True)
        self._claims.close()
        if self._committer is not None:
            self._committer.close()

    def load(self, files: Iterable[FeedFile]) -> None:
        """Load the files; those that another loader is at come last, when it has finished with them.

        Raises:
            CommitFailed: bronze does not take rows. Of files that were not reported, nothing more is known than bronze
                says of them; they can be loaded again.
        """
        try:
            later = [file for file in files if not self._one(file, wait=False)]
            self._settle()
            for file in later:
                self._one(file, wait=True)
                self._settle()
        except BaseException:
            self._forget()
            raise

    def _one(self, file: FeedFile, *, wait: bool) -> bool:
        """Read one file; False where another loader is at it."""
        reading = _Reading(file)
        try:
            with file.path.open("rb") as opened:
                return self._opened(reading, opened, wait=wait)
        except OSError as error:
            self._give_up(reading, "failed", f"it cannot be read: {error.strerror}")
        except BadFile as error:
            self._give_up(reading, "failed", error.problem)
        return True

    def _opened(self, reading: _Reading, opened: IO[bytes], *, wait: bool) -> bool:
        reading.mark = mark_of(os.fstat(opened.fileno()))
        reading.done = Done(fingerprint_of(opened))
        file = reading.done.file
        if file in self._met:  # the same content under another name, which is in when that one is
            reading.done, reading.format, reading.twin = self._met[file].done, self._met[file].format, True
            reading.from_row = reading.done.rows
            self._ended.append(reading)
            return True
        if not self._claims.take(file, wait=wait):
            return False
        self._met[file] = reading
        if self._committer is not None:
            with at_table(self._job.source.name):
                reading.done = self._committer.look(file)
        reading.from_row = reading.done.rows
        reading.format = format_of(reading.file.path, opened, self._job.kind)
        if reading.done.ended:
            self._claims.release(file)
            self._report(reading, "already")
        else:
            self._read(reading, opened)
        return True

    def _read(self, reading: _Reading, opened: IO[bytes]) -> None:
        job, name, size = self._job, str(reading.file.path), reading.file.size
        options = {"encoding": job.encoding, "delimiter": job.delimiter}
        for segment in read(name, opened, reading.format, job.source, reading.done, **options):
            if mark_of(os.fstat(opened.fileno())) != reading.mark:
                raise BadFile(name, "it was written to while it was read; load it again when it is complete")
            part = self._sealer.seal(name, reading.done, segment, time.time_ns() // 1000)
            rows = part.after.rows
            if part.after.rejects > job.max_rejects * rows and (rows >= _JUDGED_FROM or segment.ended):
                share = f"{part.after.rejects / rows:.1%} of the first {rows:,} rows are refused"
                self._give_up(reading, "refused", f"{share}, more than the {job.max_rejects:.1%} allowed")
                return
            if why := self._refusal(part):
                self._give_up(reading, "refused", why)
                return
            reading.done = part.after
            self._add(part)
            self._tell(Step(name, size, min(size, opened.tell()), rows - reading.from_row))
            if part.after.file in self._taken:
                break
        self._ended.append(reading)

    def _refusal(self, part: Part) -> str:
        """Why the gate does not let the rows pass; empty where it does."""
        if not self._job.gate or not part.payloads:
            return ""
        from lakehouse.quality.gate import gate  # seconds, and only where it is asked for

        rows = self._sealer.rows([part])
        for column in COLUMNS:
            if column.name not in rows.schema.names:
                rows = rows.append_column(column, pa.nulls(rows.num_rows, column.type))
        result = gate(rows.select(COLUMNS.names), self._job.source)
        return "" if result.passed else f"quality gate: {result}"

    def _add(self, part: Part) -> None:
        self._chunk.append(part)
        self._rows += len(part.payloads)
        self._bytes += part.bytes
        if self._rows >= self._job.chunk_rows or self._bytes >= CHUNK_BYTES:
            self._flush()

    def _flush(self) -> None:
        """Hand the chunk to the writer, as soon as it has finished the one before."""
        self._finish_writing()
        if self._chunk and self._committer is not None:
            self._writing = self._writer.submit(self._commit, self._committer, self._chunk)
        self._chunk, self._rows, self._bytes = [], 0, 0
        self._waiting, self._ended = self._ended, []

    def _commit(self, committer: Committer, parts: list[Part]) -> int:
        """In the writer's thread."""
        while parts:
            try:
                with at_table(self._job.source.name):
                    return committer.commit(parts)
            except FileTaken as error:
                self._taken.add(error.fingerprint)
                parts = [part for part in parts if part.before.file != error.fingerprint]
        return -1

    def _finish_writing(self) -> None:
        version = -1
        if self._writing is not None:
            writing, self._writing = self._writing, None
            version = writing.result()
        for reading in self._waiting:
            self._claims.release(reading.done.file)
            if reading.twin:
                self._report(reading, "already")
            elif reading.done.file in self._taken:
                self._report(reading, "already", "another loader has loaded it meanwhile")
            else:
                self._report(reading, "would load" if self._job.trial else "loaded", version=version)
        self._waiting = []

    def _forget(self) -> None:
        """Let go of all files that are not reported: what had been read of them is not in bronze."""
        self._chunk, self._rows, self._bytes = [], 0, 0
        self._waiting, self._ended = [], []
        self._met.clear()
        self._claims.release_all()

    def _settle(self) -> None:
        self._flush()
        self._finish_writing()

    def _give_up(self, reading: _Reading, state: str, reason: str) -> None:
        """Leave a file where it is; the rows before that place are good, and stay."""
        self._settle()
        if reading.done.file:
            self._met.pop(reading.done.file, None)
            self._claims.release(reading.done.file)
        self._report(reading, state, reason)

    def _report(self, reading: _Reading, state: str, reason: str = "", *, version: int = -1) -> None:
        now = time.time()
        self._tell(
            FileReport(
                name=str(reading.file.path),
                file=reading.done.file,
                format=reading.format,
                bytes=reading.file.size,
                rows=reading.done.rows,
                rejects=reading.done.rejects,
                from_row=reading.from_row,
                seconds=round(now - reading.began, 3),
                state=state,
                reason=reason,
                bronze_version=version,
                started_at=int(reading.began * 1e6),
                finished_at=int(now * 1e6),
                mark=reading.mark,
            )
        )


@dataclass(slots=True)
class _Reading:
    """A file in hand."""

    file: FeedFile
    done: Done = field(default_factory=lambda: Done(""))
    mark: Mark | None = None
    format: str = ""
    from_row: int = 0
    twin: bool = False  # its content is another file's
    began: float = field(default_factory=time.time)

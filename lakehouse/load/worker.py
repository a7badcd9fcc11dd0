"""Loads files: reads, seals and commits chunks of rows, one chunk behind the reading, in one process or several.

A large file is committed chunk by chunk, each with the position to go on from; small files share a chunk. A loader
claims a file while it reads it, with a lock on a byte that the fingerprint names, so that several loaders share the
work on the same files. That rows count once does not depend on claims (lakehouse.load.commit).
"""

from __future__ import annotations

import fcntl
import logging
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from multiprocessing.queues import Queue
from queue import Empty
from typing import IO

import pyarrow as pa

from lakehouse.bronze.table import COLUMNS
from lakehouse.contract.lake import Lake
from lakehouse.contract.pipeline import Source
from lakehouse.contract.pipeline.source import LOADER
from lakehouse.errors import BadFile, FileTaken, LoaderDied
from lakehouse.load.commit import Committer, at_table
from lakehouse.load.files import FeedFile, FileMark, OpenFile, fingerprint_of, format_of, imported, mark_of, own_readers
from lakehouse.load.readers import read
from lakehouse.load.rows import FilePosition, SealedSegment, Sealer

log = logging.getLogger(__name__)

CHUNK_BYTES = 1 << 25
GROUP_BYTES = 1 << 24
GROUP_FILES = 200
_SHARE_FROM = 100  # rows, before the share of refused rows can refuse a file
_QUEUE_SIZE = 1_000  # messages of the worker processes
_POLL_S = 0.05
_LAST_MESSAGES_S = 10.0
_GATES = "millrace.gates"

Gate = Callable[[Source, pa.Table], str]
"""A gate of one's own: a function that another package names in the metadata of its distribution, group
``millrace.gates``. It judges a batch of a file's rows, in bronze's columns, where the load checks expectations: why the
file is refused, or an empty text."""


def check_extensions(*, gates: bool) -> None:
    """Import readers and gates of one's own before the first file. Raises ConfigError: one cannot be imported."""
    for point in (*own_readers().values(), *(entry_points(group=_GATES) if gates else ())):
        imported(point)


@dataclass(frozen=True, slots=True)
class LoadJob:
    """What to do with every file of a load.

    Attributes:
        node: id of the loader, the rows' ``collector``.
        kind: format; ``auto``: by the name or the first bytes of each file.
        max_rejects: share of refused rows (0 to 1) above which a file is refused.
        gate: check the source's expectations on each batch of rows (some 4 MB) before its commit.
        chunk_rows: rows of a commit, about; 32 MiB of payloads end a chunk too.
        trial: dry run: read and count, and write nothing.
    """

    lake: Lake
    source: Source
    tenant: str = "default"
    node: str = LOADER
    kind: str = "auto"
    encoding: str = "utf-8"
    delimiter: str = ","
    max_rejects: float = 1.0
    gate: bool = False
    chunk_rows: int = 100_000
    trial: bool = False


@dataclass(frozen=True, slots=True)
class FileReport:
    """The result of loading one file.

    Attributes:
        name: path, as found.
        file: fingerprint of its content; empty if it could not be read at all.
        format: ``csv``, ``tsv``, ``jsonl`` or ``parquet``; empty if unknown.
        rows: its rows in bronze, of this and earlier loads.
        rejects: refused rows among them.
        from_row: first row of this load; not 0 for a file that an earlier load had begun.
        seconds: from its opening to its last commit.
        state: ``loaded``; ``already`` (an earlier load or another file brought the rows); ``failed`` (it cannot be
            read to its end); ``refused`` (too many bad rows); ``would load`` (a dry run).
        reason: of a failure or refusal.
        bronze_version: bronze version with its last row of this load; -1 for none.
        started_at, finished_at: microseconds since the epoch.
        mark: of the file that was read, which another may have replaced since; None if it could not be opened.
    """

    name: str
    file: str
    format: str
    bytes: int
    rows: int
    rejects: int
    from_row: int
    seconds: float
    state: str
    reason: str = ""
    bronze_version: int = -1
    started_at: int = 0
    finished_at: int = 0
    mark: FileMark | None = None

    @property
    def ok(self) -> bool:
        """Whether the whole file is in."""
        return self.state in ("loaded", "already", "would load")

    @property
    def new_rows(self) -> int:
        """Rows that this load brought into bronze."""
        return 0 if self.state == "already" else max(0, self.rows - self.from_row)


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """Progress in one file: its path, its size and the bytes read, and the rows read in this load."""

    name: str
    size: int
    read: int
    rows: int


LoadListener = Callable[[LoadProgress | FileReport], None]


class FileClaims:
    """The files of a job that one process has claimed, until it ends. A dry run claims none."""

    def __init__(self, job: LoadJob) -> None:
        self._file: int | None = None
        if not job.trial:
            path = job.lake.state / "loads" / job.source.name / "claims"
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def take(self, file: str, *, wait: bool) -> bool:
        """Claim a file; False if another process has it and ``wait`` is not set."""
        if self._file is None:
            return True
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB), 1, _byte(file))
        except BlockingIOError:
            return False
        return True

    def release(self, file: str) -> None:
        if self._file is not None:
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, _byte(file))

    def release_all(self) -> None:
        if self._file is not None:
            fcntl.lockf(self._file, fcntl.LOCK_UN)

    def close(self) -> None:
        """Release all claims, and close the file."""
        if self._file is not None:
            os.close(self._file)


def _byte(file: str) -> int:
    return int(file[:15], 16)


class FileLoader:
    """Loads files of one job; a context manager. One instance a process.

    Args:
        notify: called for every segment read and every file finished.
    """

    def __init__(self, job: LoadJob, notify: LoadListener) -> None:
        self._job = job
        self._notify = notify
        self._sealer = Sealer(job.source, tenant=job.tenant, node=job.node)
        with at_table(job.source.name):
            self._committer = None if job.trial else Committer(job.lake, job.source.name, self._sealer)
        self._claims = FileClaims(job)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="load-commit")
        self._chunk: list[SealedSegment] = []
        self._rows = self._bytes = 0
        self._ended: list[_Reading] = []  # read to the end, last rows in the current chunk
        self._writing: Future[int] | None = None
        self._waiting: list[_Reading] = []  # read to the end, the writer commits their last rows
        self._taken: set[str] = set()  # fingerprints of files that another loader has loaded meanwhile
        self._met: dict[str, _Reading] = {}

    def __enter__(self) -> FileLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self._writer.shutdown(cancel_futures=True)
        self._claims.close()
        if self._committer is not None:
            self._committer.close()

    def load(self, files: Iterable[FeedFile]) -> None:
        """Load the files; those that another loader has claimed come last, when it has finished them.

        Raises:
            CommitFailed: bronze does not take rows. Files without a report may be in or not; they can be loaded again.
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
        """Read one file; False if another loader has claimed it."""
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
        reading.position = FilePosition(fingerprint_of(opened))
        file = reading.position.file
        if file in self._met:  # the same content under another name: it is in when that file is
            reading.position, reading.format, reading.twin = self._met[file].position, self._met[file].format, True
            reading.from_row = reading.position.rows
            self._ended.append(reading)
            return True
        if not self._claims.take(file, wait=wait):
            return False
        self._met[file] = reading
        if self._committer is not None:
            with at_table(self._job.source.name):
                reading.position = self._committer.position(file)
        reading.from_row = reading.position.rows
        reading.format = format_of(reading.file.path, opened, self._job.kind)
        if reading.position.ended:
            self._claims.release(file)
            self._report(reading, "already")
        else:
            self._read(reading, opened)
        return True

    def _read(self, reading: _Reading, opened: IO[bytes]) -> None:
        job, name, size = self._job, str(reading.file.path), reading.file.size
        text = OpenFile(name, opened, reading.format, job.encoding, job.delimiter)
        for segment in read(text, job.source, reading.position):
            if mark_of(os.fstat(opened.fileno())) != reading.mark:
                raise BadFile(name, "it was written to while it was read; load it again when it is complete")
            part = self._sealer.seal(name, reading.position, segment, time.time_ns() // 1000)
            rows = part.after.rows
            if why := self._too_many_rejects(part) or self._failed_gate(part):
                self._give_up(reading, "refused", why)
                return
            reading.position = part.after
            self._add(part)
            self._notify(LoadProgress(name, size, min(size, opened.tell()), rows - reading.from_row))
            if part.after.file in self._taken:
                break
        self._ended.append(reading)

    def _too_many_rejects(self, part: SealedSegment) -> str:
        """Why the share of refused rows refuses the file; empty if it does not."""
        rows, rejects, allowed = part.after.rows, part.after.rejects, self._job.max_rejects
        if rejects <= allowed * rows or (rows < _SHARE_FROM and not part.after.ended):
            return ""
        share = f"{rejects / rows:.1%} of the first {rows:,} rows are refused"
        return f"{share}, more than the {allowed:.1%} allowed"

    def _failed_gate(self, part: SealedSegment) -> str:
        """Why the rows do not pass the quality gate; empty if they do."""
        if not self._job.gate or not part.payloads:
            return ""
        from lakehouse.quality.run import gate  # the import takes seconds

        rows = self._sealer.rows([part])
        for column in COLUMNS:
            if column.name not in rows.schema.names:
                rows = rows.append_column(column, pa.nulls(rows.num_rows, column.type))
        rows = rows.select(COLUMNS.names)
        result = gate(rows, self._job.source)
        if not result.passed:
            return f"quality gate: {result}"
        for point in sorted(entry_points(group=_GATES)):
            own: Gate = imported(point)
            try:
                why = own(self._job.source, rows)
            except Exception as error:  # what cannot be judged is not let in
                log.warning("gate %s failed", point.name, exc_info=True)
                why = repr(error)
            if why:
                return f"gate {point.name!r}: {why}"
        return ""

    def _add(self, part: SealedSegment) -> None:
        self._chunk.append(part)
        self._rows += len(part.payloads)
        self._bytes += part.bytes
        if self._rows >= self._job.chunk_rows or self._bytes >= CHUNK_BYTES:
            self._flush()

    def _flush(self) -> None:
        """Hand the chunk to the writer, once it has finished the previous one."""
        self._finish_writing()
        if self._chunk and self._committer is not None:
            self._writing = self._writer.submit(self._commit, self._committer, self._chunk)
        self._chunk, self._rows, self._bytes = [], 0, 0
        self._waiting, self._ended = self._ended, []

    def _commit(self, committer: Committer, parts: list[SealedSegment]) -> int:
        """Runs in the writer's thread."""
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
            self._claims.release(reading.position.file)
            if reading.twin:
                self._report(reading, "already")
            elif reading.position.file in self._taken:
                self._report(reading, "already", "another loader has loaded it meanwhile")
            else:
                self._report(reading, "would load" if self._job.trial else "loaded", version=version)
        self._waiting = []

    def _forget(self) -> None:
        """Release all files without a report: bronze does not have the rows read of them."""
        self._chunk, self._rows, self._bytes = [], 0, 0
        self._waiting, self._ended = [], []
        self._met.clear()
        self._claims.release_all()

    def _settle(self) -> None:
        self._flush()
        self._finish_writing()

    def _give_up(self, reading: _Reading, state: str, reason: str) -> None:
        """End a file here. The rows before this place are good, and stay in bronze."""
        self._settle()
        if reading.position.file:
            self._met.pop(reading.position.file, None)
            self._claims.release(reading.position.file)
        self._report(reading, state, reason)

    def _report(self, reading: _Reading, state: str, reason: str = "", *, version: int = -1) -> None:
        now = time.time()
        self._notify(
            FileReport(
                name=str(reading.file.path),
                file=reading.position.file,
                format=reading.format,
                bytes=reading.file.size,
                rows=reading.position.rows,
                rejects=reading.position.rejects,
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
    """A file that is being loaded."""

    file: FeedFile
    position: FilePosition = field(default_factory=lambda: FilePosition(""))
    mark: FileMark | None = None
    format: str = ""
    from_row: int = 0
    twin: bool = False  # another file of this load has the same content
    began: float = field(default_factory=time.time)


_loader: FileLoader | None = None  # of a worker process


def load_files(
    job: LoadJob, files: Sequence[FeedFile], *, workers: int = 1, notify: LoadListener = lambda _: None
) -> list[FileReport]:
    """Load the files, and report on each.

    Args:
        workers: processes; one: this process does the work.
        notify: receives progress and each finished file, in this process, from one thread.

    Raises:
        LoaderDied: a worker process was killed. Its committed rows are in.
        CommitFailed: bronze does not take rows. Rows committed before are in.
    """
    reports: list[FileReport] = []

    def received(message: LoadProgress | FileReport) -> None:
        if isinstance(message, FileReport):
            reports.append(message)
        notify(message)

    groups = grouped(files)
    if workers <= 1 or len(groups) <= 1:
        with FileLoader(job, received) as loader:
            for group in groups:
                loader.load(group)
    else:
        _in_processes(job, groups, min(workers, len(groups)), received)
    known = {report.name for report in reports}
    why = "the worker that had it has not reported it; load it again to see whether it is in"
    for file in files:
        if str(file.path) not in known:
            received(FileReport(str(file.path), "", "", file.size, 0, 0, 0, 0.0, "failed", why))
    order = {str(file.path): number for number, file in enumerate(files)}
    return sorted(reports, key=lambda report: order.get(report.name, -1))


def grouped(files: Sequence[FeedFile]) -> list[list[FeedFile]]:
    """Groups of files for the workers: a large file alone, many small ones together; the largest groups first."""
    groups: list[list[FeedFile]] = []
    size = GROUP_BYTES
    for file in sorted(files, key=lambda file: -file.size):
        if size + file.size > GROUP_BYTES or len(groups[-1]) >= GROUP_FILES:
            groups.append([])
            size = 0
        groups[-1].append(file)
        size += file.size
    return groups


def _in_processes(job: LoadJob, groups: list[list[FeedFile]], workers: int, notify: LoadListener) -> None:
    context = multiprocessing.get_context("spawn")  # a fork would share delta-rs's threads, which is unsafe
    messages: Queue[LoadProgress | FileReport] = context.Queue(_QUEUE_SIZE)
    ended = threading.Event()
    errors: list[BaseException] = []

    def listen() -> None:
        """Receive the workers' messages. A thread of its own does so, lest a worker waits for ever if another fails."""
        while True:
            try:
                message = messages.get(timeout=_POLL_S)
            except Empty:
                if ended.is_set():
                    return
                continue
            if not errors:
                try:
                    notify(message)
                except BaseException as error:  # noqa: BLE001 - raised below
                    errors.append(error)

    listener = threading.Thread(target=listen, name="load-listen", daemon=True)
    listener.start()
    pool = ProcessPoolExecutor(workers, context, _start, (job, messages, os.getpid()))
    try:
        running: set[Future[None]] = {pool.submit(_load, group) for group in groups}
        while running and not errors:
            done, running = wait(running, timeout=_POLL_S, return_when=FIRST_COMPLETED)
            for one in done:
                one.result()
    except BrokenProcessPool:
        raise LoaderDied from None
    finally:
        pool.shutdown(cancel_futures=True)
        ended.set()
        listener.join(_LAST_MESSAGES_S)  # a killed worker may have left half a message
        messages.close()
    if errors:
        raise errors[0]


def _start(job: LoadJob, messages: Queue[LoadProgress | FileReport], parent: int) -> None:
    """Runs once in a worker process."""
    global _loader
    threading.Thread(target=_follow, args=(parent,), daemon=True).start()
    _loader = FileLoader(job, messages.put)


def _follow(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)  # the workers of a killed loader must not go on


def _load(group: list[FeedFile]) -> None:
    assert _loader is not None
    _loader.load(group)

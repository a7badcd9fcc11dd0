"""Where a lake lies: in a folder of this machine, or below a prefix of an object store.

A path of an object store is a :class:`StorePath`. It has the operations of ``pathlib.Path`` that tables and small state
need, with the same errors; a store that does not answer within ten seconds raises OSError, and that is logged once. The
stores are those of obstore, which delta-rs reaches by the same code: ``s3://``, ``abfss://`` and ``gs://``. Credentials
and endpoint come from the environment (``AWS_ACCESS_KEY_ID``, ``AWS_ENDPOINT_URL``, …), for both alike.

A PUT is whole or not at all, and one that must create an object is refused if the object exists. Everything here blocks
for one request, or for one a thousand objects that are listed.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import cache
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, ParamSpec, TypeAlias, TypeVar

from lakehouse.contract.errors import ConfigError, EnvironmentProblem

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.dataset as ds
    import pyarrow.parquet as pq
    from deltalake import DeltaTable
    from obstore import ObjectMeta
    from obstore.store import ObjectStore

_URL = re.compile(r"(?P<store>(?P<scheme>[a-z][a-z0-9]*)://[^/]+)(?P<key>/.*)?")
_SCHEMES = ("s3", "s3a", "abfss", "abfs", "gs")
_RETRIES: Any = {
    "max_retries": 20,
    "retry_timeout": timedelta(seconds=10),
    "backoff": {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=1), "base": 2},
}
_FAILED_REQUEST = re.compile(
    r"Error performing (?P<request>[A-Z]+ \S+).*?(?: - (?P<why>[^\n<]{0,120}).*)?$", re.MULTILINE
)
_AWAY = re.compile(
    r"the object store does not do it: |Error performing [A-Z]+ |Generic (?:S3|MicrosoftAzure|GCS) error|\bfs\.s3a\."
)
_P = ParamSpec("_P")
_T = TypeVar("_T")
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Stamp:
    """What tells two objects apart that were written under one name.

    Attributes:
        tag: the store's ETag, or the file's inode.
        at: when it was written, nanoseconds since the epoch.
    """

    tag: str
    at: int


@dataclass(frozen=True, order=True, slots=True)
class StorePath:
    """An object, or the prefix of several, in an object store.

    Attributes:
        url: without a slash at the end, e.g. ``s3://bucket/lake/gold``.
    """

    url: str
    _key: str = field(init=False, repr=False, compare=False)
    _bucket: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        found = _URL.fullmatch(self.url)
        assert found is not None, self.url
        object.__setattr__(self, "_bucket", found["store"])
        object.__setattr__(self, "_key", (found["key"] or "").strip("/"))

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> StorePath:
        return StorePath(f"{self.url}/{name}")

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]

    @property
    def stem(self) -> str:
        return PurePosixPath(self.name).stem

    @property
    def parent(self) -> StorePath:
        return StorePath(self.url.rpartition("/")[0])

    # --- objects

    def is_file(self) -> bool:
        """Whether there is an object of this name."""
        return self.stamp() is not None

    def is_dir(self) -> bool:
        """Whether there are objects below this prefix."""
        return _ask(lambda: any(len(page) for page in self._store.list(self._key + "/", chunk_size=1)))

    def exists(self) -> bool:
        """Whether there is an object of this name, or one below it."""
        return self.is_file() or self.is_dir()

    def stamp(self) -> Stamp | None:
        """The object's; None if there is none."""
        try:
            return _stamped(_ask(self._store.head, self._key))
        except FileNotFoundError:
            return None

    def read_stamped(self) -> tuple[bytes, Stamp]:
        """The object and its stamp, in one request. Raises FileNotFoundError."""

        def read() -> tuple[bytes, Stamp]:
            found = self._store.get(self._key)
            return bytes(found.bytes()), _stamped(found.meta)

        return _ask(read)

    def read_bytes(self) -> bytes:
        """The object. Raises FileNotFoundError."""
        return self.read_stamped()[0]

    def read_text(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        """The object as text. Raises FileNotFoundError."""
        return self.read_bytes().decode(encoding, errors)

    def write_bytes(self, data: bytes) -> None:
        """Write the object, whole or not at all."""
        _ask(self._store.put, self._key, data)

    def create(self, data: bytes) -> bool:
        """Write the object unless there is one of this name; False if there is."""
        from obstore.exceptions import AlreadyExistsError

        try:
            _ask(self._store.put, self._key, data, mode="create")
        except AlreadyExistsError:
            # A request that is repeated because its answer was lost finds its own object.
            return self.read_bytes() == data
        return True

    def sizes(self) -> dict[str, int]:
        """Bytes of the objects directly below, by name."""
        found = _ask(self._store.list_with_delimiter, self._key + "/")["objects"]
        return {each["path"].rpartition("/")[2]: int(each["size"]) for each in found}

    def upload(self, file: Path) -> None:
        """Write the object from a local file, in parts if it is large."""
        _ask(self._store.put, self._key, file)

    def unlink(self, missing_ok: bool = False) -> None:
        """Remove the object, if there is one: not every store says whether there was."""
        with suppress(FileNotFoundError):
            _ask(self._store.delete, self._key)

    # --- prefixes

    def mkdir(self, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
        """Nothing: a store has no folders."""

    def iterdir(self) -> Iterator[StorePath]:
        """Objects and prefixes directly below."""
        found = _ask(self._store.list_with_delimiter, self._key + "/")
        for key in [*found["common_prefixes"], *(each["path"] for each in found["objects"])]:
            yield self / key.rstrip("/").rpartition("/")[2]

    def names(self, after: str = "") -> Iterator[str]:
        """Names of the objects below, in order, from behind ``after``; those of deeper prefixes with a slash."""
        return (name for name, _ in self._below(after))

    def stamps(self, after: str = "") -> dict[str, Stamp]:
        """As :meth:`names`, with the objects' stamps."""
        return {name: _stamped(found) for name, found in self._below(after)}

    def _below(self, after: str = "") -> list[tuple[str, ObjectMeta]]:
        start = f"{self._key}/"

        def listed() -> list[tuple[str, ObjectMeta]]:
            pages = self._store.list(start, offset=start + after if after else None)
            return [(found["path"].removeprefix(start), found) for page in pages for found in page]

        return _ask(listed)

    def glob(self, pattern: str) -> Iterator[StorePath]:
        """Objects directly below, by the pattern of their names."""
        return (path for path in self.iterdir() if PurePosixPath(path.name).match(pattern))

    def remove_tree(self) -> None:
        """Remove every object below."""
        keys = [f"{self._key}/{name}" for name in self.names()]
        if keys:
            _ask(self._store.delete, keys)

    @property
    def _store(self) -> ObjectStore:
        return _opened(self._bucket)


LakePath: TypeAlias = Path | StorePath
"""A place in a lake."""


@cache
def _opened(bucket: str) -> ObjectStore:
    from obstore.store import from_url

    options: dict[str, Any] = {}
    if bucket.startswith("s3"):
        options["conditional_put"] = "etag"
        bucket = bucket.replace("s3a://", "s3://")
    return from_url(bucket, retry_config=_RETRIES, **options)


class _Outage:
    """Says once that the store cannot be used in one way, and once that it can be again.

    Args:
        what: ``read`` or ``written``. A store without room on its disk can be read.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._lock = threading.Lock()
        self._since: float | None = None

    def failed(self, why: str) -> None:
        with self._lock:
            if self._since is None:
                self._since = time.monotonic()
                log.warning("the object store cannot be %s: %s. It is tried until it can be", self._what, why)

    def ended(self) -> None:
        if self._since is not None:
            with self._lock:
                since, self._since = self._since, None
            if since is not None:
                log.warning("the object store can be %s again, after %.0f s", self._what, time.monotonic() - since)


_READS, _WRITES = _Outage("read"), _Outage("written")


def _ask(request: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """Ask the store. Its errors have no common base with those of files: here they become one."""
    from obstore.exceptions import AlreadyExistsError, BaseError

    outage = _WRITES if request.__name__ in ("put", "delete") else _READS
    try:
        found = request(*args, **kwargs)
    except (AlreadyExistsError, FileNotFoundError):
        outage.ended()
        raise
    except BaseError as error:
        why = _gist(str(error))
        outage.failed(why)
        raise OSError(errno.EIO, f"the object store does not do it: {why}") from None
    outage.ended()
    return found


def _gist(text: str) -> str:
    """What is worth reading of a store's error: the request, and the answer."""
    found = _FAILED_REQUEST.search(text)
    code = re.search(r"<Code>(\w+)</Code>", text)
    said = (
        f"{found['request']}: {(found['why'] or 'no answer').rstrip(': ')}"
        if found
        else text.strip().partition("\n")[0][:200]
    )
    return f"{said} ({code[1]})" if code else said


def is_away(error: BaseException) -> bool:
    """Whether an object store did not do what it was asked for, by obstore, delta-rs or Hadoop's S3A."""
    return _AWAY.search(str(error)) is not None


def _stamped(found: ObjectMeta) -> Stamp:
    written: datetime = found["last_modified"]
    # A listing says milliseconds, and the object itself whole seconds.
    return Stamp(str(found["e_tag"]).strip('"'), int(written.timestamp()) * 1_000_000_000)


def lake_path(text: str | Path | StorePath) -> LakePath:
    """The path that a setting names. Raises ConfigError: a URL of another kind than an object store's."""
    if isinstance(text, Path | StorePath):
        return text
    if "://" not in text:
        return Path(text)
    found = _URL.fullmatch(text)
    if found is None or found["scheme"] not in _SCHEMES:
        remedy = f"Name a folder, or a URL that begins with one of {', '.join(f'{s}://' for s in _SCHEMES)}"
        raise ConfigError(f"{text!r} is not a place for a lake", key="lake", remedy=remedy)
    return StorePath(text.rstrip("/"))


def files_in(folder: LakePath, pattern: str) -> list[LakePath]:
    """Files directly in a folder, by the pattern of their names, in order of names; none if the folder is absent."""
    return sorted(folder.glob(pattern), key=str)


def folder_stamp(folder: LakePath) -> int:
    """Changes whenever a file directly in a folder is made, replaced or removed; 0: there is no folder."""
    if isinstance(folder, StorePath):
        found = folder.stamps()
        return hash(tuple(found.items())) if found else 0
    try:
        return folder.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def file_sizes(folder: LakePath, pattern: str) -> dict[str, int]:
    """Bytes of the files directly in a folder, by name, of those that fit a pattern."""
    if isinstance(folder, StorePath):
        return {name: size for name, size in folder.sizes().items() if PurePosixPath(name).match(pattern)}
    return {file.name: file.stat().st_size for file in sorted(folder.glob(pattern))}


def stamp_of(path: LakePath) -> Stamp | None:
    """What tells the file from another of its name; None if there is none."""
    if isinstance(path, StorePath):
        return path.stamp()
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return Stamp(str(found.st_ino), found.st_mtime_ns)


def write_whole(path: LakePath, data: bytes, mode: int = 0o644, *, durable: bool = False) -> None:
    """Write a small file whole or not at all, and the folders above it.

    Args:
        mode: permissions of a local file.
        durable: it is on the disk when this returns; otherwise a power failure may leave the file of before.
    """
    if isinstance(path, StorePath):
        path.write_bytes(data)
    else:
        _draft(path, data, mode, durable=durable).replace(path)
        if durable:
            sync_folder(path.parent)


def create_whole(path: LakePath, data: bytes, mode: int = 0o644, *, durable: bool = True) -> bool:
    """Write a small file whole unless there is one of this name; False if there is.

    Of several processes that do so at once, one succeeds.

    Args:
        mode, durable: see :func:`write_whole`.
    """
    if isinstance(path, StorePath):
        return path.create(data)
    draft = _draft(path, data, mode, durable=durable)
    try:
        path.hardlink_to(draft)
    except FileExistsError:
        return False
    finally:
        draft.unlink()
    return True


def sync_folder(folder: Path) -> None:
    """Return when names of files in a local folder that were made or replaced are on the disk."""
    handle = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _draft(path: Path, data: bytes, mode: int, *, durable: bool) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
    handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            if durable:
                file.flush()
                os.fsync(handle)
    except BaseException:  # a full disk
        draft.unlink()
        raise
    return draft


def try_lock(path: Path) -> int | None:
    """A handle that holds the file's lock until it is closed or the process ends; None if another process has it."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        return None
    return handle


@contextmanager
def locked(path: Path, waiting: str = "") -> Iterator[None]:
    """Hold an advisory lock on a file of this machine; waits for it, and says so if ``waiting`` is given."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if waiting:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                log.warning(waiting)
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def shared_secret(path: LakePath, size: int) -> bytes:
    """Random bytes that all processes of a lake share; made by the first that asks, readable by their owner only.

    Raises EnvironmentProblem: they can be neither read nor made, or others may read them.
    """
    try:
        if not path.exists():
            create_whole(path, secrets.token_bytes(size), 0o600)  # if another process is faster, its bytes count
        if isinstance(path, Path) and path.stat().st_mode & 0o077:
            raise EnvironmentProblem(f"others may read the key {path}", f"chmod 600 {path}")
        key = path.read_bytes()
    except OSError as error:
        remedy = f"Let a process write there once, or put {size} random bytes there (mode 0600)"
        raise EnvironmentProblem(f"the key {path} can be neither read nor made: {error.strerror}", remedy) from None
    if len(key) != size:
        problem = f"{path} holds {len(key)} bytes, not {size}"
        raise EnvironmentProblem(problem, "Remove it; a new one is made, and what was signed with the old one is void")
    return key


def remove_tree(path: LakePath) -> None:
    """Remove all that is below, if anything is."""
    if isinstance(path, StorePath):
        path.remove_tree()
        return
    import shutil

    shutil.rmtree(path, ignore_errors=True)


def parquet_file(path: LakePath) -> pq.ParquetFile:
    """A Parquet file to read from; one of a store is read whole now. Raises FileNotFoundError."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    return pq.ParquetFile(pa.BufferReader(path.read_bytes()) if isinstance(path, StorePath) else path, memory_map=True)


def write_parquet(path: LakePath, rows: pa.Table, **options: Any) -> int:
    """Write a Parquet file; returns its bytes. ``options`` are those of ``pyarrow.parquet.write_table``."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    if isinstance(path, Path):
        pq.write_table(rows, path, **options)
        return path.stat().st_size
    made = pa.BufferOutputStream()
    pq.write_table(rows, made, **options)
    data = made.getvalue()
    path.write_bytes(data.to_pybytes())
    return int(data.size)


def file_rows(files: Sequence[str], schema: pa.Schema) -> ds.Dataset:
    """Rows of Parquet files in a schema, null in columns that a file lacks. Files of a store are read whole now."""
    import pyarrow as pa
    import pyarrow.dataset as ds

    if not files or "://" not in files[0]:
        return ds.dataset(list(files), schema=schema)
    read = [parquet_file(StorePath(file)).read() for file in files]
    whole = pa.concat_tables([schema.empty_table(), *read], promote_options="default")
    return ds.dataset(whole.select(schema.names))


def table_rows(table: DeltaTable, path: LakePath) -> ds.Dataset:
    """The rows of a Delta table at ``path``, for DuckDB to read.

    DuckDB begins a scan with the interpreter's lock held (pyarrow 26, ``Scanner.to_reader``), and waits for Arrow's
    threads. delta-rs's file system is written in Python: its reads in these threads wait for that lock, and both for
    ever. So Arrow reads files of this machine by itself.
    """
    import pyarrow.fs as arrow_fs

    if isinstance(path, StorePath):
        return table.to_pyarrow_dataset()
    return table.to_pyarrow_dataset(filesystem=arrow_fs.SubTreeFileSystem(str(path), arrow_fs.LocalFileSystem()))


def spark_uri(path: LakePath | str) -> str:
    """The path as Spark's file systems name it."""
    text = str(path)
    return f"s3a{text.removeprefix('s3')}" if text.startswith("s3://") else text

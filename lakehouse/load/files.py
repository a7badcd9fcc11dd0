"""Files to load: finding them, their fingerprints and formats, and their unpacked text."""

from __future__ import annotations

import codecs
import functools
import glob
import gzip
import io
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import IO, Any, Protocol

from lakehouse.contract.errors import ConfigError
from lakehouse.contract.pipeline.source import READERS
from lakehouse.errors import BadFile

FORMATS = ("auto", "csv", "tsv", "jsonl", "parquet")
BLOCK = 1 << 22
FileMark = tuple[int, int, int]
"""Size, time of change (ns) and inode of a file: differs after a write or a replacement."""
_GZIP, _PARQUET = b"\x1f\x8b", b"PAR1"
_UNFINISHED = (".part", ".tmp", ".crdownload", ".filepart")
_SUFFIXES = {
    ".csv": "csv",
    ".tsv": "tsv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
    ".pq": "parquet",
}


@functools.cache
def own_readers() -> Mapping[str, EntryPoint]:
    """Readers of other formats that are installed (:data:`lakehouse.load.readers.Reader`), by format."""
    return {point.name: point for point in entry_points(group=READERS) if point.name not in FORMATS}


@functools.cache
def imported(point: EntryPoint) -> Callable[..., Any]:
    """The function of another package. Raises ConfigError: it cannot be imported."""
    try:
        found: Callable[..., Any] = point.load()
    except Exception as error:  # whatever its module raises
        whose = point.dist.name if point.dist else "?"
        raise ConfigError(
            f"{point.value} of package {whose} cannot be imported: {error!r}",
            key=f"{point.group} {point.name}",
            remedy="Mend the package, or uninstall it",
        ) from error
    return found


def format_of_suffix(suffix: str) -> str:
    """The format of files with this suffix; empty if unknown."""
    return _SUFFIXES.get(suffix, suffix[1:] if suffix[1:] in own_readers() else "")


@dataclass(frozen=True, slots=True)
class FeedFile:
    """A file to load, with its size in bytes when it was found."""

    path: Path
    size: int


@dataclass(frozen=True, slots=True)
class OpenFile:
    """A file that is being read.

    Attributes:
        name: path, for messages.
        format: ``csv``, ``tsv``, ``jsonl``, ``parquet``, or that of a reader of one's own.
    """

    name: str
    file: IO[bytes]
    format: str
    encoding: str = "utf-8"
    delimiter: str = ","

    def text(self, offset: int = 0) -> TextStream:
        """Its unpacked text from a byte offset on; see :func:`unpacked`."""
        return unpacked(self.name, self.file, self.encoding, offset)


class TextStream(Protocol):
    def read(self, size: int, /) -> bytes:
        """Up to ``size`` bytes of unpacked text; none at the end."""


def is_finished(path: Path) -> bool:
    """Whether its name does not mark it as unfinished (``.part``, ``.tmp``, a leading dot)."""
    return not path.name.startswith(".") and path.suffix.lower() not in _UNFINISHED


def find(paths: Iterable[str | Path]) -> list[FeedFile]:
    """The files that the arguments name: files, folders (recursively) and globs; each once, in order.

    Raises ConfigError: an argument matches nothing.
    """
    found: dict[Path, FeedFile] = {}
    for text in paths:
        given = Path(text)
        if given.is_dir():
            names: Iterable[Path] = sorted(given.rglob("*"))
        elif given.exists():
            names = [given]
        else:
            names = [Path(name) for name in sorted(glob.glob(str(text), recursive=True))]  # noqa: PTH207 - a glob may be absolute
            if not names:
                raise ConfigError(f"there is no file {text!s}", key="PATH", remedy="Give files, folders or globs")
        for path in names:
            if path.is_file() and (is_finished(path) or path == given):
                found.setdefault(path.absolute(), FeedFile(path, path.stat().st_size))
    return list(found.values())


def fingerprint_of(file: IO[bytes]) -> str:
    """BLAKE2b-128 of the whole content in hexadecimal; it identifies a file, whatever its name."""
    digest = blake2b(digest_size=16)
    file.seek(0)
    while block := file.read(BLOCK):
        digest.update(block)
    file.seek(0)
    return digest.hexdigest()


def format_of(path: Path, file: IO[bytes], wanted: str = "auto") -> str:
    """The wanted format; of ``auto`` the format by the name, else by the first bytes.

    Raises BadFile: the format is unknown.
    """
    if wanted != "auto":
        return wanted
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in (".gz", ".gzip"):
        suffixes.pop()
    if suffixes and (found := format_of_suffix(suffixes[-1])):
        return found
    file.seek(0)
    head = file.read(4)
    if head == _PARQUET:
        return "parquet"
    text = unpacked(str(path), file).read(512).lstrip(b"\xef\xbb\xbf \t\r\n")
    if text[:1] in (b"{", b"["):
        return "jsonl"
    if b"," in text.split(b"\n")[0]:
        return "csv"
    raise BadFile(str(path), "neither its name nor its first bytes tell the format; give --format")


def unpacked(name: str, file: IO[bytes], encoding: str = "utf-8", skip: int = 0) -> TextStream:
    """The text of the file as UTF-8, without its first ``skip`` bytes; gzip is detected by its first bytes.

    Raises BadFile: while reading: the gzip stream is cut off or damaged, or the text does not have the encoding.
    """
    file.seek(0)
    packed = file.read(2) == _GZIP
    file.seek(0)
    plain = codecs.lookup(encoding).name == "utf-8"
    if not packed and plain:
        file.seek(skip)
        return io.BufferedReader(file, BLOCK) if isinstance(file, io.RawIOBase) else file
    stream: TextStream = _Gunzipped(name, file) if packed else file
    if not plain:
        stream = _Transcoded(name, stream, encoding)
    while skip > 0:
        block = stream.read(min(BLOCK, skip))
        if not block:
            break
        skip -= len(block)
    return stream


class _Gunzipped:
    def __init__(self, name: str, file: IO[bytes]) -> None:
        self._name = name
        self._unzip = gzip.GzipFile(fileobj=file, mode="rb")

    def read(self, size: int, /) -> bytes:
        try:
            return self._unzip.read(size)
        except EOFError:
            problem = f"the gzip stream is cut off after {self._unzip.tell():,} bytes of text"
            raise BadFile(self._name, problem) from None
        except (OSError, zlib.error) as error:
            raise BadFile(self._name, f"damaged gzip: {error}") from None


class _Transcoded:
    def __init__(self, name: str, stream: TextStream, encoding: str) -> None:
        self._name = name
        self._stream = stream
        self._encoding = encoding
        self._decode = codecs.getincrementaldecoder(encoding)()
        self._ready = b""

    def read(self, size: int, /) -> bytes:
        while len(self._ready) < size:
            block = self._stream.read(BLOCK)
            try:
                self._ready += self._decode.decode(block, final=not block).encode()
            except UnicodeError as error:
                raise BadFile(self._name, f"not {self._encoding}: {error}") from None
            if not block:
                break
        taken, self._ready = self._ready[:size], self._ready[size:]
        return taken


def read_lines(stream: TextStream, offset: int, limit: int) -> Iterator[tuple[bytes, int]]:
    """Blocks of whole lines, each with the offset behind it.

    Args:
        stream: positioned at ``offset``.
        limit: a longer line is cut to this length (without its line end), so that memory is bounded.
    """
    rest = b""
    while block := stream.read(BLOCK):
        joined = rest + block
        end = joined.rfind(b"\n") + 1
        if end:
            offset += end
            yield joined[:end], offset
        rest = joined[end:]
        if len(rest) > limit:
            kept, length, rest = _skip_line(stream, rest, limit)
            offset += length
            yield kept, offset
    if rest:
        yield rest, offset + len(rest)


def _skip_line(stream: TextStream, begun: bytes, limit: int) -> tuple[bytes, int, bytes]:
    """The beginning of an overlong line, its length with the line end, and the bytes after it."""
    kept, length = begun[: limit + 1], len(begun)
    while block := stream.read(BLOCK):
        end = block.find(b"\n") + 1
        if end:
            return kept, length + end, block[end:]
        length += len(block)
    return kept, length, b""


def mark_of(found: os.stat_result) -> FileMark:
    return found.st_size, found.st_mtime_ns, found.st_ino

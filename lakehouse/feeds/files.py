"""Feed files: which there are, what they are, and their unpacked text."""

from __future__ import annotations

import codecs
import glob
import gzip
import io
import os
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import IO, Protocol

from lakehouse.contract.errors import ConfigError
from lakehouse.feeds.errors import BadFile

FORMATS = ("auto", "csv", "tsv", "jsonl", "parquet")
BLOCK = 1 << 22
Mark = tuple[int, int, int]
"""Size, time of change (ns) and inode of a file."""
_GZIP, _PARQUET = b"\x1f\x8b", b"PAR1"
_UNFINISHED = (".part", ".tmp", ".crdownload", ".filepart")
SUFFIXES = {
    ".csv": "csv",
    ".tsv": "tsv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
    ".pq": "parquet",
}


@dataclass(frozen=True, slots=True)
class FeedFile:
    """A file to be loaded.

    Attributes:
        path: where it is.
        size: bytes, when it was found.
    """

    path: Path
    size: int


class Stream(Protocol):
    """Unpacked text of a file, read forward in blocks."""

    def read(self, size: int, /) -> bytes:
        """Up to ``size`` bytes; none at the end."""


def is_finished(path: Path) -> bool:
    """Whether its name says that nobody writes it any more."""
    return not path.name.startswith(".") and path.suffix.lower() not in _UNFINISHED


def find(paths: Iterable[str | Path]) -> list[FeedFile]:
    """The files that the arguments name: files, folders (with all below them) and globs; each once, in order.

    Raises:
        ConfigError: an argument names nothing.
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
    """BLAKE2b-128 of the whole content in hexadecimal: what a file is known by, whatever its name."""
    digest = blake2b(digest_size=16)
    file.seek(0)
    while block := file.read(BLOCK):
        digest.update(block)
    file.seek(0)
    return digest.hexdigest()


def format_of(path: Path, file: IO[bytes], wanted: str = "auto") -> str:
    """The format by what was asked for, else by the name, else by the first bytes.

    Raises:
        BadFile: it cannot be told.
    """
    if wanted != "auto":
        return wanted
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in (".gz", ".gzip"):
        suffixes.pop()
    if suffixes and suffixes[-1] in SUFFIXES:
        return SUFFIXES[suffixes[-1]]
    file.seek(0)
    head = file.read(4)
    if head == _PARQUET:
        return "parquet"
    text = unpacked(str(path), file).read(512).lstrip(b"\xef\xbb\xbf \t\r\n")
    if text[:1] in (b"{", b"["):
        return "jsonl"
    if b"," in text.split(b"\n")[0]:
        return "csv"
    raise BadFile(str(path), "its format is not known by its name or first bytes; give --format")


def unpacked(name: str, file: IO[bytes], encoding: str = "utf-8", skip: int = 0) -> Stream:
    """The file's text as UTF-8, gunzipped where it is gzip (by its first bytes), from the given place on.

    Raises:
        BadFile: when reading: the gzip stream is cut off or damaged, or the text is not of the encoding.
    """
    file.seek(0)
    packed = file.read(2) == _GZIP
    file.seek(0)
    plain = codecs.lookup(encoding).name == "utf-8"
    if not packed and plain:
        file.seek(skip)
        return io.BufferedReader(file, BLOCK) if isinstance(file, io.RawIOBase) else file
    stream: Stream = _Gunzipped(name, file) if packed else file
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
            raise BadFile(
                self._name, f"the gzip stream is cut off after {self._unzip.tell():,} bytes of text"
            ) from None
        except (OSError, zlib.error) as error:
            raise BadFile(self._name, f"damaged gzip: {error}") from None


class _Transcoded:
    def __init__(self, name: str, stream: Stream, encoding: str) -> None:
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


def read_lines(stream: Stream, offset: int, limit: int) -> Iterator[tuple[bytes, int]]:
    """Blocks of whole lines with the place behind each, bytes from the beginning.

    Args:
        stream: stands at ``offset``.
        limit: a line longer than this comes cut to it (without its end), so that memory is bounded.
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


def _skip_line(stream: Stream, begun: bytes, limit: int) -> tuple[bytes, int, bytes]:
    """The beginning of an overlong line, its length with its end, and what follows it."""
    kept, length = begun[: limit + 1], len(begun)
    while block := stream.read(BLOCK):
        end = block.find(b"\n") + 1
        if end:
            return kept, length + end, block[end:]
        length += len(block)
    return kept, length, b""


def mark_of(found: os.stat_result) -> Mark:
    """What differs when somebody writes the file, or puts another in its place."""
    return found.st_size, found.st_mtime_ns, found.st_ino

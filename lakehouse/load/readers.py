"""Readers: a CSV, JSON-lines or Parquet file as segments of JSON payloads, from any place at which a segment ended.

CSV: names come from the header, types from the source's schema. A value of another type stays text: the schema check
then sends the row to quarantine, with its field named. An empty value is null. Arrow parses blocks of rows; a block
that Arrow refuses (an unclosed quote, a text that is not UTF-8) is read row by row, so that one bad row costs one row.
"""

from __future__ import annotations

import csv
import functools
import io
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq

from lakehouse.contract.pipeline import Source
from lakehouse.contract.sql import quoted
from lakehouse.contract.sql.ddl import parse_ddl
from lakehouse.errors import BadFile
from lakehouse.load.files import BLOCK, OpenFile, imported, own_readers, read_lines
from lakehouse.load.rows import FilePosition, Segment

log = logging.getLogger(__name__)

_BATCH = 20_000  # rows of a Parquet file at a time
_INTEGERS = ("TINYINT", "BYTE", "SMALLINT", "SHORT", "INT", "INTEGER", "BIGINT", "LONG")
_NUMBERS = ("FLOAT", "REAL", "DOUBLE")  # a decimal stays text: exact, and Spark casts it
_PLAIN_INTEGER = "0|-?[1-9][0-9]{0,17}"
_JSON_NUMBER = r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?"
_NESTED = ("STRUCT", "ARRAY", "MAP")

Reader = Callable[[OpenFile, Source, int], Iterator[Segment]]
"""A reader of one's own: a function that another package names in the metadata of its distribution, group
``millrace.readers``: ``FORMAT = "module:function"``. The format is also the suffix of its files.

It gives a file's segments from a place on: 0, or the ``offset`` of a segment that it gave. The last one has ``ended``
set. It raises :class:`~lakehouse.errors.BadFile` for a file that it cannot read to its end."""

_local = threading.local()  # one connection a thread: a load may have thousands of files


def read(opened: OpenFile, source: Source, position: FilePosition) -> Iterator[Segment]:
    """The rows after ``position``. The last segment has ``ended`` set, and may be empty.

    Raises:
        BadFile: the file cannot be read, or not to its end.
        ConfigError: a reader of one's own cannot be imported.
    """
    if opened.format == "parquet":
        return _parquet(opened, position.rows)
    if opened.format in own_readers():
        segments: Reader = _by_own_reader
    else:
        segments = _json_lines if opened.format == "jsonl" else read_csv
    return _after(segments(opened, source, max(0, position.offset)), position)


def _after(segments: Iterator[Segment], position: FilePosition) -> Iterator[Segment]:
    """The segments without the committed rows, if the offset of the next row is unknown."""
    skip = position.rows if position.offset < 0 else 0
    for segment in segments:
        count = len(segment.payloads)
        if skip >= count and not segment.ended:
            skip -= count
            continue
        if skip:
            refused = {index - skip: reason for index, reason in segment.refused.items() if index >= skip}
            segment = Segment(segment.payloads[skip:], refused, segment.offset, segment.ended)
            skip = 0
        yield segment


def _by_own_reader(opened: OpenFile, source: Source, offset: int) -> Iterator[Segment]:
    point = own_readers()[opened.format]
    reader: Reader = imported(point)
    ended = False
    try:
        for segment in reader(opened, source, offset):
            ended = segment.ended
            yield segment
    except BadFile:
        raise
    except Exception as error:  # other files can be read
        log.warning("reader %s of %s failed", point.name, opened.name, exc_info=True)
        raise BadFile(opened.name, f"reader {point.name!r} ({point.value}) failed: {error!r}") from error
    if not ended:
        raise BadFile(opened.name, f"reader {point.name!r} ({point.value}) gave no last segment, one with ended=True")


def _json_lines(opened: OpenFile, source: Source, offset: int) -> Iterator[Segment]:
    """The untouched lines without empty ones. The sealer checks later that they are JSON."""
    stream = opened.text(offset)
    first = offset == 0
    for block, end in read_lines(stream, offset, source.max_event_bytes):
        if first:
            first = False
            block = block.removeprefix(b"\xef\xbb\xbf")
            if block[:2] in (b"\xff\xfe", b"\xfe\xff"):
                raise BadFile(opened.name, "UTF-16 text; give --encoding utf-16")
            if block.lstrip()[:1] == b"[":
                raise BadFile(opened.name, "begins with '[': a JSON array, not JSON lines")
        lines = block.replace(b"\r\n", b"\n").split(b"\n") if b"\r\n" in block else block.split(b"\n")
        yield Segment([line for line in lines if line and not line.isspace()], offset=end)
        offset = end
    yield Segment([], offset=offset, ended=True)


def _parquet(opened: OpenFile, skip: int) -> Iterator[Segment]:
    """Rows as JSON objects."""
    try:
        parquet = pq.ParquetFile(opened.file)
        sizes = [parquet.metadata.row_group(number).num_rows for number in range(parquet.num_row_groups)]
        first = 0
        while first < len(sizes) and skip >= sizes[first]:
            skip -= sizes[first]
            first += 1
        for batch in parquet.iter_batches(_BATCH, row_groups=range(first, len(sizes))):
            if skip >= batch.num_rows:
                skip -= batch.num_rows
                continue
            yield Segment(to_json(pa.Table.from_batches([batch]).slice(skip)))
            skip = 0
    except (pa.ArrowException, OSError, duckdb.Error) as error:
        raise BadFile(opened.name, f"unreadable Parquet: {str(error).splitlines()[0]}") from None
    yield Segment([], ended=True)


def to_json(rows: pa.Table, select: str = "to_json(r)") -> list[bytes]:
    """Each row as one JSON text, made by DuckDB: times as text in UTC, decimals as numbers, nulls kept.

    Args:
        select: SQL of the text over the table ``r``.
    """
    connection: duckdb.DuckDBPyConnection | None = getattr(_local, "connection", None)
    if connection is None:
        connection = _local.connection = duckdb.connect(config={"threads": "1"})
        connection.execute("SET TimeZone = 'UTC'")
    connection.register("r", rows)
    try:
        found = connection.sql(f"SELECT {select} AS payload FROM r").to_arrow_table()  # noqa: S608 - ours; names are quoted
    finally:
        connection.unregister("r")
    return list(found["payload"].cast(pa.large_binary()).to_pylist())


def read_csv(opened: OpenFile, source: Source, offset: int) -> Iterator[Segment]:
    """Segments of the rows from ``offset`` on: 0, or the end of a segment. Each call reads the header.

    Raises BadFile: no header, or an unreadable text.
    """
    parser = _CsvParser(opened, source)
    offset = max(offset, parser.begin)
    stream = opened.text(offset)
    rest = b""
    while True:
        block = stream.read(BLOCK)
        text = rest + block
        end = _end_of_rows(text) if block else len(text)
        if not end and block:
            if len(text) <= source.max_event_bytes + BLOCK:
                rest = text
                continue
            end = len(text)  # a quote is not closed; the careful way below reports it
        if end:
            segment, used = parser.segment(text[:end], final=not block)
            offset += used
            yield Segment(segment.payloads, segment.refused, offset)
            rest = text[used:]
        if not block:
            break
    yield Segment([], offset=offset, ended=True)


def _header(opened: OpenFile, delimiter: str) -> tuple[list[str], int]:
    """Names of the columns, and the offset of the first row."""
    text = opened.text().read(BLOCK)
    mark = 3 if text.startswith(b"\xef\xbb\xbf") else 0
    if text[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise BadFile(opened.name, "UTF-16 text; give --encoding utf-16")
    end = text.find(b"\n", mark) + 1 or len(text)
    try:
        names = next(csv.reader([text[mark:end].decode()], delimiter=delimiter, strict=True), [])
    except (UnicodeDecodeError, csv.Error) as error:
        raise BadFile(opened.name, f"the header cannot be read: {error}") from None
    names = [column.strip() for column in names]
    if not names or not all(names):
        raise BadFile(opened.name, "it has no header, or a column without a name")
    if any("\0" in column for column in names):
        raise BadFile(opened.name, "a column's name holds a NUL character")
    if len({column.lower() for column in names}) < len(names):
        raise BadFile(opened.name, "two columns have the same name")
    return names, end


def _end_of_rows(text: bytes) -> int:
    """Offset behind the last line end outside quotes; 0 if there is none."""
    if b'"' not in text:
        return text.rfind(b"\n") + 1
    codes = np.frombuffer(text, np.uint8)
    ends = np.flatnonzero(codes == 10)
    if not ends.size:
        return 0
    quotes = np.flatnonzero(codes == 34)
    outside = ends[np.searchsorted(quotes, ends) % 2 == 0]
    return int(outside[-1]) + 1 if outside.size else 0


def _well_quoted(text: bytes, delimiter: bytes) -> bool:
    """Whether each quote is at the edge of a field or next to another quote; Arrow accepts other quotes silently."""
    codes = np.frombuffer(b"\n" + text + b"\n", np.uint8)
    quotes = np.flatnonzero(codes == 34)
    edges = np.frombuffer(delimiter + b'\r\n"', np.uint8)
    return quotes.size % 2 == 0 and bool(np.all(np.isin(codes[quotes - 1], edges) | np.isin(codes[quotes + 1], edges)))


class _CsvParser:
    def __init__(self, opened: OpenFile, source: Source) -> None:
        self._name = opened.name
        self._encoding = opened.encoding
        self._delimiter = "\t" if opened.format == "tsv" else opened.delimiter
        header, self.begin = _header(opened, self._delimiter)
        self._header = header
        self._limit = source.max_event_bytes
        self._select = _select(tuple(header), source.schema)

    def segment(self, text: bytes, *, final: bool) -> tuple[Segment, int]:
        """Rows of a text that ends with a row, and the number of bytes used: all, but for a row that is cut off."""
        try:
            return self._quick(text), len(text)
        except (pa.ArrowInvalid, _Unsure):
            return self._careful(text, final=final)

    def _quick(self, text: bytes) -> Segment:
        if b'"' in text and not _well_quoted(text, self._delimiter.encode()):
            raise _Unsure
        bad: list[str] = []

        def refuse(row: Any) -> str:
            bad.append(row.text)
            return "skip"

        rows = pacsv.read_csv(
            io.BytesIO(text),
            read_options=pacsv.ReadOptions(column_names=self._header, use_threads=False, block_size=len(text) + 1),
            parse_options=pacsv.ParseOptions(
                delimiter=self._delimiter, newlines_in_values=b'"' in text, invalid_row_handler=refuse
            ),
            convert_options=pacsv.ConvertOptions(
                column_types=dict.fromkeys(self._header, pa.string()), strings_can_be_null=False, null_values=[]
            ),
        )
        return self._made(rows, [(row, self._width(row)) for row in bad])

    def _careful(self, text: bytes, *, final: bool) -> tuple[Segment, int]:
        """Parse row by row. A quote may cut off the last row: it waits for the next text, if there is one."""
        lines = text.splitlines(keepends=True)
        taken = 0  # lines given to the CSV reader
        began = 0  # the first line of the current row
        cells: list[list[str]] = []
        bad: list[tuple[str, str]] = []

        def feed() -> Iterator[str]:
            nonlocal taken
            for line in lines:
                taken += 1
                yield line.decode("utf-8", "surrogateescape")

        csv.field_size_limit(self._limit)
        reader = csv.reader(feed(), delimiter=self._delimiter, strict=True)
        while taken < len(lines):
            began = taken
            try:
                row = next(reader, None)
            except csv.Error as error:
                raw = b"".join(lines[began:taken])
                if taken - began > 1 or taken == len(lines):  # it ran on: a quote that is not closed
                    if taken == len(lines) and not final and len(raw) <= self._limit:
                        return self._made(self._table(cells), bad), sum(map(len, lines[:began]))
                    raise self._broken(cells, lines[began]) from None
                bad.append((raw.decode("utf-8", "surrogateescape"), f"broken CSV: {error}"))
                continue
            if row is None or not row:
                continue
            raw = b"".join(lines[began:taken])
            try:
                raw.decode()
            except UnicodeDecodeError as error:
                raise BadFile(
                    self._name,
                    f"not {self._encoding} (byte {raw[error.start]:#04x} in {raw[:60]!r}); give --encoding",
                ) from None
            if len(row) != len(self._header):
                bad.append((raw.decode(), self._width(row)))
            else:
                cells.append(row)
        return self._made(self._table(cells), bad), len(text)

    def _broken(self, cells: list[list[str]], line: bytes) -> BadFile:
        last = f" after the row {self._delimiter.join(cells[-1])[:80]!r}" if cells else ""
        return BadFile(self._name, f"a quote is not closed in the row that begins {line[:80]!r}{last}")

    def _table(self, cells: list[list[str]]) -> pa.Table:
        columns = zip(*cells, strict=True) if cells else [[] for _ in self._header]
        return pa.table([pa.array(list(column), pa.string()) for column in columns], names=self._header)

    def _made(self, rows: pa.Table, bad: list[tuple[str, str]]) -> Segment:
        """The good rows in their order, then the text of the refused ones."""
        payloads: list[bytes] = []
        if rows.num_rows:
            payloads = to_json(rows, self._select)
        refused = {len(payloads) + index: reason for index, (_, reason) in enumerate(bad)}
        lines = [raw.rstrip("\r\n").encode("utf-8", "surrogateescape") for raw, _ in bad]
        return Segment(payloads + lines, refused)

    def _width(self, row: str | list[str]) -> str:
        if isinstance(row, str):
            try:
                row = next(csv.reader(io.StringIO(row), delimiter=self._delimiter), [])
            except csv.Error as error:  # a field beyond the limit
                return f"broken CSV: {error}"
        return f"broken CSV: {len(row)} fields, the header has {len(self._header)}"


@functools.lru_cache(maxsize=64)
def _select(header: tuple[str, ...], schema: str) -> str:
    """SQL of a row as JSON text. It concatenates texts, because ``json_object`` would parse every JSON value again."""
    types = {name.lower(): field.declared.partition(" ")[0] for name, field in parse_ddl(schema).items()}
    pairs = [
        f"to_json({_text(name)})::VARCHAR, ':', {_quick_json_of(name, types.get(name.lower(), ''))}" for name in header
    ]
    return "concat('{', " + ", ',', ".join(pairs) + ", '}')"


class _Unsure(Exception):
    """Arrow may misread the text."""


def _text(name: str) -> str:
    return "'" + name.replace("'", "''") + "'"


def _quick_json_of(name: str, kind: str) -> str:
    """The value of :func:`_json_of` as text, with a shortcut for values in JSON's own notation."""
    column = f"r.{quoted(name)}"
    careful = f"coalesce(({_json_of(column, kind)})::VARCHAR, 'null')"
    if kind == "BOOLEAN":
        return f"CASE WHEN {column} IN ('true', 'false') THEN {column} ELSE {careful} END"
    plain = {**dict.fromkeys(_INTEGERS, _PLAIN_INTEGER), **dict.fromkeys(_NUMBERS, _JSON_NUMBER)}.get(kind)
    return f"CASE WHEN regexp_full_match({column}, '{plain}') THEN {column} ELSE {careful} END" if plain else careful


def _json_of(column: str, kind: str) -> str:
    """SQL of a text column's value as JSON of the declared type, or as text if it has another type."""
    empty = f"WHEN {column} = '' THEN NULL"
    text = f"to_json({column})"
    if kind in _INTEGERS:
        fits = f"regexp_full_match(trim({column}), '[-+]?[0-9]{{1,18}}')"
        return f"CASE {empty} WHEN {fits} THEN to_json(TRY_CAST({column} AS BIGINT)) ELSE {text} END"
    if kind in _NUMBERS:
        fits = f"regexp_full_match(trim({column}), '{_JSON_NUMBER}')"
        return f"CASE {empty} WHEN {fits} THEN trim({column})::JSON ELSE {text} END"
    if kind == "BOOLEAN":
        low = f"lower(trim({column}))"
        return f"CASE {empty} WHEN {low} IN ('true', 'false') THEN {low}::JSON ELSE {text} END"
    if kind in _NESTED:
        return f"CASE {empty} WHEN json_valid({column}) THEN {column}::JSON ELSE {text} END"
    return f"CASE {empty} ELSE {text} END"

"""CSV as JSON payloads: the header's names, values by the types of the source's schema.

A value that is not of its column's type stays text: the schema check then sends the row to quarantine, with its field
named. An empty value is null. Blocks are parsed by Arrow; a block that it cannot take (a quote that is not closed, a
text that is not UTF-8) is read row by row, so that one bad row costs one row.
"""

from __future__ import annotations

import csv
import functools
import io
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import sqlglot
from sqlglot import exp

from lakehouse.contract.pipeline import Source
from lakehouse.feeds.errors import BadFile
from lakehouse.feeds.files import BLOCK, Stream, unpacked
from lakehouse.feeds.jsontext import to_json
from lakehouse.feeds.rows import Segment

_INTEGERS = ("TINYINT", "SMALLINT", "INT", "BIGINT")
_NUMBERS = ("FLOAT", "DOUBLE")  # a decimal stays text: exact, and Spark takes it
_PLAIN_INTEGER = "0|-?[1-9][0-9]{0,17}"
_JSON_NUMBER = r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?"
_NESTED = ("STRUCT", "ARRAY", "MAP", "OBJECT", "LIST")


@dataclass(frozen=True, slots=True)
class CsvOptions:
    """How the file is written.

    Attributes:
        delimiter: one character.
        encoding: as Python names it.
    """

    delimiter: str = ","
    encoding: str = "utf-8"


def column_types(ddl: str) -> dict[str, str]:
    """Top-level columns of a Spark DDL schema, in lower case, with the name of their type."""
    columns: list[exp.Expr] = []
    for text in (f"CREATE TABLE t ({ddl})", f"CAST(x AS STRUCT<{ddl}>)"):  # "a: BIGINT, …" is Spark DDL too
        try:
            tree = sqlglot.parse_one(text, dialect="spark")
        except sqlglot.errors.ParseError:
            continue
        table = tree.this if isinstance(tree, exp.Create) else tree.find(exp.DataType)
        columns = [column for column in table.expressions if isinstance(column, exp.ColumnDef)] if table else []
        if columns:
            break
    return {column.name.lower(): column.args["kind"].this.name for column in columns if column.args.get("kind")}


def read_csv(name: str, file: IO[bytes], source: Source, options: CsvOptions, offset: int) -> Iterator[Segment]:
    """Segments of the rows from ``offset`` on, which is 0 or where a segment ended; the header is read each time.

    Raises:
        BadFile: no header, or a text that cannot be read on.
    """
    header, begin = _header(name, unpacked(name, file, options.encoding), options)
    offset = max(offset, begin)
    parser = _Parser(name, header, source, options)
    stream = unpacked(name, file, options.encoding, offset)
    rest = b""
    while True:
        block = stream.read(BLOCK)
        text = rest + block
        end = _end_of_rows(text) if block else len(text)
        if not end and block:
            if len(text) <= source.max_event_bytes + BLOCK:
                rest = text
                continue
            end = len(text)  # a quote that is not closed; found by the careful way below
        if end:
            segment, used = parser.segment(text[:end], final=not block)
            offset += used
            yield Segment(segment.payloads, segment.refused, offset)
            rest = text[used:]
        if not block:
            break
    yield Segment([], offset=offset, ended=True)


def _header(name: str, stream: Stream, options: CsvOptions) -> tuple[list[str], int]:
    """Names of the columns, and where the rows begin."""
    text = stream.read(BLOCK)
    mark = 3 if text.startswith(b"\xef\xbb\xbf") else 0
    if text[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise BadFile(name, "UTF-16 text; give --encoding utf-16")
    end = text.find(b"\n", mark) + 1 or len(text)
    try:
        names = next(csv.reader([text[mark:end].decode()], delimiter=options.delimiter, strict=True), [])
    except (UnicodeDecodeError, csv.Error) as error:
        raise BadFile(name, f"the header cannot be read: {error}") from None
    names = [column.strip() for column in names]
    if not names or not all(names):
        raise BadFile(name, "it has no header, or a column without a name")
    if len({column.lower() for column in names}) < len(names):
        raise BadFile(name, "two columns have the same name")
    return names, end


def _end_of_rows(text: bytes) -> int:
    """Behind the last line end that is not inside quotes; 0 for none."""
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
    """Whether each quote is at the edge of a field or beside another; Arrow would make something of others too."""
    codes = np.frombuffer(b"\n" + text + b"\n", np.uint8)
    quotes = np.flatnonzero(codes == 34)
    edges = np.frombuffer(delimiter + b'\r\n"', np.uint8)
    return quotes.size % 2 == 0 and bool(np.all(np.isin(codes[quotes - 1], edges) | np.isin(codes[quotes + 1], edges)))


class _Parser:
    def __init__(self, name: str, header: list[str], source: Source, options: CsvOptions) -> None:
        self._name = name
        self._header = header
        self._options = options
        self._limit = source.max_event_bytes
        self._select = _select(tuple(header), source.schema)

    def segment(self, text: bytes, *, final: bool) -> tuple[Segment, int]:
        """Rows of a text that ends with a row, and how many bytes of it were used: all, but for a row cut off."""
        try:
            return self._quick(text), len(text)
        except (pa.ArrowInvalid, _Unsure):
            return self._careful(text, final=final)

    def _quick(self, text: bytes) -> Segment:
        if b'"' in text and not _well_quoted(text, self._options.delimiter.encode()):
            raise _Unsure
        bad: list[str] = []

        def refuse(row: Any) -> str:
            bad.append(row.text)
            return "skip"

        rows = pacsv.read_csv(
            io.BytesIO(text),
            read_options=pacsv.ReadOptions(column_names=self._header, use_threads=False, block_size=len(text) + 1),
            parse_options=pacsv.ParseOptions(
                delimiter=self._options.delimiter, newlines_in_values=b'"' in text, invalid_row_handler=refuse
            ),
            convert_options=pacsv.ConvertOptions(
                column_types=dict.fromkeys(self._header, pa.string()), strings_can_be_null=False, null_values=[]
            ),
        )
        return self._made(rows, [(row, self._width(row)) for row in bad])

    def _careful(self, text: bytes, *, final: bool) -> tuple[Segment, int]:
        """Row by row. At the text's end a row may be cut off by a quote: it is left, unless nothing follows."""
        lines = text.splitlines(keepends=True)
        taken = 0  # lines that the CSV reader has had
        began = 0  # the first line of its present row
        cells: list[list[str]] = []
        bad: list[tuple[str, str]] = []

        def feed() -> Iterator[str]:
            nonlocal taken
            for line in lines:
                taken += 1
                yield line.decode("utf-8", "surrogateescape")

        csv.field_size_limit(self._limit)
        reader = csv.reader(feed(), delimiter=self._options.delimiter, strict=True)
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
                    f"not {self._options.encoding} (byte {raw[error.start]:#04x} in {raw[:60]!r}); give --encoding",
                ) from None
            if len(row) != len(self._header):
                bad.append((raw.decode(), self._width(row)))
            else:
                cells.append(row)
        return self._made(self._table(cells), bad), len(text)

    def _broken(self, cells: list[list[str]], line: bytes) -> BadFile:
        last = f" after the row {self._options.delimiter.join(cells[-1])[:80]!r}" if cells else ""
        return BadFile(self._name, f"a quote is not closed in the row that begins {line[:80]!r}{last}")

    def _table(self, cells: list[list[str]]) -> pa.Table:
        columns = zip(*cells, strict=True) if cells else [[] for _ in self._header]
        return pa.table([pa.array(list(column), pa.string()) for column in columns], names=self._header)

    def _made(self, rows: pa.Table, bad: list[tuple[str, str]]) -> Segment:
        """The good rows in their order, then the refused ones as they stand in the file."""
        payloads: list[bytes] = []
        if rows.num_rows:
            payloads = to_json(rows, self._select)
        refused = {len(payloads) + index: reason for index, (_, reason) in enumerate(bad)}
        lines = [raw.rstrip("\r\n").encode("utf-8", "surrogateescape") for raw, _ in bad]
        return Segment(payloads + lines, refused)

    def _width(self, row: str | list[str]) -> str:
        if isinstance(row, str):
            row = next(csv.reader(io.StringIO(row), delimiter=self._options.delimiter), [])
        return f"broken CSV: {len(row)} fields, the header has {len(self._header)}"


@functools.lru_cache(maxsize=64)
def _select(header: tuple[str, ...], schema: str) -> str:
    """SQL of a row as JSON text, put together of texts: ``json_object`` would read every value that is JSON again."""
    types = column_types(schema)
    pairs = [
        f"to_json({_text(name)})::VARCHAR, ':', {_quick_json_of(name, types.get(name.lower(), ''))}" for name in header
    ]
    return "concat('{', " + ", ',', ".join(pairs) + ", '}')"


class _Unsure(Exception):
    """The quick way may take the text for something else than it is."""


def _text(name: str) -> str:
    return "'" + name.replace("'", "''") + "'"


def _column(name: str) -> str:
    return f'r."{name.replace(chr(34), chr(34) * 2)}"'


def _quick_json_of(name: str, kind: str) -> str:
    """The same as :func:`_json_of` as text, at once for values that are written as JSON writes them."""
    column = _column(name)
    careful = f"coalesce(({_json_of(name, kind)})::VARCHAR, 'null')"
    if kind == "BOOLEAN":
        return f"CASE WHEN {column} IN ('true', 'false') THEN {column} ELSE {careful} END"
    plain = {**dict.fromkeys(_INTEGERS, _PLAIN_INTEGER), **dict.fromkeys(_NUMBERS, _JSON_NUMBER)}.get(kind)
    return f"CASE WHEN regexp_full_match({column}, '{plain}') THEN {column} ELSE {careful} END" if plain else careful


def _json_of(name: str, kind: str) -> str:
    """SQL for a text column's value as JSON of the declared type, or as text where it is not of it."""
    column = _column(name)
    empty = f"WHEN {column} = '' THEN NULL"
    text = f"to_json({column})"
    if kind in _INTEGERS:
        fits = _matches(column, "[-+]?[0-9]{1,18}")
        return f"CASE {empty} WHEN {fits} THEN to_json(TRY_CAST({column} AS BIGINT)) ELSE {text} END"
    if kind in _NUMBERS:
        fits = _matches(column, _JSON_NUMBER)
        return f"CASE {empty} WHEN {fits} THEN trim({column})::JSON ELSE {text} END"
    if kind == "BOOLEAN":
        low = f"lower(trim({column}))"
        return f"CASE {empty} WHEN {low} IN ('true', 'false') THEN {low}::JSON ELSE {text} END"
    if kind in _NESTED:
        return f"CASE {empty} WHEN json_valid({column}) THEN {column}::JSON ELSE {text} END"
    return f"CASE {empty} ELSE {text} END"


def _matches(column: str, pattern: str) -> str:
    return f"regexp_full_match(trim({column}), '{pattern}')"

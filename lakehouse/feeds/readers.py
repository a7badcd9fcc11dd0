"""Readers: a file in one of the formats as segments of JSON payloads, from any place at which a segment ended."""

from __future__ import annotations

from collections.abc import Iterator
from typing import IO

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from lakehouse.contract.pipeline import Source
from lakehouse.feeds.csvfile import CsvOptions, read_csv
from lakehouse.feeds.errors import BadFile
from lakehouse.feeds.files import read_lines, unpacked
from lakehouse.feeds.jsontext import to_json
from lakehouse.feeds.ledger import Done
from lakehouse.feeds.rows import Segment

_BATCH = 20_000  # rows of a Parquet file at a time


def read(
    name: str, file: IO[bytes], kind: str, source: Source, done: Done, *, encoding: str = "utf-8", delimiter: str = ","
) -> Iterator[Segment]:
    """The rows that come after ``done``. The last segment says so, and may be empty.

    Args:
        kind: ``csv``, ``tsv``, ``jsonl`` or ``parquet``.

    Raises:
        BadFile: it cannot be read, or not to its end.
    """
    if kind == "parquet":
        return _parquet(name, file, done.rows)
    if kind == "jsonl":
        return _after(_json_lines(name, file, source, encoding, max(0, done.offset)), done)
    options = CsvOptions("\t" if kind == "tsv" else delimiter, encoding)
    return _after(read_csv(name, file, source, options, max(0, done.offset)), done)


def _after(segments: Iterator[Segment], done: Done) -> Iterator[Segment]:
    """Segments from where rows have been counted but the place is not known."""
    skip = done.rows if done.offset < 0 else 0
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


def _json_lines(name: str, file: IO[bytes], source: Source, encoding: str, offset: int) -> Iterator[Segment]:
    """The untouched lines; empty ones are passed over. Whether a line is JSON is looked at later."""
    stream = unpacked(name, file, encoding, offset)
    first = offset == 0
    for block, end in read_lines(stream, offset, source.max_event_bytes):
        if first:
            first = False
            block = block.removeprefix(b"\xef\xbb\xbf")
            if block[:2] in (b"\xff\xfe", b"\xfe\xff"):
                raise BadFile(name, "UTF-16 text; give --encoding utf-16")
            if block.lstrip()[:1] == b"[":
                raise BadFile(name, "begins with '[': a JSON array, not JSON lines")
        lines = block.replace(b"\r\n", b"\n").split(b"\n") if b"\r\n" in block else block.split(b"\n")
        yield Segment([line for line in lines if line and not line.isspace()], offset=end)
        offset = end
    yield Segment([], offset=offset, ended=True)


def _parquet(name: str, file: IO[bytes], skip: int) -> Iterator[Segment]:
    """Rows as JSON objects, by DuckDB: times as text, decimals as numbers, nulls kept."""
    try:
        parquet = pq.ParquetFile(file)
        groups = []
        for number in range(parquet.num_row_groups):
            count = parquet.metadata.row_group(number).num_rows
            if skip >= count:
                skip -= count
            else:
                groups.append(number)
        for batch in parquet.iter_batches(_BATCH, row_groups=groups):
            if skip >= batch.num_rows:
                skip -= batch.num_rows
                continue
            yield Segment(to_json(pa.Table.from_batches([batch]).slice(skip)))
            skip = 0
    except (pa.ArrowException, OSError, duckdb.Error) as error:
        raise BadFile(name, f"unreadable Parquet: {str(error).splitlines()[0]}") from None
    yield Segment([], ended=True)

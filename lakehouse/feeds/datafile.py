"""A chunk of bronze rows as a data file, written before its commit's time is known.

``bronze_at`` is one value for all rows of a commit, and must be later than that of every commit before: it is known
when the loader has its turn (lakehouse.bronze.clock), too late to write megabytes. So the file is written with a
placeholder: the column is dictionary-encoded and uncompressed, its dictionary one 8-byte value, which is overwritten
in its place. Nothing else in the file depends on it: no statistics, no checksum of pages.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from lakehouse.feeds.rows import PLACEHOLDER

_CONSTANT = ("source", "tenant", "collector", "suspect", "reject", "topic", "partition", "origin", "weight")
_MICROS = struct.Struct("<q")
_CODEC = "zstd"


@dataclass(frozen=True, slots=True)
class DataFile:
    """A written file that waits for its commit.

    Attributes:
        path: where it is.
        rows: how many rows it has.
        size: bytes.
        stamp_at: place in the file of the value of ``bronze_at``.
    """

    path: Path
    rows: int
    size: int
    stamp_at: int

    def stamp(self, bronze_at: int) -> None:
        """Set ``bronze_at`` (microseconds since the epoch) of all rows."""
        with self.path.open("r+b") as file:
            file.seek(self.stamp_at)
            file.write(_MICROS.pack(bronze_at))


def write(rows: pa.Table, path: Path) -> DataFile:
    """Write the rows as one Parquet file of one row group."""
    mark = os.urandom(_MICROS.size)
    at = pa.array(_MICROS.unpack(mark), pa.int64()).cast(pa.timestamp("us", "UTC"))
    rows = rows.append_column(PLACEHOLDER, pa.repeat(at[0], rows.num_rows))
    compression = {field.name: _CODEC for field in rows.schema if field.name != PLACEHOLDER}
    if "headers" in rows.schema.names:
        del compression["headers"]
        compression |= {f"headers.key_value.{part}": _CODEC for part in ("key", "value")}
    with pq.ParquetWriter(
        path,
        rows.schema,
        compression={**compression, PLACEHOLDER: "NONE"},
        compression_level=dict.fromkeys(compression, 1),
        use_dictionary=[*_CONSTANT, PLACEHOLDER],
        write_statistics=False,
        store_schema=False,
    ) as writer:
        writer.write_table(rows, row_group_size=max(1, rows.num_rows))
    return DataFile(path, rows.num_rows, path.stat().st_size, _place_of(mark, path))


def _place_of(mark: bytes, path: Path) -> int:
    metadata = pq.read_metadata(path)
    group = metadata.row_group(0)
    column = next(group.column(i) for i in range(group.num_columns) if group.column(i).path_in_schema == PLACEHOLDER)
    start = column.dictionary_page_offset
    with path.open("rb") as file:
        file.seek(start)
        page = file.read(column.data_page_offset - start)
    assert metadata.num_row_groups == 1 and column.compression == "UNCOMPRESSED" and page.count(mark) == 1
    return int(start + page.index(mark))

"""The readers of bronze tables with their positions, and the check that a table is still the one that they read.

Sets of products and joins store their positions. A bronze table that was deleted, or put back from an
older copy, must not be taken for a new one: its query would go on behind the lost events, and products would be built
again without them, silently.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from deltalake import DeltaTable

from lakehouse.bronze.table import progress
from lakehouse.contract.deltalog import DeltaLog
from lakehouse.contract.lake import Lake, TableRef
from lakehouse.contract.storage import LakePath, files_in, write_whole
from lakehouse.errors import BronzeReplaced


@dataclass(frozen=True, slots=True)
class BronzeReader:
    """A reader of a bronze table.

    Attributes:
        query: name of the set of products, or of a join and its source.
        too_late: events before that version that arrived too late, by lateness; of the set that counts them.
    """

    query: str
    place: LakePath
    next_version: int
    table_id: str
    too_late: Mapping[str, int] = field(default_factory=dict)


def note_reader(
    lake: Lake, name: str, table_id: str, next_version: int, too_late: Mapping[str, int] | None = None
) -> None:
    """Store the position of a set of products in a bronze table, and what it has counted up to there."""
    note = {"table": table_id, "next": next_version} | ({"too_late": too_late} if too_late else {})
    write_whole(reader_file(lake, name), json.dumps(note).encode())


def noted_reader(lake: Lake, name: str) -> BronzeReader | None:
    """The stored position of a set of products; None for a new one."""
    file = reader_file(lake, name)
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        return BronzeReader(name, file, int(found["next"]), str(found["table"]), found.get("too_late", {}))
    except (OSError, ValueError, KeyError):
        return None


def reader_file(lake: Lake, name: str) -> LakePath:
    return lake.shared / "readers" / f"{name}.json"


def readers(lake: Lake) -> Iterator[BronzeReader]:
    """All readers of the lake's bronze tables; a join has one for each table that it reads."""
    for file in files_in(lake.shared / "readers", "*.json"):
        reader = noted_reader(lake, file.stem)
        if reader is not None:
            yield reader


def newest_batch(checkpoint: Path, log: str) -> int | None:
    """The newest batch of a query in one of its logs: ``offsets`` (begun) or ``commits`` (done); None: no batch."""
    return max((int(path.name) for path in (checkpoint / log).glob("[0-9]*") if path.name.isdigit()), default=None)


def batch_ends(checkpoint: Path, batch: int) -> dict[str, int]:
    """``TOPIC/PARTITION`` to the offset behind a batch's last one, from the query's own write-ahead log."""
    topics = json.loads((checkpoint / "offsets" / str(batch)).read_text(encoding="utf-8").splitlines()[-1])
    return {f"{topic}/{number}": int(end) for topic, ends in topics.items() for number, end in ends.items()}


def id_of(table: TableRef) -> str:
    """The identity of a table, which another one at its path does not have."""
    return str(DeltaTable(str(table.path)).metadata().id)


def readers_of(lake: Lake, table: TableRef) -> list[BronzeReader]:
    """The readers of this table, not of an earlier one at its path."""
    table_id = id_of(table)
    return [reader for reader in readers(lake) if reader.table_id == table_id]


def too_late(lake: Lake, table: TableRef) -> dict[str, int]:
    """Events of a bronze table that arrived too late, by declared lateness; empty if no lateness is declared."""
    return {text: count for reader in readers_of(lake, table) for text, count in reader.too_late.items()}


def unread_since(table: TableRef, reader: BronzeReader) -> float | None:
    """Age of the oldest commit that the reader has not read, seconds; None if it has read all."""
    log = DeltaLog(table.path)
    written = log.written_at(reader.next_version)
    if written is None:
        later = [log.written_at(version) for version in log.versions() if version > reader.next_version]
        written = min((at for at in later if at is not None), default=None)
    return None if written is None else max(0.0, time.time() - written)


def check_record(lake: Lake, source: str, products: Iterable[TableRef] = ()) -> None:
    """Refuse to start on a bronze table other than the one that the products derive from.

    Args:
        products: the source's product tables.

    Raises:
        BronzeReplaced: it was deleted, replaced, or put back from a copy older than its readers.
    """
    table, path = lake.bronze(source), _record(lake, source)
    noted = path.read_text(encoding="utf-8") if path.is_file() else ""
    table_id = id_of(table) if table.exists() else ""
    derived = [product.path for product in products if product.exists()]
    problem = ""
    if not table_id:
        if noted or derived or _taken(lake, source):
            problem = "is gone"
    elif noted and noted != table_id:
        problem = "is another table than before"
    elif ahead := next(_ahead(lake, table, table_id), ""):
        problem = f"is older than before: {ahead}"
    if problem:
        leftovers = _leftovers(lake, source, noted or table_id, derived)
        raise BronzeReplaced(source, f"{table.path} {problem}", leftovers)


def note_record(lake: Lake, source: str) -> None:
    """Store the identity of the bronze table, which must exist."""
    path = _record(lake, source)
    if not path.is_file():
        write_whole(path, id_of(lake.bronze(source)).encode())


def _ahead(lake: Lake, table: TableRef, table_id: str) -> Iterator[str]:
    """Positions of readers and writers that the table does not reach."""
    newest = DeltaLog(table.path).newest()
    for reader in readers(lake):
        if reader.table_id == table_id and reader.next_version > newest + 1:
            yield f"{reader.query} has read up to version {reader.next_version - 1}, and it ends at {newest}"
    held = progress(table).offsets
    for place, end in _taken(lake, table.name).items():
        if held.get(place, 0) < end:
            yield f"offsets of {place} up to {end} were taken, and it has those up to {held.get(place, 0)}"


def _taken(lake: Lake, source: str) -> dict[str, int]:
    """Offsets that the query that writes the table has finished."""
    checkpoint = lake.checkpoint(f"bronze-{source}")
    batch = newest_batch(checkpoint, "commits")
    if batch is None:
        return {}
    try:
        return {place: end for place, end in batch_ends(checkpoint, batch).items() if end > 0}
    except (OSError, ValueError, AttributeError, IndexError):  # a torn file
        return {}


def _leftovers(lake: Lake, source: str, table_id: str, derived: Iterable[LakePath]) -> list[LakePath]:
    """Files and folders to remove in order to start again from the remaining data."""
    queries = {reader.query for reader in readers(lake) if reader.table_id == table_id}
    queries |= {f"{kind}-{source}" for kind in ("bronze", "live", "silver", "gold")}
    state = [
        folder
        for name in sorted(queries)
        for folder in (lake.checkpoint(name), lake.state / "seen" / name, reader_file(lake, name))
    ]
    own = [_record(lake, source), lake.shared / "clocks" / source, lake.state / "loads" / source]
    return [path for path in (*own, *state, *derived) if path.exists()]


def _record(lake: Lake, source: str) -> LakePath:
    """The file with the identity of the source's bronze table."""
    return lake.shared / "record" / source

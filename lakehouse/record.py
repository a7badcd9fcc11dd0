"""Is bronze still the table that everything derived comes from? Asked before anything is written.

A bronze table that was deleted, or put back from an older copy, would otherwise be taken for a new one: its query
would go on behind the events that are gone, and products would be built again without them, silently.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from deltalake import DeltaTable

from lakehouse.bronze.table import progress
from lakehouse.contract.deltalog import DeltaLog
from lakehouse.contract.lake import Lake, TableRef
from lakehouse.errors import BronzeReplaced
from lakehouse.maintain.readers import last_offsets, reader_file, readers


def check_record(lake: Lake, source: str, products: Iterable[TableRef] = ()) -> None:
    """Refuse to start on a bronze table that is not the one that was derived from.

    Args:
        products: the source's product tables.

    Raises:
        BronzeReplaced: it was deleted, replaced, or is older than what has been read from it.
    """
    table = lake.bronze(source)
    noted = _noted(lake, source)
    derived = [product.path for product in products if product.exists()]
    if not table.exists():
        if noted or derived or _taken(lake, source):
            raise BronzeReplaced(source, f"{table.path} is gone", _leftovers(lake, source, noted, derived))
        return
    table_id = str(DeltaTable(str(table.path)).metadata().id)
    if noted and noted != table_id:
        raise BronzeReplaced(
            source, f"{table.path} is another table than before", _leftovers(lake, source, noted, derived)
        )
    for what in _ahead(lake, table, table_id):
        raise BronzeReplaced(
            source, f"{table.path} is older than before: {what}", _leftovers(lake, source, table_id, derived)
        )


def note_record(lake: Lake, source: str) -> None:
    """Remember which table bronze is; it must exist."""
    path = _file(lake, source)
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_suffix(".new")
        fresh.write_text(str(DeltaTable(str(lake.bronze(source).path)).metadata().id), encoding="utf-8")
        fresh.replace(path)


def _ahead(lake: Lake, table: TableRef, table_id: str) -> Iterator[str]:
    """What has been read or written of the table that is not in it."""
    newest = DeltaLog(table.path).newest()
    for reader in readers(lake):
        if reader.table_id == table_id and reader.next_version > newest + 1:
            yield f"{reader.query} has read up to version {reader.next_version - 1}, and it ends at {newest}"
    held = progress(table).offsets
    for place, end in _taken(lake, table.name).items():
        if held.get(place, 0) < end:
            yield f"offsets of {place} up to {end} were taken, and it has those up to {held.get(place, 0)}"


def _taken(lake: Lake, source: str) -> dict[str, int]:
    """Offsets up to which the query that writes the table is done."""
    found = [offsets for offsets in last_offsets(lake.checkpoint(f"bronze-{source}")) if isinstance(offsets, dict)]
    return {
        f"{topic}/{number}": int(end)
        for offsets in found
        for topic, ends in offsets.items()
        if isinstance(ends, dict)
        for number, end in ends.items()
        if int(end) > 0
    }


def _leftovers(lake: Lake, source: str, table_id: str, derived: Iterable[Path]) -> list[Path]:
    """What must go in order to begin again from what there is."""
    queries = {reader.query for reader in readers(lake) if reader.table_id == table_id}
    queries |= {f"{kind}-{source}" for kind in ("bronze", "live", "silver", "gold")}
    state = [
        folder
        for name in sorted(queries)
        for folder in (lake.checkpoint(name), lake.state / "seen" / name, reader_file(lake, name))
    ]
    own = [_file(lake, source), lake.state / "clocks" / source, lake.state / "loads" / source]
    return [path for path in (*own, *state, *derived) if path.exists()]


def _noted(lake: Lake, source: str) -> str:
    path = _file(lake, source)
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def _file(lake: Lake, source: str) -> Path:
    return lake.state / "record" / source

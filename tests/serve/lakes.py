"""Real Delta tables as the lakehouse commits them, written with delta-rs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake

from lakehouse.contract import lake
from lakehouse.contract.storage import LakePath

WINDOW = datetime(2026, 1, 1, tzinfo=UTC)
TIME = pa.timestamp("us", "UTC")
TOPICS = pa.schema(
    [
        ("window_start", TIME),
        ("window_end", TIME),
        ("rank", pa.int32()),
        ("item", pa.string()),
        ("count", pa.int64()),
        ("error", pa.int64()),
        ("sketch", pa.binary()),
    ]
)
CITIES = pa.schema(
    [
        ("window_start", TIME),
        ("window_end", TIME),
        ("city", pa.string()),
        ("country", pa.string()),
        ("yes", pa.int64()),
        ("no", pa.int64()),
        ("guests", pa.int64()),
    ]
)
CITY_FOLD = {"window_end": "max", "yes": "sum", "no": "sum", "guests": "sum"}


def window(number: int) -> datetime:
    """Start of a one-minute window."""
    return WINDOW + timedelta(minutes=number)


class Product:
    """One product table, made if it is absent, and its writer."""

    def __init__(self, folder: LakePath, schema: pa.Schema, configuration: dict[str, str]) -> None:
        self.folder = folder
        self.schema = schema
        folder.parent.mkdir(parents=True, exist_ok=True)
        self.table = DeltaTable.create(
            str(folder), schema, mode="ignore", configuration=configuration, raise_if_key_not_exists=False
        )
        self.batch = 0

    @property
    def version(self) -> int:
        """Newest version."""
        return DeltaTable(str(self.folder)).version()

    def properties(self) -> CommitProperties:
        """What a product commit carries."""
        self.batch += 1
        return CommitProperties(
            custom_metadata={
                lake.COMMIT_THROUGH: json.dumps({"rsvps/0": self.batch * 10}),
                lake.COMMIT_EVENTS: "10",
                lake.COMMIT_OLDEST: str(1_767_225_600_000 + self.batch),
                lake.COMMIT_NEWEST: str(1_767_225_600_500 + self.batch),
            },
            app_transactions=[Transaction(self.folder.name, self.batch)],
        )

    def overwrite(self, rows: Sequence[dict[str, Any]], windows: Iterable[datetime]) -> None:
        """Replace the rows of these windows, as a driver does."""
        self.table.update_incremental()
        names = ", ".join(f"'{start.isoformat()}'" for start in windows)
        write_deltalake(
            self.table,
            pa.Table.from_pylist(list(rows), schema=self.schema),
            mode="overwrite",
            predicate=f"window_start IN ({names})",
            commit_properties=self.properties(),
        )

    def append(self, rows: Sequence[dict[str, Any]]) -> None:
        """Add rows."""
        self.table.update_incremental()
        data = pa.Table.from_pylist(list(rows), schema=self.schema)
        write_deltalake(self.table, data, mode="append", commit_properties=self.properties())

    def compact(self) -> None:
        """Fewer files, same rows."""
        self.table.update_incremental()
        self.table.optimize.compact()


def top_topics(root: LakePath) -> Product:
    """gold/top_topics, empty."""
    return Product(root / "gold" / "top_topics", TOPICS, {lake.PROPERTY_KEY: "window_start,rank"})


def rsvps_by_city(root: Path, name: str = "rsvps_by_city") -> Product:
    """silver/rsvps_by_city, or another name, empty: partials."""
    properties = {lake.PROPERTY_KEY: "window_start,city,country", lake.PROPERTY_FOLD: json.dumps(CITY_FOLD)}
    return Product(root / "silver" / name, CITIES, properties)


def topics(number: int, counts: Sequence[int]) -> list[dict[str, Any]]:
    """A window's top topics."""
    return [
        {
            "window_start": window(number),
            "window_end": window(number + 1),
            "rank": rank,
            "item": f"topic {rank}",
            "count": count,
            "error": 0,
            "sketch": b"\x00\xff" if rank == 1 else None,
        }
        for rank, count in enumerate(counts, 1)
    ]


def city(number: int, name: str, yes: int, no: int = 0, guests: int = 0) -> dict[str, Any]:
    """A city's partial."""
    return {
        "window_start": window(number),
        "window_end": window(number + 1),
        "city": name,
        "country": "de",
        "yes": yes,
        "no": no,
        "guests": guests,
    }

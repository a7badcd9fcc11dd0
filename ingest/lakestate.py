"""What the lake says about an event, read from the tables' own logs: no JVM, no service.

Bronze commits carry ``userMetadata`` ``{"offsets": {"TOPIC/PARTITION": next offset}}``; product commits carry
``millrace.through`` of the same form. Only commits after the last one read are looked at.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import deltalake
import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from deltalake.exceptions import TableNotFoundError

from ingest.front import RAW_PLACE
from lakehouse.contract.lake import COMMIT_THROUGH, Lake, TableRef

_LOOK_BACK = 1_000  # commits that are searched for the newest offsets when a table is first asked


@dataclass(frozen=True, slots=True)
class Coordinates:
    """Where an event is in Kafka."""

    topic: str
    partition: int
    offset: int


@dataclass(frozen=True, slots=True)
class BronzeEvent:
    """What bronze says of an event.

    Attributes:
        coordinates: where it was in Kafka, or None for an event from a file.
        reject: why the border refused it, or None.
        payload: the event itself.
        event_id: of the event.
    """

    coordinates: Coordinates | None
    reject: str | None
    payload: bytes | None = None
    event_id: str = ""


class LakeState:
    """Reads tables' progress; may be used from several threads.

    Args:
        lake: where the tables are.
    """

    def __init__(self, lake: Lake) -> None:
        self._lake = lake
        self._progress: dict[Path, _Progress] = {}
        self._lock = threading.Lock()

    def in_bronze(self, source: str, at: Coordinates) -> bool:
        """Whether bronze has committed the event at these coordinates."""
        return self._of(self._lake.bronze(source)).holds(at) is not None

    def product_version(self, name: str, at: Coordinates) -> int | None:
        """The current version of the product if it holds the event at these coordinates, else None."""
        for layer in ("gold", "silver"):
            table = self._lake.table(layer, name)
            if table.exists():
                return self._of(table).holds(at)
        return None

    def progress(self, name: str) -> tuple[int, dict[str, int]]:
        """Current version of a product (-1 before it exists), and ``TOPIC/PARTITION`` to the next offset it lacks."""
        for layer in ("gold", "silver"):
            table = self._lake.table(layer, name)
            if table.exists():
                return self._of(table).now()
        return -1, {}

    def find_event(self, source: str, tenant: str, event_id: str, received_at: int) -> BronzeEvent | None:
        """The event in bronze, found by its id; reads about a day of the table."""
        row = self._first_row(
            self._lake.bronze(source),
            ["topic", "partition", "offset", "reject", "payload"],
            {"event_id": event_id, "source": source, "tenant": tenant},
            received_at,
        )
        if row is None:
            return None
        at = None if row["offset"] is None else Coordinates(row["topic"], row["partition"], row["offset"])
        return BronzeEvent(at, row["reject"], row.get("payload"), event_id)

    def find_refined(self, source: str, raw: Coordinates, received_at: int) -> BronzeEvent | None:
        """The event in bronze that the second step of a collection made of the one at ``raw``; reads about a day."""
        columns = ["event_id", "topic", "partition", "offset", "reject", "headers"]
        rows = self._scan(self._lake.bronze(source), columns, {"source": source}, received_at)
        if rows is None:
            return None
        place = f"{raw.topic}/{raw.partition}/{raw.offset}".encode()
        for batch in rows:
            found = batch.filter(pc.equal(pc.map_lookup(batch["headers"], RAW_PLACE, "first"), place))
            if found.num_rows:
                row = found.slice(0, 1).drop_columns(["headers"]).to_pylist()[0]
                at = Coordinates(row["topic"], row["partition"], row["offset"])
                return BronzeEvent(at, row["reject"], event_id=row["event_id"])
        return None

    def quarantine_reason(self, source: str, tenant: str, event_id: str) -> str | None:
        """Why the event is in quarantine, or None."""
        wanted = {"event_id": event_id, "source": source, "tenant": tenant}
        row = self._first_row(self._lake.quarantine(), ["reason"], wanted)
        return None if row is None else str(row["reason"])

    def _of(self, table: TableRef) -> _Progress:
        with self._lock:
            return self._progress.setdefault(table.path, _Progress(table.path / "_delta_log"))

    def _first_row(
        self, table: TableRef, columns: list[str], wanted: dict[str, str], received_at: int | None = None
    ) -> dict[str, Any] | None:
        batches = self._scan(table, columns, wanted, received_at)
        for batch in batches or ():
            if batch.num_rows:
                return dict(batch.slice(0, 1).to_pylist()[0])
        return None

    def _scan(
        self, table: TableRef, columns: list[str], wanted: dict[str, str], received_at: int | None
    ) -> Iterable[pa.RecordBatch] | None:
        """Rows in which the columns have the wanted values, or None where there is no table."""
        try:
            data = deltalake.DeltaTable(str(table.path)).to_pyarrow_dataset()
        except TableNotFoundError:
            return None
        names = set(data.schema.names)
        match = None
        for column, value in wanted.items():
            if column in names:
                test = ds.field(column) == value
                match = test if match is None else match & test
        if received_at is not None and "date" in names:
            day = datetime.fromtimestamp(received_at / 1e6, UTC).date()
            match = match & ds.field("date").isin(_days(data.schema.field("date").type, day))
        chosen = [column for column in columns if column in names]
        batches: Iterable[pa.RecordBatch] = data.scanner(columns=chosen, filter=match).to_batches()
        return batches


class _Progress:
    """The end offsets of a table's newest commit."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._version = -1
        self._offsets: dict[str, int] = {}
        self._lock = threading.Lock()

    def holds(self, at: Coordinates) -> int | None:
        """The current version if it is past these coordinates, else None."""
        with self._lock:
            self._refresh()
            return self._version if at.offset < self._offsets.get(f"{at.topic}/{at.partition}", 0) else None

    def now(self) -> tuple[int, dict[str, int]]:
        """The current version and its end offsets."""
        with self._lock:
            self._refresh()
            return self._version, dict(self._offsets)

    def _refresh(self) -> None:
        if self._version >= 0 and not self._path(self._version).exists():  # the table was dropped and made again
            self._version, self._offsets = -1, {}
        if self._version < 0:
            versions = sorted(int(p.stem) for p in self._log.glob("*.json") if p.stem.isdigit())
            for version in versions[: -_LOOK_BACK - 1 : -1]:
                offsets = self._read(version)
                if offsets:
                    self._offsets, self._version = offsets, version
                    break
            self._version = max(self._version, versions[-1] if versions else -1)
            return
        while (offsets := self._read(self._version + 1)) is not None:
            self._version += 1
            for name, offset in offsets.items():
                self._offsets[name] = max(offset, self._offsets.get(name, 0))

    def _read(self, version: int) -> dict[str, int] | None:
        """End offsets that this commit names (maybe none), or None if there is no such commit."""
        try:
            lines = self._path(version).read_bytes().splitlines()
        except FileNotFoundError:
            return None
        for line in lines:
            info = orjson.loads(line).get("commitInfo")
            if info is not None:
                return _offsets(info)
        return {}

    def _path(self, version: int) -> Path:
        return self._log / f"{version:020d}.json"


def _offsets(info: dict[str, Any]) -> dict[str, int]:
    through = info.get(COMMIT_THROUGH)
    if through is not None:
        return dict(orjson.loads(through) if isinstance(through, str) else through)
    try:
        return dict(orjson.loads(info["userMetadata"])["offsets"])
    except (KeyError, TypeError, orjson.JSONDecodeError):  # somebody else's commit, e.g. maintenance
        return {}


def _days(kind: Any, day: Any) -> list[Any]:
    days = [day + timedelta(days=shift) for shift in (-1, 0, 1)]
    return days if str(kind).startswith("date") else [d.isoformat() for d in days]

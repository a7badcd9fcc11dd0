"""Table ``quarantine``: every rejected event, once, with its reason and its payload as it came."""

from __future__ import annotations

import logging

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake

from lakehouse.contract.envelope import EventLines
from lakehouse.contract.lake import PROPERTY_KEY, TableRef

_TOLD = 20  # of a batch; the table has them all
_lines = EventLines(logging.getLogger(__name__), _TOLD)

COLUMNS = pa.schema(
    [
        ("event_id", pa.string()),
        ("source", pa.string()),
        ("tenant", pa.string()),
        ("received_at", pa.timestamp("us", "UTC")),
        ("reason", pa.string()),
        ("payload", pa.string()),
        ("fingerprint", pa.string()),
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("bronze_at", pa.timestamp("us", "UTC")),
    ]
)


class Quarantine:
    """One source's writer of the table. Sources share the table; appends of several writers do not conflict.

    Args:
        description: what the table says of itself.
    """

    def __init__(
        self,
        table: TableRef,
        description: str = "Rejected events with their reason",
        key: str = "source,event_id,fingerprint",
    ) -> None:
        self._table = table
        self._description = description
        self._configuration = {"delta.checkpointInterval": "1000000", PROPERTY_KEY: key}
        self._delta: DeltaTable | None = None
        self._batches: dict[str, int] = {}

    def create(self) -> None:
        """Create the table where it is absent."""
        if self._table.exists():
            self._configure()
        else:
            self._table.create(COLUMNS, self._configuration, self._description)

    def apply(self, rows: pa.Table, query: str, batch: int) -> None:
        """Append a batch's rejected events; a batch that is in already is passed over."""
        self.create()
        if query not in self._batches:
            version = self._open().transaction_version(query)
            self._batches[query] = -1 if version is None else version
        if self._batches[query] >= batch or not rows.num_rows:
            return
        properties = CommitProperties(app_transactions=[Transaction(query, batch)])
        write_deltalake(
            self._open(), rows.select(COLUMNS.names).cast(COLUMNS), mode="append", commit_properties=properties
        )
        self._batches[query] = batch
        for event in rows.slice(0, _TOLD).select(["event_id", "source", "tenant", "reason"]).to_pylist():
            reason = event.pop("reason")
            _lines.say(logging.INFO, "is in quarantine", reason, **event)

    def replace(self, rows: pa.Table, source: str, done: tuple[str, int]) -> None:
        """Put a batch build in place of all rows of this source; a table that is absent is there with them, or not.

        Args:
            done: query and batch up to which the rows are; later ones that were in are to come again.
        """
        rows = rows.select(COLUMNS.names).cast(COLUMNS)
        properties = CommitProperties(app_transactions=[Transaction(*done)])
        if self._table.exists():
            predicate = f"source = '{source}'"
            write_deltalake(self._open(), rows, mode="overwrite", predicate=predicate, commit_properties=properties)
        else:
            self._table.path.mkdir(parents=True, exist_ok=True)
            write_deltalake(
                str(self._table.path),
                rows,
                mode="overwrite",
                name=self._table.name,
                description=self._description,
                commit_properties=properties,
            )
            self._configure()
        self._batches.clear()

    def _configure(self) -> None:
        """Give the table its properties; delta-rs takes properties of ours in a commit of their own only."""
        if PROPERTY_KEY not in self._open().metadata().configuration:
            self._open().alter.set_table_properties(self._configuration, raise_if_not_exists=False)

    def _open(self) -> DeltaTable:
        if self._delta is None:
            self._delta = DeltaTable(str(self._table.path))
        return self._delta

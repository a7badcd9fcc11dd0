"""Table ``quality``: what every expectation found in every run. Served like any other table."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta

import pyarrow as pa
from deltalake import DeltaTable, write_deltalake

from lakehouse.contract.lake import PROPERTY_KEY, QUALITY, Lake
from lakehouse.quality.engine import Finding
from lakehouse.quality.subject import Subject

KEEP = timedelta(days=90)
COLUMNS = pa.schema(
    [
        ("at", pa.timestamp("us", "UTC")),
        ("table", pa.string()),
        ("layer", pa.string()),
        ("version", pa.int64()),
        ("batch", pa.string()),
        ("expectation", pa.string()),
        ("kind", pa.string()),
        ("expected", pa.string()),
        ("action", pa.string()),
        ("success", pa.bool_()),
        ("blocking", pa.bool_()),
        ("total", pa.int64()),
        ("unexpected", pa.int64()),
        ("observed", pa.string()),
    ]
)


def record(lake: Lake, at: datetime, found: Sequence[tuple[Subject, Sequence[Finding]]]) -> None:
    """Append a run's findings; those older than :data:`KEEP` go."""
    rows = [
        {"at": at, "table": s.table, "layer": s.layer, "version": s.version, "batch": s.batch}
        | {name: getattr(finding, name) for name in COLUMNS.names[5:]}
        for s, findings in found
        for finding in findings
    ]
    if not rows:
        return
    table = lake.table("gold", QUALITY)
    if not table.exists():
        table.path.mkdir(parents=True, exist_ok=True)
        DeltaTable.create(
            str(table.path),
            schema=COLUMNS,
            mode="ignore",
            name=QUALITY,
            description="What expectations of tables and batches found",
            configuration={PROPERTY_KEY: "at,table,batch,expectation"},
            raise_if_key_not_exists=False,
        )
    delta = DeltaTable(str(table.path))
    write_deltalake(delta, pa.Table.from_pylist(rows, schema=COLUMNS), mode="append")
    oldest = (at - KEEP).isoformat()
    old = delta.to_pyarrow_dataset().count_rows(filter=pa.compute.field("at") < pa.scalar(at - KEEP, COLUMNS[0].type))
    if old:
        delta.delete(f"at < arrow_cast('{oldest}', 'Timestamp(Microsecond, Some(\"UTC\"))')")

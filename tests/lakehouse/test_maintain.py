"""Care of tables."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
from deltalake import DeltaTable, write_deltalake

from lakehouse.contract.lake import Lake
from lakehouse.maintain import CHECKPOINT_EVERY, VACUUM_EVERY_S, Maintenance
from tests.lakehouse.lakes import eventually


def test_a_log_checkpoint_once_there_are_many_versions(tmp_path: Path) -> None:
    path = tmp_path / "gold" / "t"
    path.mkdir(parents=True)
    rows = pa.table({"a": [1]})
    write_deltalake(str(path), rows, configuration={"delta.checkpointInterval": "1000000"})
    now = [0.0]
    care = Maintenance(Lake(tmp_path), now=lambda: now[0])

    def look() -> bool:
        now[0] += 6.0
        care.after_batch()
        return (path / "_delta_log" / "_last_checkpoint").is_file()

    delta = DeltaTable(str(path))
    assert not look()
    for _ in range(CHECKPOINT_EVERY):
        write_deltalake(delta, rows, mode="append")
    eventually(look, 30)
    now[0] += VACUUM_EVERY_S
    look()
    care.close()
    assert DeltaTable(str(path)).to_pyarrow_table().num_rows == CHECKPOINT_EVERY + 1


def test_trouble_never_stops_the_writer(tmp_path: Path) -> None:
    (tmp_path / "gold" / "broken" / "_delta_log").mkdir(parents=True)
    now = [0.0]
    care = Maintenance(Lake(tmp_path), now=lambda: now[0])
    for _ in range(3):
        now[0] += VACUUM_EVERY_S
        care.after_batch()
    care.close()

"""A query that was removed is cleared away, whatever the driver dies of meanwhile."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from lakehouse.bronze.readers import note_reader
from lakehouse.contract.lake import PROPERTY_PIPELINE, Lake
from lakehouse.contract.pipeline.added import OWNER, Declared, QuerySpec, State
from lakehouse.contract.storage import LakePath, StorePath, write_whole
from lakehouse.declaration import declaration_files
from lakehouse.derived.derivations import forget, query_name
from tests.crash_points import FORGET_CRASH_POINTS

ROOT = Path(__file__).parents[3]
SCRIPT = """
import sys
from pathlib import Path
from lakehouse.contract.lake import Lake
from lakehouse.contract.storage import lake_path
from lakehouse.derived.derivations import forget
forget(Lake(lake_path(sys.argv[1]), Path(sys.argv[2])), "cities", drop=True)
"""
SPEC = QuerySpec("cities", "SELECT city, count(*) AS n FROM clicks GROUP BY city", relation="clicks", key=("city",))


def added(lake: Lake) -> Declared[QuerySpec]:
    """What a query leaves that was added, ran and was removed."""
    index = lake.state / "seen" / query_name("cities")
    index.mkdir(parents=True)
    (index / "file").write_text("x")
    for file in declaration_files(lake, query_name("cities")):
        write_whole(file, b"x")
    note_reader(lake, query_name("cities"), "t", 3)
    table = lake.table("gold", "cities").path
    table.mkdir(parents=True, exist_ok=True)
    schema = pa.schema([("n", pa.int64())])
    DeltaTable.create(str(table), schema, configuration={PROPERTY_PIPELINE: OWNER}, raise_if_key_not_exists=False)
    write_deltalake(str(table), schema.empty_table(), mode="append")
    declared = Declared(lake, QuerySpec)
    declared.add(SPEC)
    declared.tell("cities", State("running", since=5, start_version=3))
    declared.replace(replace(SPEC, removed=True, drop=True))
    return declared


def left(lake: Lake) -> list[LakePath]:
    root = lake.root
    shared = [root / name for name in root.names()] if isinstance(root, StorePath) else [*root.rglob("*")]
    return [path for path in (*shared, *lake.state.rglob("*")) if path.is_file() and path.parent.name != "locks"]


@pytest.mark.parametrize("point", FORGET_CRASH_POINTS)
def test_killed_while_it_is_cleared_away(lake: Lake, point: str) -> None:
    declared = added(lake)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(lake.root), str(lake.state)],
        cwd=ROOT,
        env={**os.environ, "MILLRACE_CRASH_AT": point},
        timeout=300,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL
    (spec,) = declared.all().values()  # by which the next driver knows that it has to go on
    assert (spec.removed, spec.drop) == (True, True)
    forget(lake, spec.name, drop=spec.drop)
    assert left(lake) == []


def test_another_query_of_the_name_begins_at_its_own_time(lake: Lake) -> None:
    declared = added(lake)
    forget(lake, "cities", drop=True)
    declared.add(SPEC)
    assert declared.state("cities") == State()

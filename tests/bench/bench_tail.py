"""What following tables costs a server process that has no subscriber: ``python -m tests.bench.bench_tail``.

``millrace serve`` as it is follows some gold tables, first without and then with commits (delta-rs, in this process).
CPU is of all its processes, less that of a server without tables. The last line is one JSON object:
``us_a_table_second`` (looking for a next version), ``ms_a_commit`` (reading it and bringing the rows up to date), both
for one process, and ``processes`` with the same sum for two. Decision 20 weighs it against one tail for all processes.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable, write_deltalake
from rich.console import Console

from lakehouse.contract import lake as names
from tests.bench.bench_fanout import Server

SCHEMA = pa.schema([("item", pa.string()), ("n", pa.int64()), ("text", pa.string())])
RATE = 10.0  # commits a second, of all tables together
err = Console(stderr=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", type=int, default=20)
    parser.add_argument("--rows", type=int, default=100, help="of a commit, and of a table")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement")
    options = parser.parse_args()
    none = measure(0, options.rows, options.seconds, 1)["idle"]
    one, two = (measure(options.tables, options.rows, options.seconds, count) for count in (1, 2))
    found = {
        "tables": options.tables,
        "rows": options.rows,
        "us_a_table_second": round((one["idle"] - none) / options.tables * 1e6),
        "ms_a_commit": round((one["busy"] - one["idle"]) / one["rate"] * 1e3, 2),
        "base_ms_a_second": round(none * 1e3, 1),
        "processes": {
            str(count): {
                "idle_ms_a_second": round(run["idle"] * 1e3, 1),
                "busy_ms_a_second": round(run["busy"] * 1e3, 1),
            }
            for count, run in ((1, one), (2, two))
        },
    }
    sys.stdout.write(json.dumps(found) + "\n")


def measure(tables: int, rows: int, seconds: float, processes: int) -> dict[str, Any]:
    """CPU seconds a second of a server that follows the tables, while nothing is committed and while something is."""
    with tempfile.TemporaryDirectory(prefix="bench-tail-") as text:
        folder = Path(text)
        made = [_table(folder / "gold" / f"table_{number}", rows) for number in range(tables)]
        server = Server(folder, processes)
        try:
            time.sleep(5.0)  # it has found them all, and is quiet
            idle = _cpu(server, seconds, [], rows)
            busy = _cpu(server, seconds, made, rows) if made else idle
        finally:
            server.stop()
    err.print(f"{tables} tables, {processes} processes: {idle * 1e3:.1f} ms a second, {busy * 1e3:.1f} with commits")
    return {"idle": idle, "busy": busy, "rate": RATE}


def _cpu(server: Server, seconds: float, made: list[DeltaTable], rows: int) -> float:
    before, began = server.cpu_s(), time.monotonic()
    number = 0
    while (left := began + seconds - time.monotonic()) > 0:
        if made:
            write_deltalake(made[number % len(made)], _rows(rows, number), mode="overwrite")
            number += 1
            left = began + number / RATE - time.monotonic()
        time.sleep(max(0.0, left))
    return (server.cpu_s() - before) / (time.monotonic() - began)


def _table(folder: Path, rows: int) -> DeltaTable:
    folder.mkdir(parents=True)
    properties = {names.PROPERTY_KEY: "item", "delta.checkpointInterval": "1000000"}
    table = DeltaTable.create(folder, SCHEMA, configuration=properties, raise_if_key_not_exists=False)
    write_deltalake(table, _rows(rows, 0), mode="append")
    return table


def _rows(count: int, turn: int) -> pa.Table:
    items = [f"i{number}" for number in range(count)]
    return pa.table([items, [turn] * count, ["x" * 60] * count], schema=SCHEMA)


if __name__ == "__main__":
    main()

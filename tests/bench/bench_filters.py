"""How a filter is best evaluated on a small change, and what shared compression costs: ``python -m
tests.bench.bench_filters``.

The last line is a JSON object: µs of CPU a change of 1, 10 and 1,000 rows by closures over tuples, pyarrow and DuckDB
(what each needs to begin with is counted: rows come as tuples); µs and bytes of a 1 KB and a 256 KB message deflated;
ms of CPU in the hub of a change of as many rows as there are filters ``k = N``, each with one subscriber, and the same
without looking rows up by the value that a condition pins.
"""

from __future__ import annotations

import json
import random
import time
import zlib
from collections.abc import Callable
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.compute as pc

from lakehouse.contract.lake import CommitFacts
from lakehouse.contract.settings import ServeSettings
from lakehouse.contract.sql.closures import Columns, compile_condition
from lakehouse.contract.sql.filters import parse_condition
from serve.core import view
from serve.core.hub import Hub
from serve.core.model import SubscribeRequest, TableInfo
from serve.core.position import Seal
from serve.core.ring import Subscriber, deliver
from serve.push.websocket import WEBSOCKET
from serve.tables.state import StateStep, TableState

SCHEMA = pa.schema([("k", pa.int64()), ("city", pa.string()), ("n", pa.int64()), ("share", pa.float64())])
TABLE = TableInfo("t", "id", tuple(SCHEMA.names), ("k",), types=tuple(SCHEMA.types))
WHERE = "n > 40 AND (city = 'Bonn' OR city LIKE 'U%') AND share < 0.75"


def main() -> None:
    """Measure and print."""
    columns = Columns.of(TABLE)
    tree = parse_condition(WHERE, columns)
    assert tree is not None
    condition = compile_condition(tree, columns)
    chance = random.Random(1)
    cities = ["Bonn", "Ulm", "Köln"]
    result: dict[str, Any] = {}
    with duckdb.connect(config={"threads": "1"}) as database:
        for size in (1, 10, 1_000):
            rows = [(k, chance.choice(cities), chance.randrange(100), chance.random()) for k in range(size)]
            result[f"rows_{size}"] = {
                "closures_us": measured(lambda r=rows: [row for row in r if condition(row) is True]),
                "pyarrow_us": measured(lambda r=rows: by_arrow(r)),
                "duckdb_us": measured(lambda r=rows: by_duckdb(database, r)),
            }
    for size in (1_000, 262_144):
        text = json.dumps([{"city": chance.choice(cities), "n": chance.randrange(10**6)} for _ in range(size // 29)])
        body = text.encode()[:size]
        for level in (1, 6):
            result[f"deflate_{size}_level_{level}"] = {
                "us": measured(lambda b=body, at=level: deflated(b, at)),
                "bytes": len(deflated(body, level)),
            }
    for count in (1, 100, 1_000):
        result[f"filters_{count}_ms"] = in_the_hub(count)
    view.FEW_ROWS = 10**9
    result["filters_1000_unpinned_ms"] = in_the_hub(1_000)
    print(json.dumps(result))


class Nowhere:
    """A link to nobody."""

    def write(self, data: bytes) -> None:
        """Lost."""

    def pump(self) -> None:
        """Nothing waits."""

    def close(self, code: int, reason: str) -> None:
        """Nothing is open."""

    def buffered(self) -> int:
        """No bytes."""
        return 0

    async def drained(self) -> None:
        """At once."""


def in_the_hub(count: int) -> float:
    """ms of CPU a change, the best of five."""
    hub = Hub(ServeSettings(), [WEBSOCKET], Seal(b"x" * 32))
    state = TableState(TABLE, 0, CommitFacts(0), {(k,): (k, "Bonn", 0, 0.5) for k in range(count)})
    hub.table_opened(state, "")
    for k in range(count):
        subscriber = Subscriber(Nowhere(), WEBSOCKET)
        hub.subscribed(subscriber, SubscribeRequest("t", where=f"k = {k}"), 0)
        while hub.data_to_send(subscriber):
            pass
    best = float("inf")
    for version in range(1, 6):
        rows = {(k,): (k, "Bonn", version, 0.5) for k in range(count)}
        change = state.apply(StateStep(TABLE, version, CommitFacts(version), rows))
        began = time.process_time()
        deliver(hub.change_received(change, 0))
        best = min(best, time.process_time() - began)
    return round(best * 1e3, 2)


def table_of(rows: list[tuple[Any, ...]]) -> pa.Table:
    """Tuples as Arrow."""
    return pa.table(
        [pa.array(column, kind) for column, kind in zip(zip(*rows, strict=True), SCHEMA.types, strict=True)],
        schema=SCHEMA,
    )


def by_arrow(rows: list[tuple[Any, ...]]) -> pa.Table:
    """The filter with compute functions."""
    table = table_of(rows)
    city = pc.or_kleene(pc.equal(table["city"], "Bonn"), pc.starts_with(table["city"], "U"))
    mask = pc.and_kleene(pc.and_kleene(pc.greater(table["n"], 40), city), pc.less(table["share"], 0.75))
    return table.filter(mask)


def by_duckdb(database: duckdb.DuckDBPyConnection, rows: list[tuple[Any, ...]]) -> Any:
    """The filter as a statement."""
    database.register("t", table_of(rows))
    return database.execute(f"SELECT * FROM t WHERE {WHERE}").fetchall()


def deflated(body: bytes, level: int) -> bytes:
    """One message by itself."""
    deflater = zlib.compressobj(level, wbits=-15)
    return deflater.compress(body) + deflater.flush(zlib.Z_SYNC_FLUSH)


def measured(work: Callable[[], Any]) -> float:
    """µs of CPU a call, the best of five rounds: other processes share the machine."""
    best = float("inf")
    for _ in range(5):
        number, began = 0, time.process_time()
        while time.process_time() - began < 0.05:
            work()
            number += 1
        best = min(best, (time.process_time() - began) / number)
    return round(best * 1e6, 2)


if __name__ == "__main__":
    main()

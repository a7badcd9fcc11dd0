"""The driver's metrics out of what Spark reports and what the tables' logs say; of real queries: test_stream."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from deltalake import write_deltalake
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from jobs.metrics import DriverCollector
from lakehouse.contract.lake import Lake

# As Spark 4.2 writes it, less what is not read.
REPORT = json.loads("""
{"id": "c7", "runId": "d1", "name": "bronze-clicks", "timestamp": "2026-11-21T12:00:00.000Z", "batchId": 7,
 "numInputRows": 500, "durationMs": {"addBatch": 200, "triggerExecution": 250},
 "stateOperators": [{"operatorName": "symmetricHashJoin", "numRowsTotal": 12}],
 "sources": [{"description": "KafkaV2", "numInputRows": 500,
              "metrics": {"maxOffsetsBehindLatest": "40", "avgOffsetsBehindLatest": "20.0"}}]}
""")
NOON = 1_795_262_400.0


def samples(progress: Any, lake: Lake) -> dict[tuple[str, ...], float]:
    """Every sample by its name and the values of its labels, in order of their names."""
    registry = CollectorRegistry()
    collector = DriverCollector(progress, lake, now=lambda: NOON + 2)
    registry.register(collector)
    text = generate_latest(registry).decode()
    collector.close()
    found = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {(s.name.removeprefix("millrace_lakehouse_"), *s.labels.values()): s.value for s in found}


def test_families(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    for _ in range(2):
        write_deltalake(str(lake.table("gold", "tops").path), pa.table({"n": [1]}), mode="append")
    found = samples(lambda: [REPORT], lake)
    age = found.pop(("table_age_seconds", "gold", "tops"))
    assert age >= 0
    assert found == {
        ("spark_up",): 1,
        ("batch", "bronze-clicks"): 7,
        ("batch_rows", "bronze-clicks"): 500,
        ("batch_seconds", "bronze-clicks", "addBatch"): 0.2,
        ("batch_seconds", "bronze-clicks", "triggerExecution"): 0.25,
        ("batch_age_seconds", "bronze-clicks"): 2,
        ("ahead", "maxOffsetsBehindLatest", "bronze-clicks", "0"): 40,
        ("state_rows", "0-symmetricHashJoin", "bronze-clicks"): 12,
        ("table_version", "gold", "tops"): 1,
    }


def test_a_spark_that_does_not_answer(tmp_path: Path) -> None:
    def gone() -> Sequence[Mapping[str, Any]]:
        raise ConnectionRefusedError

    assert samples(gone, Lake(tmp_path)) == {("spark_up",): 0}

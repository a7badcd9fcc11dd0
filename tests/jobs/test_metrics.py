"""``/metrics`` of processes without HTTP of their own, and the driver's out of Spark's reports and the tables' logs.

Those of real queries are in test_stream.
"""

from __future__ import annotations

import json
import socket
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import write_deltalake
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from jobs.metrics import Counts, DriverCollector, metrics_server
from lakehouse.contract.errors import EnvironmentProblem
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


def test_counts_are_read_when_somebody_asks() -> None:
    copied = {"clicks": 1}
    with metrics_server(0, Counts("millrace_latest_copied", "Records copied", lambda: copied)) as url:
        copied["clicks"] = 7
        text = urllib.request.urlopen(url, timeout=60).read().decode()
    assert url.startswith("http://127.0.0.1:")
    assert 'millrace_latest_copied_total{source="clicks"} 7.0' in text
    assert "process_cpu_seconds_total" in text
    with pytest.raises(OSError):
        urllib.request.urlopen(url, timeout=60)


def test_the_port_is_taken() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(EnvironmentProblem, match=rf"127.0.0.1:{port}.*metrics_port"), metrics_server(port):
            pytest.fail("it listens")

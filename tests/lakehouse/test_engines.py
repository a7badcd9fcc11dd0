"""Tables in an object store, as other engines read them: each in a process of its own, without any code of ours."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from deltalake import DeltaTable

from lakehouse.contract.jvm import jar_paths
from lakehouse.contract.lake import Lake
from lakehouse.contract.storage import lake_path
from lakehouse.maintain.care import checkpoint_log, compact_bronze, fold
from tests.lakehouse.load.offers import ids, job, offers, run, write_jsonl
from tests.lakehouse.test_maintain import PER_CITY, TOTALS, store_with

pytestmark = [pytest.mark.s3, pytest.mark.soak]
# The newest DuckDB whose extensions are packages; the project's own DuckDB is another one.
PACKAGES = (
    "chdb==4.4.0",
    "deltalake==1.6.6",
    "duckdb==1.5.5",
    "duckdb-extension-delta==1.5.5",
    "duckdb-extension-httpfs==1.5.5",
    "polars==2.1.0",
    "pyarrow==26.0.1",
)
COLUMNS = {"per_city": ["city", "n"], "totals": ["n"], "offers": ["event_id", "offset", "origin"]}
BEFORE = "import json, os, sys\nstore = os.environ\n"
AFTER = """
asked = json.loads(sys.argv[1])
print(json.dumps([sorted(list(row) for row in read(url, columns)) for url, columns in asked]))
"""
DELTA_RS = """
from deltalake import DeltaTable
def read(url, columns):
    return [row.values() for row in DeltaTable(url).to_pyarrow_table(columns=columns).select(columns).to_pylist()]
"""
ARROW_IN_DUCKDB = """
import duckdb
from deltalake import DeltaTable
def read(url, columns):
    rows = DeltaTable(url).to_pyarrow_dataset()
    names = ", ".join(f'"{name}"' for name in columns)
    return duckdb.sql(f"SELECT {names} FROM rows").fetchall()
"""
POLARS = """
import polars
def read(url, columns):
    return polars.scan_delta(url, storage_options={"aws_allow_http": "true"}).select(columns).collect().rows()
"""
DUCKDB = """
import importlib.util, duckdb
from pathlib import Path
found = duckdb.connect()
for name in ("httpfs", "delta"):
    package = Path(importlib.util.find_spec(f"duckdb_extension_{name}").origin).parent
    found.execute(f"LOAD '{next(package.rglob('*.duckdb_extension'))}'")
def read(url, columns):
    found.execute(f'''CREATE OR REPLACE SECRET (TYPE s3, KEY_ID '{store["AWS_ACCESS_KEY_ID"]}',
        SECRET '{store["AWS_SECRET_ACCESS_KEY"]}', REGION '{store["AWS_REGION"]}', USE_SSL false, URL_STYLE 'path',
        ENDPOINT '{store["AWS_ENDPOINT_URL"].partition("//")[2]}')''')
    names = ", ".join(f'"{name}"' for name in columns)
    return found.execute(f"SELECT {names} FROM delta_scan('{url}')").fetchall()
"""
CLICKHOUSE = """
import chdb
def read(url, columns):
    place = url.replace("s3:/", store["AWS_ENDPOINT_URL"])
    keys = f"'{store['AWS_ACCESS_KEY_ID']}', '{store['AWS_SECRET_ACCESS_KEY']}'"
    found = chdb.query(f"SELECT {', '.join(columns)} FROM deltaLake('{place}', {keys})", "JSONCompact")
    return [[int(v) if v.isdigit() else v for v in map(str, row)] for row in json.loads(found.data())["data"]]
"""
SPARK = """
from pyspark.sql import SparkSession
def read(url, columns):
    builder = SparkSession.builder.master("local[1]").config("spark.jars", sys.argv[2])
    builder = builder.config("spark.ui.enabled", "false").config("spark.driver.host", "127.0.0.1")
    builder = builder.config("spark.sql.extensions", "io.delta.sql.DeltaSparkSessionExtension")
    builder = builder.config("spark.sql.catalog.spark_catalog", "org.apache.spark.sql.delta.catalog.DeltaCatalog")
    builder = builder.config("spark.hadoop.fs.s3a.endpoint", store["AWS_ENDPOINT_URL"])
    builder = builder.config("spark.hadoop.fs.s3a.path.style.access", "true")
    builder = builder.config("spark.hadoop.fs.s3a.input.stream.type", "classic")
    spark = builder.getOrCreate()
    return spark.read.format("delta").load(url.replace("s3://", "s3a://")).select(*columns).collect()
"""


@pytest.fixture(scope="module")
def asked(s3: str, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, list[str]]]:
    """Tables as the loader, products and care leave them, and columns of them."""
    folder = tmp_path_factory.mktemp("lake")
    lake = Lake(lake_path(f"{s3}/{uuid.uuid4().hex}"), folder / "work")
    for part in range(3):
        run(job(lake), write_jsonl(folder / f"{part}.jsonl", offers(20, merchant=part)))
    bronze = lake.bronze("offers")
    assert compact_bronze(lake, bronze, many=2) == 2
    silver, gold = store_with(lake, PER_CITY, 12), store_with(lake, TOTALS, 6)
    assert fold(silver)
    DeltaTable(str(silver.table.path)).alter.set_table_properties({"delta.logRetentionDuration": "interval 0 seconds"})
    assert checkpoint_log(lake, silver.table, every=1) == "log checkpoint"  # what went before it is gone
    tables = {"per_city": silver.table, "totals": gold.table, "offers": bronze}
    return [(str(tables[name].path), columns) for name, columns in COLUMNS.items()]


@pytest.fixture(scope="module")
def other_python() -> Iterator[str]:
    """A Python with packages that are no part of Millrace's."""
    with tempfile.TemporaryDirectory(prefix="millrace-engines-") as folder:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        python = f"{folder}/bin/python"
        subprocess.run([python, "-m", "pip", "install", "--quiet", *PACKAGES], check=True, timeout=900)
        yield python


def check(script: str, asked: list[tuple[str, list[str]]], python: str = sys.executable, *more: str) -> None:
    """What it reads is what was written."""
    command = [python, "-c", BEFORE + script + AFTER, json.dumps(asked), *more]
    done = subprocess.run(command, cwd="/", capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3_000:]
    cities, totals, rows = json.loads(done.stdout.splitlines()[-1])
    assert cities == [["Ulm", 4]] * 3
    assert totals == [[2]] * 3
    assert [row[0] for row in rows] == ids(row for part in range(3) for row in offers(20, merchant=part))
    places = [(f"{part}.jsonl", number) for part in range(3) for number in range(20)]
    assert sorted((Path(row[2]).name, row[1]) for row in rows) == places


@pytest.mark.parametrize("script", [DELTA_RS, ARROW_IN_DUCKDB], ids=["delta-rs", "duckdb over arrow"])
def test_a_reader_in_our_environment(asked: list[tuple[str, list[str]]], script: str) -> None:
    check(script, asked)


@pytest.mark.parametrize("script", [POLARS, DUCKDB, CLICKHOUSE], ids=["polars", "duckdb", "clickhouse"])
def test_a_reader_of_its_own(asked: list[tuple[str, list[str]]], other_python: str, script: str) -> None:
    check(script, asked, other_python)


def test_a_reader_is_spark_with_delta_alone(asked: list[tuple[str, list[str]]]) -> None:
    """Without Millrace's settings and, of its jars, with those of Delta and of S3A."""
    delta = [jar for jar in jar_paths("spark") if jar.name.startswith(("delta-", "unitycatalog-"))]
    check(SPARK, asked, sys.executable, ",".join(str(jar) for jar in [*delta, *jar_paths("s3")]))

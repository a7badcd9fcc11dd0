"""Tables that other writers of Delta made, from the tests of Delta Kernel: read as Spark reads them, or refused."""

from __future__ import annotations

import json
import shutil
import tarfile
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from lakehouse.contract.deltalog import DeltaLog, TableUnreadable
from lakehouse.contract.lake import Lake
from serve.errors import SqlError
from serve.sql.statement import run_sql
from tests.registries import crate

pytestmark = [pytest.mark.soak, pytest.mark.spark]

READ = {
    "app_txn_checkpoint",
    "app_txn_no_checkpoint",
    "basic_partitioned",
    "cdf_table",
    "cdf_table_non_partitioned",
    "data_reader_timestamp_ntz",
    "mixed_nulls",
    "parquet_row_group_skipping",
    "table_without_dv_small",
}
REFUSED = {
    "basic_decimal_table": "not a valid decimal128 number",  # a negative partition value, in delta-rs
    "cdf_table_with_cdc_and_dvs": "deletionVectors",
    "cdf_table_with_dv": "deletionVectors",
    "table_with_dv_small": "deletionVectors",
    "type_widening": "typeWidening",
    "with_short_dv": "deletionVectors",
}
LEFT_OUT = {
    "table_with_cdf",  # Spark refuses it: its protocol does not name what it uses
    "with_checkpoint_no_last_checkpoint",  # without the files of its rows
}
DELETED = {"cdf_table_with_cdc_and_dvs", "cdf_table_with_dv", "table_with_dv_small", "with_short_dv"}


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    """A lake of these tables, under names that SQL takes."""
    checksum = "2ecef8daadc2bae6c58bcf3b6eaf6babd1ec8154bd7342cfa1141bdd8b746822"
    folder = tmp_path_factory.mktemp("kernel")
    data = crate("delta_kernel", "0.6.0", checksum, folder) / "tests" / "data"
    for packed in data.glob("*.tar.zst"):
        with tarfile.open(fileobj=pa.input_stream(str(packed), compression="zstd"), mode="r|") as files:
            files.extractall(data, filter="data")
    lake = Lake(folder / "lake")
    for table in data.iterdir():
        name = table.name.replace("-", "_")
        if (table / "_delta_log").is_dir() and name not in LEFT_OUT:
            shutil.copytree(table, lake.root / "gold" / name)
    assert {table.name for table in lake.tables()} == READ | set(REFUSED)
    return lake


def rows_of(table: pa.Table) -> list[str]:
    return sorted(json.dumps(row, sort_keys=True, default=str) for row in table.to_pylist())


@pytest.mark.parametrize("name", sorted(READ))
def test_read_as_spark_does(lake: Lake, spark: SparkSession, name: str) -> None:
    sparks = spark.read.format("delta").load(str(lake.find(name).path))
    assert rows_of(run_sql(lake, f"SELECT * FROM {name}")) == rows_of(sparks.toArrow())


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_refused_with_the_reason(lake: Lake, name: str) -> None:
    with pytest.raises(SqlError, match=REFUSED[name]):
        run_sql(lake, f"SELECT * FROM {name}")


@pytest.mark.parametrize("name", sorted(DELETED))
def test_the_log_of_deleted_rows_is_refused(lake: Lake, name: str) -> None:
    log = DeltaLog(lake.find(name).path)
    with pytest.raises(TableUnreadable, match="deletion vectors"):
        [log.read(version) for version in log.versions()]


@pytest.mark.parametrize("name", sorted(READ | {"basic_decimal_table"}))
def test_the_log_names_the_files_that_spark_reads(lake: Lake, spark: SparkSession, name: str) -> None:
    folder, files = lake.find(name).path, {}
    log = DeltaLog(folder)
    for version in log.versions():
        commit = log.read(version)
        for removed in commit.removed:
            files.pop(removed.path)
        files |= {added.path: Path(str(added.located(folder))) for added in commit.added}
    assert all(file.is_file() for file in files.values())
    sparks = spark.read.format("delta").load(str(folder)).inputFiles()
    assert sorted(file.name for file in files.values()) == sorted(Path(file).name for file in sparks)

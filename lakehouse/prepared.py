"""Queries that Spark plans once and runs over one small Arrow table after another.

Planning a query costs more than running it over a few hundred events, so a query that every micro-batch needs is
planned when its driver starts. Its leaf is a ``mapInArrow`` that reads whatever table lies in a memory file of the
driver at that moment. Spark executes the same physical plan again and again: no analysis, no optimization, and no
new code. Measured: docs/decisions/0004-short-micro-batches.md.

The executors must be the driver's own (a ``local`` master), since they read the driver's memory file.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import reduce
from typing import Any, Protocol

import pyarrow as pa
from pyspark import InheritableThread
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql.classic.column import _to_java_column, _to_seq
from pyspark.sql.classic.dataframe import DataFrame as ClassicDataFrame
from pyspark.sql.types import StructField, StructType


class Table(Protocol):
    """The table of a prepared query, to be used in its plan as often as needed."""

    def __call__(self, names: Collection[str] | None = None) -> DataFrame: ...


Query = Callable[[Table], DataFrame]
Selections = Sequence[Sequence[str | Column]]
"""The columns of one ``select`` after another."""

WORKERS = 2
"""Python workers that most queries need."""

_FEW = 2_000  # rows: to write code for projections in each task takes longer than to interpret them over so few
_PROJECTIONS = "spark.sql.codegen.factoryMode"


class PreparedQuery:
    """One query, planned once. Several threads may run it; they take turns.

    Args:
        session: of this query alone, since a run sets how it evaluates projections.
        query: computes the result from such a table, or several results from some of its columns each.
        tasks: tasks that share a table; more than one only where no row depends on another.
    """

    def __init__(self, session: SparkSession, schema: StructType, query: Query, tasks: int = 1) -> None:
        self._session = session
        self._input = StructType([StructField(field.name, field.dataType, nullable=True) for field in schema])
        self._file = os.memfd_create("millrace-batch", os.MFD_CLOEXEC)
        self._tasks = tasks
        self._generated = str(session.conf.get(_PROJECTIONS))
        self._frame = query(self._table)
        self._lock = threading.Lock()

    def _table(self, names: Collection[str] | None = None) -> DataFrame:
        """The table as a leaf of the plan; with ``names`` only these columns."""
        schema = StructType([field for field in self._input if names is None or field.name in names])
        reader = _reader(f"/proc/{os.getpid()}/fd/{self._file}", self._tasks, schema.names)
        return self._session.range(0, self._tasks, 1, self._tasks).mapInArrow(reader, schema)

    @property
    def schema(self) -> StructType:
        return self._frame.schema

    def run(self, rows: pa.Table) -> pa.Table:
        """The query's result for these rows, in their order where the query keeps it."""
        rows = rows.select(self._input.names)
        with self._lock:
            os.ftruncate(self._file, 0)
            os.lseek(self._file, 0, os.SEEK_SET)
            with os.fdopen(self._file, "wb", closefd=False) as sink, pa.ipc.new_file(sink, rows.schema) as writer:
                writer.write_table(rows)
            self._session.conf.set(_PROJECTIONS, "NO_CODEGEN" if rows.num_rows < _FEW else self._generated)
            return self._frame.toArrow()

    def close(self) -> None:
        with self._lock:
            if self._file >= 0:
                os.close(self._file)
                self._file = -1


def selected(frame: DataFrame, steps: Selections) -> DataFrame:
    return reduce(lambda rows, columns: rows.select(*columns), steps, frame)


class KeptSelections:
    """Selections of one frame after another. The JVM is told their columns once: it takes a call for each column."""

    def __init__(self, steps: Selections) -> None:
        self._steps = steps
        self._java: list[Any] = []  # for each step Scala's Seq[Column]

    def of(self, frame: DataFrame) -> DataFrame:
        if not self._java:
            context = frame.sparkSession.sparkContext
            self._java = [_to_seq(context, columns, _to_java_column) for columns in self._steps]
        rows: Any = frame._jdf
        for columns in self._java:
            rows = rows.select(columns)
        return ClassicDataFrame(rows, frame.sparkSession)


def start_workers(spark: SparkSession) -> threading.Thread:
    """Start Spark's Python workers now, so that the first query does not wait for them; the thread that does so."""

    def start() -> None:
        if is_local(spark):
            spark.range(0, WORKERS, 1, WORKERS).mapInArrow(lambda batches: batches, "id BIGINT").toArrow()

    thread = InheritableThread(target=start, name="python workers", daemon=True)
    thread.start()
    return thread


def is_local(spark: SparkSession) -> bool:
    """Whether the driver is the only executor."""
    return (spark.sparkContext.master or "").startswith("local")


def _reader(path: str, tasks: int, names: list[str]) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """What a task runs in its Python worker: it gives its share of the table in the file."""

    def read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import gc

        import pyarrow

        if not gc.get_freeze_count():
            gc.freeze()  # PySpark collects garbage after each task: not over all that the worker has imported
        for batch in batches:
            task = batch.column(0)[0].as_py()
            with pyarrow.memory_map(path) as file:
                rows = pyarrow.ipc.open_file(file).read_all().select(names)
            first, end = rows.num_rows * task // tasks, rows.num_rows * (task + 1) // tasks
            yield from rows.slice(first, end - first).to_batches()

    return read

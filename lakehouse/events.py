"""The events of one or more bronze versions, parsed once for all that read them.

Two representations. *Local* events are an Arrow table in the driver, and Spark runs queries over it that it has planned
beforehand (:mod:`lakehouse.prepared`): micro-batches, where the driver is the only executor. *Spark* events stay in
Spark, in parallel, until all products have read them: on a cluster, and what a long catch-up reads from bronze.
"""

from __future__ import annotations

import json
import threading
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import cached_property, partial, reduce

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    DataType,
    MapType,
    NumericType,
    StructType,
)
from sqlglot.errors import SqlglotError

from lakehouse.batch import rejected_columns, rejected_rows, rejects_with_fields
from lakehouse.bronze.query import RECORDS, bronze_columns, to_bronze
from lakehouse.bronze.seen import JUDGED
from lakehouse.bronze.table import COLUMNS
from lakehouse.contract.envelope import Envelope
from lakehouse.contract.errors import ConfigError
from lakehouse.contract.pipeline import Product, Source
from lakehouse.contract.pipeline.product import EVENTS
from lakehouse.contract.sql.spark import unrepeatable
from lakehouse.operators.base import Operator
from lakehouse.operators.rows import OWN
from lakehouse.operators.sql import NamesRead, parse, tree_of
from lakehouse.prepared import KeptSelections, PreparedQuery, Query, Table, is_local, selected
from lakehouse.quality.watch import warned_columns
from lakehouse.silver.conform import CARRIED, conform, conforming, payload_schema, without_unread_texts

SMALL_BATCH = 20_000
"""Events: of fewer the records come to the driver unparsed, since planning a parse takes longer than a detour."""

COMPILED = {"spark.sql.codegen.wholeStage": "true", "spark.sql.codegen.factoryMode": "FALLBACK"}
"""Spark settings of sessions whose plans run again and again, or over many rows."""

PARTITIONS = "spark.sql.shuffle.partitions"
_FEW = 500  # copies that a filter names one by one; more are joined
_OF_COMMIT = ("bronze_at", "date")  # bronze columns that the commit gives
# Bronze columns that are a Kafka record's own, and what they are called there.
_OF_RECORD = {name: name for name in ("key", "topic", "partition", "offset")} | {
    "payload": "value",
    "broker_time": "timestamp",
}
_OF_ENVELOPE = ("source", "tenant", "received_at", "fingerprint", "suspect", "origin", "weight")
_CARRIED = "_bronze_"  # begins the name of a bronze column beside an event's own columns
Partial = Callable[[], pa.Table]


class Events(ABC):
    """Conformed events (:func:`lakehouse.silver.conform.conform`), at first each as often as bronze has it."""

    @abstractmethod
    def columns(self, names: Sequence[str]) -> pa.Table:
        """These columns of all events, and ``rejected``."""

    @abstractmethod
    def only(self, rows: pa.Table, chosen: npt.NDArray[np.bool_]) -> Events:
        """Some of the events.

        Args:
            rows: what :meth:`columns` gave, with an event's place.
        """

    @abstractmethod
    def partials(self, operators: Sequence[Operator], since: int) -> list[Partial]:
        """For each operator a function that computes its partial rows over the valid events.

        Args:
            since: events of bronze commits up to this time do not count (microseconds since the epoch).
        """

    @abstractmethod
    def rejected(self) -> pa.Table:
        """The rejected events as quarantine keeps them."""

    @abstractmethod
    def warned(self) -> pa.Table:
        """A row for each event and ``warn`` expectation that it fails."""


class LocalEvents(Events):
    """Events in the driver's memory.

    Args:
        rows: columns that products and others read.
        bronze: the same events, and more, as bronze has them.
        places: rows of ``bronze`` that the events are; None: all, one by one.
    """

    def __init__(
        self, queries: LocalQueries, rows: pa.Table, bronze: pa.Table, places: npt.NDArray[np.intp] | None = None
    ) -> None:
        self._queries = queries
        self._rows = rows
        self._bronze = bronze
        self._places = places

    def columns(self, names: Sequence[str]) -> pa.Table:
        return self._rows.select(names).append_column("rejected", pc.is_valid(self._rows["reason"]))

    def only(self, rows: pa.Table, chosen: npt.NDArray[np.bool_]) -> LocalEvents:
        if chosen.all():
            return self
        # Bronze's rows are not copied: few of them are asked for, and their payloads are most of a batch.
        return LocalEvents(self._queries, self._rows.filter(pa.array(chosen)), self._bronze, self._in_bronze(chosen))

    def partials(self, operators: Sequence[Operator], since: int) -> list[Partial]:
        valid = self._rows.filter(pc.is_null(self._rows["reason"]))
        if since:
            valid = valid.filter(pc.greater(pc.cast(valid["bronze_at"], pa.int64()), since))
        found = dict(zip(self._queries.operators, self._queries.partials(valid), strict=True))
        return [partial(found.__getitem__, operator) for operator in operators]

    def rejected(self) -> pa.Table:
        return self._queries.rejected(self._bronze_with("reason"))

    def warned(self) -> pa.Table:
        return self._queries.warned(self._bronze_with("warned"))

    def _bronze_with(self, column: str) -> pa.Table:
        """Bronze's rows of the events that have a value in a column."""
        return self._bronze.take(self._in_bronze(pc.is_valid(self._rows[column]).to_numpy()))

    def _in_bronze(self, chosen: npt.NDArray[np.bool_]) -> npt.NDArray[np.intp]:
        places = np.flatnonzero(chosen)
        return places if self._places is None else self._places[places]


class SparkEvents(Events):
    """Events in Spark.

    Args:
        frame: conformed, with the bronze columns that :func:`~lakehouse.silver.conform.conform` carries.
        source: whose they are.
    """

    def __init__(self, frame: DataFrame, source: Source) -> None:
        self.frame = frame
        self._source = source

    def columns(self, names: Sequence[str]) -> pa.Table:
        return self.frame.select(*names, F.col("reason").isNotNull().alias("rejected")).toArrow()

    def only(self, rows: pa.Table, chosen: npt.NDArray[np.bool_]) -> SparkEvents:
        if chosen.all():
            return self
        return SparkEvents(_without(self.frame, rows.filter(pa.array(~chosen))), self._source)

    def partials(self, operators: Sequence[Operator], since: int) -> list[Partial]:
        valid = self.frame.where(F.col("reason").isNull())
        if since:
            valid = valid.where(F.unix_micros("bronze_at") > since)
        valid.createOrReplaceTempView(self._source.name)
        session = valid.sparkSession
        return [partial(lambda one: session.sql(one.partial_sql()).toArrow(), operator) for operator in operators]

    def rejected(self) -> pa.Table:
        events = conform(as_bronze(self.frame.where(F.col("reason").isNotNull())), self._source)
        return rejected_rows(events, self._source)

    def warned(self) -> pa.Table:
        return warned_columns(self.frame).toArrow()


class LocalQueries:
    """The queries over one source's local events, each planned when it is first needed.

    Args:
        spark: its settings, compiled plans apart, hold for the queries.
        needed: columns that others read.

    Raises:
        ConfigError: SQL of the source or of a product depends on when it is computed.
    """

    def __init__(
        self,
        spark: SparkSession,
        source: Source,
        products: Sequence[Product],
        operators: Sequence[Operator],
        needed: Sequence[str],
        tenant: str,
    ) -> None:
        check_repeatable(source, products)
        self.session = compiled_session(spark)  # of long batches; a prepared query has a session of its own
        cores = spark.sparkContext.defaultParallelism
        self.session.conf.set(PARTITIONS, max(cores, int(self.session.conf.get(PARTITIONS) or 1)))
        self.operators = list(operators)
        self._source = source
        self._read = columns_read(products)
        self._needed = {*needed, *JUDGED, "reason"}
        self._fields = _fields_to_parse(source, products, self._needed)
        self._checks_text = False
        self._tenant = tenant
        self._prepared: dict[str, PreparedQuery] = {}
        self._preparing: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
        self._bronze = from_arrow_schema(COLUMNS)
        self._view = self.narrowed(self._conformed(self.session.createDataFrame([], self._bronze))).schema
        self._shapes: list[StructType] = []

    @cached_property
    def usable(self) -> bool:
        """Whether the driver is the only executor, and Arrow has a type for each column."""
        if not is_local(self.session):
            return False
        try:
            to_arrow_schema(self._view, timezone="UTC")
        except Exception:  # noqa: BLE001 - of Spark's own, which names no common base
            return False
        return True

    def plan(self) -> None:
        """Plan what the products' SQL needs, so that a mistake in it shows before the first event.

        Raises:
            AnalysisException: of Spark, where the SQL does not fit the source's schema.
        """
        if not self.operators:
            return
        if self.usable:
            self._prepare("partials", self._view, self._union)
        else:
            self._union(lambda *_: self.session.createDataFrame([], self._view))

    def rehearsals(self) -> list[Callable[[], object]]:
        """Functions that plan and compile the queries of every batch, so that the first event need not wait for it."""
        if not self.usable:
            return []
        now = datetime.now(UTC)
        payload = json.dumps(_sample(payload_schema(self._source))).encode()
        received_at = int(now.timestamp() * 1e6)
        headers = Envelope("e", self._source.name, self._tenant, received_at, "rehearsal", "").to_headers()
        record = {
            "value": payload,
            "topic": self._source.topic,
            "partition": 0,
            "offset": 0,
            "timestamp": now,
            "headers": [{"key": key, "value": value} for key, value in headers],
        }
        records = pa.Table.from_pylist([record] * 10, schema=RECORDS)
        events = to_arrow_schema(self._view, timezone="UTC").empty_table()
        return [partial(self.of_records, records), partial(self.partials, events)]

    def close(self) -> None:
        for query in list(self._prepared.values()):
            query.close()

    def _conformed(self, bronze: DataFrame, carried: Sequence[str] = ()) -> DataFrame:
        """Bronze rows as events, with those fields of the payload that are read, or that may not fit the schema."""
        return selected(bronze, conforming(self._source, carried=carried, schema=self._fields))

    def narrowed(self, events: DataFrame, *others: str) -> DataFrame:
        """Conformed events without the columns that nobody reads."""
        if self._read is None:
            return events
        kept = {*self._needed, *others}
        return events.select(
            [c for c in events.columns if c.lower() in self._read.every or c in kept or c.startswith(_CARRIED)]
        )

    def parsed(self, bronze: DataFrame) -> DataFrame:
        """Bronze rows as events, with all that bronze has of them."""
        return self.narrowed(self._conformed(bronze, CARRIED), *COLUMNS.names)

    def read_again(self, bronze: DataFrame) -> DataFrame:
        """The same, of rows of bronze. What no product reads is null, unless quarantine or warnings take it."""
        events = self.parsed(bronze)
        if self._read is None:
            return events
        told = F.col("reason").isNotNull()
        if "warned" in events.columns:
            told = told | F.col("warned").isNotNull()
        read = self._read.every | self._needed
        return events.select([c if c.lower() in read else F.when(told, F.col(c)).alias(c) for c in events.columns])

    def of_records(self, records: pa.Table) -> tuple[pa.Table, pa.Table]:
        """Kafka records as events, and as bronze rows without the columns that a commit gives.

        Args:
            records: columns of :data:`~lakehouse.bronze.query.RECORDS`, in the order in which bronze is to have them.
        """

        def parse_records(table: Table) -> DataFrame:
            bronze = to_bronze(table(), source=self._source.name, tenant=self._tenant)
            bronze = bronze.withColumn("bronze_at", F.lit(None).cast("timestamp"))
            carried = ("event_id", "collector", "reject", "headers")
            return self.narrowed(self._conformed(bronze, carried), *_OF_ENVELOPE)

        found = self._run("records", records, from_arrow_schema(RECORDS), parse_records, tasks=2)
        names = [name for name in COLUMNS.names if name not in _OF_COMMIT]
        columns = [
            records[_OF_RECORD[name]]
            if name in _OF_RECORD
            else found[f"{_CARRIED}{name}" if f"{_CARRIED}{name}" in found.schema.names else name]
            for name in names
        ]
        return found.select(self._view.names), pa.table(columns, names)

    def of_batch(self, records: DataFrame) -> tuple[pa.Table, pa.Table]:
        """The same of a long batch, whose records are parsed where Spark has read them.

        Whether all is UTF-8 is seen here, in a tenth of the time that Spark takes for it. From the first batch on of
        which something is not, Spark looks at each event.
        """
        found = self._batch_columns.of(records).toArrow()
        if not self._checks_text and not self._is_text(found):
            self._checks_text = True
            del self._batch_columns
            found = self._batch_columns.of(records).toArrow()
        rows = found.num_rows
        known = {
            "topic": pa.repeat(self._source.topic, rows),
            "origin": pa.repeat("stream", rows),
            "source": pc.fill_null(found["source"], self._source.name),
            "tenant": pc.fill_null(found["tenant"], self._tenant),
            f"{_CARRIED}event_id": pc.coalesce(found[f"{_CARRIED}event_id"], found["event_id"]),
            "bronze_at": pa.nulls(rows, COLUMNS.field("bronze_at").type),
        }

        def column(name: str) -> pa.ChunkedArray:
            return known[name] if name in known else found[name]

        bronze = {
            name: column(f"{_CARRIED}{name}" if name in CARRIED else name)
            for name in COLUMNS.names
            if name not in _OF_COMMIT
        }
        return pa.table({name: column(name) for name in self._view.names}), pa.table(bronze)

    @cached_property
    def _batch_names(self) -> list[str]:
        return self.parsed(self.session.createDataFrame([], self._bronze)).columns

    @cached_property
    def _batch_columns(self) -> KeptSelections:
        """From records to events; what nearly all events have alike is null, and need not be carried to the driver."""
        usual = {
            "source": F.nullif("source", F.lit(self._source.name)),
            "tenant": F.nullif("tenant", F.lit(self._tenant)),
            f"{_CARRIED}event_id": F.nullif(f"{_CARRIED}event_id", "event_id"),
        }
        names = [name for name in self._batch_names if name not in ("topic", "origin", "bronze_at")]
        return KeptSelections(
            [
                *bronze_columns(source=self._source.name, tenant=self._tenant, checks_text=self._checks_text),
                ["*", F.lit(None).cast("timestamp").alias("bronze_at")],
                *conforming(self._source, carried=CARRIED, schema=self._fields, checks_text=self._checks_text),
                [usual[name].alias(name) if name in usual else name for name in names],
            ]
        )

    def _is_text(self, found: pa.Table) -> bool:
        """Whether all texts are UTF-8, and the payloads, unless they are of a binary format."""
        try:
            found.validate(full=True)
            if self._source.format == "json":
                found["payload"].cast(pa.string())
        except pa.ArrowInvalid:
            return False
        return True

    def of_bronze(self, bronze: pa.Table) -> LocalEvents:
        """Bronze rows as events."""
        rows = self._run("bronze", bronze, self._bronze, lambda table: self.narrowed(self._conformed(table())), tasks=2)
        return LocalEvents(self, rows, bronze)

    def partials(self, valid: pa.Table) -> list[pa.Table]:
        """Partial rows of every operator over valid events, by one Spark job."""
        if not self.operators:
            return []
        found = self._run("partials", valid, self._view, self._union)
        tables = []
        for number, shape in enumerate(self._shapes):
            rows = found.filter(pc.equal(found["operator"], number))
            tables.append(rows.select([f"{number}:{name}" for name in shape.names]).rename_columns(shape.names))
        return tables

    def _union(self, table: Table) -> DataFrame:
        """The partial rows of all operators, each in columns of its own."""
        frames = []
        for operator in self.operators:
            sql = operator.partial_sql()
            read = NamesRead.of([tree_of(sql)])
            columns = None if read is None else {name for name in self._view.names if name.lower() in read.every}
            events = table(columns or None)
            events.createOrReplaceTempView(self._source.name)
            frames.append(events.sparkSession.sql(sql))
        self._shapes = [frame.schema for frame in frames]

        def widened(number: int, frame: DataFrame) -> DataFrame:
            columns = [
                (F.col(f"`{field.name}`") if other == number else F.lit(None).cast(field.dataType)).alias(
                    f"{other}:{field.name}"
                )
                for other, shape in enumerate(self._shapes)
                for field in shape
            ]
            return frame.select(F.lit(number).alias("operator"), *columns)

        return reduce(DataFrame.union, [widened(*numbered) for numbered in enumerate(frames)])

    def rejected(self, bronze: pa.Table) -> pa.Table:
        """Quarantine's rows of those bronze rows that are rejected."""
        found = self._run(
            "rejected",
            bronze,
            self._bronze,
            lambda table: rejected_columns(conform(table(), self._source), self._source),
        )
        return rejects_with_fields(found, self._source)

    def warned(self, bronze: pa.Table) -> pa.Table:
        """A row for each of these bronze rows and ``warn`` expectation that it fails."""
        return self._run("warned", bronze, self._bronze, lambda table: warned_columns(conform(table(), self._source)))

    def _run(self, name: str, rows: pa.Table, schema: StructType, query: Query, tasks: int = 1) -> pa.Table:
        return self._prepare(name, schema, query, tasks).run(rows)

    def _prepare(self, name: str, schema: StructType, query: Query, tasks: int = 1) -> PreparedQuery:
        with self._preparing[name]:
            if name not in self._prepared:
                # In a session of its own: a view that another thread makes under the source's name is not seen here.
                self._prepared[name] = PreparedQuery(compiled_session(self.session), schema, query, tasks)
            return self._prepared[name]


def check_repeatable(source: Source, products: Iterable[Product]) -> None:
    """Refuse SQL whose answer depends on when it is computed: a replay would give another, and plans are made once.

    Raises:
        ConfigError: with the key that holds it.
    """
    declared = {f"sources.{source.name}.event_time": source.event_time}
    expected = f"sources.{source.name}.expectations"
    declared |= {f"{expected}.{name}": one.sql for name, one in source.expectations.items()}
    for product in products:
        declared[f"products.{product.name}.sql"] = product.sql
        declared |= {f"products.{product.name}.aggregates.{name}": sql for name, sql in product.aggregates.items()}
    for key, sql in declared.items():
        if function := unrepeatable(sql):
            remedy = "Use received_at (when a collector had the event) for the present time"
            raise ConfigError(f"{function}() gives another answer on a replay", key=key, remedy=remedy)


def columns_read(products: Sequence[Product], paths: Iterable[str] = (), sql: Iterable[str] = ()) -> NamesRead | None:
    """Every name in the products' SQL, in ``paths`` and in the expressions ``sql``.

    Returns:
        None: all may be read (``SELECT *``, a product without SQL, an expression that only Spark understands).
    """
    if not all(product.sql.strip() for product in products):
        return None
    own = OWN.values() if any(product.operator == EVENTS for product in products) else ()
    try:
        read = NamesRead.of([*map(parse, products), *(tree_of(f"SELECT {text}") for text in sql)])
    except SqlglotError:
        return None
    return read and read.with_paths([*own, *paths])


def _fields_to_parse(source: Source, products: Sequence[Product], needed: Iterable[str]) -> StructType:
    """The source's schema without texts that neither the products nor the source's own expressions read."""
    template = source.event_id_template
    paths = [*source.required, *(template.fields if template else ()), *needed]
    read = columns_read(products, paths, [source.event_time, *(one.sql for one in source.expectations.values())])
    schema = payload_schema(source)
    return schema if read is None else without_unread_texts(schema, read)


def compiled_session(spark: SparkSession) -> SparkSession:
    """A session of the same driver whose plans are compiled."""
    session = spark.newSession()
    for key, value in COMPILED.items():
        session.conf.set(key, value)
    return session


def as_bronze(events: DataFrame) -> DataFrame:
    """Conformed events with all that is carried as the bronze rows that they come from, without ``date``."""
    carried = {name: F.col(f"{_CARRIED}{name}").alias(name) for name in CARRIED}
    return events.select([carried.get(name, F.col(name)) for name in COLUMNS.names if name != "date"])


@contextmanager
def materialized(events: DataFrame) -> Iterator[DataFrame]:
    """The same events, computed by the first reader and kept until the end of the block.

    With the driver as the only executor they are kept as rows (``localCheckpoint``): a copy of the bytes. Spark's cache
    takes each row apart into columns and every reader puts it together again; but it survives the loss of an executor.
    """
    if not is_local(events.sparkSession):
        events.persist()
        try:
            yield events
        finally:
            events.unpersist()
        return
    rows = events.localCheckpoint(eager=False)
    try:
        yield rows
    finally:
        rows._jdf.queryExecution().logical().rdd().unpersist(False)


def _without(events: DataFrame, copies: pa.Table) -> DataFrame:
    """Events less those at the places of ``copies``."""
    places = copies.select(["topic", "partition", "offset"])
    if places.num_rows > _FEW:
        other = events.sparkSession.createDataFrame(places)
        return events.join(F.broadcast(other), ["topic", "partition", "offset"], "left_anti")
    by_partition: dict[tuple[str, int], list[int]] = {}
    for row in places.to_pylist():
        by_partition.setdefault((row["topic"], row["partition"]), []).append(row["offset"])
    condition = F.lit(False)
    for (topic, partition), offsets in by_partition.items():
        here = (F.col("topic") == topic) & (F.col("partition") == partition)
        condition = condition | (here & F.col("offset").isin(offsets))
    return events.where(~condition)


def _sample(kind: DataType) -> object:
    """A JSON value of this type."""
    if isinstance(kind, StructType):
        return {field.name: _sample(field.dataType) for field in kind}
    if isinstance(kind, ArrayType):
        return [_sample(kind.elementType)]
    if isinstance(kind, MapType):
        return {"a": _sample(kind.valueType)}
    if isinstance(kind, BooleanType):
        return True
    return 1 if isinstance(kind, NumericType) else "a"

"""Bronze rows → typed events: schema, required fields and expectations of the source, and a reason where one fails.

A transform: DataFrame in, DataFrame out, no action. Nothing is dropped here; what fails carries a ``reason``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence, Set
from datetime import UTC, datetime
from functools import reduce
from typing import Any

from pyspark import SparkContext
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, DataType, StringType, StructField, StructType

from lakehouse.contract.errors import ConfigError
from lakehouse.contract.pipeline import Source, Template
from lakehouse.contract.pipeline.expectations import HALT, QUARANTINE, WARN
from lakehouse.contract.pipeline.source import ENVELOPE_COLUMNS, column_of
from lakehouse.operators.sql import NamesRead
from lakehouse.prepared import Selections, selected
from lakehouse.silver.avro import decoded

CARRIED = ("event_id", "collector", "reject", "headers", "key", "broker_time")
"""Bronze columns that an event does not have, or not as bronze has them."""

_OF_BRONZE = ("event_id", "source", "tenant", "received_at", "origin", "payload", "fingerprint", "suspect", "reject")
_CORRUPT = "_corrupt_record"
_FLAW, _ABSENT = "_flaw", "_absent"  # why the payload cannot be decoded; there is nothing to unwrap
MISFIT = "does not fit the schema"
_FIRST_TIME, _LAST_TIME = datetime(1, 1, 2, tzinfo=UTC), datetime(9999, 1, 1, tzinfo=UTC)


def payload_schema(source: Source) -> StructType:
    """The source's DDL as a Spark type. Raises ConfigError: it is no DDL, or two columns would have one name."""
    try:
        schema = StructType.fromDDL(source.schema)
        assert isinstance(schema, StructType)
    except Exception as error:  # noqa: BLE001 - the parser's exceptions have no common base that is public
        raise ConfigError(
            f"not a Spark DDL schema: {str(error).strip().splitlines()[0]}", key=f"sources.{source.name}.schema"
        ) from None
    columns = [*map(column_of, schema.fieldNames()), *source.enrich, _CORRUPT, _FLAW, _ABSENT]
    if taken := {name for name in columns if columns.count(name) > 1}:
        raise ConfigError(
            f"column {min(taken)!r} would stand for two things",
            key=f"sources.{source.name}.schema",
            remedy="Nest one of them, or leave it out",
        )
    return schema


def payload_columns(source: Source) -> list[str]:
    """The columns of the payload's fields, in order."""
    return [column_of(name) for name in payload_schema(source).fieldNames()]


def without_unread_texts(schema: StructType, read: NamesRead) -> StructType:
    """A schema of JSON without the texts that nobody reads.

    Every JSON value is a text, so to leave one out refuses no event less. Of what is not a text it must be seen that it
    fits, whoever reads it.
    """

    def without(kind: DataType) -> DataType:
        if isinstance(kind, ArrayType):
            return ArrayType(without(kind.elementType), kind.containsNull)
        if not isinstance(kind, StructType):
            return kind
        fields = [field for field in kind if not isinstance(field.dataType, StringType) or is_in(field, read.every)]
        return StructType(
            [
                field if is_in(field, read.whole) else StructField(field.name, without(field.dataType))
                for field in fields or kind.fields[:1]
            ]
        )

    def is_in(field: StructField, names: Set[str]) -> bool:
        return not names.isdisjoint({field.name.lower(), column_of(field.name).lower()})

    found = without(schema)
    assert isinstance(found, StructType)
    return found


def conform(bronze: DataFrame, source: Source, *, carried: Sequence[str] = ()) -> DataFrame:
    """Typed events of one source.

    Args:
        bronze: rows of the source's bronze table.
        carried: columns of :data:`CARRIED` to pass on as bronze has them, as ``_bronze_NAME``.

    Returns:
        The payload's fields, reference data by the name of its header (``MAP<STRING, STRING>``, null where there is
        none), :data:`ENVELOPE_COLUMNS`, ``reason`` (null for a valid event), ``dedupe_key`` (16 bytes,
        equal for events that are one and the same), and the bronze columns that quarantine keeps. Where the source
        has such expectations, also ``warned`` (names, or null) and ``halted`` (the first name, or null): what a valid
        event fails that does not refuse it.
    """
    return selected(bronze, conforming(source, carried=carried))


def conforming(
    source: Source, *, carried: Sequence[str] = (), schema: StructType | None = None, checks_text: bool = True
) -> Selections:
    """The selections that :func:`conform` makes.

    Args:
        schema: what to parse of the payload; None: all that the source declares.
        checks_text: refuse payloads that are not UTF-8; otherwise the caller has to look at them.
    """
    schema = schema or payload_schema(source)
    avro = source.format == "avro"
    text = F.col("d")["text"] if avro else F.col("payload").cast("string")
    options = {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": _CORRUPT}
    fields = reduce(lambda inner, step: StructType([StructField(step, inner)]), reversed(source.unwrap_path), schema)
    parsed = F.from_json(text, StructType([*fields, StructField(_CORRUPT, StringType())]), options).alias("j")
    event = reduce(lambda column, step: column[step], source.unwrap_path, F.col("j"))
    corrupt = F.when(F.col("j").isNull(), text).otherwise(F.col("j")[_CORRUPT])  # null for an empty text
    place = ["topic", "partition", "offset", "bronze_at"]
    passed = {f"_bronze_{name}": F.col(name) for name in carried}
    flat = {
        **{column_of(name): event[name] for name in schema.fieldNames()},
        _CORRUPT: corrupt,
        **({_FLAW: F.col("d")["flaw"]} if avro else {}),
        **({_ABSENT: event.isNull()} if source.unwrap else {}),
        **{name: F.from_json(F.col("headers")[name].cast("string"), "map<string,string>") for name in source.enrich},
        **{name: F.col(name) for name in _OF_BRONZE},
        "weight": F.coalesce("weight", F.lit(1.0)),
        **{name: F.col(name) for name in place},
        **passed,
    }
    # An event's time may be in a header, such as that of a CloudEvent; else nothing here needs them any more.
    if "headers" in source.event_time and "headers" not in flat:
        flat["headers"] = F.col("headers")
    steps: list[Sequence[str | Column]] = [["*", decoded(F.col("payload")).alias("d")]] if avro else []
    steps += [["*", parsed], [column.alias(name) for name, column in flat.items()]]
    if source.event_id_template is not None:
        # Marked: the record came without an envelope, and bronze had only the broker's coordinates to name it by.
        given = F.when(F.col("event_id").startswith("@"), _from_template(source.event_id_template))
        named = {**{name: F.col(name) for name in flat}, "event_id": F.coalesce(given, "event_id")}
        steps.append([column.alias(name) for name, column in named.items()])
    valid = F.col("reason").isNull()
    # A rejected copy must not stand in the way of a valid one with the same id.
    identity = F.concat_ws("\x1f", "source", "tenant", "event_id", F.when(~valid, F.col("fingerprint")))
    events: list[str | Column] = [
        *map(column_of, schema.fieldNames()),
        *source.enrich,
        *[c for c in ENVELOPE_COLUMNS if c != "event_time"],
        F.when(valid, _attempt(source.event_time)).alias("event_time"),
        "reason",
        "payload",
        "fingerprint",
        "suspect",
        *place,
        F.unhex(F.md5(identity.cast("binary"))).alias("dedupe_key"),
        *[column.alias(name) for name, column in _remarks(source, valid).items()],
        *passed,
    ]
    return [*steps, ["*", _reason(source, checks_text).alias("reason")], events]


def _reason(source: Source, checks_text: bool) -> Column:
    """Why an event is refused, or null; the first that applies, from the general to the particular."""
    checks: list[Column] = [F.col("reject"), F.when(F.col("payload").isNull(), F.lit("no payload"))]
    if source.format == "avro":
        checks.append(F.col(_FLAW))
    elif checks_text:
        checks.append(F.when(~F.expr("is_valid_utf8(payload)"), F.lit("not valid UTF-8")))
    checks.append(F.when(F.col(_CORRUPT).isNotNull(), F.lit(MISFIT)))
    if source.unwrap:
        checks.append(F.when(F.col(_ABSENT), F.lit(f"missing {source.unwrap}")))
    checks += [
        F.when(_path(path).isNull(), F.lit(f"missing {path}"))
        for path in (*source.required, *(source.event_id_template.fields if source.event_id_template else ()))
    ]
    checks += [
        F.when(~met(predicate), F.lit(f"expectation {name} failed"))
        for name, predicate in source.expected(QUARANTINE).items()
    ]
    # Python and Parquet's readers know the years 1 to 9999.
    a_time = _attempt(source.event_time).between(F.lit(_FIRST_TIME), F.lit(_LAST_TIME))
    checks.append(F.when(~F.coalesce(a_time, F.lit(False)), F.lit("no event_time, or one out of range")))
    # coalesce stops at the first reason: a later check never sees what an earlier one refused.
    return F.coalesce(*checks)


def met(predicate: str) -> Column:
    """Whether an expectation holds; null, or a value that raises, is no."""
    return F.coalesce(_attempt(predicate).cast("boolean"), F.lit(False))


def _remarks(source: Source, valid: Column) -> dict[str, Column]:
    """What a valid event fails without being refused. Nothing where nothing is declared: a column costs every batch."""
    warns = [F.when(~met(p), F.lit(name)) for name, p in source.expected(WARN).items()]
    halts = [F.when(~met(p), F.lit(name)) for name, p in source.expected(HALT).items()]
    found: dict[str, Column] = {}
    if warns:
        names = F.array_compact(F.array(*warns))
        found["warned"] = F.when(valid & (F.size(names) > 0), names)
    if halts:
        found["halted"] = F.when(valid, F.coalesce(*halts))
    return found


def misfits(payload: str, taken: str, schema: StructType, unwrap: Sequence[str] = ()) -> str:
    """Which fields of a payload did not fit the schema, by path.

    Args:
        payload: JSON, or what should have been.
        taken: JSON of the fields as they were parsed, without those that are null.
        unwrap: steps to the object that holds the fields.
    """
    try:
        given = json.loads(payload)
    except (ValueError, RecursionError):
        return "not JSON"
    for step in (None, *unwrap):
        given = given if step is None else given.get(step)
        if not isinstance(given, dict):
            return f"{'.'.join(unwrap)} is no object" if step else "not a JSON object"
    return ", ".join(_misfit_paths(given, json.loads(taken), schema)) or "an element of an array"


def _misfit_paths(given: dict[str, Any], taken: dict[str, Any], schema: StructType, at: str = "") -> Iterator[str]:
    for field in schema:
        value, parsed = given.get(field.name), taken.get(field.name if at else column_of(field.name))
        if value is not None and parsed is None:
            yield at + field.name
        elif isinstance(field.dataType, StructType) and isinstance(value, dict) and isinstance(parsed, dict):
            yield from _misfit_paths(value, parsed, field.dataType, f"{at}{field.name}.")


def _attempt(expression: str) -> Column:
    """A Spark SQL expression, null where it raises: some functions do (an overflow), whatever the ANSI setting says.

    Spark has this only inside its own ``try_`` functions, so it is taken from there.
    """
    jvm = SparkContext._jvm
    assert jvm is not None
    sql = jvm.org.apache.spark.sql
    inner = sql.classic.ExpressionUtils.expression(F.expr(expression)._jc)
    return Column(sql.classic.ExpressionUtils.column(sql.catalyst.expressions.TryEval(inner)))


def _path(path: str) -> Column:
    head, *rest = path.split(".")
    return reduce(lambda column, step: column[step], rest, F.col(column_of(head)))


def _from_template(template: Template) -> Column:
    """A :class:`~lakehouse.contract.pipeline.Template` as a column; null where a field is null."""
    pieces: list[Column] = []
    rest = template.text
    for path in template.fields:
        before, _, rest = rest.partition("{" + path + "}")
        pieces += [F.lit(before)] if before else []
        pieces.append(_path(path).cast("string"))
    return F.concat(*pieces, *([F.lit(rest)] if rest else []))

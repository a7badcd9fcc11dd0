"""From expectations to the columns they need, and those columns as a pandas frame."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import duckdb
import sqlglot
from sqlglot.errors import SqlglotError

from lakehouse.contract.pipeline import Source
from lakehouse.contract.pipeline.expectations import FAIL, HALT, Check
from lakehouse.contract.sql.locked import locked_connection
from lakehouse.errors import QualityProblem
from lakehouse.quality.subject import Subject, plain_times, quoted

if TYPE_CHECKING:
    import pandas as pd  # type: ignore[import-untyped]

EVENT = "event"  # kind of an expectation on events, which the stream acts on by itself
TABLE = "table"
TYPE_OF = "expect_column_values_to_be_of_type"
_COLUMN_ARGUMENTS = ("column", "column_A", "column_B", "column_list")
_SHAPE = ("expect_table_column", "expect_column_to_exist")  # about which columns there are, not what is in them
_SPARK_FUNCTIONS = (  # those that sqlglot passes on as they are
    "CREATE MACRO timestamp_millis(x) AS make_timestamp(x * 1000)",
    "CREATE MACRO timestamp_micros(x) AS make_timestamp(x)",
    "CREATE MACRO timestamp_seconds(x) AS make_timestamp(CAST(x * 1000000 AS BIGINT))",
)


@dataclass(frozen=True, slots=True)
class Asked:
    """One expectation as it is put to a subject.

    Attributes:
        check: what is expected.
        kind: :data:`EVENT` or :data:`TABLE`.
        blocking: whether the subject does not pass where it is not met.
    """

    check: Check
    kind: str
    blocking: bool

    @property
    def computed(self) -> str:
        """Name of the column that holds the verdict on each row, where there is one."""
        if self.check.sql:
            return f"expectation {self.check.name}"
        return f"type of {dict(self.check.arguments).get('column')}" if self.check.expect == TYPE_OF else ""


def asked_of(checks: Sequence[Check], source: Source | None = None, *, gate: bool = False) -> list[Asked]:
    """Everything that a subject is asked.

    Args:
        checks: of the table.
        source: whose expectations on events are asked too.
        gate: rows are about to be committed: what would halt the stream must not get in.
    """
    found = [Asked(check, TABLE, check.action == FAIL) for check in checks]
    for name, expectation in source.expectations.items() if source else ():
        check = Check(name, sql=expectation.sql, action=expectation.action)
        found.append(Asked(check, EVENT, gate and expectation.action == HALT))
    return found


def frames_of(subject: Subject, asked: Sequence[Asked]) -> Iterator[tuple[str, pd.DataFrame, list[Asked]]]:
    """Frames that between them answer everything that is asked: what to call each, and what it answers.

    Raises:
        QualityProblem: see :func:`frame_of`.
    """
    shape = [item for item in asked if _is_shape(item)]
    for suffix, items in (("", [item for item in asked if item not in shape]), (" columns", shape)):
        if items:
            yield suffix, frame_of(subject, items), items


def _is_shape(item: Asked) -> bool:
    return item.check.expect.startswith(_SHAPE)


def frame_of(subject: Subject, asked: Sequence[Asked]) -> pd.DataFrame:
    """The columns that the expectations look at, computed ones among them; for the table's shape, its own columns.

    Raises:
        QualityProblem: a predicate is not one that DuckDB can evaluate, or a column is not there.
    """
    wanted = {column: quoted(column) for column in _columns(asked)}
    for item in asked:
        if item.check.sql:
            wanted[item.computed] = _verdict(item, subject)
        elif item.computed:
            column = str(dict(item.check.arguments)["column"])
            wanted[item.computed] = f"'{subject.types.get(column, 'absent')}'"
    if any(_is_shape(item) for item in asked):
        wanted = dict.fromkeys(subject.types, "NULL")
    columns = ", ".join(f"{sql} AS {_named(name)}" for name, sql in wanted.items())
    return _ask(subject, f"SELECT {columns or '1 AS one'} FROM ({subject.query})")  # noqa: S608 - quoted above


def _columns(asked: Iterable[Asked]) -> list[str]:
    found: dict[str, None] = {}
    for item in asked:
        if _is_shape(item) or item.check.expect == TYPE_OF:
            continue
        for argument, value in item.check.arguments:
            if argument in _COLUMN_ARGUMENTS:
                found |= dict.fromkeys(map(str, value) if isinstance(value, list) else [str(value)])
    return list(found)


def _verdict(item: Asked, subject: Subject) -> str:
    """The predicate in DuckDB's SQL: true, false, or null for a row that it does not judge."""
    try:
        tree = sqlglot.parse_one(item.check.sql, dialect="spark")
    except SqlglotError as error:
        raise _untold(subject, item, str(error)) from None
    met = f"coalesce(TRY({tree.transform(plain_times).sql(dialect='duckdb')}), false)"
    return f"CASE WHEN {subject.fits} THEN {met} END" if subject.fits and item.kind == EVENT else met


def _ask(subject: Subject, sql: str) -> pd.DataFrame:
    connection = locked_connection(threads=None)
    try:
        for macro in _SPARK_FUNCTIONS:
            connection.execute(macro)
        connection.register("rows", subject.rows)
        return connection.sql(sql).to_arrow_table().to_pandas()
    except duckdb.Error as error:
        raise QualityProblem(
            subject.table,
            f"DuckDB cannot evaluate an expectation: {str(error).splitlines()[0]}",
            "Correct it; or, if Spark can evaluate it, run: millrace quality --engine spark",
        ) from None
    finally:
        connection.close()


def _untold(subject: Subject, item: Asked, detail: str) -> QualityProblem:
    return QualityProblem(subject.table, f"expectation {item.check.name} does not parse: {detail.splitlines()[0]}")


def _named(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'

"""One reading statement of somebody who may see a part of the lake, and the process in which the server runs it.

sqlglot's tree decides whether it is allowed: one SELECT or the like, known tables, few table functions. DuckDB runs
that tree, written out again, so that nothing runs that was not checked. It has neither files nor network nor
extensions.

A table with a row filter is *copied* into DuckDB through the filter before the statement runs. With a view, the
optimiser could evaluate the statement's expressions on hidden rows, and their error messages would show the content.

The process, ``python -m serve.sql.statement``, runs one statement at a time. Statements and answers go over standard
input and output in MessagePack, each with its length in front. A statement that does not end is ended with its process:
the server kills it, or the alarm that it has set for itself.
"""

from __future__ import annotations

import os
import resource
import signal
import struct
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import duckdb
import msgspec
import pyarrow as pa
import sqlglot
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError
from sqlglot import exp
from sqlglot.errors import SqlglotError

from lakehouse.contract.deltalog import TableGone, TableUnreadable
from lakehouse.contract.errors import MillraceError
from lakehouse.contract.lake import Lake, UnknownTable
from lakehouse.contract.rows import Fold
from lakehouse.contract.sql import locked_connection, quoted
from lakehouse.contract.sql.closures import Columns
from lakehouse.contract.sql.filters import parse_condition
from lakehouse.contract.sql.spark import no_sql
from lakehouse.contract.storage import LakePath, lake_path, table_rows
from serve.core.messages import encode_rows
from serve.core.model import OPEN, Principal, TableInfo
from serve.errors import FilterError, PositionExpired, SqlError
from serve.sql.payloads import EVENTS, PayloadSchema, events_sql
from serve.tables.state import AsOf, describe, metadata_of, parse_as_of, version_at

PARTIALS = "__partials"
"""Suffix under which the raw rows of a folded table are reached."""

_READS = (exp.Query, exp.Values, exp.Describe, exp.Summarize)
_WRITES = (
    exp.DML,
    exp.DDL,
    exp.Command,
    exp.Set,
    exp.Pragma,
    exp.Attach,
    exp.Detach,
    exp.Copy,
    exp.Drop,
    exp.Alter,
    exp.Merge,
    exp.Use,
    exp.Into,
)
_FUNCTIONS = (exp.GenerateSeries, exp.Unnest)
_REFUSED = frozenset({"current_setting", "getenv", "getvariable", "nextval", "currval", "query", "query_table"})
_BATCH_ROWS = 2_048
_THREADS = 2

LENGTH = struct.Struct(">I")
READY = b"ready\n"
"""Said once, when everything is imported: a statement's time begins after it."""

_SPARE_BYTES = 1_073_741_824  # stacks and arenas of threads
_SPARE_S = 5  # after the time at which the server should have killed us


@dataclass(frozen=True, slots=True)
class Statement:
    """A statement and its bounds.

    Attributes:
        as_of: version or time for tables without one in the text; empty: the newest.
        rows, size: bounds of the answer, which the server holds in memory; size in bytes.
        memory_mb: of DuckDB.
        seconds: after which whoever runs it ends it.
        arrow: whether the answer is an Arrow IPC stream, else JSON.
        trusted: run the text itself where no table has a moment, not what sqlglot makes of it.
        payloads: what the payloads of each source hold.
    """

    lake: str
    sql: str
    principal: Principal
    as_of: str = ""
    rows: int = 100_000
    size: int = 67_108_864
    memory_mb: int = 512
    seconds: float = 60.0
    arrow: bool = False
    trusted: bool = False
    payloads: dict[str, PayloadSchema] = field(default_factory=dict)


@dataclass(slots=True)
class StatementResult:
    """The answer.

    Attributes:
        body: the rows, a JSON array of objects or an Arrow IPC stream.
        columns: name and type of each.
        truncated: whether there were more than the bounds allow.
        versions: of each table that was read.
        code, detail: of a refusal or failure, for programs and for people; empty: it succeeded.
    """

    body: bytes = b""
    columns: list[tuple[str, str]] = field(default_factory=list)
    rows: int = 0
    truncated: bool = False
    versions: dict[str, int] = field(default_factory=dict)
    code: str = ""
    detail: str = ""


def run(statement: Statement) -> StatementResult:
    """The answer, cut off at its bounds. Raises SqlError, and UnknownTable also for tables that are hidden."""
    with _executed(statement) as (schema, batches, versions):
        answer = _answer(statement, schema, batches)
        answer.versions = versions
        return answer


def run_sql(
    lake: Lake, sql: str, *, limit: int | None = None, payloads: Mapping[str, PayloadSchema] | None = None
) -> pa.Table:
    """The result of one reading statement by somebody who may see everything, at most ``limit`` rows.

    A table of partials is seen folded, one row a key; ``NAME__partials`` has the partials. ``SOURCE__events`` has the
    events of a source whose payloads are described. Times are in UTC.

    Raises:
        UnknownTable: the statement names a table that the lake does not have.
        SqlError: it is not a single reading statement, or it fails.
    """
    taken: list[pa.RecordBatch] = []
    rows = 0
    statement = Statement(str(lake.root), sql, OPEN, memory_mb=1_024, trusted=True, payloads=dict(payloads or {}))
    with _executed(statement) as (schema, batches, _):
        for batch in batches:
            taken.append(batch)
            rows += batch.num_rows
            if limit is not None and rows >= limit:
                break
        return pa.Table.from_batches(taken, schema).slice(0, limit)


def rows_as_json(table: pa.Table) -> bytes:
    """A JSON array of row objects.

    Times are ISO 8601 in UTC with ``Z``, binary is base64, integers and decimals are numbers whatever their size.
    """
    return b"[" + b",".join(encode_rows(table.column_names, _rows(table))) + b"]"


@contextmanager
def _executed(statement: Statement) -> Iterator[tuple[pa.Schema, Iterable[pa.RecordBatch], dict[str, int]]]:
    """Schema and batches of the result, and the version of each table that is read."""
    lake = Lake(lake_path(statement.lake))
    tree = read_statement(statement.sql)
    known = {table.name for table in lake.tables() if statement.principal.may_read(table.name)}
    if isinstance(tree, exp.Show):
        names = pa.table({"name": sorted(known)})
        yield names.schema, names.to_batches(), {}
        return
    wanted = _tables(tree, known, statement)
    connection = locked_connection(memory_mb=statement.memory_mb, threads=_THREADS)
    versions: dict[str, int] = {}
    try:
        for alias, (name, moment) in wanted.items():
            versions[name] = _open(connection, lake, statement, alias, name, moment)
        as_written = statement.trusted and not any(moment for _, moment in wanted.values())
        text = statement.sql.strip().rstrip(";") if as_written else tree.sql(dialect="duckdb")
        named = {name.lower().removesuffix(PARTIALS) for name in connection.get_table_names(text)}
        if foreign := named - wanted.keys():
            raise UnknownTable(min(foreign), sorted(known))  # DuckDB parses it differently
        reader: Any = connection.sql(text).to_arrow_reader(_BATCH_ROWS)
        yield reader.schema, reader, versions
    except duckdb.Error as error:
        raise SqlError(str(error).strip()) from None
    finally:
        connection.close()


def read_statement(sql: str, dialect: str = "duckdb") -> exp.Expression:
    """The tree of one reading statement. Raises SqlError."""
    try:
        parsed = sqlglot.parse(sql, dialect=dialect)
    except RecursionError:
        raise SqlError("the statement is nested too deeply") from None
    except SqlglotError as error:
        refused = no_sql(error)
        raise SqlError(refused.problem, refused.remedy) from None
    statements = [cast(exp.Expression, statement) for statement in parsed if statement is not None]
    if len(statements) != 1:
        raise SqlError(f"one statement is taken, not {len(statements)}")
    statement = statements[0]
    if isinstance(statement, exp.Show):
        if statement.name.upper() != "TABLES":
            raise SqlError(f"SHOW {statement.name} is not taken", "Use SHOW TABLES or DESCRIBE NAME")
    elif not isinstance(statement, _READS) or any(True for _ in statement.find_all(*_WRITES)):
        raise SqlError("only reading statements are taken", "Use SELECT, WITH or DESCRIBE")
    return statement


def _tables(tree: exp.Expression, known: set[str], statement: Statement) -> dict[str, tuple[str, AsOf | None]]:
    """Tables that the statement reads: name in it → table and moment. Removes the moments from the tree."""
    defined = {cte.alias.lower() for cte in tree.find_all(exp.CTE)}
    everywhere = parse_as_of(statement.as_of) if statement.as_of else None
    for call in tree.find_all(exp.Func):
        if call.name.lower() in _REFUSED or call.sql_name().lower() in _REFUSED:
            raise SqlError(f"the function {call.name or call.sql_name()} is not taken")
    found: dict[str, tuple[str, AsOf | None]] = {}
    for node in list(tree.find_all(exp.Table)):
        if not isinstance(node.this, exp.Identifier):
            if not isinstance(node.this, _FUNCTIONS):
                raise SqlError(f"{node.this.sql('duckdb')} is not taken in FROM", "Tables, range and unnest are")
            continue
        if node.db:
            raise SqlError(f"{node.sql()} is qualified", f"Names are unique in the lake: write {node.name}")
        name = node.name.lower()
        partials = name.removesuffix(PARTIALS)
        base = partials.removesuffix(EVENTS) if name not in known else name
        if base not in known:
            if name in defined:
                continue
            raise UnknownTable(node.name, sorted(known))
        if base != partials and (base not in statement.payloads or partials != name):
            raise SqlError(
                f"{node.name}: the pipeline has no source {base!r} with payloads in JSON",
                f"Write {base}, or ask with the pipeline that declares it",
            )
        if partials != name and statement.principal.condition(base):
            raise SqlError(f"{node.name} is not taken: this key sees a part of {base} only", f"Write {base}")
        moment = _moment(node) or everywhere
        alias = partials if moment is None else f"{partials}__at_{moment.text}"
        if moment is not None:
            if node.alias == "":
                node.set("alias", exp.TableAlias(this=exp.to_identifier(node.name, quoted=True)))
            node.set("this", exp.to_identifier(alias + name[len(partials) :], quoted=True))
            node.set("version", None)
        found[alias] = base, moment
    _check_payloads(tree, {alias for alias in found if EVENTS not in alias} & statement.payloads.keys())
    return found


def _check_payloads(tree: exp.Expression, bronze: set[str]) -> None:
    """Refuse functions of JSON over bronze's bytes: DuckDB would answer null to each of them."""
    for column in tree.find_all(exp.Column) if bronze else ():
        call = column.parent
        if column.name.lower() != "payload" or not isinstance(call, exp.Func):
            continue
        name = str(call.name if isinstance(call, exp.Anonymous) else call.sql_name()).lower()
        if "json" in name:
            remedy = f"Write FROM {min(bronze)}{EVENTS}, or decode(payload) for payload"
            raise SqlError(f"payload has bytes, and {name} reads text", remedy)


def _moment(node: exp.Table) -> AsOf | None:
    version = node.args.get("version")
    if version is None:
        return None
    value = version.expression
    while isinstance(value, exp.Cast | exp.Paren):
        value = value.this
    if version.args.get("kind") != "AS OF" or not isinstance(value, exp.Literal):
        raise SqlError(
            f"{version.sql()} is not taken", "Write FOR VERSION AS OF 7 or FOR TIMESTAMP AS OF '2026-01-31 12:00:00'"
        )
    return parse_as_of(value.name)


def _open(
    connection: duckdb.DuckDBPyConnection, lake: Lake, statement: Statement, alias: str, name: str, moment: AsOf | None
) -> int:
    """Make a table, as it was at a moment, visible under its name in the statement; returns its version."""
    path = lake.find(name).path
    events = statement.payloads[name] if alias.startswith(name + EVENTS) else None
    try:
        table = DeltaTable(str(path), version=None if moment is None else version_at(path, moment))
        rows = table_rows(table, path)
        info, fold = _described(path, table, rows.schema)
    except (TableGone, TableUnreadable, PositionExpired) as error:
        raise SqlError(str(error)) from None
    except (DeltaError, OSError, pa.ArrowException) as error:
        raise SqlError(f"table {name!r} cannot be read: {str(error).splitlines()[0]}") from None
    guard = statement.principal.condition(name)
    raw = "__source" if guard else alias if fold is None and events is None else alias + PARTIALS
    connection.register(raw, rows)
    source, shown = quoted(raw), ""
    if events is not None:
        shown = events_sql(source, rows.schema.names, events)
        columns = connection.sql(f"{shown} LIMIT 0").to_arrow_table().schema
        info = TableInfo(name, "", tuple(columns.names), (), types=tuple(columns.types))
    elif fold is not None:
        types = dict(zip(rows.schema.names, map(str, connection.table(raw).types), strict=True))
        shown = fold.sql(source, rows.schema.names, types)
    if guard:
        try:
            condition = parse_condition(guard, Columns.of(info))
        except FilterError as error:
            raise SqlError(f"the condition of this key does not fit {name!r}: {error}") from None
        kept = "" if condition is None else f" WHERE {condition.sql('duckdb')}"
        select = f"SELECT * FROM {f'({shown})' if shown else source}{kept}"  # noqa: S608 - parsed, quoted
        connection.execute(f"CREATE TABLE {quoted(alias)} AS {select}")
        connection.unregister(raw)
    elif shown:
        connection.execute(f"CREATE VIEW {quoted(alias)} AS {shown}")
    return int(table.version())


def _described(path: LakePath, table: DeltaTable, schema: pa.Schema) -> tuple[TableInfo, Fold | None]:
    """Description for filters. Bronze, for one, has no key."""
    try:
        info = describe(path.name, metadata_of(table))
    except TableUnreadable:
        return TableInfo(path.name, "", tuple(schema.names), (), types=tuple(schema.types)), None
    whole = TableInfo(path.name, info.table_id, tuple(schema.names), info.key, types=tuple(schema.types))
    return whole, info.folding if info.fold else None


def _answer(statement: Statement, schema: pa.Schema, batches: Any) -> StatementResult:
    """The rows within the bounds."""
    answer = StatementResult(columns=[(column.name, str(column.type)) for column in schema])
    sink = pa.BufferOutputStream()
    writer = pa.ipc.new_stream(sink, schema) if statement.arrow else None
    texts: list[bytes] = []
    size = 0
    for batch in batches:
        left = statement.rows - answer.rows
        if batch.num_rows > left:
            batch, answer.truncated = batch.slice(0, left), True
        if writer is not None:
            size += batch.nbytes
        else:
            some = encode_rows(schema.names, _rows(batch))
            size += sum(map(len, some)) + len(some)
        if size > statement.size:
            answer.truncated = True
            break
        answer.rows += batch.num_rows
        if writer is not None:
            writer.write_batch(batch)
        else:
            texts += some
        if answer.truncated:
            break
    if writer is not None:
        writer.close()
        answer.body = sink.getvalue().to_pybytes()
    else:
        answer.body = b"[" + b",".join(texts) + b"]"
    return answer


def _rows(batch: pa.RecordBatch | pa.Table) -> Any:
    columns = [
        (column.cast(pa.timestamp("us"), safe=False) if pa.types.is_timestamp(column.type) else column).to_pylist()
        for column in batch.columns
    ]
    return zip(*columns, strict=True)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server handles Ctrl-C
    source, sink = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # keep what libraries print out of the answers
    statements = msgspec.msgpack.Decoder(Statement)
    sink.write(READY)
    sink.flush()
    while len(length := source.read(LENGTH.size)) == LENGTH.size:
        statement = statements.decode(source.read(*LENGTH.unpack(length)))
        sink.write(packed(_answered(statement)))
        sink.flush()


def packed(message: Any) -> bytes:
    """A statement or an answer with its length in front."""
    content = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(content)) + content


def _answered(statement: Statement) -> StatementResult:
    _limit_memory(statement.memory_mb)
    signal.alarm(int(statement.seconds) + _SPARE_S)
    try:
        return run(statement)
    except UnknownTable as error:
        return StatementResult(code="no_such_table", detail=str(error))
    except MemoryError:
        return StatementResult(code="bad_sql", detail="it takes more memory than is given")
    except MillraceError as error:
        return StatementResult(code="bad_sql", detail=str(error))
    finally:
        signal.alarm(0)


def _limit_memory(memory_mb: int) -> None:
    """Limit the process too: DuckDB does not count everything, for instance a single huge text."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    mapped = int(status.partition("VmSize:")[2].split()[0]) * 1024
    most = mapped + 2 * memory_mb * 1024 * 1024 + _SPARE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))


if __name__ == "__main__":
    main()

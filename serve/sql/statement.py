"""One reading statement of somebody who may see a part of the lake. Blocking; runs in a worker process.

What it may be is decided on sqlglot's tree (one SELECT or the like, known tables, few table functions), and what runs
is that tree written out again, so that nothing runs that was not looked at. DuckDB then has neither files nor
network nor extensions. A table with a row filter is *copied* into DuckDB through the filter before the statement is
seen: a view would let the optimiser try the statement's own expressions on hidden rows, and an error message of theirs
would tell what is in them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError
from sqlglot import exp

from lakehouse.contract.deltalog import TableGone, TableUnreadable
from lakehouse.contract.lake import Lake, UnknownTable
from lakehouse.contract.rows import Fold
from serve.errors import FilterError, PositionExpired, QueryError
from serve.filters.kinds import Columns
from serve.filters.parse import parse_condition
from serve.model import TableInfo
from serve.moment import Moment, moment_of, version_at
from serve.principal import Principal
from serve.query import PARTIALS, read_statement
from serve.reader import describe, metadata_of
from serve.rows import encode_rows

_FUNCTIONS = (exp.GenerateSeries, exp.Unnest)
_REFUSED = frozenset({"current_setting", "getenv", "getvariable", "nextval", "currval", "query", "query_table"})
_BATCH_ROWS = 2_048
_THREADS = 2


@dataclass(frozen=True, slots=True)
class Asked:
    """A statement and its bounds.

    Attributes:
        lake: root of the lake.
        sql: the text.
        principal: who asks.
        as_of: version or time of every table that has none in the text; empty: the newest.
        rows: of the answer at most.
        size: bytes of the answer at most.
        memory_mb: of DuckDB.
        arrow: whether the answer is an Arrow IPC stream, else JSON.
    """

    lake: Path
    sql: str
    principal: Principal
    as_of: str = ""
    rows: int = 100_000
    size: int = 67_108_864
    memory_mb: int = 512
    arrow: bool = False


@dataclass(slots=True)
class Answer:
    """What came out.

    Attributes:
        body: the rows, a JSON array of objects or an Arrow IPC stream.
        columns: name and type of each.
        rows: how many.
        truncated: whether there were more than the bounds let through.
        versions: of each table that was read.
    """

    body: bytes
    columns: list[tuple[str, str]] = field(default_factory=list)
    rows: int = 0
    truncated: bool = False
    versions: dict[str, int] = field(default_factory=dict)


def run(asked: Asked) -> Answer:
    """The statement's result.

    Raises:
        UnknownTable: it names a table that the principal does not have.
        QueryError: it is not taken, or it fails.
    """
    lake = Lake(asked.lake)
    tree = read_statement(asked.sql)
    known = {table.name for table in lake.tables() if asked.principal.may_read(table.name)}
    if isinstance(tree, exp.Show):
        names = pa.table({"name": sorted(known)})
        return _answer(asked, names.schema, iter(names.to_batches()))
    wanted = _tables(tree, known, asked)
    connection = duckdb.connect(
        config={
            "enable_external_access": "false",
            "autoinstall_known_extensions": "false",
            "autoload_known_extensions": "false",
            "python_enable_replacements": "false",
            "temp_directory": "",
            "memory_limit": f"{asked.memory_mb}MB",
            "threads": str(_THREADS),
        }
    )
    versions: dict[str, int] = {}
    try:
        connection.execute("SET TimeZone = 'UTC'")
        for alias, (name, moment) in wanted.items():
            versions[name] = _open(connection, lake, alias, name, moment, asked.principal)
        connection.execute("SET lock_configuration = true")
        text = tree.sql(dialect="duckdb")
        named = {name.lower().removesuffix(PARTIALS) for name in connection.get_table_names(text)}
        if foreign := named - wanted.keys():
            raise UnknownTable(min(foreign), sorted(known))  # DuckDB reads it otherwise than we did
        reader: Any = connection.sql(text).to_arrow_reader(_BATCH_ROWS)
        answer = _answer(asked, reader.schema, reader)
        answer.versions = versions
        return answer
    except duckdb.Error as error:
        raise QueryError(str(error).strip()) from None
    finally:
        connection.close()


def _tables(tree: exp.Expression, known: set[str], asked: Asked) -> dict[str, tuple[str, Moment | None]]:
    """What the statement reads: name in it → table and moment. Takes the moments out of the tree."""
    defined = {cte.alias.lower() for cte in tree.find_all(exp.CTE)}
    everywhere = moment_of(asked.as_of) if asked.as_of else None
    for call in tree.find_all(exp.Func):
        if call.name.lower() in _REFUSED or call.sql_name().lower() in _REFUSED:
            raise QueryError(f"the function {call.name or call.sql_name()} is not taken")
    found: dict[str, tuple[str, Moment | None]] = {}
    for node in list(tree.find_all(exp.Table)):
        if not isinstance(node.this, exp.Identifier):
            if not isinstance(node.this, _FUNCTIONS):
                raise QueryError(f"{node.this.sql('duckdb')} is not taken in FROM", "Tables, range and unnest are")
            continue
        if node.db:
            raise QueryError(f"{node.sql()} is qualified", f"Names are unique in the lake: write {node.name}")
        name = node.name.lower()
        base = name.removesuffix(PARTIALS)
        if base not in known:
            if name in defined:
                continue
            raise UnknownTable(node.name, sorted(known))
        if base != name and asked.principal.condition(base):
            raise QueryError(f"{node.name} is not taken: this key sees a part of {base} only", f"Write {base}")
        moment = _moment(node) or everywhere
        alias = base if moment is None else f"{base}__at_{moment.text}"
        if moment is not None:
            if node.alias == "":
                node.set("alias", exp.TableAlias(this=exp.to_identifier(node.name, quoted=True)))
            node.set("this", exp.to_identifier(alias + name[len(base) :], quoted=True))
            node.set("version", None)
        found[alias] = base, moment
    return found


def _moment(node: exp.Table) -> Moment | None:
    version = node.args.get("version")
    if version is None:
        return None
    value = version.expression
    while isinstance(value, exp.Cast | exp.Paren):
        value = value.this
    if version.args.get("kind") != "AS OF" or not isinstance(value, exp.Literal):
        raise QueryError(
            f"{version.sql()} is not taken", "Write FOR VERSION AS OF 7 or FOR TIMESTAMP AS OF '2026-01-31 12:00:00'"
        )
    return moment_of(value.name)


def _open(
    connection: duckdb.DuckDBPyConnection,
    lake: Lake,
    alias: str,
    name: str,
    moment: Moment | None,
    principal: Principal,
) -> int:
    """Make a table visible under a name; returns its version."""
    path = lake.find(name).path
    try:
        table = DeltaTable(path, version=None if moment is None else version_at(path, moment))
        rows = table.to_pyarrow_dataset()
        info, fold = _described(path, table, rows.schema)
    except (TableGone, TableUnreadable, PositionExpired) as error:
        raise QueryError(str(error)) from None
    except (DeltaError, OSError) as error:
        raise QueryError(f"table {name!r} cannot be read: {str(error).splitlines()[0]}") from None
    raw = alias + PARTIALS if fold is not None else alias
    guard = principal.condition(name)
    if not guard:
        connection.register(raw, rows)
        if fold is not None:
            connection.execute(f"CREATE VIEW {_quoted(alias)} AS {_folded(connection, fold, raw, rows)}")
        return int(table.version())
    try:
        condition = parse_condition(guard, Columns.of(info))
    except FilterError as error:
        raise QueryError(f"the condition of this key does not fit {name!r}: {error}") from None
    connection.register("__source", rows)
    source = "__source" if fold is None else f"({_folded(connection, fold, '__source', rows)})"
    kept = "" if condition is None else f" WHERE {condition.sql('duckdb')}"
    connection.execute(f"CREATE TABLE {_quoted(alias)} AS SELECT * FROM {source}{kept}")  # noqa: S608 - parsed, quoted
    connection.unregister("__source")
    return int(table.version())


def _described(path: Path, table: DeltaTable, schema: pa.Schema) -> tuple[TableInfo, Fold | None]:
    """What filters have to know of a table; bronze and the like have no key."""
    try:
        info = describe(path.name, metadata_of(table)).info
    except TableUnreadable:
        return TableInfo(path.name, "", tuple(schema.names), (), types=tuple(schema.types)), None
    whole = TableInfo(path.name, info.table_id, tuple(schema.names), info.key, types=tuple(schema.types))
    return whole, info.folding if info.folded else None


def _folded(connection: duckdb.DuckDBPyConnection, fold: Fold, raw: str, rows: Any) -> str:
    types: Mapping[str, str] = dict(zip(rows.schema.names, map(str, connection.table(raw).types), strict=True))
    return fold.sql(_quoted(raw), rows.schema.names, types)


def _answer(asked: Asked, schema: pa.Schema, batches: Any) -> Answer:
    """The rows that the bounds let through."""
    answer = Answer(b"", [(column.name, str(column.type)) for column in schema])
    sink = pa.BufferOutputStream() if asked.arrow else None
    writer = pa.ipc.new_stream(sink, schema) if sink is not None else None
    texts: list[bytes] = []
    size = 0
    for batch in batches:
        left = asked.rows - answer.rows
        if batch.num_rows > left:
            batch, answer.truncated = batch.slice(0, left), True
        if writer is not None:
            size += batch.nbytes
        else:
            some = encode_rows(schema.names, _rows(batch))
            size += sum(map(len, some)) + len(some)
        if size > asked.size:
            answer.truncated = True
            break
        answer.rows += batch.num_rows
        if writer is not None:
            writer.write_batch(batch)
        else:
            texts += some
        if answer.truncated:
            break
    if writer is not None and sink is not None:
        writer.close()
        answer.body = sink.getvalue().to_pybytes()
    else:
        answer.body = b"[" + b",".join(texts) + b"]"
    return answer


def _rows(batch: pa.RecordBatch) -> Any:
    columns = [
        (column.cast(pa.timestamp("us"), safe=False) if pa.types.is_timestamp(column.type) else column).to_pylist()
        for column in batch.columns
    ]
    return zip(*columns, strict=True)


def _quoted(name: str) -> str:
    return exp.to_identifier(name, quoted=True).sql(dialect="duckdb")

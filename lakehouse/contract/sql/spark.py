"""What SQL that comes in at run time may be: parsed, and every relation and function in it looked up in a list.

Nothing is decided by looking at the text. Two lists: what Spark may be asked over a source, and what a view or an alert
may ask over a product (those run in DuckDB, so only functions that mean the same in both are in it). Whatever gives
another answer when it is asked again (``now``, ``rand``, ``uuid``) is in neither: results must be the same on a replay.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection

import sqlglot
from sqlglot import exp

from lakehouse.contract.errors import QueryRefused

MAX_DEPTH = 100

_AND_OR = "and or xor not case if coalesce nullif cast try_cast"
_NUMBERS = "abs ceil ceiling floor round sqrt cbrt exp ln log log2 log10 pow power sign greatest least mod pmod"
_TEXTS = """
    lower upper trim ltrim rtrim length char_length substring substr concat concat_ws replace left right reverse
    starts_with startswith ends_with endswith contains lpad rpad
"""
_TIMES = """
    date_trunc timestamp_trunc year month day day_of_month dayofmonth hour minute second quarter week day_of_week
    dayofweek day_of_year extract date_add date_diff datediff to_date ts_or_ds_to_date timestamp_add timestamp_diff
    unix_to_time unix_seconds
"""
_AGGREGATES = "count count_if sum min max avg arg_max arg_min max_by min_by stddev stddev_samp stddev_pop variance"
_RANKS = "row_number rank dense_rank lag lead ntile percent_rank cume_dist"

_OF_SOURCES = """
    window_of explode explode_outer posexplode array array_size size cardinality array_contains element_at get
    map_keys map_values array_distinct array_sort sort_array transform filter array_filter exists json_extract
    get_json_object json_extract_scalar json_bodyextract split str_to_array regexp_like rlike regexp_extract
    regexp_replace timestamp_millis timestamp_seconds timestamp_micros unix_millis unix_micros unix_to_str to_timestamp
    str_to_time ts_or_ds_to_timestamp date_format time_to_str from_unixtime hash xxhash64 md5 md5_digest sha sha2 crc32
    bit_count bitwise_count isnan is_nan is_null nvl ifnull nanvl format_string parse_url try_divide try_add
    try_subtract try_multiply named_struct struct hex unhex initcap ascii
"""


def _names(*texts: str) -> frozenset[str]:
    return frozenset(name for text in texts for name in text.split())


VIEW_FUNCTIONS = _names(_AND_OR, _NUMBERS, _TEXTS, _TIMES, _AGGREGATES, _RANKS)
"""Functions of views and alerts."""

SOURCE_FUNCTIONS = VIEW_FUNCTIONS | _names(_OF_SOURCES)
"""Functions of queries over a source."""

_UNREPEATABLE = _names(
    "current_timestamp current_date current_time localtimestamp now curdate getdate rand randn random uuid shuffle",
    "monotonically_increasing_id spark_partition_id input_file_name",
)

# QueryTransform starts a program; the others write, wait, give hints, or leave something open.
_NEVER = (
    exp.QueryTransform, exp.Into, exp.Hint, exp.Lock, exp.Parameter, exp.Placeholder, exp.Command, exp.TableSample,
    exp.DML, exp.DDL, exp.Set, exp.Pragma, exp.Use, exp.Kill,
)  # fmt: skip

WINDOW = "window_of"  # what the function `window` is called in a parsed query


def parse_query(sql: str, *, max_bytes: int) -> exp.Query:
    """The one SELECT that the text is (WITH and UNION ALL are taken too), in Spark's dialect.

    Raises:
        QueryRefused: it is too long, is not SQL, is more than one statement, or is not a SELECT.
    """
    tree = _one(sql, max_bytes)
    if not isinstance(tree, exp.Query):
        raise QueryRefused("sql", "only a SELECT is taken", "Write one SELECT")
    return tree


def parse_condition(sql: str, *, max_bytes: int = 4_000) -> exp.Expr:
    """One expression over a row's columns: checked for functions, and that it looks at nothing else.

    Raises:
        QueryRefused: it is not an expression, or asks for what an expression of a row may not.
    """
    tree = _one(f"SELECT {sql}\n", max_bytes + 8)
    plain = isinstance(tree, exp.Select) and len(tree.expressions) == 1
    if not plain or any(value for name, value in tree.args.items() if name not in ("expressions", "kind")):
        raise QueryRefused("sql", f"{_short(sql)} is not one expression", "Write e.g. count > 100")
    expression = tree.expressions[0].unalias()
    bad = next(expression.find_all(exp.Query, exp.AggFunc, exp.Window, exp.Star), None)
    if bad is not None:
        raise QueryRefused("sql", f"{_short(bad.sql(dialect='spark'))} looks at other rows", "Use a view for that")
    check_functions(expression, VIEW_FUNCTIONS)
    return expression  # type: ignore[no-any-return]


def _one(sql: str, max_bytes: int) -> exp.Expr:
    if len(sql.encode()) > max_bytes:
        raise QueryRefused("quota", f"the SQL has more than {max_bytes} bytes", "Shorten it")
    if any((ord(c) < 32 and c not in "\n\r\t") or ord(c) == 127 for c in sql):
        raise QueryRefused("sql", "the SQL has control characters")
    try:
        found = [tree for tree in sqlglot.parse(spark_text(sql), dialect="spark") if tree is not None]
    except sqlglot.errors.SqlglotError as error:
        raise QueryRefused("sql", f"it is not SQL: {str(error).splitlines()[0]}") from None
    except RecursionError:
        raise QueryRefused("quota", "it is nested too deep", "Write it in a simpler way") from None
    if len(found) != 1:
        raise QueryRefused("sql", f"one statement is taken, not {len(found)}")
    tree = found[0]
    if _depth(tree) > MAX_DEPTH:
        raise QueryRefused("quota", f"it is nested more than {MAX_DEPTH} deep", "Write it in a simpler way")
    bad = next((node for node in tree.walk() if isinstance(node, _NEVER) and not isinstance(node, exp.Query)), None)
    if bad is not None:
        raise QueryRefused("sql", f"{_short(bad.sql(dialect='spark'))} is not taken")
    return tree


def spark_text(sql: str) -> str:
    """The text as sqlglot parses it: it takes a leading ``window`` in GROUP BY for the WINDOW clause."""
    return re.sub(r"\bwindow(?=\s*\()", WINDOW, sql, flags=re.IGNORECASE)


def check_relations(tree: exp.Query, allowed: Collection[str]) -> str:
    """The one relation that the query reads.

    Raises:
        QueryRefused: it reads another, several, or none; or a table function.
    """
    defined = {cte.alias for cte in tree.find_all(exp.CTE)}
    found: set[str] = set()
    for table in tree.find_all(exp.Table):
        if not isinstance(table.this, exp.Identifier) or table.db or table.catalog:
            raise QueryRefused(
                "relation", f"{_short(table.sql(dialect='spark'))} is no source or product", _all(allowed)
            )
        if table.name not in defined:
            found.add(table.name)
    if not found:
        raise QueryRefused("relation", "it reads no source and no product", _all(allowed))
    unknown = sorted(found - set(allowed))
    if unknown:
        raise QueryRefused("relation", f"there is no source or product {unknown[0]!r}", _all(allowed))
    if len(found) > 1:
        raise QueryRefused("relation", f"it reads {' and '.join(sorted(found))}", "Read one; join them in a pipeline")
    return found.pop()


def _all(names: Collection[str]) -> str:
    return f"There are: {', '.join(sorted(names)) or 'none'}"


def check_functions(tree: exp.Expr, allowed: frozenset[str]) -> None:
    """Refuse a function that is not in the list.

    Raises:
        QueryRefused: with the function's name.
    """
    for node in tree.find_all(exp.Func, exp.Unnest, exp.Lateral):
        name = _name(node)
        if name not in allowed and not isinstance(node, exp.Lateral):
            written = node.sql(dialect="spark").partition("(")[0].strip().lower()
            if written not in allowed:
                raise QueryRefused(
                    "function", f"the function {written} is not taken here", "docs/queries.md lists them"
                )


def _name(node: exp.Expr) -> str:
    if isinstance(node, exp.Anonymous | exp.AnonymousAggFunc):
        return str(node.name).lower()
    return node.sql_name().lower() if isinstance(node, exp.Func) else type(node).__name__.lower()


def unrepeatable(sql: str) -> str:
    """The first function in the text whose answer is another one when it is asked again; empty for none.

    Args:
        sql: a statement or an expression in Spark's dialect; one that does not parse has none.
    """
    text = spark_text(sql)
    for whole in (text, f"SELECT {text}"):
        try:
            tree = sqlglot.parse_one(whole, dialect="spark")
        except (sqlglot.errors.SqlglotError, RecursionError):
            continue
        return next((name for name in map(_name, tree.find_all(exp.Func)) if name in _UNREPEATABLE), "")
    return ""


def check_columns(tree: exp.Expr, known: Collection[str]) -> None:
    """Refuse a column that is neither in ``known`` nor named in the query itself.

    Raises:
        QueryRefused: with the nearest known name.
    """
    own = {alias.alias.lower() for alias in tree.find_all(exp.Alias, exp.TableAlias, exp.CTE, exp.Table) if alias.alias}
    own |= {column.name.lower() for alias in tree.find_all(exp.TableAlias) for column in alias.columns}
    own |= {name.name.lower() for made in tree.find_all(exp.Lambda) for name in made.expressions}
    own |= {table.name.lower() for table in tree.find_all(exp.Table)} | {"window", "col", "pos"}
    names = {name.lower() for name in known} | own
    for column in tree.find_all(exp.Column):
        first = column.parts[0].name
        if first.lower() not in names and not isinstance(column.this, exp.Star):
            near = difflib.get_close_matches(first, list(known), n=1)
            remedy = f"Did you mean {near[0]!r}?" if near else f"There are: {', '.join(known)}"
            raise QueryRefused("column", f"there is no column {first!r}", remedy)


def outputs(tree: exp.Query, *, limit: int) -> tuple[str, ...]:
    """Names of the columns that it gives; empty where a ``*`` leaves them open.

    Raises:
        QueryRefused: a column has no name, two have one, or there are too many.
    """
    columns = list(tree.selects)
    if any(column.is_star for column in columns):
        return ()
    unnamed = [c for c in columns if not isinstance(c, exp.Alias | exp.Column | exp.Dot)]
    if unnamed:
        raise QueryRefused("column", f"column {_short(unnamed[0].sql(dialect='spark'))} has no name", "Add AS name")
    names = [column.alias_or_name for column in columns]
    double = next((name for name in names if names.count(name) > 1), None)
    if double is not None:
        raise QueryRefused("column", f"two columns are called {double!r}", "Give one another name")
    if len(names) > limit:
        raise QueryRefused("quota", f"it has {len(names)} columns, more than {limit}", "Select fewer")
    return tuple(names)


def grouped(tree: exp.Query) -> tuple[str, ...]:
    """The columns by which its rows are told apart: those of a GROUP BY that are no aggregates; else none."""
    if not isinstance(tree, exp.Select) or tree.args.get("group") is None:
        return ()
    return tuple(c.alias_or_name for c in tree.expressions if not c.find(exp.AggFunc, exp.Window) and not c.is_star)


def to_spark(tree: exp.Expr) -> str:
    """The same in Spark's dialect: what was checked, and not what a second parser makes of the text."""
    return re.sub(rf"\b{WINDOW}(?=\()", "window", tree.sql(dialect="spark"), flags=re.IGNORECASE)


def to_duckdb(tree: exp.Expr) -> str:
    """The same in DuckDB's dialect."""
    return tree.sql(dialect="duckdb")


def _depth(tree: exp.Expr) -> int:
    deepest, level = 0, [tree]
    while level and deepest <= MAX_DEPTH:
        level = [child for node in level for child in node.iter_expressions()]
        deepest += 1
    return deepest


def _short(text: str) -> str:
    text = text.replace(WINDOW, "window")
    return text if len(text) <= 60 else f"{text[:60]} …"

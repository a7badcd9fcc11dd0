"""What SQL that comes in at run time may be: parsed, and every relation and function in it looked up in a list.

Nothing is decided by looking at the text. Two lists: what Spark may be asked over a source, and what a view or an alert
may ask over a product (those run in DuckDB, so only functions that mean the same in both are in it). Whatever gives
another answer when it is asked again (``now``, ``rand``, ``uuid``) is in neither: results must be the same on a replay.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Collection, Mapping
from typing import Any

import sqlglot
from sqlglot import exp
from sqlglot.dialects.spark import Spark
from sqlglot.tokenizer_core import TokenType

from lakehouse.contract.errors import QueryRefused, did_you_mean, nearest
from lakehouse.contract.sql.ddl import Field

MAX_DEPTH = 100
_MAX_QUERY_BYTES = 16_384  # parsing takes milliseconds up to here
_MAX_CONDITION_BYTES = 4_000

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

_OF_GRAMMAR = "try_cast timestampadd timestampdiff identifier group sets cube rollup grouping within"

SPARK_FUNCTIONS = _names(
    _OF_GRAMMAR,
    """
    abs acos acosh add_months aes_decrypt aes_encrypt aggregate and any any_value approx_count_distinct
    approx_percentile approx_top_k approx_top_k_accumulate approx_top_k_combine approx_top_k_estimate array
    array_agg array_append array_compact array_contains array_distinct array_except array_insert array_intersect
    array_join array_max array_min array_position array_prepend array_remove array_repeat array_size array_sort
    array_union arrays_overlap arrays_zip ascii asin asinh assert_true atan atan2 atanh avg base64 between bigint
    bin binary bit_and bit_count bit_get bit_length bit_or bit_xor bitmap_and_agg bitmap_bit_position
    bitmap_bucket_number bitmap_construct_agg bitmap_count bitmap_or_agg bool_and bool_or boolean bround btrim
    cardinality case cast cbrt ceil ceiling char char_length character_length chr coalesce collate collation
    collations collect_list collect_set concat concat_ws contains conv convert_timezone corr cos cosh cot count
    count_if count_min_sketch covar_pop covar_samp crc32 csc cume_dist curdate current_catalog current_database
    current_date current_path current_schema current_time current_timestamp current_timezone current_user date
    date_add date_diff date_format date_from_unix_date date_part date_sub date_trunc dateadd datediff datepart day
    dayname dayofmonth dayofweek dayofyear decimal decode degrees dense_rank div double e element_at elt encode
    endswith equal_null every exists exp explode explode_outer expm1 extract factorial filter find_in_set first
    first_value flatten float floor forall format_number format_string from_avro from_csv from_json from_protobuf
    from_unixtime from_utc_timestamp from_xml get get_json_object getbit greatest grouping grouping_id hash hex
    histogram_numeric hll_sketch_agg hll_sketch_estimate hll_union hll_union_agg hour hypot if ifnull ilike in
    initcap inline inline_outer input_file_block_length input_file_block_start input_file_name instr int
    is_valid_utf8 is_valid_variant is_variant_null isnan isnotnull isnull java_method json_array_length
    json_object_keys json_tuple kll_merge_agg_bigint kll_merge_agg_double kll_merge_agg_float kll_sketch_agg_bigint
    kll_sketch_agg_double kll_sketch_agg_float kll_sketch_get_n_bigint kll_sketch_get_n_double
    kll_sketch_get_n_float kll_sketch_get_quantile_bigint kll_sketch_get_quantile_double
    kll_sketch_get_quantile_float kll_sketch_get_rank_bigint kll_sketch_get_rank_double kll_sketch_get_rank_float
    kll_sketch_merge_bigint kll_sketch_merge_double kll_sketch_merge_float kll_sketch_to_string_bigint
    kll_sketch_to_string_double kll_sketch_to_string_float kurtosis lag last last_day last_value lcase lead least
    left len length levenshtein like listagg ln localtimestamp locate log log10 log1p log2 lower lpad ltrim
    luhn_check make_date make_dt_interval make_interval make_time make_timestamp make_timestamp_ltz
    make_timestamp_ntz make_valid_utf8 make_ym_interval map map_concat map_contains_key map_entries map_filter
    map_from_arrays map_from_entries map_keys map_values map_zip_with mask max max_by md5 mean measure median min
    min_by minute mod mode monotonically_increasing_id month monthname months_between named_struct nanvl negative
    next_day not now nth_value ntile nullif nullifzero nvl nvl2 octet_length or overlay parse_json parse_url
    percent_rank percentile percentile_approx percentile_cont percentile_disc pi pmod posexplode posexplode_outer
    position positive pow power printf python_worker_logs quarter quote radians raise_error rand randn random
    randstr range rank reduce reflect regexp regexp_count regexp_extract regexp_extract_all regexp_instr regexp_like
    regexp_replace regexp_substr regr_avgx regr_avgy regr_count regr_intercept regr_r2 regr_slope regr_sxx regr_sxy
    regr_syy repeat replace reverse right rint rlike round row_number rpad rtrim schema_of_avro schema_of_csv
    schema_of_json schema_of_variant schema_of_variant_agg schema_of_xml sec second sentences sequence session_user
    session_window sha sha1 sha2 shiftleft shiftright shiftrightunsigned shuffle sign signum sin sinh size skewness
    slice smallint some sort_array soundex space spark_partition_id split split_part sql_keywords sqrt st_asbinary
    st_geogfromwkb st_geomfromwkb st_setsrid st_srid stack startswith std stddev stddev_pop stddev_samp str_to_map
    string string_agg struct substr substring substring_index sum tan tanh theta_difference theta_intersection
    theta_intersection_agg theta_sketch_agg theta_sketch_estimate theta_union theta_union_agg time time_bucket
    time_diff time_from_micros time_from_millis time_from_seconds time_to_micros time_to_millis time_to_seconds
    time_trunc timestamp timestamp_micros timestamp_millis timestamp_seconds tinyint to_avro to_binary to_char
    to_csv to_date to_json to_number to_protobuf to_time to_timestamp to_timestamp_ltz to_timestamp_ntz
    to_unix_timestamp to_utc_timestamp to_varchar to_variant_object to_xml transform transform_keys transform_values
    translate trim trunc try_add try_aes_decrypt try_avg try_divide try_element_at try_make_interval
    try_make_timestamp try_make_timestamp_ltz try_make_timestamp_ntz try_mod try_multiply try_parse_json
    try_parse_url try_reflect try_subtract try_sum try_to_binary try_to_date try_to_number try_to_time
    try_to_timestamp try_url_decode try_validate_utf8 try_variant_get tuple_difference_double
    tuple_difference_integer tuple_difference_theta_double tuple_difference_theta_integer
    tuple_intersection_agg_double tuple_intersection_agg_integer tuple_intersection_double
    tuple_intersection_integer tuple_intersection_theta_double tuple_intersection_theta_integer
    tuple_sketch_agg_double tuple_sketch_agg_integer tuple_sketch_estimate_double tuple_sketch_estimate_integer
    tuple_sketch_summary_double tuple_sketch_summary_integer tuple_sketch_theta_double tuple_sketch_theta_integer
    tuple_union_agg_double tuple_union_agg_integer tuple_union_double tuple_union_integer tuple_union_theta_double
    tuple_union_theta_integer typeof ucase unbase64 unhex uniform unix_date unix_micros unix_millis unix_seconds
    unix_timestamp upper url_decode url_encode user uuid validate_utf8 var_pop var_samp variance variant_explode
    variant_explode_outer variant_get vector_avg vector_cosine_similarity vector_inner_product vector_l2_distance
    vector_norm vector_normalize vector_sum version weekday weekofyear when width_bucket window window_time xpath
    xpath_boolean xpath_double xpath_float xpath_int xpath_long xpath_number xpath_short xpath_string xxhash64 year
    zeroifnull zip_with
    """,
)
"""All functions of the Spark release that jars.lock names: what SHOW FUNCTIONS says, and those of its grammar."""

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


def parse_query(sql: str, *, max_bytes: int = _MAX_QUERY_BYTES) -> exp.Query:
    """The one SELECT that the text is (WITH and UNION ALL are taken too), in Spark's dialect.

    Raises QueryRefused: it is too long, is not SQL, is more than one statement, or is not a SELECT.
    """
    tree = _one(sql, max_bytes)
    if not isinstance(tree, exp.Query):
        raise QueryRefused("sql", "only a SELECT is taken", "Write one SELECT")
    return tree


def parse_condition(sql: str, *, functions: frozenset[str] = VIEW_FUNCTIONS) -> exp.Expr:
    """One expression over a row's columns: checked for functions, and that it looks at nothing else.

    Raises QueryRefused: it is not an expression, or asks for what an expression of a row may not.
    """
    tree = _one(f"SELECT {sql}\n", _MAX_CONDITION_BYTES + 8)
    plain = isinstance(tree, exp.Select) and len(tree.expressions) == 1
    if not plain or any(value for name, value in tree.args.items() if name not in ("expressions", "kind")):
        raise QueryRefused("sql", f"{_short(sql)} is not one expression", "Write e.g. count > 100")
    expression = tree.expressions[0].unalias()
    bad = next(expression.find_all(exp.Query, exp.AggFunc, exp.Window, exp.Star), None)
    if bad is not None:
        raise QueryRefused("sql", f"{_short(bad.sql(dialect='spark'))} looks at other rows", "Use a view for that")
    check_functions(expression, functions)
    return expression  # type: ignore[no-any-return]


def both_hold(one: str, other: str) -> bool:
    """Whether some value meets both conditions, as far as comparisons with numbers tell. Raises QueryRefused."""
    found = [_comparison(parse_condition(text)) for text in (one, other)]
    if found[0] is None or found[1] is None or found[0][0] != found[1][0]:
        return False
    (_, low, from_), (_, high, to) = found[0], found[1]
    low, high = (max(low, high), min(from_, to))
    if low[0] == high[0]:
        return not (low[1] or high[1])
    # Of an integer, n > 10 and n < 11 leave no value.
    whole = low[1] and high[1] and high[0] - low[0] == 1 and low[0].is_integer()
    return low[0] < high[0] and not whole


_Bound = tuple[float, float]  # a number, and 1 or -1 if the value must be above or below it, 0 if it may be equal
_SIDES: dict[type[exp.Expr], tuple[int, int]] = {
    exp.GT: (1, 1),
    exp.GTE: (1, 0),
    exp.LT: (-1, 1),
    exp.LTE: (-1, 0),
    exp.EQ: (0, 0),
}
"""A comparison: 1 if the value lies above the number, -1 if below; and 1 if they may not be equal."""


def _comparison(tree: exp.Expr) -> tuple[exp.Expr, _Bound, _Bound] | None:
    """What a comparison compares, and the lowest and highest value that meet it; None: it is not one with a number."""
    tree = tree.unnest()
    if type(tree) not in _SIDES:
        return None
    above, strict = _SIDES[type(tree)]
    for value, number, side in ((tree.this, tree.expression, above), (tree.expression, tree.this, -above)):
        try:
            n = float(number.sql())
        except ValueError:
            continue
        low = (n, strict) if side >= 0 else (-math.inf, 0)
        high = (n, -strict) if side <= 0 else (math.inf, 0)
        return value, low, high
    return None


def _one(sql: str, max_bytes: int) -> exp.Expr:
    if len(sql.encode()) > max_bytes:
        raise QueryRefused("quota", f"the SQL has more than {max_bytes} bytes", "Shorten it")
    if any((ord(c) < 32 and c not in "\n\r\t") or ord(c) == 127 for c in sql):
        raise QueryRefused("sql", "the SQL has control characters")
    try:
        found = [tree for tree in sqlglot.parse(spark_text(sql), dialect="spark") if tree is not None]
    except sqlglot.errors.SqlglotError as error:
        raise no_sql(error) from None
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


_KEYWORDS = _names("SELECT FROM WHERE GROUP BY ORDER HAVING WITH UNION LATERAL VIEW CASE WHEN THEN END")


def no_sql(error: sqlglot.errors.SqlglotError) -> QueryRefused:
    """The parser's error with its line, its token, and the keyword that was probably meant."""
    place: dict[str, Any] = next(iter(getattr(error, "errors", ())), {})
    token = str(place.get("highlight") or "")
    if not token:
        return QueryRefused("sql", f"it is not SQL: {str(error).splitlines()[0]}")
    before = re.findall(r"\w+", str(place.get("start_context") or ""))[-3:]
    for word in (token, *reversed(before)):
        near = nearest(word.upper(), _KEYWORDS, cutoff=0.75)
        if near and near != word.upper():
            return QueryRefused("sql", f"it is not SQL at {word!r}", f"Did you mean {near}?", place["line"])
    return QueryRefused("sql", f"it is not SQL at {token!r}", "Correct the text before it", place["line"])


def check_spark_query(sql: str, relation: str, columns: Mapping[str, Field]) -> tuple[str, ...]:
    """Check the SQL that a pipeline gives to Spark, without Spark; returns the names of its columns if they are known.

    Args:
        relation: the only table that there is for it; empty: the text is an expression over the columns.

    Raises:
        QueryRefused: Spark would certainly refuse it.
    """
    text = sql if relation else f"SELECT {sql}"
    try:
        tree = sqlglot.parse_one(spark_text(text), dialect="spark")
    except sqlglot.errors.SqlglotError as error:
        raise no_sql(error) from None
    except RecursionError:
        return ()
    _check_known_functions(tree, text)
    own = {cte.alias.lower() for cte in tree.find_all(exp.CTE)}
    for table in tree.find_all(exp.Table):
        plain = isinstance(table.this, exp.Identifier) and not table.db
        if relation and plain and table.name.lower() not in (relation.lower(), *own):
            problem = f"there is no table {table.name!r}"
            raise QueryRefused("relation", problem, f"It reads FROM {relation}", line_of(table))
    open_ended = any(node.is_star for node in tree.find_all(exp.Column)) or re.search(_NAMES_COLUMNS, sql, re.I)
    if columns and not (open_ended and len(list(tree.find_all(exp.Select))) > 1):
        check_columns(tree, (*columns, *_UNITS) if relation else columns)
        _check_members(tree, columns)
    if not isinstance(tree, exp.Query) or open_ended or any(column.is_star for column in tree.selects):
        return ()
    names = tuple(column.alias_or_name for column in tree.selects)
    return names if all(names) else ()


_NAMES_COLUMNS = r"\b(inline|inline_outer|json_tuple|stack)\s*\("  # functions that name their columns themselves
_UNITS = ("YEAR", "QUARTER", "MONTH", "WEEK", "DAY", "HOUR", "MINUTE", "SECOND", "MILLISECOND", "MICROSECOND")


def _check_known_functions(tree: exp.Expr, text: str) -> None:
    """Refuse a function that Spark does not have. The tree does not know how it was written, so tokens are read."""
    aliases = {alias.name.lower() for alias in tree.find_all(exp.TableAlias)}
    tokens = list(Spark().tokenize(text))
    for at, (token, after) in enumerate(itertools.pairwise(tokens)):
        name = token.text.lower()
        if token.token_type is not TokenType.VAR or after.token_type is not TokenType.L_PAREN:
            continue
        qualified = at > 0 and tokens[at - 1].token_type in (TokenType.DOT, TokenType.ALIAS)
        if name not in SPARK_FUNCTIONS and name not in aliases and not qualified:
            near = nearest(name, SPARK_FUNCTIONS)
            remedy = f"Did you mean {near!r}?" if near else "Spark's documentation lists its functions"
            raise QueryRefused("function", f"Spark has no function {token.text!r}", remedy, token.line)


def _check_members(tree: exp.Expr, columns: Mapping[str, Field]) -> None:
    """Refuse a path into a struct that does not have the member."""
    if len(list(tree.find_all(exp.Select))) > 1:
        return
    for column in tree.find_all(exp.Column):
        found: Field | None = columns.get(column.parts[0].name)
        for part in column.parts[1:]:
            members = {} if found is None else found.below
            if not members or isinstance(part, exp.Star):
                break
            found = next((field for name, field in members.items() if name.lower() == part.name.lower()), None)
            if found is None:
                path = ".".join(one.name for one in column.parts)
                problem, remedy = f"there is no field {part.name!r} in {path!r}", did_you_mean(part.name, members)
                raise QueryRefused("column", problem, remedy, line_of(part))


def line_of(tree: exp.Expr) -> int:
    """The first line of the text, 1-based, that a name in the tree stands on; 0 if it holds none."""
    return min((name.meta["line"] for name in tree.find_all(exp.Identifier) if "line" in name.meta), default=0)


def spark_text(sql: str) -> str:
    """The text as sqlglot parses it: it takes a leading ``window`` in GROUP BY for the WINDOW clause."""
    return re.sub(r"\bwindow(?=\s*\()", WINDOW, sql, flags=re.IGNORECASE)


def check_relations(tree: exp.Query, allowed: Collection[str]) -> str:
    """The one relation that the query reads.

    Raises QueryRefused: it reads another, several, or none; or a table function.
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
    """Refuse a function that is not in the list. Raises QueryRefused."""
    for node in tree.find_all(exp.Func, exp.Unnest, exp.Lateral):
        name = _name(node)
        if name not in allowed and not isinstance(node, exp.Lateral):
            written = node.sql(dialect="spark").partition("(")[0].strip().lower()
            if written not in allowed:
                raise QueryRefused(
                    "function", f"the function {written} is not taken here", "docs/guide/queries.md lists them"
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
    """Refuse a column that is neither in ``known`` nor named in the query itself. Raises QueryRefused."""
    own = {alias.alias.lower() for alias in tree.find_all(exp.Alias, exp.TableAlias, exp.CTE, exp.Table) if alias.alias}
    own |= {column.name.lower() for alias in tree.find_all(exp.TableAlias) for column in alias.columns}
    own |= {name.name.lower() for made in tree.find_all(exp.Lambda) for name in made.expressions}
    own |= {table.name.lower() for table in tree.find_all(exp.Table)} | {"window", "col", "pos"}
    names = {name.lower() for name in known} | own
    for column in tree.find_all(exp.Column):
        first = column.parts[0].name
        if first.lower() not in names and not isinstance(column.this, exp.Star):
            problem, remedy = f"there is no column {first!r}", did_you_mean(first, known)
            raise QueryRefused("column", problem, remedy, line_of(column))


def outputs(tree: exp.Query, *, limit: int) -> tuple[str, ...]:
    """Names of the columns that it gives; empty where a ``*`` leaves them open.

    Raises QueryRefused: a column has no name, two have one, or there are too many.
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


def _depth(tree: exp.Expr) -> int:
    deepest, level = 0, [tree]
    while level and deepest <= MAX_DEPTH:
        level = [child for node in level for child in node.iter_expressions()]
        deepest += 1
    return deepest


def _short(text: str) -> str:
    text = text.replace(WINDOW, "window")
    return text if len(text) <= 60 else f"{text[:60]} …"

"""What Spark, DuckDB and the operators would certainly refuse of a pipeline, found without any of their engines."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path

import pyarrow as pa

from lakehouse.contract.errors import ConfigError, QueryRefused, StatementError, did_you_mean
from lakehouse.contract.lake import TableRef
from lakehouse.contract.pipeline import Pipeline, Product, Source, View
from lakehouse.contract.pipeline.added import MAX_COLUMNS
from lakehouse.contract.pipeline.folder import in_order
from lakehouse.contract.pipeline.product import EVENTS, TAKEN_BY
from lakehouse.contract.pipeline.source import ENVELOPE_COLUMNS, column_of
from lakehouse.contract.sql import filters
from lakehouse.contract.sql.ddl import Field, find_field, parse_ddl, unknown_type
from lakehouse.contract.sql.spark import (
    VIEW_FUNCTIONS,
    check_columns,
    check_functions,
    check_relations,
    check_spark_query,
    grouped,
    outputs,
    parse_condition,
    parse_query,
)
from lakehouse.contract.tomlfile import line_of, read_toml
from lakehouse.errors import BadProduct
from lakehouse.gold.state_store import store_of
from lakehouse.operators.base import Operator
from lakehouse.operators.rows import OWN
from lakehouse.stateful.windows import END, START, Sessions

_VIEW_BYTES = 1_000_000
_OF_ALERT = ("when", "clear", "value")
_UNKNOWN = Field("", "")


def pipeline_problems(pipeline: Pipeline) -> list[ConfigError]:
    """The problems of its types, SQL, operators and names of columns, each with its line."""
    found = _Statements(pipeline)
    inputs = {name: _source_columns(found, source) for name, source in pipeline.sources.items()}
    results: dict[str, Collection[str]] = {}
    for name, product in pipeline.products.items():
        sides = {side: Field("STRUCT", "", inputs[side]) for side in (product.source, product.right) if side in inputs}
        columns = sides if product.operator == "join" else inputs[product.source]
        results[name] = _product_columns(found, product, columns)
    for view in in_order(pipeline.views):
        look_at = partial(_view_columns, view, results.get(view.base, ()))
        results[view.name] = found.check(f"products.{view.name}.sql", look_at)
        found.columns(f"products.{view.name}.key", view.key, results[view.name])
    served: dict[str, Product | View] = {**pipeline.products, **pipeline.views}
    for name, one in served.items():
        if one.channel.where:
            found.check(f"products.{name}.channel.where", partial(_filter, one.channel.where, results[name]))
        found.columns(f"products.{name}.channel.columns", one.channel.columns, results[name])
    for name, product in pipeline.products.items():
        _checks(found, f"products.{name}.expectations", product, results[name])
    for name, alert in pipeline.alerts.items():
        for option in _OF_ALERT:
            look_at = partial(_condition, getattr(alert, option), results[alert.product])
            found.check(f"alerts.{name}.{option}", look_at)
        found.columns(f"alerts.{name}.by", alert.by, results[alert.product])
        found.columns(f"alerts.{name}.time", (alert.time,), results[alert.product])
    for name, copy in pipeline.staging.items():
        found.check(f"staging.{name}.where", partial(_condition, copy.where, results[copy.product]))
        found.columns(f"staging.{name}.columns", copy.columns, results[copy.product])
    return found.problems


class _Statements:
    """Checks the SQL and the columns of one pipeline, and knows which line of which file each text is."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._raw = read_toml(pipeline.path)
        self._lines = pipeline.path.read_text(encoding="utf-8").splitlines()
        self.problems: list[ConfigError] = []

    def check(self, key: str, look: Callable[[], tuple[str, ...]]) -> tuple[str, ...]:
        """The names that ``look`` returns; none if it refuses, which is then a problem of the dotted key."""
        try:
            return look()
        except StatementError as refused:
            self.refuse(key, refused.problem, refused.remedy, line=getattr(refused, "line", 0))
            return ()

    def columns(self, key: str, wanted: Collection[str], columns: Collection[str]) -> None:
        """Refuse what is not among the columns; nothing is refused if these are not known."""
        known = {name.lower() for name in columns}
        for name in wanted:
            if known and name and name.lower() not in known:
                self.refuse(key, f"there is no column {name!r}", did_you_mean(name, columns), word=name)

    def refuse(self, key: str, problem: str, remedy: str, *, word: str = "", line: int = 0) -> None:
        """Note a problem of the dotted key.

        Args:
            word: the problem's line is the first from the key's on that has it.
            line: of the key's text, 1-based.
        """
        file, there = self._place(key, line)
        if word and file == self._pipeline.path:
            lines = range(there, len(self._lines) + 1)
            there = next((n for n in lines if re.search(rf"\b{re.escape(word)}\b", self._lines[n - 1])), there)
        self.problems.append(ConfigError(problem, key=key, remedy=remedy, file=file, line=there))

    def _place(self, key: str, line: int) -> tuple[Path, int]:
        path, value = self._pipeline.path, self._raw
        for step in key.split("."):
            value = value.get(step, {}) if isinstance(value, dict) else {}
        if key.endswith(".sql") and isinstance(value, str) and value.endswith(".sql"):
            return path.parent / value, line or 1
        first = line_of(path, key) or 1
        opens = re.search(r"""(\"{3}|'{3})\s*$""", self._lines[first - 1])  # TOML drops the line break behind it
        return path, first + max(line - 1, 0) + (bool(opens) and line > 0)


def _source_columns(found: _Statements, source: Source) -> Mapping[str, Field]:
    """The columns that SQL over the source may use; empty: they are not known."""
    key, payload = f"sources.{source.name}", parse_ddl(source.schema)
    if not payload:
        found.refuse(f"{key}.schema", "not a Spark DDL schema", "Write e.g. id BIGINT, member STRUCT<name: STRING>")
    elif wrong := unknown_type(payload):
        word, near = wrong
        remedy = f"Did you mean {near}?" if near else "Use e.g. BIGINT, DOUBLE, STRING, BOOLEAN, TIMESTAMP, STRUCT<…>"
        found.refuse(f"{key}.schema", f"{word} is not a type of Spark", remedy, word=word)
    else:
        templates = {"event_id": source.event_id_template, "key": source.key_template}
        paths = {"required": source.required, **{name: made.fields for name, made in templates.items() if made}}
        for option, path in ((option, path) for option, given in paths.items() for path in given):
            if find_field(payload, tuple(path.split("."))) is None:
                remedy = f"Fields: {', '.join(payload)}" if "." in path else did_you_mean(path, payload, "Fields")
                found.refuse(f"{key}.{option}", f"the schema has no field {path!r}", remedy)
    if not payload:
        return {}
    columns = {column_of(name): field for name, field in payload.items()}
    columns |= dict.fromkeys((*source.enrich, *ENVELOPE_COLUMNS), _UNKNOWN)
    hidden = dict.fromkeys(("payload", "headers", "key", "topic", "partition", "offset", "fingerprint"), _UNKNOWN)
    texts = {"event_time": source.event_time}
    texts |= {f"expectations.{name}": expected.sql for name, expected in source.expectations.items()}
    for option, text in texts.items():
        if text:
            found.check(f"{key}.{option}", partial(check_spark_query, text, "", {**columns, **hidden}))
    _checks(found, f"{key}.table_expectations", source, {**columns, **hidden})
    return columns


def _product_columns(found: _Statements, product: Product, columns: Mapping[str, Field]) -> Collection[str]:
    """The columns of the product's table; empty: they are not known."""
    key, before = f"products.{product.name}", len(found.problems)
    names: Collection[str] = columns
    if product.sql:
        relation = "joined" if product.operator == "join" else product.source
        names = found.check(f"{key}.sql", partial(check_spark_query, product.sql, relation, columns))
    for option in ("time", "item", "version", "value", "by"):
        if product.operator in TAKEN_BY.get(option, ()):
            given = getattr(product, option)
            found.columns(f"{key}.{option}", (given,) if isinstance(given, str) else given, names)
    of_rows = {name: columns.get(name, _UNKNOWN) for name in names}
    for aggregate, text in product.aggregates.items():
        found.check(f"{key}.aggregates.{aggregate}", partial(check_spark_query, text, "", of_rows))
    if len(found.problems) > before:
        return ()
    try:
        operator = store_of(product, TableRef(product.layer, product.name, Path()), "").operator
        return _result(product, operator, names)
    except BadProduct as bad:
        found.refuse(f"{key}.{bad.key}", bad.problem, bad.remedy, line=bad.line)
        return ()


def _result(product: Product, operator: Operator, names: Collection[str]) -> list[str]:
    """The columns that the operator makes of its input's."""
    if product.operator in ("", "join", "latest", EVENTS, "reservoir"):
        if not names or product.operator == "reservoir":
            return []
    else:
        ends = (START, END) if isinstance(operator, Sessions) else ()
        names = [*product.by, *ends, *product.aggregates]
    added = {"latest": ["tie"], EVENTS: [name for name in OWN if name not in names]}.get(product.operator, [])
    operator.describe(pa.schema([(name, pa.int64()) for name in [*names, *added]]))
    assert operator.schema is not None
    return list(operator.schema.names)


def _checks(found: _Statements, key: str, declared: Product | Source, columns: Collection[str]) -> None:
    """Refuse expectations of a table over columns that it does not have."""
    for check in declared.checks:
        if check.sql and columns:
            known = dict.fromkeys(columns, _UNKNOWN)
            found.check(f"{key}.{check.name}", partial(check_spark_query, check.sql, "", known))
        for argument, value in check.arguments:
            if argument.startswith("column") and argument not in ("column_index", "column_set"):
                found.columns(f"{key}.{check.name}", [value] if isinstance(value, str) else value, columns)


def _view_columns(view: View, columns: Collection[str]) -> tuple[str, ...]:
    tree = parse_query(view.sql, max_bytes=_VIEW_BYTES)
    check_relations(tree, [view.base])
    check_functions(tree, VIEW_FUNCTIONS)
    if columns:
        check_columns(tree, columns)
    if not (view.key or grouped(tree)):
        raise QueryRefused("key", "which columns name one row?", 'Add key = ["…"]')
    return outputs(tree, limit=MAX_COLUMNS)


def _condition(text: str, columns: Collection[str]) -> tuple[str, ...]:
    if text:
        tree = parse_condition(text)
        if columns:
            check_columns(tree, columns)
    return ()


def _filter(text: str, columns: Collection[str]) -> tuple[str, ...]:
    tree = filters.checked(text)
    if columns:
        check_columns(tree, columns)
    return ()

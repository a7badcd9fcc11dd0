"""Continuous queries and alerts that are declared at run time: what they are, whether they may be, where they lie.

Each is a TOML file, ``LAKE/_millrace/queries/NAME.toml`` or ``LAKE/_millrace/alerts/NAME.toml``, written in one step.
The driver watches the folder and says in ``NAME.state.json`` beside it how it fares. So the server, the command line
and a driver that starts later all agree, and neither needs another to be up. No Java here.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Generic, TypeVar

from sqlglot import exp

from lakehouse.contract.envelope import TENANT
from lakehouse.contract.errors import ConfigError, QueryRefused, crash_point
from lakehouse.contract.lake import NAME_PATTERN, RESERVED, Lake
from lakehouse.contract.pipeline import Pipeline, Product
from lakehouse.contract.pipeline.folder import Alert, View
from lakehouse.contract.pipeline.product import EVENTS
from lakehouse.contract.pipeline.source import ENVELOPE_COLUMNS, EnrichSpec, column_of
from lakehouse.contract.pipeline.tenants import check_tenant
from lakehouse.contract.settings import QuerySettings
from lakehouse.contract.sql.ddl import parse_ddl
from lakehouse.contract.sql.spark import (
    SOURCE_FUNCTIONS,
    VIEW_FUNCTIONS,
    check_columns,
    check_functions,
    check_relations,
    grouped,
    outputs,
    parse_condition,
    parse_query,
    to_spark,
)
from lakehouse.contract.storage import create_whole, files_in, folder_stamp, write_whole
from lakehouse.contract.tomlfile import build, read_toml, toml_text

OWNER = "@queries"  # in the property millrace.pipeline of a table that a query made
MAX_COLUMNS = 100  # of a query or view; a wider result is a mistake in most cases
STARTS = ("now", "start")

T = TypeVar("T", "QuerySpec", Alert)


@dataclass(frozen=True, slots=True)
class QuerySpec:
    """A query as it was declared.

    Attributes:
        sql: one SELECT in Spark SQL: over a source an aggregate that merges (or the input of an operator), over a
            product anything small.
        key: columns that name one row; empty: what it groups by.
        start: over a source, the events that count: ``now`` (those that come into bronze from now on) or ``start``.
        options: further keys of a product (``operator``, ``item``, ``window``, …), over a source.
        created: when, ISO 8601.
        removed: it is to be stopped and forgotten.
        drop: its table is to go too.
    """

    name: str
    sql: str
    relation: str = ""
    key: tuple[str, ...] = ()
    start: str = "now"
    options: dict[str, Any] = field(default_factory=dict)
    created: str = ""
    removed: bool = False
    drop: bool = False

    def product(self) -> Product:
        """The product that it is, over a source. Raises ConfigError."""
        sql = to_spark(parse_query(self.sql, max_bytes=len(self.sql.encode())))
        values = {"layer": "gold", "source": self.relation, "sql": sql, "name": self.name, **self.options}
        return build(Product, values, file=Path("query"))

    @property
    def tenant_column(self) -> str:
        """As a product's, by the options alone: the SQL was checked when the query was added."""
        return str(self.options.get("tenant", TENANT if self.options.get("operator") == EVENTS else ""))

    def view(self) -> View:
        """The view that it is, over a product."""
        return View(base=self.relation, sql=self.sql, key=self.key, name=self.name)


@dataclass(frozen=True, slots=True)
class State:
    """How a query or an alert fares, by the driver's word.

    Attributes:
        state: ``waiting`` (no driver has taken it up yet), ``starting``, ``running``, ``failed`` or ``removing``.
        since: of a query from now: bronze commits before it do not count (microseconds since the epoch).
        start_version: of a query from now: the bronze version to stream from; -1: none.
    """

    state: str = "waiting"
    reason: str = ""
    since: int = 0
    start_version: int = -1


class Declared(Generic[T]):
    """The declarations of one kind in a lake."""

    def __init__(self, lake: Lake, kind: type[T]) -> None:
        self.folder = lake.shared / ("queries" if kind is QuerySpec else "alerts")
        self._kind: type[T] = kind

    def all(self) -> dict[str, T]:
        """By name; a file that cannot be read is passed over (somebody else's, or from another version)."""
        found = {}
        for file in files_in(self.folder, "*.toml"):
            try:
                found[file.stem] = build(self._kind, {**read_toml(file), "name": file.stem}, file=file)
            except ConfigError:
                continue
        return found

    def stamp(self) -> int:
        """Changes whenever a declaration or a state does; 0: there is no folder."""
        return folder_stamp(self.folder)

    def add(self, item: T) -> None:
        """Write a declaration that is not there yet, in one step. Raises QueryRefused."""
        if not create_whole(self.folder / f"{item.name}.toml", _text_of(item), 0o600):
            raise QueryRefused("taken", f"the name {item.name!r} is taken", "Choose another")

    def replace(self, item: T) -> None:
        """Write a declaration over the one that is there, in one step."""
        write_whole(self.folder / f"{item.name}.toml", _text_of(item), 0o600, durable=True)

    def remove(self, name: str) -> None:
        """Forget a declaration and, before it, its state: another of the name must not go on from there."""
        (self.folder / f"{name}.state.json").unlink(missing_ok=True)
        crash_point("forget.after_state")
        (self.folder / f"{name}.toml").unlink(missing_ok=True)

    def state(self, name: str) -> State:
        """What the driver said last."""
        try:
            found = json.loads((self.folder / f"{name}.state.json").read_text(encoding="utf-8"))
            return State(**{f.name: found[f.name] for f in fields(State) if f.name in found})
        except (OSError, ValueError, TypeError):
            return State()

    def tell(self, name: str, state: State) -> None:
        """The driver's word."""
        write_whole(self.folder / f"{name}.state.json", json.dumps(asdict(state)).encode(), 0o600, durable=True)


def _text_of(item: QuerySpec | Alert) -> bytes:
    values = {f.metadata.get("key", f.name): getattr(item, f.name) for f in fields(item) if f.name != "name"}
    return toml_text(values).encode()


def added_products(lake: Lake, source: str) -> list[tuple[Product, int]]:
    """Products that queries made of a source, each with the bronze time since which events count in it."""
    declared = Declared(lake, QuerySpec)
    found = [spec for spec in declared.all().values() if spec.relation == source and not spec.removed]
    return [(spec.product(), declared.state(spec.name).since) for spec in found]


def checked_query(
    spec: QuerySpec,
    pipeline: Pipeline,
    lake: Lake,
    quotas: QuerySettings,
    columns: Mapping[str, Collection[str]] | None = None,
) -> QuerySpec:
    """The query with what its SQL says filled in. Raises QueryRefused.

    Args:
        columns: of products that exist, by table.
    """
    declared = Declared(lake, QuerySpec).all()
    _check_name(spec.name, pipeline, lake, declared)
    if sum(not query.removed for query in declared.values()) >= quotas.max_queries:
        raise QueryRefused("quota", f"there are {quotas.max_queries} queries already", "Remove one: millrace query rm")
    if spec.start not in STARTS:
        raise QueryRefused("option", f"from {spec.start!r} is not known", f"Use one of: {', '.join(STARTS)}")
    tree = parse_query(spec.sql)
    if resolve_references(tree, {name: source.enrich for name, source in pipeline.sources.items()}):
        spec = replace(spec, sql=to_spark(tree))
    derived = [*pipeline.products, *pipeline.views, *(name for name, query in declared.items() if not query.removed)]
    relation = check_relations(tree, [*pipeline.sources, *derived])
    if spec.relation not in ("", relation):
        raise QueryRefused("relation", f"its SQL reads {relation!r}, not {spec.relation!r}", "Leave the source out")
    names = outputs(tree, limit=MAX_COLUMNS)
    spec = replace(spec, relation=relation, created=spec.created or datetime.now(UTC).isoformat(timespec="seconds"))
    if relation in pipeline.sources:
        check_functions(tree, SOURCE_FUNCTIONS)
        payload = parse_ddl(pipeline.sources[relation].schema)
        if payload:
            check_columns(tree, (*map(column_of, payload), *pipeline.sources[relation].enrich, *ENVELOPE_COLUMNS))
        return _over_source(spec, tree, grouped(tree))
    check_functions(tree, VIEW_FUNCTIONS)
    if columns and relation in columns:
        check_columns(tree, columns[relation])
    return _over_product(spec, names, grouped(tree))


def resolve_references(tree: exp.Query, references: Mapping[str, Mapping[str, EnrichSpec]]) -> bool:
    """Resolve joins of a source with its references (``[sources.NAME.enrich.REFERENCE]``) in a query.

    The row of a reference travels with each event and is a map in SQL. So ``FROM rides r JOIN stations s ON r.station =
    s.id`` is a condition that there is one, and ``LEFT JOIN`` none; ``s.name`` is ``stations.name``. A replay gives the
    same rows, whatever the reference holds by then.

    Returns:
        Whether there was one.

    Raises:
        QueryRefused: the reference is joined in another way than it is declared.
    """
    joins = [] if not isinstance(tree, exp.Select) else list(tree.args.get("joins") or ())
    relation = tree.args.get("from_") or tree.args.get("from")
    if relation is None or not joins:
        return False
    known = references.get(relation.this.name, {})
    for join in joins:
        name, alias = join.this.name, join.this.alias_or_name
        spec = known.get(name)
        if spec is None or not isinstance(join.this, exp.Table):
            return False
        on = join.args.get("on")
        sides = [_path(side, relation.this.alias_or_name) for side in ((on.left, on.right) if on else ())]
        wanted = [spec.key.strip("{}"), f"{alias}.{spec.column or 'key'}"]
        kind = f"{join.method} {join.side} {join.kind}".split()
        if not isinstance(on, exp.EQ) or sorted(sides) != sorted(wanted) or kind not in ([], ["INNER"], ["LEFT"]):
            remedy = f"Write JOIN {name} ON {wanted[0]} = {name}.{spec.column or 'key'}, or LEFT JOIN"
            raise QueryRefused("relation", f"the reference {name!r} is not joined as it is declared", remedy)
        for column in tree.find_all(exp.Column):
            if column.parts[0].name == alias:
                column.parts[0].replace(exp.to_identifier(name))
        if kind != ["LEFT"]:
            tree.where(exp.column(name).is_(exp.null()).not_(), copy=False)
        join.pop()
    return True


def _path(side: exp.Expr, relation: str) -> str:
    """A column's path without the relation."""
    parts = [part.name for part in side.parts] if isinstance(side, exp.Column | exp.Dot) else [""]
    return ".".join(parts[1:] if parts[0] == relation else parts)


def _over_source(spec: QuerySpec, tree: exp.Query, own: tuple[str, ...]) -> QuerySpec:
    if not own and "operator" not in spec.options and not tree.find(exp.AggFunc):
        spec = replace(spec, options={**spec.options, "operator": EVENTS})
    try:
        product = spec.product()
        check_tenant(product)
    except ConfigError as error:
        raise QueryRefused("option", f"{error.key}: {error.problem}", error.remedy) from None
    if product.operator == "join":
        raise QueryRefused("option", "a join reads two sources", "Declare it in pipeline.toml")
    if product.operator:
        if spec.key:
            raise QueryRefused("key", "an operator has a key of its own", "Leave the key out")
        return spec
    if not own:
        raise QueryRefused("sql", "an aggregate over a source needs GROUP BY", "Or name an operator")
    if spec.key and set(spec.key) != set(own):
        raise QueryRefused("key", f"it groups by {', '.join(own)}, so that is its key", "Leave the key out")
    return replace(spec, key=own)


def _over_product(spec: QuerySpec, names: tuple[str, ...], own: tuple[str, ...]) -> QuerySpec:
    if spec.options:
        raise QueryRefused("option", "options are for queries over a source", "Leave them out")
    key = spec.key or own
    if not key:
        raise QueryRefused("key", "which columns name one row?", "Give the key, e.g. --key city")
    missing = [column for column in key if names and column not in names]
    if missing:
        raise QueryRefused("key", f"it gives no column {missing[0]!r}", f"Columns: {', '.join(names)}")
    return replace(spec, key=key, start="now")


def _check_name(name: str, pipeline: Pipeline, lake: Lake, declared: Collection[str]) -> None:
    if not NAME_PATTERN.fullmatch(name):
        raise QueryRefused("name", f"{name!r} is not a table name", "Use [a-z][a-z0-9_]*, at most 63 characters")
    taken = {*pipeline.sources, *pipeline.products, *pipeline.views, *RESERVED, *declared}
    if name in taken:
        raise QueryRefused("taken", f"the name {name!r} is taken", "Choose another")
    tables = [ref.name for ref in lake.tables()]
    if name in tables:
        raise QueryRefused(
            "taken", f"there is a table {name!r} already", f"Choose another name, or: millrace query rm {name} --drop"
        )


def checked_alert(
    alert: Alert,
    pipeline: Pipeline,
    lake: Lake,
    quotas: QuerySettings,
    columns: Mapping[str, Collection[str]] | None = None,
) -> Alert:
    """The alert, if it may be. Raises QueryRefused."""
    declared = Declared(lake, Alert).all()
    if not NAME_PATTERN.fullmatch(alert.name):
        raise QueryRefused("name", f"{alert.name!r} is not a name", "Use [a-z][a-z0-9_]*, at most 63 characters")
    if alert.name in pipeline.alerts or alert.name in declared:
        raise QueryRefused("taken", f"there is an alert {alert.name!r} already", "Choose another name")
    if len(declared) >= quotas.max_queries:
        raise QueryRefused(
            "quota", f"there are {quotas.max_queries} alerts already", "Remove one: millrace query rm NAME"
        )
    known = {*pipeline.products, *pipeline.views, *Declared(lake, QuerySpec).all()}
    if alert.product not in known:
        raise QueryRefused(
            "relation", f"there is no product {alert.product!r}", f"There are: {', '.join(sorted(known))}"
        )
    for text in (alert.when, alert.clear, alert.value):
        if text:
            tree = parse_condition(text)
            if columns and alert.product in columns:
                check_columns(tree, columns[alert.product])
    return alert

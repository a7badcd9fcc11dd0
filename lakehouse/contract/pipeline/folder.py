"""The pipeline model: what ``conf/pipelines/NAME/pipeline.toml`` declares, with the sources added at run time.

``sources/NAME.toml`` in the control plane's state declares one source: the keys of ``[sources.NAME]`` and, as
``[products.PRODUCT]``, products of that source. Others may have written it, so it may not do all that ``pipeline.toml``
may: its SQL has the functions of a query of the run time, and it runs no code, opens no file and reads no environment.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lakehouse.contract.errors import ConfigError, FilterError, QueryRefused, did_you_mean
from lakehouse.contract.lake import NAME_PATTERN, RESERVED
from lakehouse.contract.pipeline.product import EVERYTHING, ChannelSpec, Product, check_product_keys
from lakehouse.contract.pipeline.source import COLLECTOR_KINDS, ENVELOPE_COLUMNS, Source, column_of
from lakehouse.contract.pipeline.tenants import check_tenant, check_tenants
from lakehouse.contract.settings import Settings
from lakehouse.contract.sql.ddl import parse_ddl
from lakehouse.contract.storage import Stamp, stamp_of
from lakehouse.contract.tomlfile import build, duration_ms, durations, line_of, one_of, placed, read_toml

if TYPE_CHECKING:
    from sqlglot import exp

log = logging.getLogger(__name__)

Declared = tuple[Source, dict[str, Product]]
"""A source that is added at run time, with its products by name."""


@dataclass(frozen=True, slots=True)
class View:
    """A table that is what its SQL gives over another product's current rows: ``[products.NAME] from = "PRODUCT"``.

    Attributes:
        base: the product (or view) whose rows it reads, ``from`` in TOML; the only relation of its SQL.
        sql: one SELECT in Spark SQL, the text of the file named in the TOML.
        key: columns that name one row; empty: what the SQL groups by.
        tenant: as a product's.
    """

    base: str = field(metadata={"key": "from"})
    sql: str
    key: tuple[str, ...] = ()
    layer: str = "gold"
    channel: ChannelSpec = EVERYTHING
    tenant: str = ""
    name: str = ""

    def __post_init__(self) -> None:
        one_of("layer", self.layer, ("silver", "gold"))
        if not self.sql.strip():
            raise ConfigError("a view needs SQL", key="sql", remedy="Name a .sql file, or write one SELECT")


def in_order(views: dict[str, View]) -> list[View]:
    """The views, each after the one that it reads. Raises ConfigError."""
    reads = {name: {view.base} & views.keys() for name, view in views.items()}
    try:
        order = list(TopologicalSorter(reads).static_order())
    except CycleError as error:
        key = f"products.{error.args[1][0]}.from"
        raise ConfigError("it reads itself, over other views", key=key, remedy="Break the circle") from None
    return [views[name] for name in order]


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a condition must hold before it counts: a number of versions, or a duration of the product's own time.

    Attributes:
        versions: versions of the product in a row, the first included; 1: at once.
        ms: milliseconds by the product's clock, see :attr:`Alert.time`.
    """

    versions: int = 1
    ms: int = 0

    @classmethod
    def read(cls, key: str, value: object) -> Patience:
        """From TOML: a whole number of versions, or a duration such as ``"30 seconds"``. Raises ConfigError."""
        if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= 1_000_000:
            return cls(versions=value)
        if isinstance(value, str):
            try:
                return cls(ms=duration_ms(value))
            except ValueError as error:
                raise ConfigError(str(error), key=key) from None
        raise ConfigError(f"{value!r} is no patience", key=key, remedy='Give versions (3) or a duration ("30 seconds")')

    def over(self, versions: int, ms: int) -> bool:
        """Whether a condition that has held for so long counts."""
        return versions >= self.versions and ms >= self.ms


@dataclass(frozen=True, slots=True)
class Alert:
    """A condition over a product: one row in ``alerts`` for each key, pushed when it is raised and when it is cleared.

    Attributes:
        product: whose rows are looked at, each version of it: a product or a view.
        when: SQL condition over the product's columns that raises the alert.
        clear: SQL condition that clears it; empty: ``when`` is not true. A row that is gone clears it too. Once
            cleared, the alert is raised again only after ``when`` was not true.
        hold_raise: ``for`` in TOML: how long ``when`` must hold (versions or a duration).
        hold_clear: ``hold`` in TOML: how long ``clear`` must hold.
        by: columns that tell one alert from another; empty: the product's key. Where several rows have one key, the
            alert is raised when any of them meets ``when``, and cleared when all of them meet ``clear``.
        value: SQL expression of a number that the alert carries: the largest of the rows that meet ``when``, else of
            all rows of the key.
        time: timestamp column whose newest value is the clock for durations; empty: when the newest event that the
            version holds came in.
        name: key of the table in the TOML file.
    """

    product: str
    when: str
    clear: str = ""
    hold_raise: Any = field(default=1, metadata={"key": "for"})
    hold_clear: Any = field(default=1, metadata={"key": "hold"})
    by: tuple[str, ...] = ()
    value: str = ""
    time: str = ""
    name: str = ""

    def __post_init__(self) -> None:
        if not self.when.strip():
            raise ConfigError("an alert needs a condition", key="when", remedy="Write e.g. when = 'count > 100'")
        Patience.read("for", self.hold_raise)
        Patience.read("hold", self.hold_clear)
        if self.clear:
            from lakehouse.contract.sql.spark import both_hold  # sqlglot is needed by few of those who read a pipeline

            with contextlib.suppress(QueryRefused):  # told where conditions are checked against the columns
                if both_hold(self.when, self.clear):
                    raise ConfigError(
                        f"{self.clear!r} can be true together with when = {self.when!r}",
                        key="clear",
                        remedy="Clear on the other side of it: when = 'x > 10', clear = 'x < 8'",
                    )

    @property
    def patience(self) -> tuple[Patience, Patience]:
        """To raise, and to clear."""
        return Patience.read("for", self.hold_raise), Patience.read("hold", self.hold_clear)


_COLUMN = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,62}")


@dataclass(frozen=True, slots=True)
class Staging:
    """``[staging.NAME]``: some columns and rows of a product's result, refreshed by a command or on a schedule.

    Attributes:
        product: whose rows they are; one that is stored as partials is read folded.
        columns: of them; empty: all. The product's key columns are always in it.
        every: pause between two refreshes by the driver; empty: only the command refreshes it.
    """

    product: str
    columns: tuple[str, ...] = ()
    where: str = ""
    every: str = ""
    name: str = ""

    def __post_init__(self) -> None:
        durations(self, "every")
        for column in self.columns:
            if not _COLUMN.fullmatch(column):
                raise ConfigError(f"{column!r} is no column name", key="columns", remedy="Use names of columns")


@dataclass(frozen=True)
class Pipeline:
    """A folder's worth of sources and products.

    Attributes:
        views: by name: the ``[products.NAME]`` that say ``from``.
        staging: by name: copies of a part of a product, for slow readers.
        path: the ``pipeline.toml`` it was read from.
        added: names of the sources that were added at run time, see :class:`PipelineFiles`.
    """

    sources: dict[str, Source]
    products: dict[str, Product] = field(default_factory=dict)
    views: dict[str, View] = field(default_factory=dict)
    alerts: dict[str, Alert] = field(default_factory=dict)
    staging: dict[str, Staging] = field(default_factory=dict)
    name: str = ""
    path: Path = Path()
    added: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if not self.sources:
            raise ConfigError("a pipeline needs a source", key="sources", remedy="Add a [sources.NAME] table")
        seen = set(RESERVED)
        kinds: tuple[tuple[str, Iterable[str]], ...] = (
            ("sources", self.sources),
            ("products", self.products),
            ("products", self.views),
            ("staging", self.staging),
        )
        for kind, names in kinds:
            for name in names:
                if not NAME_PATTERN.fullmatch(name):
                    raise ConfigError("not a table name", key=f"{kind}.{name}", remedy="Use [a-z][a-z0-9_]*")
                if name in seen:
                    raise ConfigError("the name is taken", key=f"{kind}.{name}", remedy="Names of tables are unique")
                seen.add(name)
        derived = {**self.products, **self.views}
        for name, product in self.products.items():
            at = f"products.{name}"
            _known("source", product.source, self.sources, f"{at}.source")
            if product.operator == "join" and (product.right == product.source or product.right not in self.sources):
                raise ConfigError(
                    f"{product.right!r} is not another source",
                    key=f"{at}.right",
                    remedy=f"Sources: {', '.join(other for other in self.sources if other != product.source)}",
                )
            if product.confirm:
                _known("product", product.confirm.partition(".")[0], self.products, f"{at}.confirm")
            if not product.lateness and self.sources[product.source].lateness:
                self.products[name] = replace(product, lateness=self.sources[product.source].lateness)
        for name, source in self.sources.items():
            if source.answer is not None:
                _known("product", source.answer.product, derived, f"sources.{name}.answer.product")
        for name, copy in self.staging.items():
            _known("product", copy.product, derived, f"staging.{name}.product")
        for name, view in self.views.items():
            _known("product", view.base, derived, f"products.{name}.from")
        for name, alert in self.alerts.items():
            if not NAME_PATTERN.fullmatch(name):
                raise ConfigError("not a name", key=f"alerts.{name}", remedy="Use [a-z][a-z0-9_]*")
            _known("product", alert.product, derived, f"alerts.{name}.product")
        in_order(self.views)

    def products_of(self, source: str) -> list[Product]:
        """Products that derive from this source alone, in the order of the file."""
        return [p for p in self.products.values() if p.source == source and p.operator != "join"]

    @property
    def joins(self) -> list[Product]:
        """Products that derive from two sources, in the order of the file."""
        return [p for p in self.products.values() if p.operator == "join"]


def _known(kind: str, name: str, known: Mapping[str, Any], key: str) -> None:
    if name not in known:
        remedy = did_you_mean(name, known, f"{kind.capitalize()}s")
        raise ConfigError(f"there is no {kind} {name!r}", key=key, remedy=remedy)


def load_pipeline(folder: Path) -> Pipeline:
    """The pipeline in ``folder`` (its ``pipeline.toml`` and the SQL files that it names). Raises ConfigError."""
    path = folder / "pipeline.toml"
    raw = read_toml(path)
    for kind in ("sources", "products", "alerts", "staging"):
        for name, table in raw.get(kind, {}).items():
            if isinstance(table, dict):
                table["name"] = name
                if kind == "products" and isinstance(table.get("sql"), str) and table["sql"].endswith(".sql"):
                    table["sql"] = _sql(folder / table["sql"], key=f"products.{name}.sql", file=path)
    raw["path"] = str(path)
    raw["name"] = folder.name
    _set_views_apart(raw)
    try:
        pipeline = build(Pipeline, raw, file=path)
        check_product_keys(pipeline.products, raw.get("products", {}))
        check_tenants(pipeline)
    except ConfigError as error:
        key = re.sub(r"^views\.", "products.", error.key)  # a view is written as a product
        raise placed(error, path, key) from None
    return pipeline


def _set_views_apart(raw: dict[str, Any]) -> None:
    products = raw.get("products")
    if isinstance(products, dict):
        views = {name: table for name, table in products.items() if isinstance(table, dict) and "from" in table}
        raw["products"] = {name: table for name, table in products.items() if name not in views}
        raw["views"] = views


def _sql(path: Path, *, key: str, file: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        problem, remedy = f"{path.name} cannot be read: {error.strerror}", "Write the file, or name another"
        raise ConfigError(problem, key=key, remedy=remedy, file=file, line=line_of(file, key)) from None


class PipelineFiles:
    """The pipeline as its files declare it now.

    A wrong file of an added source is passed over and logged once; what the file declared before stays.

    Args:
        added: folder with a file for each added source; need not exist.

    Attributes:
        pipeline: as of the last :meth:`load`.
        problems: what is wrong with files of added sources, as of the last :meth:`load`.
    """

    pipeline: Pipeline

    def __init__(self, folder: Path, added: Path) -> None:
        self.problems: dict[Path, ConfigError] = {}
        self._folder = folder
        self._added = added
        self._stamps: list[tuple[Path, Stamp | None]] = []
        self._good: dict[Path, Declared] = {}

    @classmethod
    def of(cls, settings: Settings) -> PipelineFiles:
        """The files that a process's settings name. Raises ConfigError: there is no such pipeline."""
        return cls(settings.pipeline_folder(), settings.control_state / "sources")

    def load(self) -> Pipeline:
        """Read all files. Raises ConfigError: ``pipeline.toml`` or SQL that it names is wrong."""
        self._stamps = self._stamped()
        pipeline = load_pipeline(self._folder)
        told, self.problems = self.problems, {}
        good, self._good = self._good, {}
        for file in sorted(self._added.glob("*.toml")):
            try:
                declared = added_source(read_toml(file), file)
                pipeline = _with(pipeline, declared, file)
                self._good[file] = declared
            except ConfigError as error:
                self.problems[file] = error
                if str(told.get(file)) != str(error):
                    log.error("%s", error)
                if file in good:
                    with contextlib.suppress(ConfigError):  # pipeline.toml has the name now
                        pipeline = _with(pipeline, good[file], file)
                        self._good[file] = good[file]
        self.pipeline = pipeline
        return pipeline

    def changed(self) -> Pipeline | None:
        """The pipeline if a file has changed since it was read last; None also while ``pipeline.toml`` is wrong."""
        if self._stamped() == self._stamps:
            return None
        try:
            return self.load()
        except ConfigError as error:
            log.error("%s. What it said before stays", error)
            return None

    def _stamped(self) -> list[tuple[Path, Stamp | None]]:
        places = ((self._folder, "*.toml"), (self._folder, "*.sql"), (self._added, "*.toml"))
        return [(file, stamp_of(file)) for folder, pattern in places for file in sorted(folder.glob(pattern))]


def declared_pipeline(settings: Settings) -> Pipeline:
    """The pipeline that a process's settings name, with the sources that were added.

    Raises ConfigError: there is none, or its folder is wrong.
    """
    return PipelineFiles.of(settings).load()


def added_source(declaration: Mapping[str, Any], file: Path) -> Declared:
    """The source that a file of its own declares, with its products. Raises ConfigError."""
    tables = declaration.get("products", {})
    own = {key: value for key, value in declaration.items() if key != "products"}
    source = build(Source, {**own, "name": file.stem}, file=file)
    products = {}
    try:
        if not isinstance(tables, dict):
            raise ConfigError("this is a table of products", key="products", remedy="Write [products.NAME]")
        for name, table in tables.items():
            values = {"source": source.name, **table, "name": name} if isinstance(table, dict) else {}
            product = products[name] = build(Product, values, file=file, at=f"products.{name}")
            if product.source != source.name or product.operator == "join":
                raise _only_in_folder(f"products.{name}", "a product of another source")
        check_product_keys(products, tables)
        _check_harmless(source, products)
        for product in products.values():
            check_tenant(product)
        return _checked_source(source, products)
    except ConfigError as error:
        raise _placed(error, file) from None


def _checked_source(source: Source, products: Mapping[str, Product]) -> tuple[Source, dict[str, Product]]:
    """A source that is added at run time and its products, with their SQL as it was understood.

    Raises ConfigError: SQL in it is not one that a query over the source may have.
    """
    from lakehouse.contract.sql import filters, spark  # here: collectors need no parser as long as nothing is added

    payload = parse_ddl(source.schema)
    columns = (*map(column_of, payload), *source.enrich, *ENVELOPE_COLUMNS)

    def known(tree: exp.Expr) -> str:
        if payload:
            spark.check_columns(tree, columns)
        return spark.to_spark(tree)

    def query(sql: str) -> str:
        tree = spark.parse_query(sql)
        spark.check_relations(tree, [source.name])
        spark.check_functions(tree, spark.SOURCE_FUNCTIONS)
        return known(tree)

    def aggregate(sql: str) -> str:
        text = query(f"SELECT {sql} FROM {source.name}")  # noqa: S608 - it is parsed, and then looked at
        return text.removeprefix("SELECT ").removesuffix(f" FROM {source.name}")

    def condition(sql: str) -> str:
        return known(spark.parse_condition(sql, functions=spark.SOURCE_FUNCTIONS))

    def checked(sql: str, key: str, check: Callable[[str], str]) -> str:
        try:
            return check(sql) if sql else sql
        except (QueryRefused, FilterError) as refused:
            raise ConfigError(refused.problem, key=key, remedy=refused.remedy) from None

    def subscribers(where: str) -> str:
        filters.checked(where)
        return where

    expected = {
        name: replace(found, sql=checked(found.sql, f"expectations.{name}", condition))
        for name, found in source.expectations.items()
    }
    event_time = checked(source.event_time, "event_time", condition)
    kept = {}
    for name, product in products.items():
        at = f"products.{name}"
        checked(product.channel.where, f"{at}.channel.where", subscribers)
        sums = {n: checked(sql, f"{at}.aggregates.{n}", aggregate) for n, sql in product.aggregates.items()}
        kept[name] = replace(product, sql=checked(product.sql, f"{at}.sql", query), aggregates=sums)
    return replace(source, event_time=event_time, expectations=expected), kept


def _check_harmless(source: Source, products: Mapping[str, Product]) -> None:
    for index, spec in enumerate(source.collectors):
        if spec.kind not in COLLECTOR_KINDS:
            raise _only_in_folder(f"collectors[{index}].kind", "a collector of one's own")
        if any(value.startswith("$") for value in spec.headers.values()):
            raise _only_in_folder(f"collectors[{index}].headers", "a value from the environment")
    for name, reference in source.enrich.items():
        if reference.file:
            raise _only_in_folder(f"enrich.{name}.file", "reference data from a file")
    for index, feed in enumerate(source.feeds):
        if feed.private:
            raise _only_in_folder(f"feeds[{index}].private", "a feed from a private address")
    checks = {"table_expectations": source.table_expectations}
    checks |= {f"products.{name}.expectations": product.expectations for name, product in products.items()}
    if key := next((key for key, found in checks.items() if found), ""):
        raise _only_in_folder(key, "an expectation of a table")


def _only_in_folder(key: str, what: str) -> ConfigError:
    return ConfigError(f"{what} is not for a source that is added", key=key, remedy="Declare it in pipeline.toml")


def _with(pipeline: Pipeline, declared: Declared, file: Path) -> Pipeline:
    source, products = declared
    try:
        taken = [f"sources.{source.name}"] if source.name in pipeline.sources else []
        taken += [f"products.{name}" for name in products if name in pipeline.products]
        if taken:
            raise ConfigError("the name is taken", key=taken[0], remedy="Names of tables are unique")
        return replace(
            pipeline,
            sources={**pipeline.sources, source.name: source},
            products={**pipeline.products, **products},
            added=pipeline.added | {source.name},
        )
    except ConfigError as error:
        raise _placed(error, file) from None


def _placed(error: ConfigError, file: Path) -> ConfigError:
    """The error with its place in the file of an added source, where the source's keys have nothing before them."""
    key = error.key.removeprefix(f"sources.{file.stem}").removeprefix(".")
    return placed(error, file, key)

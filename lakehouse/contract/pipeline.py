"""The pipeline model: what ``conf/pipelines/NAME/pipeline.toml`` declares, as frozen dataclasses.

Loading a pipeline starts no JVM and connects to nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lakehouse.contract.alerts import Alert
from lakehouse.contract.errors import ConfigError
from lakehouse.contract.lake import ALERTS, LOADS, NAME_PATTERN, QUALITY, QUARANTINE, WARNINGS
from lakehouse.contract.product import OPERATORS, Product, check_keys
from lakehouse.contract.source import COLLECTOR_KINDS, CollectorSpec, Source, Template
from lakehouse.contract.staging import Staging
from lakehouse.contract.tomlfile import build, duration_ms, line_of, read_toml
from lakehouse.contract.views import View, in_order

__all__ = [
    "COLLECTOR_KINDS",
    "OPERATORS",
    "Alert",
    "CollectorSpec",
    "Pipeline",
    "Product",
    "Source",
    "Staging",
    "Template",
    "View",
    "load_pipeline",
]


@dataclass(frozen=True)
class Pipeline:
    """A folder's worth of sources and products.

    Attributes:
        name: the folder's name.
        sources: by name.
        products: by name.
        views: by name: the ``[products.NAME]`` that say ``from``.
        alerts: by name.
        staging: by name: copies of a part of a product, for slow readers.
        path: the ``pipeline.toml`` it was read from.
    """

    sources: dict[str, Source]
    products: dict[str, Product] = field(default_factory=dict)
    views: dict[str, View] = field(default_factory=dict)
    alerts: dict[str, Alert] = field(default_factory=dict)
    staging: dict[str, Staging] = field(default_factory=dict)
    name: str = ""
    path: Path = Path()

    def __post_init__(self) -> None:
        if not self.sources:
            raise ConfigError("a pipeline needs a source", key="sources", remedy="Add a [sources.NAME] table")
        seen: set[str] = {QUARANTINE, ALERTS, WARNINGS, QUALITY, LOADS}
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
        for name, product in self.products.items():
            if product.source not in self.sources:
                raise ConfigError(
                    f"there is no source {product.source!r}",
                    key=f"products.{name}.source",
                    remedy=f"Sources: {', '.join(self.sources)}",
                )
            if product.operator == "join" and (product.right == product.source or product.right not in self.sources):
                raise ConfigError(
                    f"{product.right!r} is not another source",
                    key=f"products.{name}.right",
                    remedy=f"Sources: {', '.join(other for other in self.sources if other != product.source)}",
                )
            if product.confirm and product.confirm.partition(".")[0] not in self.products:
                raise ConfigError(
                    f"there is no product {product.confirm.partition('.')[0]!r}",
                    key=f"products.{name}.confirm",
                    remedy=f"Products: {', '.join(self.products)}",
                )
            if not product.lateness and self.sources[product.source].lateness:
                self.products[name] = replace(product, lateness=self.sources[product.source].lateness)
        for name, source in self.sources.items():
            if source.answer is not None and source.answer.product not in {**self.products, **self.views}:
                raise ConfigError(
                    f"there is no product {source.answer.product!r}",
                    key=f"sources.{name}.answer.product",
                    remedy=f"Products: {', '.join(self.products)}",
                )
        for name, copy in self.staging.items():
            if copy.product not in self.products and copy.product not in self.views:
                raise ConfigError(
                    f"there is no product {copy.product!r}",
                    key=f"staging.{name}.product",
                    remedy=f"Products: {', '.join(self.products)}",
                )
        self._check_views()

    def _check_views(self) -> None:
        derived = {**self.products, **self.views}
        for kind, declared in (("products", self.views), ("alerts", self.alerts)):
            for name, item in declared.items():
                if not NAME_PATTERN.fullmatch(name):
                    raise ConfigError("not a name", key=f"{kind}.{name}", remedy="Use [a-z][a-z0-9_]*")
                key, wanted = ("product", item.product) if isinstance(item, Alert) else ("from", item.base)
                if wanted not in derived:
                    raise ConfigError(
                        f"there is no product {wanted!r}",
                        key=f"{kind}.{name}.{key}",
                        remedy=f"Products: {', '.join(derived)}",
                    )
        in_order(self.views)

    @property
    def bronze_retentions(self) -> dict[str, int]:
        """How long bronze is kept, in milliseconds, by source; not those that are kept for ever."""
        return {name: duration_ms(s.bronze_retention) for name, s in self.sources.items() if s.bronze_retention}

    def products_of(self, source: str) -> list[Product]:
        """Products that derive from this source alone, in the order of the file."""
        return [p for p in self.products.values() if p.source == source and p.operator != "join"]

    @property
    def joins(self) -> list[Product]:
        """Products that derive from two sources, in the order of the file."""
        return [p for p in self.products.values() if p.operator == "join"]


def load_pipeline(folder: Path) -> Pipeline:
    """The pipeline in ``folder`` (its ``pipeline.toml`` and the SQL files that it names).

    Raises:
        ConfigError: the file or something in it is wrong.
    """
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
        _check_keys(pipeline, raw.get("products", {}), path)
        return pipeline
    except ConfigError as error:
        if error.key.startswith("views."):  # a view is written as a product
            error.key = f"products.{error.key.removeprefix('views.')}"
        raise


def _check_keys(pipeline: Pipeline, products: dict[str, Any], file: Path) -> None:
    """Refuse keys that say nothing to the operator of their product; the dataclass no longer knows which were given."""
    for name, product in pipeline.products.items():
        try:
            check_keys(product.operator, products[name])
        except ConfigError as error:
            key, line = f"products.{name}.{error.key}", line_of(file, error.key)
            raise ConfigError(error.problem, key=key, remedy=error.remedy, file=file, line=line) from None


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
        raise ConfigError(f"{path.name} cannot be read: {error.strerror}", key=key, file=file) from None

"""The pipeline model: what ``conf/pipelines/NAME/pipeline.toml`` declares, as frozen dataclasses.

Loading a pipeline starts no JVM and connects to nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from lakehouse.contract.errors import ConfigError
from lakehouse.contract.lake import NAME_PATTERN, QUARANTINE
from lakehouse.contract.product import OPERATORS, Product
from lakehouse.contract.source import COLLECTOR_KINDS, CollectorSpec, Source, Template
from lakehouse.contract.tomlfile import build, read_toml

__all__ = [
    "COLLECTOR_KINDS",
    "OPERATORS",
    "CollectorSpec",
    "Pipeline",
    "Product",
    "Source",
    "Template",
    "load_pipeline",
]


@dataclass(frozen=True)
class Pipeline:
    """A folder's worth of sources and products.

    Attributes:
        name: the folder's name.
        sources: by name.
        products: by name.
        path: the ``pipeline.toml`` it was read from.
    """

    sources: dict[str, Source]
    products: dict[str, Product] = field(default_factory=dict)
    name: str = ""
    path: Path = Path()

    def __post_init__(self) -> None:
        if not self.sources:
            raise ConfigError("a pipeline needs a source", key="sources", remedy="Add a [sources.NAME] table")
        seen: set[str] = {QUARANTINE}
        for kind, names in (("sources", self.sources), ("products", self.products)):
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

    def products_of(self, source: str) -> list[Product]:
        """Products that derive from this source, in the order of the file."""
        return [p for p in self.products.values() if p.source == source]


def load_pipeline(folder: Path) -> Pipeline:
    """The pipeline in ``folder`` (its ``pipeline.toml`` and the SQL files that it names).

    Raises:
        ConfigError: the file or something in it is wrong.
    """
    path = folder / "pipeline.toml"
    raw = read_toml(path)
    for kind in ("sources", "products"):
        for name, table in raw.get(kind, {}).items():
            if isinstance(table, dict):
                table["name"] = name
                if kind == "products" and isinstance(table.get("sql"), str) and table["sql"].endswith(".sql"):
                    table["sql"] = _sql(folder / table["sql"], key=f"products.{name}.sql", file=path)
    raw["path"] = str(path)
    raw["name"] = folder.name
    return build(Pipeline, raw, file=path)


def _sql(path: Path, *, key: str, file: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path.name} cannot be read: {error.strerror}", key=key, file=file) from None

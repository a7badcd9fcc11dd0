"""The files that declare a pipeline, followed while a process runs: its folder, and sources added at run time.

``sources/NAME.toml`` in the control plane's state declares one source: the keys of ``[sources.NAME]`` and, as
``[products.PRODUCT]``, products of that source. Others may have written it, so it may not do all that ``pipeline.toml``
may: its SQL has the functions of a query of the run time, and it runs no code, opens no file and reads no environment.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lakehouse.contract.errors import ConfigError
from lakehouse.contract.pipeline.folder import Pipeline, check_product_keys, load_pipeline
from lakehouse.contract.pipeline.product import Product
from lakehouse.contract.pipeline.source import COLLECTOR_KINDS, Source
from lakehouse.contract.pipeline.tenants import check_tenant
from lakehouse.contract.settings import Settings
from lakehouse.contract.storage import Stamp, stamp_of
from lakehouse.contract.tomlfile import build, line_of, read_toml

log = logging.getLogger(__name__)

Declared = tuple[Source, dict[str, Product]]


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

    Raises:
        ConfigError: there is none, or its folder is wrong.
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
        # With a parser of SQL, which collectors do without as long as nothing is added.
        from lakehouse.contract.pipeline.added import checked_source

        return checked_source(source, products)
    except ConfigError as error:
        raise _placed(error, file) from None


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
    line = error.line or line_of(file, key)
    return ConfigError(error.problem, key=key, remedy=error.remedy, file=file, line=line)

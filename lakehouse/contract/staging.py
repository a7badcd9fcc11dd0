"""Staging tables of the pipeline model: copies of a part of a product, for readers that take their time."""

from __future__ import annotations

import re
from dataclasses import dataclass

from lakehouse.contract.errors import ConfigError

_COLUMN = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,62}")


@dataclass(frozen=True, slots=True)
class Staging:
    """``[staging.NAME]``: some columns and rows of a product's result, made anew or refreshed by a command.

    Attributes:
        product: whose rows they are; one that is stored as partials is read folded.
        columns: of them; empty: all. The product's key columns are always in it.
        where: SQL condition over the product's columns; empty: all rows.
        name: of the table, in layer gold.
    """

    product: str
    columns: tuple[str, ...] = ()
    where: str = ""
    name: str = ""

    def __post_init__(self) -> None:
        for column in self.columns:
            if not _COLUMN.fullmatch(column):
                raise ConfigError(f"{column!r} is no column name", key="columns", remedy="Use names of columns")

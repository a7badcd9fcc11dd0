"""Readers' API keys: who may read what. The file is of the kind that :mod:`lakehouse.contract.keys` describes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lakehouse.contract.errors import ConfigError
from lakehouse.contract.keys import Key, KeyFile
from lakehouse.contract.lake import Lake
from lakehouse.contract.settings import Settings
from serve.errors import FilterError
from serve.filters.parse import check, parsed
from serve.principal import Principal


@dataclass(frozen=True, slots=True, repr=False)
class ReaderKey(Key):
    """What is kept of a reader's key; its ``rate`` is requests a second, its ``connections`` are streams and polls.

    Attributes:
        tables: names that it may read; empty: all.
        rows: SQL condition by table (``*``: every other one) that its rows must fulfil.
        queries: may add and remove continuous queries and alerts. A query reads whole tables, and everybody's query is
            removed alike: so this goes with no limit to tables, rows or a tenant.
    """

    tables: tuple[str, ...] = ()
    rows: dict[str, str] = field(default_factory=dict)
    queries: bool = False

    def __post_init__(self) -> None:
        Key.__post_init__(self)
        if self.queries and (self.tables or self.rows or self.tenant):
            raise ConfigError(
                "a key that is limited to tables, rows or a tenant may not change queries, which read whole tables",
                key="queries",
                remedy="Make two keys: one with --queries alone, one with --table, --rows or --tenant",
            )
        for table, condition in self.rows.items():
            try:
                check(parsed(condition))
            except FilterError as error:
                raise ConfigError(str(error), key=f"rows.{table}", remedy="Write a condition as in where=") from None

    def principal(self) -> Principal:
        """Its rights."""
        tables = frozenset(self.tables) if self.tables else None
        return Principal(self.name or self.id, self.tenant, tables, self.rows, key=self.id, queries=self.queries)


def reader_keys(settings: Settings) -> KeyFile[ReaderKey]:
    """The file of the readers' keys."""
    named = settings.serve.keys
    return KeyFile(Path(named) if named else Lake(settings.lake).state / "readers.toml", ReaderKey)


def checked_rows(texts: Sequence[str]) -> dict[str, str]:
    """Conditions by table from ``TABLE=CONDITION``.

    Raises:
        ConfigError: it is not of this form, or a table comes twice.
    """
    found: dict[str, str] = {}
    for text in texts:
        table, equals, condition = text.partition("=")
        if not equals or not table.strip() or not condition.strip() or table.strip() in found:
            raise ConfigError(f"{text!r} is no condition", key="--rows", remedy="Write TABLE=CONDITION, once a table")
        found[table.strip()] = condition.strip()
    return found

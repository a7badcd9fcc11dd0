"""The words of the serving tier: a table as it is pushed, a commit's facts, a change. Data only; nothing here reads."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from lakehouse.contract.lake import CommitFacts
from lakehouse.contract.rows import Fold, Key, Row

DEFAULT_RETENTION_MS = 7 * 86_400_000
"""Delta keeps removed data files for a week and the log for a month, where a table does not say otherwise."""


@dataclass(frozen=True, slots=True)
class TableInfo:
    """A table as subscribers see it.

    Attributes:
        name: unique in the lake.
        table_id: id in the Delta metadata.
        columns: the columns that are sent, in the table's order (binary ones are not).
        key: the columns that identify a row.
        fold: how a column's partials are folded (lakehouse.contract.rows), for every column beside the key;
            empty for a table that holds each key once.
        types: Arrow types of ``columns``.
        order: of a fold by ``latest``: columns whose greatest values say which of a key's rows counts.
        retention_ms: for how long the table promises to keep what a position needs: its log and removed data files.
    """

    name: str
    table_id: str
    columns: tuple[str, ...]
    key: tuple[str, ...]
    fold: Mapping[str, str] = field(default_factory=dict)
    types: tuple[pa.DataType, ...] = ()
    retention_ms: int = DEFAULT_RETENTION_MS
    order: tuple[str, ...] = ()

    @property
    def folded(self) -> bool:
        """Whether rows of one key are partials."""
        return bool(self.fold)

    @property
    def folding(self) -> Fold:
        """How partials become rows."""
        return Fold(self.key, self.fold, self.order)

    def key_of(self, row: Row) -> Key:
        """The key's values in a row."""
        return tuple([row[self.columns.index(name)] for name in self.key])


@dataclass(frozen=True, slots=True)
class Change:
    """What one commit changed for a subscriber.

    Attributes:
        table: the table after the commit.
        version: the commit's version.
        upserts: rows that are new or have other values, in the order of their keys.
        deletes: keys that are gone, in order.
        facts: of the commit; ``through`` is the last one known.
        before: rows that upserts and deletes replace, by key; keys that are new are not in it.
        was: the table before the commit, where its columns were others: ``before`` has them.
        left: those of ``deletes`` that are in the table still and no longer in the subscriber's view of it.
        keys: of the upserts; empty: not worked out.
    """

    table: TableInfo
    version: int
    upserts: tuple[Row, ...]
    deletes: tuple[Key, ...]
    facts: CommitFacts
    before: Mapping[Key, Row] = field(default_factory=dict)
    was: TableInfo | None = None
    left: frozenset[Key] = frozenset()
    keys: tuple[Key, ...] = ()
    _indexes: dict[int, _Index] = field(default_factory=dict, init=False, compare=False, repr=False)

    def keyed(self) -> Iterator[tuple[Key, Row]]:
        """Upserts with their keys."""
        return zip(self.keys or map(self.table.key_of, self.upserts), self.upserts, strict=True)

    def pinned(self, column: int, values: Collection[Any]) -> tuple[list[tuple[Key, Row]], list[Key]]:
        """Of the upserts with their keys, and of the deletes, those whose column has or had one of the values: found
        without looking at the others, so that a change that a thousand filters ask for one value each is read once."""
        index = self._indexes.get(column)
        if index is None:
            index = self._indexes[column] = _Index(self, column)
        upserts = sorted({at for value in values for at in index.upserts.get(value, ())})
        deletes = sorted({at for value in values for at in index.deletes.get(value, ())})
        return [index.pairs[at] for at in upserts], [self.deletes[at] for at in deletes]

    def settle(self) -> None:
        """Everybody has asked :meth:`pinned`: what was kept for it is dropped, and made anew for who asks later."""
        self._indexes.clear()


class _Index:
    """Where a change's rows are, by the values that a column has now and had before."""

    def __init__(self, change: Change, column: int) -> None:
        self.pairs = list(change.keyed())
        self.upserts: dict[Any, list[int]] = {}
        self.deletes: dict[Any, list[int]] = {}
        before = change.before
        for at, (key, row) in enumerate(self.pairs):
            value, old = row[column], before.get(key)
            self.upserts.setdefault(value, []).append(at)
            if old is not None and old[column] != value:
                self.upserts.setdefault(old[column], []).append(at)
        for at, key in enumerate(change.deletes):
            if (old := before.get(key)) is not None:
                self.deletes.setdefault(old[column], []).append(at)


def in_order(key: Key) -> tuple[Any, ...]:
    """A sort key for keys: nulls last, so that every process sends a commit's rows in the same order."""
    return tuple([(value is None, value if value is not None else 0) for value in key])

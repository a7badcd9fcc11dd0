"""Rows and columns of a table as one subscriber sees them. Subscribers that ask alike share one view."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import orjson

from lakehouse.contract.lake import CommitFacts
from lakehouse.contract.rows import Key, Row
from lakehouse.contract.sql.closures import Columns, Pin, compile_condition, pin_of
from lakehouse.contract.sql.filters import MAX_LENGTH, conjunction, parse_condition
from serve.core.model import TableChange, TableInfo, in_order
from serve.core.position import WHOLE
from serve.errors import FilterError

MAX_COLUMNS = 1_000
FEW_ROWS = 8  # changes this small are scanned even if a condition pins a column


@dataclass(frozen=True, slots=True)
class SubscriberView:
    """What of a table is seen: plain data, identified by :attr:`id`."""

    where: str = ""  # the subscriber's condition, normalized
    columns: tuple[str, ...] = ()  # that it wants; empty: all
    select: str = ""  # a live aggregate, normalized
    guard: str = ""  # the principal's condition, normalized
    id: bytes = field(init=False)  # eight bytes that a position carries; WHOLE for the whole table

    def __post_init__(self) -> None:
        said = [self.where, self.columns, self.select, self.guard]
        ident = hashlib.sha256(orjson.dumps(said)).digest()[: len(WHOLE)] if any(said) else WHOLE
        object.__setattr__(self, "id", ident)

    @property
    def description(self) -> dict[str, Any]:
        """The view as ``snapshot`` and ``resumed`` describe it; without the principal's own condition."""
        return {name: text for name, text in (("where", self.where), ("select", self.select)) if text}

    def facts(self, facts: CommitFacts) -> CommitFacts:
        """What of a commit is told: who sees a part of the rows does not learn how many events others sent."""
        return replace(facts, through=None, events=0) if self.guard else facts


@contextmanager
def filter_errors(view: SubscriberView) -> Iterator[None]:
    """Turn any error of a filter into FilterError: it concerns that filter alone."""
    try:
        yield
    except FilterError:
        raise
    except Exception as error:
        if view.id == WHOLE:
            raise
        raise FilterError(f"it fails on a row: {error}") from error


def rows_view(
    table: TableInfo, where: str, columns: Sequence[str], guard: str, seen: TableInfo | None = None
) -> SubscriberView:
    """The view for a request; ``seen`` has the columns that ``where`` and ``columns`` may name; None: all.

    Raises FilterError: see :func:`lakehouse.contract.sql.filters.parse_condition`; or a column is missing.
    """
    known, named = Columns.of(table), Columns.of(seen or table)
    if len(columns) > MAX_COLUMNS or sum(map(len, columns)) > MAX_LENGTH:
        raise FilterError("these are too many columns")
    chosen = {named.resolve(name) for name in columns}
    wanted = tuple(name for name in table.columns if name in chosen or name in table.key) if chosen else ()
    view = SubscriberView(_text(where, named), () if wanted == table.columns else wanted, "", _text(guard, known))
    RowsView(view, table)  # kinds are checked here
    return view


def _text(condition: str, columns: Columns) -> str:
    tree = parse_condition(condition, columns)
    return "" if tree is None else tree.sql("duckdb")


def touched_rows(change: TableChange, pin: Pin | None) -> tuple[Iterable[tuple[Key, Row]], Sequence[Key]]:
    """Upserts with their keys, and deletes, that a view with this pin must look at."""
    if pin is None or len(change.upserts) + len(change.deletes) <= FEW_ROWS:
        return change.keyed(), change.deletes
    return change.pinned(pin.column, pin.values)


class RowsView:
    """Rows for which the condition is true, in the wanted columns. Raises FilterError if it does not fit the table."""

    def __init__(self, view: SubscriberView, table: TableInfo) -> None:
        self._view = view
        self._bind(table)

    def advance(self, change: TableChange) -> TableChange:
        """The change in the view: rows that are in it now, and keys gone from the table or out of the condition.

        Call it for every commit, in order. Raises FilterError: the columns no longer fit.
        """
        if change.was is not None:
            return self._rebound(change)
        if change.table is not self._source:
            self._bind(change.table)
        before = change.before
        if self._matches is None and self._project is None:
            return change
        matches, project = self._matches or _always, self._project or _same
        upserts, left = [], []
        changed, gone = touched_rows(change, self._pin)
        for key, row in changed:
            old = before.get(key)
            was_in = old is not None and matches(old) is True
            if matches(row) is True:
                seen = project(row)
                if not was_in or old is None or project(old) != seen:
                    upserts.append(seen)
            elif was_in:
                left.append(key)
        deletes = [key for key in gone if key in before and matches(before[key]) is True]
        if left:
            deletes = sorted([*deletes, *left], key=in_order)
        facts = self._view.facts(change.facts)
        return TableChange(self.table, change.version, tuple(upserts), tuple(deletes), facts, left=frozenset(left))

    def source(self, rows: Mapping[Key, Row]) -> list[tuple[Key, Row]]:
        """Input of :meth:`rows`: the table's current rows."""
        return list(rows.items())

    def rows(self, pairs: Iterable[tuple[Key, Row]]) -> Iterable[tuple[Key, Row]]:
        """The view's rows by key, for part of :meth:`source`."""
        matches, project = self._matches, self._project
        if matches is not None:
            pairs = [pair for pair in pairs if matches(pair[1]) is True]
        return pairs if project is None else [(key, project(row)) for key, row in pairs]

    def _rebound(self, change: TableChange) -> TableChange:
        """The table's columns have changed and every row was sent again: compare with the old condition."""
        were_in = self._matches or _always
        self._bind(change.table)
        are_in = self._matches or _always
        inside = {key: row for key, row in change.keyed() if are_in(row) is True}
        gone = [key for key, row in change.before.items() if were_in(row) is True and key not in inside]
        return replace(
            change,
            table=self.table,
            upserts=tuple(map(self._project or _same, inside.values())),
            deletes=tuple(sorted(gone, key=in_order)),
            before={},
            facts=self._view.facts(change.facts),
            left=frozenset(gone) - frozenset(change.deletes),
            keys=(),
        )

    def _bind(self, table: TableInfo) -> None:
        """Compile the view for one description of the table."""
        known = Columns.of(table)
        condition = conjunction(parse_condition(self._view.guard, known), parse_condition(self._view.where, known))
        matches = None if condition is None else compile_condition(condition, known)
        pin = None if condition is None else pin_of(condition, known)
        seen, project = table, None
        if self._view.columns:
            seen, at = table.narrowed({known.resolve(name) for name in self._view.columns} | set(table.key))
            project = _projection(at)
        self._source, self.table = table, seen
        self._matches, self._project, self._pin = matches, project, pin


def rows_before(rows: Mapping[Key, Row], changes: Sequence[TableChange]) -> dict[Key, Row]:
    """The rows before these changes, which are consecutive and end at ``rows``."""
    earlier = dict(rows)
    for change in reversed(changes):
        for key in change.keys or map(change.table.key_of, change.upserts):
            if key in change.before:
                earlier[key] = change.before[key]
            else:
                earlier.pop(key, None)
        for key in change.deletes:
            earlier[key] = change.before[key]
    return earlier


def _projection(at: Sequence[int]) -> Callable[[Row], Row]:
    return lambda row: tuple([row[i] for i in at])


def _always(_: Row) -> bool:
    return True


def _same(row: Row) -> Row:
    return row

"""A table's current rows in memory, and what a commit changes in them. No I/O: rows of files come from the caller.

Two kinds of table. In one, each key stands once, and a commit replaces files: keys of removed files that no added file
holds are gone. In the other (``millrace.fold``) rows are partials of a key and a commit adds partials: they are folded
into the row. What cannot be told from the commit alone (files removed from a folded table, files nobody knows, another
schema) is answered by a state loaded afresh and compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from lakehouse.contract.deltalog import AddedFile, Commit
from lakehouse.contract.lake import CommitFacts
from lakehouse.contract.rows import Key, Row
from serve.model import Change, TableInfo, in_order

_SAME_SUM = 1e-12  # floating-point sums in another order differ by this much, and mean the same


@dataclass(slots=True)
class TableState:
    """The rows at one version.

    Attributes:
        table: the table's description at this version.
        version: Delta version.
        facts: of the last commit; ``through`` and ``newest_at`` are the last ones known.
        rows: current row by key.
        files: keys that each live file holds; empty for a folded table.
    """

    table: TableInfo
    version: int
    facts: CommitFacts
    rows: dict[Key, Row]
    files: dict[str, frozenset[Key]] = field(default_factory=dict)

    def apply(self, step: Step) -> Change:
        """Move to the step's version, and say what changed."""
        was = None if step.table.columns == self.table.columns else self.table
        self.table, self.version = step.table, step.version
        self.facts = carried(self.facts, step.facts)
        before = {key: self.rows[key] for key in step.upserts if key in self.rows}
        for key in step.deletes:
            before[key] = self.rows.pop(key)
        self.rows.update(step.upserts)
        for path in step.files_removed:
            self.files.pop(path, None)
        self.files.update(step.files_added)
        keys = tuple(sorted(step.upserts, key=in_order))
        return Change(
            step.table,
            step.version,
            tuple([step.upserts[key] for key in keys]),
            tuple(sorted(step.deletes, key=in_order)),
            replace(step.facts, through=self.facts.through),
            before,
            was,
            keys=keys,
        )


@dataclass(frozen=True, slots=True)
class Step:
    """What one commit does to a state: prepared beside it, applied in one go."""

    table: TableInfo
    version: int
    facts: CommitFacts
    upserts: Mapping[Key, Row] = field(default_factory=dict)
    deletes: tuple[Key, ...] = ()
    files_added: Mapping[str, frozenset[Key]] = field(default_factory=dict)
    files_removed: tuple[str, ...] = ()


class NeedsLoad(Exception):
    """The commit alone does not say what the rows are now: load the version and :func:`compare`."""


def carried(before: CommitFacts, after: CommitFacts) -> CommitFacts:
    """Facts of ``after`` where it says something, else of ``before``: maintenance commits say nothing of events."""
    return replace(
        after,
        through=before.through if after.through is None else after.through,
        newest_at=before.newest_at if after.newest_at is None else after.newest_at,
    )


def step_of(state: TableState, commit: Commit, read: Callable[[AddedFile], list[Row]]) -> Step:
    """What the commit changes.

    Args:
        state: the state before it; only read.
        commit: the next version.
        read: rows of a data file in the table's columns.

    Raises:
        NeedsLoad: see :func:`compare`.
    """
    if state.table.folded:
        return _fold_step(state, commit, read)
    return _upsert_step(state, commit, read)


def compare(state: TableState, loaded: TableState, facts: CommitFacts) -> Step:
    """The step from ``state`` to the state ``loaded`` at a later version.

    Args:
        state: the state before.
        loaded: the state after.
        facts: of the commit.
    """
    table = loaded.table
    if table.columns != state.table.columns:
        changed = dict(loaded.rows)
    else:
        changed = {
            key: row
            for key, row in loaded.rows.items()
            if key not in state.rows or not _same(table, state.rows[key], row)
        }
    return Step(
        table=table,
        version=loaded.version,
        facts=facts,
        upserts=changed,
        deletes=tuple(key for key in state.rows if key not in loaded.rows),
        files_added=loaded.files,
        files_removed=tuple(path for path in state.files if path not in loaded.files),
    )


def _fold_step(state: TableState, commit: Commit, read: Callable[[AddedFile], list[Row]]) -> Step:
    if any(file.data_change for file in commit.removed):
        raise NeedsLoad
    partials = [row for file in commit.added if file.data_change for row in read(file)]
    table = state.table
    totals = table.folding.rows(table.columns, partials, state.rows)
    changed = {key: row for key, row in totals.items() if state.rows.get(key) != row}
    return Step(table, commit.version, CommitFacts.of(table.name, commit), changed)


def _upsert_step(state: TableState, commit: Commit, read: Callable[[AddedFile], list[Row]]) -> Step:
    if any(file.path not in state.files for file in commit.removed):
        raise NeedsLoad
    table = state.table
    new: dict[Key, Row] = {}
    files_added: dict[str, frozenset[Key]] = {}
    moved = [state.files[file.path] for file in commit.removed if not file.data_change]
    for file in commit.added:
        if not file.data_change and sum(not other.data_change for other in commit.added) == 1:
            files_added[file.path] = frozenset().union(*moved)
            continue
        rows = {table.key_of(row): row for row in read(file)}
        files_added[file.path] = frozenset(rows)
        if file.data_change:
            new.update(rows)
    gone = [state.files[file.path] for file in commit.removed if file.data_change]
    deletes = frozenset().union(*gone) - new.keys() if gone else frozenset()
    removed = tuple(file.path for file in commit.removed)
    if deletes and any(deletes & keys for path, keys in state.files.items() if path not in removed):
        raise NeedsLoad  # a key that stands in two files: against the contract, and still to be answered rightly
    changed = {key: row for key, row in new.items() if state.rows.get(key) != row}
    facts = CommitFacts.of(table.name, commit)
    return Step(table, commit.version, facts, changed, tuple(deletes), files_added, removed)


def _same(table: TableInfo, old: Row, new: Row) -> bool:
    if old == new:
        return True
    for name, a, b in zip(table.columns, old, new, strict=True):
        sums = table.fold.get(name) == "sum" and isinstance(a, float) and isinstance(b, float)
        if a != b and not (sums and math.isclose(a, b, rel_tol=_SAME_SUM)):
            return False
    return True

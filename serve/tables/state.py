"""A table's current rows in memory, and what a commit changes in them. No I/O: the caller reads the files.

There are two kinds of table. In one, each key occurs once and a commit replaces files: keys of removed files that no
added file holds are gone. In the other (``millrace.fold``) rows are partials of a key, and a commit adds partials to be
folded. Some changes cannot be told from the commit alone: files removed from a table of partials, unknown files,
another schema. Then the state is loaded again and compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from lakehouse.contract.deltalog import AddedFile, Commit
from lakehouse.contract.lake import CommitFacts
from lakehouse.contract.rows import Key, Row
from serve.core.model import TableChange, TableInfo, in_order

_SAME_SUM = 1e-12  # float sums in another order may differ by this much


@dataclass(slots=True)
class TableState:
    """The rows at one version.

    Attributes:
        table: the table's description at this version.
        version: Delta version.
        facts: of the last commit; ``through`` and ``newest_at`` are the last ones known.
        rows: by key.
        files: keys in each live file; empty for a table of partials.
    """

    table: TableInfo
    version: int
    facts: CommitFacts
    rows: dict[Key, Row]
    files: dict[str, frozenset[Key]] = field(default_factory=dict)

    def apply(self, step: StateStep) -> TableChange:
        """Move to the step's version; returns what changed."""
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
        return TableChange(
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
class StateStep:
    """The effect of one commit on a state: prepared beside it, applied at once."""

    table: TableInfo
    version: int
    facts: CommitFacts
    upserts: Mapping[Key, Row] = field(default_factory=dict)
    deletes: tuple[Key, ...] = ()
    files_added: Mapping[str, frozenset[Key]] = field(default_factory=dict)
    files_removed: tuple[str, ...] = ()


class NeedsLoad(Exception):
    """The commit alone does not tell the rows: load the version and :func:`compare`."""


def carried(before: CommitFacts, after: CommitFacts) -> CommitFacts:
    """``after``, with gaps filled from ``before``: maintenance commits say nothing of events."""
    return replace(
        after,
        through=before.through if after.through is None else after.through,
        newest_at=before.newest_at if after.newest_at is None else after.newest_at,
    )


def step_of(state: TableState, commit: Commit, read: Callable[[AddedFile], list[Row]]) -> StateStep:
    """What the commit changes.

    Args:
        state: before the commit; only read.
        commit: the next version.
        read: returns rows of a data file in the table's columns.

    Raises:
        NeedsLoad: see :func:`compare`.
    """
    if state.table.folded:
        return _fold_step(state, commit, read)
    return _upsert_step(state, commit, read)


def compare(state: TableState, loaded: TableState, facts: CommitFacts) -> StateStep:
    """The step from ``state`` to ``loaded``, the state at a later version."""
    table = loaded.table
    if table.columns != state.table.columns:
        changed = dict(loaded.rows)
    else:
        changed = {
            key: row
            for key, row in loaded.rows.items()
            if key not in state.rows or not _same(table, state.rows[key], row)
        }
    return StateStep(
        table=table,
        version=loaded.version,
        facts=facts,
        upserts=changed,
        deletes=tuple(key for key in state.rows if key not in loaded.rows),
        files_added=loaded.files,
        files_removed=tuple(path for path in state.files if path not in loaded.files),
    )


def _fold_step(state: TableState, commit: Commit, read: Callable[[AddedFile], list[Row]]) -> StateStep:
    if any(file.data_change for file in commit.removed):
        raise NeedsLoad
    partials = [row for file in commit.added if file.data_change for row in read(file)]
    table = state.table
    totals = table.folding.rows(table.columns, partials, state.rows)
    changed = {key: row for key, row in totals.items() if state.rows.get(key) != row}
    return StateStep(table, commit.version, CommitFacts.of(table.name, commit), changed)


def _upsert_step(state: TableState, commit: Commit, read: Callable[[AddedFile], list[Row]]) -> StateStep:
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
        raise NeedsLoad  # a key in two files breaks the contract; the answer must be right all the same
    changed = {key: row for key, row in new.items() if state.rows.get(key) != row}
    facts = CommitFacts.of(table.name, commit)
    return StateStep(table, commit.version, facts, changed, tuple(deletes), files_added, removed)


def _same(table: TableInfo, old: Row, new: Row) -> bool:
    if old == new:
        return True
    for name, a, b in zip(table.columns, old, new, strict=True):
        sums = table.fold.get(name) == "sum" and isinstance(a, float) and isinstance(b, float)
        if a != b and not (sums and math.isclose(a, b, rel_tol=_SAME_SUM)):
            return False
    return True

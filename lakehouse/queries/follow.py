"""A product's rows, one version after the other, from its log: only the files that a commit adds are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from lakehouse.contract import lake as names
from lakehouse.contract.deltalog import LogFollower, TableGone, TableUnreadable
from lakehouse.contract.lake import TableRef
from lakehouse.contract.rows import Fold, names_in
from lakehouse.queries.errors import QueryError


@dataclass(slots=True)
class Facts:
    """What the commits since the last :meth:`take` say of the events they hold, as a commit's own keys.

    Attributes:
        through: COMMIT_THROUGH and COMMIT_BRONZE as the newest commit that has them says.
        newest: received_at of the newest event that any version held, ms since the epoch; never goes back.
        events, oldest: summed and least since the last take.
    """

    through: dict[str, str] = field(default_factory=dict)
    newest: int = 0
    events: int = 0
    oldest: int | None = None

    def add(self, info: Mapping[str, Any]) -> None:
        """Take in a commit's commitInfo."""
        for key in (names.COMMIT_THROUGH, names.COMMIT_BRONZE):
            if info.get(key):
                self.through[key] = str(info[key])
        self.events += int(info.get(names.COMMIT_EVENTS) or 0)
        if info.get(names.COMMIT_NEWEST):
            self.newest = max(self.newest, int(info[names.COMMIT_NEWEST]))
        if info.get(names.COMMIT_OLDEST):
            oldest = int(info[names.COMMIT_OLDEST])
            self.oldest = oldest if self.oldest is None else min(self.oldest, oldest)

    def take(self) -> dict[str, str]:
        """The same as keys of a derived table's commit; counting begins anew."""
        found = {**self.through, names.COMMIT_EVENTS: str(self.events)}
        if self.oldest is not None:
            found |= {names.COMMIT_OLDEST: str(self.oldest), names.COMMIT_NEWEST: str(self.newest)}
        self.events, self.oldest = 0, None
        return found


class Follower:
    """One product's table. Attributes are those of the version that it stands at.

    Attributes:
        version: Delta version; -1 before :meth:`open`.
        table_id: of the Delta metadata: another one is another table.
        key: columns that name a row.
        schema: of the rows as stored.
    """

    def __init__(self, table: TableRef, max_rows: int) -> None:
        self.table = table
        self.version = -1
        self.table_id = ""
        self.key: tuple[str, ...] = ()
        self.schema: pa.Schema = pa.schema([])
        self.facts = Facts()
        self._max_rows = max_rows
        self._follower = LogFollower(table.path)
        self._fold: Fold | None = None
        self._files: dict[str, pa.Table] = {}
        self._count = 0
        self._result: pa.Table | None = None

    def open(self, version: int | None = None) -> None:
        """Stand at a version, the newest by default.

        Raises:
            QueryError: the table cannot be read, or has too many rows.
        """
        try:
            self._follower.open()  # first: a table that replaces this one from now on is noticed
            delta = DeltaTable(str(self.table.path), version=version)
            metadata = delta.metadata()
            if metadata.partition_columns:
                raise QueryError(self.table.name, "a partitioned table cannot be looked at")
            self.table_id, self.version = str(metadata.id), delta.version()
            self.key = names_in(metadata.configuration.get(names.PROPERTY_KEY))
            self._fold = Fold.from_properties(metadata.configuration)
            self.schema = pa.schema(delta.schema().to_arrow())
            self._files, self._count = {}, 0
            self._result = None
            for path in pa.table(delta.get_add_actions(flatten=True))["path"].to_pylist():
                self._read(path)
            for info in reversed(delta.history(limit=50)):
                if int(info.get("version", 0)) <= self.version:
                    self.facts.add(info)
            self.facts.take()
        except (DeltaError, OSError, ValueError) as error:
            raise QueryError(self.table.name, f"it cannot be read: {str(error).splitlines()[0]}") from None

    def close(self) -> None:
        """Let go of the log."""
        self._follower.close()

    def replaced(self) -> bool:
        """Whether the table was dropped, or built again under its name."""
        try:
            self._follower.check()
        except TableGone:
            return True
        return False

    def lost(self) -> bool:
        """Whether the next version's commit is gone although there is a later one."""
        try:
            self._follower.check_gap(self.version + 1)
        except TableGone:
            return True
        return False

    def step(self) -> bool:
        """Go to the next version; False if there is none yet.

        If files of that version were removed meanwhile, go to the newest.

        Raises:
            QueryError: as :meth:`open`.
        """
        if not self._follower.log.has(self.version + 1):
            return False
        try:
            commit = self._follower.read(self.version + 1)
        except (TableGone, ValueError):  # replaced, which the next turn finds; or not written to its end
            return False
        except TableUnreadable as error:
            raise QueryError(self.table.name, error.problem, error.remedy) from None
        removed = [file.path for file in commit.removed]
        if commit.metadata or (removed and (self._fold or not self._files.keys() >= set(removed))):
            self._open_at(self.version + 1)
            return True
        for path in removed:
            self._count -= self._files.pop(path).num_rows
        try:
            for file in commit.added:
                self._read(file.path)
        except FileNotFoundError:  # vacuumed meanwhile
            self._open_at(None)
            return True
        self.facts.add(commit.info)
        if commit.added or removed:
            self._result = None
        self.version += 1
        return True

    def rows(self) -> pa.Table:
        """The rows at this version, partials folded."""
        if self._result is None:
            tables = [table for table in self._files.values() if table.num_rows]
            found = pa.concat_tables(tables) if tables else self.schema.empty_table()
            if self._fold is not None:
                found = self._fold.arrow(found)
                self._files = dict.fromkeys(self._files, self.schema.empty_table())
                self._files[""] = found  # what they fold to, so that the next version folds only what it adds
                self._count = found.num_rows
            self._result = found
        return self._result

    def _open_at(self, version: int | None) -> None:
        before = self.facts.newest
        self.open(version)
        self.facts.newest = max(before, self.facts.newest)

    def _read(self, path: str) -> None:
        rows = pq.read_table(self.table.path / unquote(path))
        columns = [
            rows[name].cast(kind) if name in rows.schema.names else pa.nulls(rows.num_rows, kind)
            for name, kind in zip(self.schema.names, self.schema.types, strict=True)
        ]
        self._files[path] = pa.table(columns, schema=self.schema)
        self._count += rows.num_rows
        if self._count > self._max_rows:
            raise QueryError(
                self.table.name,
                f"it has more than {self._max_rows:,} rows, too many to be looked at again and again",
                "Derive a smaller product, or raise queries.max_base_rows",
            )

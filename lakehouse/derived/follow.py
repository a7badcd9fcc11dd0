"""A product's rows, one version after the other, from its log: only the files that a commit adds are read."""

from __future__ import annotations

from dataclasses import replace
from urllib.parse import unquote

import pyarrow as pa
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from lakehouse.contract import lake as names
from lakehouse.contract.deltalog import Commit, LogFollower, TableGone, TableUnreadable
from lakehouse.contract.lake import CommitFacts, TableRef
from lakehouse.contract.rows import Fold, names_in
from lakehouse.contract.storage import parquet_file
from lakehouse.errors import QueryError


class Follower:
    """One product's table. Attributes are those of the version that it stands at.

    Attributes:
        version: Delta version; -1 before :meth:`open`.
        table_id: of the Delta metadata: another one is another table.
        schema: of the rows as stored.
        facts: what commits since the last :meth:`take_facts` say of their events; ``newest_at`` never goes back.
    """

    def __init__(self, table: TableRef, max_rows: int) -> None:
        self.table = table
        self.version = -1
        self.table_id = ""
        self.key: tuple[str, ...] = ()
        self.schema: pa.Schema = pa.schema([])
        self.facts = CommitFacts(0)
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
                    self.facts = CommitFacts.of(self.table.name, Commit(self.version, (), (), info)).after(self.facts)
            self.take_facts()
        except (DeltaError, OSError, ValueError, TableUnreadable) as error:
            raise QueryError(self.table.name, f"it cannot be read: {str(error).splitlines()[0]}") from None

    def close(self) -> None:
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
        """Go to the next version; False if there is none yet. Raises QueryError.

        If files of that version were removed meanwhile, go to the newest.
        """
        try:
            if (commit := self._follower.look(self.version + 1)) is None:
                return False
            facts = CommitFacts.of(self.table.name, commit)
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
        self.facts = facts.after(self.facts)
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

    def take_facts(self) -> dict[str, str]:
        """The facts as keys of a derived table's commit; events are counted anew."""
        found, self.facts = self.facts.keys(), replace(self.facts, events=0, oldest_at=None)
        return found

    def _open_at(self, version: int | None) -> None:
        before = self.facts
        self.open(version)
        self.facts = self.facts.after(replace(before, events=0, oldest_at=None))

    def _read(self, path: str) -> None:
        rows = parquet_file(self.table.path / unquote(path)).read()
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

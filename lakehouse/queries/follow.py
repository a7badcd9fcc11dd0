"""A product's rows, one version after the other, from its log: only the files that a commit adds are read."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from lakehouse.contract import lake as names
from lakehouse.contract.lake import TableRef
from lakehouse.queries.engine import Engine
from lakehouse.queries.errors import QueryError

log = logging.getLogger(__name__)


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
        self._fold: dict[str, str] = {}
        self._files: dict[str, pa.Table] = {}
        self._count = 0
        self._log_inode = 0
        self._result: pa.Table | None = None

    def open(self, version: int | None = None) -> None:
        """Stand at a version, the newest by default.

        Raises:
            QueryError: the table cannot be read, or has too many rows.
        """
        try:
            delta = DeltaTable(str(self.table.path), version=version)
            metadata = delta.metadata()
            if metadata.partition_columns:
                raise QueryError(self.table.name, "a partitioned table cannot be looked at")
            self._log_inode = self._log_folder().stat().st_ino
            self.table_id, self.version = str(metadata.id), delta.version()
            found = metadata.configuration
            self.key = tuple(k for k in found.get(names.PROPERTY_KEY, "").split(",") if k)
            self._fold = json.loads(found.get(names.PROPERTY_FOLD) or "{}")
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

    def replaced(self) -> bool:
        """Whether the table was dropped, or built again under its name."""
        try:
            return self._log_folder().stat().st_ino != self._log_inode
        except FileNotFoundError:
            return True

    def step(self) -> bool:
        """Go to the next version; False where there is none yet.

        Where the log has been cleaned up to beyond it, go to the newest.

        Raises:
            QueryError: as :meth:`open`.
        """
        try:
            actions = _actions(self._commit(self.version + 1))
        except FileNotFoundError:
            return False
        except ValueError:  # not written to its end, on some file systems
            return False
        if any("metaData" in action for action in actions):
            self._open_at(self.version + 1)
            return True
        added = [a["add"]["path"] for a in actions if "add" in a]
        removed = [a["remove"]["path"] for a in actions if "remove" in a]
        if any(path not in self._files for path in removed) or (removed and self._fold):
            self._open_at(self.version + 1)
            return True
        for path in removed:
            self._count -= self._files.pop(path).num_rows
        try:
            for path in added:
                self._read(path)
        except FileNotFoundError:  # vacuumed meanwhile: this version can be seen no more
            self._open_at(None)
            return True
        for action in actions:
            if "commitInfo" in action:
                self.facts.add(action["commitInfo"])
        if added or removed:
            self._result = None
        self.version += 1
        return True

    def behind(self) -> bool:
        """Whether there is a newer version."""
        return self._commit(self.version + 1).exists()

    def lost(self) -> bool:
        """Whether the next version's commit is gone although a later one is there."""
        if self.behind():
            return False
        return any(int(p.stem) > self.version + 1 for p in self._log_folder().glob("[0-9]*.json"))

    def rows(self, engine: Engine) -> pa.Table:
        """The rows at this version, partials folded."""
        if self._result is None:
            tables = [table for table in self._files.values() if table.num_rows]
            found = pa.concat_tables(tables) if tables else self.schema.empty_table()
            if self._fold:
                found = engine.fold(self.table.name, found, self.key, self._fold)
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

    def _log_folder(self) -> Path:
        return self.table.path / "_delta_log"

    def _commit(self, version: int) -> Path:
        return self._log_folder() / f"{version:020d}.json"


def _actions(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]

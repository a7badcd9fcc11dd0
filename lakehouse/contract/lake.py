"""Where things lie below the lake's root. Names of tables are unique across layers.

::

    LAKE/bronze/SOURCE          raw events, append-only: the record
    LAKE/silver/PRODUCT         LAKE/gold/PRODUCT
    LAKE/silver/quarantine      rejected events with their reason (derived from bronze like any product)
    LAKE/gold/alerts            conditions over products: raised and cleared
    LAKE/_millrace/             small state that all machines share: locks, clocks, keys, queries of the run time
    WORK/                       of one machine: checkpoints, indexes, message logs, embedded broker, state of its parts

In a lake on this machine's file system WORK is ``LAKE/_millrace`` too. All that is in it follows from the tables and
from Kafka, but for events in a message log that Kafka has not acknowledged.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import orjson

from lakehouse.contract.deltalog import Commit, DeltaLog, TableUnreadable
from lakehouse.contract.errors import MillraceError
from lakehouse.contract.storage import LakePath, StorePath, create_whole

if TYPE_CHECKING:
    import pyarrow as pa

    from lakehouse.contract.settings import Settings

LAYERS: tuple[str, ...] = ("bronze", "silver", "gold")
QUARANTINE = "quarantine"
ALERTS = "alerts"
LOADS = "loads"  # silver: files that the batch loader was given, and what became of them
WARNINGS = "warnings"  # silver: events that count although an expectation of action "warn" is not met
QUALITY = "quality"  # gold: what expectations of tables and batches found, run by run
RESERVED = (QUARANTINE, ALERTS, WARNINGS, QUALITY, LOADS)
FILE_TOPIC = "file:"  # begins the topic of bronze rows from files; no Kafka topic has a colon in its name
_REMOTE_LOOK_S = 1.0
NAME_PATTERN = re.compile(r"[a-z][a-z0-9_]{0,62}")

# Properties in a Delta table's metadata: a table says itself how it is to be read.
PROPERTY_KEY = "millrace.key"  # comma-separated key columns of one result row
PROPERTY_FOLD = "millrace.fold"  # JSON {column: "sum"|"min"|"max"|"latest"}: rows of one key are partials
PROPERTY_ORDER = "millrace.order"  # of a fold by "latest": comma-separated columns whose greatest values win
PROPERTY_STAGING = "millrace.staging"  # the product that a staging table is a copy of
PROPERTY_PIPELINE = "millrace.pipeline"
PROPERTY_OPERATOR = "millrace.operator"  # JSON {"operator": …} with the parameters that its sketches depend on
PROPERTY_POSITIONS = "millrace.positions"  # ms that a subscriber's position lives: versions and files are kept so long
PROPERTY_DECLARATION = "millrace.declaration"  # fingerprint of what the pipeline declares the rows to be made of

# Keys in a product commit's commitInfo.
COMMIT_THROUGH = "millrace.through"  # JSON {"topic/partition": next offset}: every event before it is in this version
COMMIT_EVENTS = "millrace.events"  # events this commit added to the product
COMMIT_OLDEST = "millrace.oldest"  # received_at of the oldest and the newest of those events, ms since the epoch
COMMIT_NEWEST = "millrace.newest"
COMMIT_CLOCK = "millrace.clock"  # newest event time so far, µs since the epoch (lakehouse.gold.store.BatchMark)
COMMIT_BATCH = "millrace.batch"  # "APPLICATION/NUMBER", its Delta application transaction
COMMIT_BRONZE = "millrace.bronze"  # bronze version that the commit reaches; of a join, two with a comma between them


@dataclass(frozen=True, slots=True)
class CommitFacts:
    """What a product commit says of the events in it.

    Attributes:
        through: next offset by ``topic/partition``: every event before it is in the table. None if it does not say.
        oldest_at: when a collector received the oldest of them, ms since the epoch.
        newest_at: the same of the newest.
        bronze: the bronze version that the commit reaches; of a join JSON, see :data:`COMMIT_BRONZE`.
    """

    committed_at: int
    through: Mapping[str, int] | None = None
    events: int = 0
    oldest_at: int | None = None
    newest_at: int | None = None
    bronze: str = ""

    @classmethod
    def of(cls, table: str, commit: Commit) -> CommitFacts:
        """The facts in a commit's commitInfo. Raises TableUnreadable."""
        info = commit.info
        try:
            return cls(
                committed_at=int(info.get("timestamp") or 0),
                through=orjson.loads(info[COMMIT_THROUGH]) if info.get(COMMIT_THROUGH) else None,
                events=int(info.get(COMMIT_EVENTS) or 0),
                oldest_at=_optional_int(info.get(COMMIT_OLDEST)),
                newest_at=_optional_int(info.get(COMMIT_NEWEST)),
                bronze=str(info.get(COMMIT_BRONZE) or ""),
            )
        except (ValueError, TypeError) as error:
            problem = f"commitInfo of version {commit.version} cannot be read: {error}"
            raise TableUnreadable(table, problem) from None

    def after(self, earlier: CommitFacts) -> CommitFacts:
        """Both commits as one."""
        return CommitFacts(
            self.committed_at,
            earlier.through if self.through is None else self.through,
            earlier.events + self.events,
            min((at for at in (earlier.oldest_at, self.oldest_at) if at is not None), default=None),
            max((at for at in (earlier.newest_at, self.newest_at) if at is not None), default=None),
            self.bronze or earlier.bronze,
        )

    def keys(self) -> dict[str, str]:
        """The facts as a commit's own keys, for a table that derives from these commits."""
        found = {COMMIT_EVENTS: str(self.events)}
        if self.through is not None:
            found[COMMIT_THROUGH] = json.dumps(self.through)
        if self.bronze:
            found[COMMIT_BRONZE] = self.bronze
        if self.oldest_at is not None:
            found |= {COMMIT_OLDEST: str(self.oldest_at), COMMIT_NEWEST: str(self.newest_at)}
        return found


def _optional_int(value: Any) -> int | None:
    return int(value) if value not in (None, "") else None


class UnknownTable(MillraceError):
    """No such table in this lake."""

    def __init__(self, name: str, known: list[str]) -> None:
        super().__init__(name)
        self.name = name
        self.known = known

    def __str__(self) -> str:
        return f"no table {self.name!r}; there are: {', '.join(self.known) or 'none yet'}"


@dataclass(frozen=True, slots=True)
class TableRef:
    """One Delta table."""

    layer: str
    name: str
    path: LakePath

    def exists(self) -> bool:
        """Whether the table has been created (its log has a first version)."""
        return DeltaLog(self.path).exists()

    def create(
        self, schema: Any, properties: Mapping[str, str], description: str = "", partition_by: Sequence[str] = ()
    ) -> None:
        """Create the table unless it exists; of several processes that do so at once, one succeeds.

        delta-rs alone commits version 1 with another table id if version 0 appears meanwhile.

        Args:
            schema: a ``pyarrow.Schema``.
            properties: of the table, Delta's and our own.
        """
        if self.exists():
            return
        from deltalake import DeltaTable

        self.path.mkdir(parents=True, exist_ok=True)
        beside = self.path if isinstance(self.path, Path) else None
        with TemporaryDirectory(prefix=".new-", dir=beside) as draft:
            DeltaTable.create(
                draft,
                schema=schema,
                name=self.name,
                description=description or None,
                partition_by=list(partition_by),
                configuration=dict(properties),
                raise_if_key_not_exists=False,
            )
            log = DeltaLog(self.path)
            if isinstance(log.folder, Path):
                try:  # the log is there with its first version, or not at all
                    (Path(draft) / log.folder.name).rename(log.folder)
                except OSError:
                    if not log.exists():
                        raise
            else:
                create_whole(log.commit_file(0), DeltaLog(Path(draft)).commit_file(0).read_bytes())


@dataclass(frozen=True, slots=True)
class Lake:
    """A lake on a file system or in an object store.

    Attributes:
        root: where the tables are; created when something is first written.
        work: folder of this machine for everything that is not a table; None: ``_millrace`` in a lake of this machine.
    """

    root: LakePath
    work: Path | None = None

    @classmethod
    def of(cls, settings: Settings) -> Lake:
        """The lake that the settings name."""
        return cls(settings.lake, settings.work_folder())

    def table(self, layer: str, name: str) -> TableRef:
        """The table's place, whether it exists or not."""
        return TableRef(layer, name, self.root / layer / name)

    def bronze(self, source: str) -> TableRef:
        return self.table("bronze", source)

    def quarantine(self) -> TableRef:
        """Rejected events of every source."""
        return self.table("silver", QUARANTINE)

    def tables(self, layers: Sequence[str] = LAYERS, but: Collection[str] = ()) -> list[TableRef]:
        """All tables that exist, in order of layer and name. In an object store a request a layer and a table.

        Args:
            but: names to leave out.
        """
        return [
            TableRef(layer, folder.name, folder)
            for layer in layers
            for folder in sorted(_folders(self.root / layer), key=str)
            if folder.name not in but and DeltaLog(folder).exists()
        ]

    def find(self, name: str) -> TableRef:
        """The existing table of this name. Raises UnknownTable: there is none."""
        tables = self.tables()
        for table in tables:
            if table.name == name:
                return table
        raise UnknownTable(name, [t.name for t in tables])

    @property
    def state(self) -> Path:
        """Folder of this machine for everything that is not a table."""
        if self.work is not None:
            return self.work
        assert isinstance(self.root, Path), "a lake in an object store needs a work folder"
        return self.root / "_millrace"

    @property
    def remote(self) -> bool:
        """Whether it is in an object store, where each look is a request."""
        return isinstance(self.root, StorePath)

    def pause_s(self, here: float) -> float:
        """Seconds between two looks at something: as given, or a second at least where a look is a request."""
        return max(here, _REMOTE_LOOK_S) if self.remote else here

    @property
    def shared(self) -> LakePath:
        """Where the small state is that all machines share."""
        return self.root / "_millrace"

    @property
    def data_docs(self) -> Path:
        """Report of the newest run of ``millrace quality``, as HTML."""
        return self.state / "data-docs"

    def checkpoint(self, query: str) -> Path:
        """Spark checkpoint folder of one streaming query."""
        return self.state / "checkpoints" / query

    def collector_log(self, node: str) -> Path:
        """Message log of one collecting node."""
        return self.state / "log" / node

    def broker(self) -> Path:
        """Data and logs of the embedded broker."""
        return self.state / "kafka"


def offsets_behind(rows: pa.Table) -> dict[str, int]:
    """``TOPIC/PARTITION`` to the offset behind the last of these rows of bronze or records of Kafka."""
    ends = rows.group_by(["topic", "partition"]).aggregate([("offset", "max")]).to_pylist()
    return {f"{end['topic']}/{end['partition']}": end["offset_max"] + 1 for end in ends}


def _folders(layer: LakePath) -> list[Any]:
    try:
        return list(layer.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []

"""What a product's commit says of the bronze rows it holds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import CommitProperties, Transaction

from lakehouse.contract import lake as names
from lakehouse.contract.lake import FILE_TOPIC, offsets_behind


@dataclass(frozen=True, slots=True)
class BatchMark:
    """What a product commit says of the batch it holds.

    Attributes:
        application: the Delta application: ``bronze-TABLE_ID``; of a join, with the ids of both tables.
        versions: the bronze version that the product holds; of a join, the left and the right one.
        through: ``TOPIC/PARTITION`` to next offset: all events before it are in the product.
        oldest: received_at of the oldest of them, ms since the epoch; None without events.
        newest: of the newest.
        clock: the newest event time in all of bronze so far, no later than its arrival, microseconds since the epoch:
            what sessions end and retention counts by, the same in a replay; None if nothing came yet.
    """

    application: str
    versions: tuple[int, ...]
    through: Mapping[str, int] = field(default_factory=dict)
    events: int = 0
    oldest: int | None = None
    newest: int | None = None
    clock: int | None = None

    @property
    def transaction(self) -> int:
        """The application's number of the commit."""
        return sum(self.versions)

    def to_metadata(self) -> dict[str, str]:
        """commitInfo keys (lakehouse.contract.lake)."""
        found = {
            names.COMMIT_THROUGH: json.dumps(dict(self.through), separators=(",", ":")),
            names.COMMIT_EVENTS: str(self.events),
            names.COMMIT_BATCH: f"{self.application}/{self.transaction}",
            names.COMMIT_BRONZE: ",".join(map(str, self.versions)),
        }
        if self.oldest is not None and self.newest is not None:
            found |= {names.COMMIT_OLDEST: str(self.oldest), names.COMMIT_NEWEST: str(self.newest)}
        if self.clock is not None:
            found[names.COMMIT_CLOCK] = str(self.clock)
        return found

    def commit_properties(self) -> CommitProperties:
        return CommitProperties(
            custom_metadata=self.to_metadata(),
            app_transactions=[Transaction(self.application, self.transaction)],
            max_commit_retries=0,  # one writer: a conflict means that there is another, and must be heard
        )

    @classmethod
    def from_metadata(cls, info: Mapping[str, object]) -> BatchMark | None:
        """The mark in a commitInfo; None if it has none."""
        try:
            return cls(
                str(info[names.COMMIT_BATCH]).rpartition("/")[0],
                versions_of(str(info[names.COMMIT_BRONZE])),
                json.loads(str(info[names.COMMIT_THROUGH])),
                int(str(info[names.COMMIT_EVENTS])),
                clock=int(str(info[names.COMMIT_CLOCK])) if names.COMMIT_CLOCK in info else None,
            )
        except (KeyError, ValueError):
            return None


def versions_of(bronze: str) -> tuple[int, ...]:
    """:attr:`BatchMark.versions` of what a commit says."""
    return tuple(int(version) for version in bronze.split(","))


def later(one: int | None, other: int | None) -> int | None:
    """The later of two clocks."""
    return max((clock for clock in (one, other) if clock is not None), default=None)


class Marks:
    """Marks of commits to products: how far in Kafka and in time they are, which only ever moves on.

    Attributes:
        through: ``TOPIC/PARTITION`` to the next offset.
    """

    def __init__(self) -> None:
        self.through: dict[str, int] = {}
        self.clock: int | None = None

    def go_on_from(self, mark: BatchMark | None) -> None:
        """Be at least as far as a product that says so."""
        if mark is not None:
            self.reached(mark.through)
            self.clock = later(self.clock, mark.clock)

    def reached(self, through: Mapping[str, int]) -> None:
        """Be at least as far as these offsets."""
        for place, end in through.items():
            self.through[place] = max(self.through.get(place, 0), end)

    def of(self, application: str, versions: tuple[int, ...], rows: pa.Table, counted: pa.Table) -> BatchMark:
        """The mark of a batch.

        Args:
            application, versions: see :class:`BatchMark`.
            rows: all its rows, with their ``topic``, ``partition`` and ``offset``.
            counted: those that count, with ``event_time`` and ``received_at``.
        """
        ends = offsets_behind(rows)
        # Of files there are thousands; COMMIT_BRONZE says that they are in.
        self.reached({place: end for place, end in ends.items() if not place.startswith(FILE_TOPIC)})
        self.clock = later(self.clock, newest(counted))
        received = pc.min_max(pc.cast(counted["received_at"], pa.int64())).as_py()
        return BatchMark(
            application,
            versions,
            dict(self.through),
            counted.num_rows,
            received["min"] // 1000 if counted.num_rows else None,
            received["max"] // 1000 if counted.num_rows else None,
            self.clock,
        )


def newest(counted: pa.Table) -> int | None:
    """The clock's value by these events (:class:`BatchMark`); None without events."""
    happened, arrived = (pc.cast(counted[name], pa.int64()) for name in ("event_time", "received_at"))
    found = pc.max(pc.min_element_wise(happened, arrived)).as_py()
    return None if found is None else int(found)

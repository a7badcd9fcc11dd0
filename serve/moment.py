"""Versions and times of a table's past: what ``as_of`` means."""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from lakehouse.contract.deltalog import DeltaLog
from serve.errors import PositionExpired, QueryError

_VERSION = re.compile(r"\d{1,18}")


@dataclass(frozen=True, slots=True)
class Moment:
    """A version, or a time.

    Attributes:
        text: as a part of a name: digits.
        version: of the table; None: whichever was the newest at ``at``.
        at: ms since the epoch.
    """

    text: str
    version: int | None = None
    at: int = 0


def moment_of(text: str) -> Moment:
    """What ``as_of`` means: digits are a version, anything else is a time in ISO 8601, in UTC where it has no zone.

    Raises:
        QueryError: it is neither.
    """
    if _VERSION.fullmatch(text):
        return Moment(f"v{int(text)}", int(text))
    try:
        moment = datetime.fromisoformat(text.strip())
    except ValueError:
        raise QueryError(f"{text[:80]!r} is neither a version nor a time", "Write 7 or 2026-01-31T12:00:00Z") from None
    moment = moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment
    at = int(moment.timestamp() * 1000)
    return Moment(f"t{at}", None, at)


def version_at(folder: Path, moment: Moment) -> int:
    """The version that a moment names. Blocking.

    Raises:
        PositionExpired: the log no longer reaches back to it, or it has not come to it yet.
    """
    if moment.version is not None:
        return moment.version
    log = DeltaLog(folder)
    known = log.versions()
    at = bisect_right(known, moment.at, key=lambda version: int(log.info(version).get("timestamp") or 0))
    if not at:
        raise PositionExpired(folder.name, known[0] if known else 0, "the log does not reach back to that time")
    return known[at - 1]

"""A node's message log as an operator sees it: what it holds, what failed and why, and another try for that.

Looking changes nothing and may be done while the node runs. Trying again needs the log for itself.
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ingest.errors import BrokerUnavailable
from ingest.events import Lane, LoggedEvent, Segment
from ingest.failed import FailedItem, FailedStore
from ingest.publish import Outcome, Publisher
from ingest.records import EVENTS, Damage, read_event, scan
from ingest.recovery import Recovery, recover
from ingest.segments import SUFFIX, lock_folder
from lakehouse.contract.errors import EnvironmentProblem, MillraceError

_RETRY_S = 60.0


@dataclass(frozen=True, slots=True)
class LogView:
    """What one node's log holds.

    Attributes:
        node: id of the node.
        running: whether a process has it open.
        clean: whether it was closed properly (or is in use).
        transient: events that Kafka has not acknowledged, as far as the marks say.
        lanes: the same by lane, those that have any.
        failed: events that Kafka refused.
        reasons: how many of these for which reason.
        damage: what could not be read, in words.
        bytes: on the disk.
        segments: files of events.
    """

    node: str
    running: bool
    clean: bool
    transient: int
    lanes: dict[str, int]
    failed: int
    reasons: dict[str, int]
    damage: list[str]
    bytes: int
    segments: int


@dataclass(frozen=True, slots=True)
class Retried:
    """What became of another try.

    Attributes:
        sent: events that Kafka has now.
        refused: events that it refused again, with its reason, by event id.
    """

    sent: int
    refused: dict[str, str]


class NoLog(MillraceError):
    """There is no such log.

    Attributes:
        node: that was asked for.
        known: nodes that have one.
    """

    def __init__(self, node: str, known: Sequence[str]) -> None:
        super().__init__(node)
        self.node = node
        self.known = known

    def __str__(self) -> str:
        return f"no log of a node {self.node!r}; there are: {', '.join(self.known) or 'none yet'}"


def nodes(folder: Path) -> list[str]:
    """Nodes with a log below this folder."""
    return sorted(found.name for found in folder.iterdir() if found.is_dir()) if folder.is_dir() else []


def log_of(folder: Path, node: str) -> Path:
    """Folder of a node's log.

    Raises:
        NoLog: there is none.
    """
    if node not in nodes(folder):
        raise NoLog(node, nodes(folder))
    return folder / node


def look(folder: Path) -> LogView:
    """What the log in this folder holds."""
    running = is_running(folder)
    found = recover(folder, mend=False)
    failed = list(FailedStore(folder, folder.name, mend=False))
    reasons = Counter(item.reason for item in failed if item.event is not None)
    damage = [item.reason for item in failed if item.event is None]
    damage += [text for text in map(str, found.corrupt) if text not in damage]
    if found.torn is not None and not running:
        damage.append(str(found.torn))
    return LogView(
        node=folder.name,
        running=running,
        clean=found.clean or running,
        transient=found.to_replay,
        lanes={lane.name: lane.in_log for lane in found.lanes if lane.in_log},
        failed=sum(reasons.values()),
        reasons=dict(reasons),
        damage=damage,
        bytes=sum(path.stat().st_size for path in folder.iterdir() if path.is_file()),
        segments=len(found.segments),
    )


def is_running(folder: Path) -> bool:
    """Whether a process has the log open."""
    try:
        with _alone(folder):
            return False
    except EnvironmentProblem:
        return True


def transient(folder: Path) -> Iterator[dict[str, Any]]:
    """Events that Kafka has not acknowledged, as far as the marks say, as JSON objects."""
    found = recover(folder, mend=False)
    for segment in found.segments:
        yield from _of_segment(segment.path, folder.name, found)


def failed(folder: Path) -> Iterator[dict[str, Any]]:
    """What the failed store holds, as JSON objects."""
    for item in FailedStore(folder, folder.name, mend=False):
        if item.event is None:
            yield {"kind": "damage", "reason": item.reason, **_bytes(item.data)}
        else:
            yield {"kind": "failed", "seq": item.seq, "reason": item.reason, **_event(item.event)}


async def retry(
    folder: Path,
    publisher: Publisher,
    *,
    ids: Sequence[str] = (),
    progress: Callable[[int, int], None] = lambda done, of: None,
    timeout_s: float = _RETRY_S,
) -> Retried:
    """Send failed events again, once, under the ids they have, marked ``suspect``: they count once in any case.

    1. Take the log for itself. 2. Send. 3. Take what Kafka has off the store. A crash before 3 sends them again at the
    next try.

    Args:
        folder: of the log.
        publisher: not started yet.
        ids: event ids to send; empty: all.
        progress: called with the events whose fate is known, and all.
        timeout_s: the longest to wait for Kafka.

    Raises:
        EnvironmentProblem: a node has the log open.
        BrokerUnavailable: Kafka cannot be reached, or does not answer in time; nothing was changed.
    """
    with _alone(folder):
        store = FailedStore(folder, folder.name)
        wanted = [item for item in store if item.event is not None and (not ids or _id_of(item) in ids)]
        outcomes: dict[int, Outcome] = {}
        done = asyncio.Event()

        def deliver(batch: Sequence[Outcome]) -> None:
            for outcome in batch:
                outcomes[outcome.event.seq] = outcome
            progress(len(outcomes), len(wanted))
            if len(outcomes) == len(wanted):
                done.set()

        await asyncio.to_thread(publisher.start, deliver)
        try:
            publisher.send([_again(item) for item in wanted])
            if wanted:
                await asyncio.wait_for(done.wait(), timeout_s)
        except TimeoutError:
            reason = f"{len(outcomes)} of {len(wanted)} events were answered in {timeout_s:.0f} s"
            raise BrokerUnavailable("the broker", reason) from None
        finally:
            await asyncio.to_thread(publisher.close, 1.0)
        store.remove([seq for seq, outcome in outcomes.items() if not outcome.error])
        refused = {o.event.envelope.event_id: o.error for o in outcomes.values() if o.error}
        return Retried(len(outcomes) - len(refused), refused)


def _again(item: FailedItem) -> LoggedEvent:
    event = item.event
    assert event is not None
    envelope = dataclasses.replace(event.envelope, suspect=True)
    lane = Lane(event.lane, "", envelope.source)
    return LoggedEvent(item.seq, lane, envelope, event.key, event.payload, Segment(0, Path()), 0, None)


def _of_segment(path: Path, node: str, found: Recovery) -> Iterator[dict[str, Any]]:
    for item in scan(path.read_bytes()):
        if isinstance(item, Damage) or item.kind not in EVENTS or item.seq < found.acked:
            continue
        lane = found.lanes[int.from_bytes(item.body[1:3], "little")]
        event = read_event(item.body, source=lane.source, collector=node)
        yield {"kind": "transient", "seq": item.seq, "lane": lane.name, **_event(event)}


def _event(event: Any) -> dict[str, Any]:
    envelope = event.envelope
    return {
        "event_id": envelope.event_id,
        "source": envelope.source,
        "tenant": envelope.tenant,
        "received_at": envelope.received_at,
        "reject": envelope.reject,
        "key": event.key.decode("utf-8", "replace"),
        **_bytes(event.payload),
    }


def _bytes(data: bytes) -> dict[str, str]:
    """As text where it is UTF-8, so that it can be read; else in base64, so that nothing is lost."""
    try:
        return {"payload": data.decode("utf-8")}
    except UnicodeDecodeError:
        return {"payload_base64": base64.b64encode(data).decode()}


def _id_of(item: FailedItem) -> str:
    return item.event.envelope.event_id if item.event is not None else ""


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """The log's lock; its folder has a log, or is left as it is."""
    if not any(folder.glob(f"*{SUFFIX}")) and not (folder / "failed").exists():
        yield
        return
    handle = lock_folder(folder)
    try:
        yield
    finally:
        os.close(handle)

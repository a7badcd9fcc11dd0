"""A node's message log for operators: what it holds, what failed and why, and a retry of failed events.

Inspection changes nothing and may run beside the node. A retry needs exclusive access to the log.
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
from ingest.kafka import KafkaPublisher, SendOutcome
from ingest.log.records import EVENTS, Damage, read_event, scan
from ingest.log.recovery import FailedItem, FailedStore, Recovery, recover
from ingest.log.segments import SUFFIX, LoggedEvent, LogSegment, SourceLane, lock_folder
from lakehouse.contract.errors import EnvironmentProblem, MillraceError

_RETRY_S = 60.0


@dataclass(frozen=True, slots=True)
class LogView:
    """The contents of one node's log.

    Attributes:
        node: id of the node.
        running: whether a process has the log open.
        clean: whether it was closed properly, or is in use.
        transient: events that Kafka has not acknowledged, according to the marks.
        lanes: the same by lane, without empty lanes.
        failed: events that Kafka refused.
        reasons: count of failed events by reason.
        damage: descriptions of unreadable bytes.
        bytes: on disk.
        segments: number of segment files.
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
    """Result of a retry.

    Attributes:
        sent: events that Kafka has taken.
        refused: reason by event id of events that it refused again.
    """

    sent: int
    refused: dict[str, str]


class NoLog(MillraceError):
    def __init__(self, node: str, known: Sequence[str]) -> None:
        super().__init__(node)
        self.node = node
        self.known = known

    def __str__(self) -> str:
        return f"no log of a node {self.node!r}; there are: {', '.join(self.known) or 'none yet'}"


def nodes(folder: Path) -> list[str]:
    """Nodes that have a log below this folder."""
    return sorted(found.name for found in folder.iterdir() if found.is_dir()) if folder.is_dir() else []


def log_of(folder: Path, node: str) -> Path:
    """Folder of a node's log.

    Raises:
        NoLog: the node has none.
    """
    if node not in nodes(folder):
        raise NoLog(node, nodes(folder))
    return folder / node


def look(folder: Path) -> LogView:
    """Read the log in this folder."""
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
    try:
        with _alone(folder):
            return False
    except EnvironmentProblem:
        return True


def transient(folder: Path) -> Iterator[dict[str, Any]]:
    """Events that Kafka has not acknowledged, according to the marks, as JSON objects."""
    found = recover(folder, mend=False)
    for segment in found.segments:
        yield from _of_segment(segment.path, folder.name, found)


def failed(folder: Path) -> Iterator[dict[str, Any]]:
    """The entries of the failed store as JSON objects."""
    for item in FailedStore(folder, folder.name, mend=False):
        if item.event is None:
            yield {"kind": "damage", "reason": item.reason, **_bytes(item.data)}
        else:
            yield {"kind": "failed", "seq": item.seq, "reason": item.reason, **_event(item.event)}


async def retry(
    folder: Path,
    publisher: KafkaPublisher,
    *,
    ids: Sequence[str] = (),
    progress: Callable[[int, int], None] = lambda done, of: None,
    timeout_s: float = _RETRY_S,
) -> Retried:
    """Send failed events again, once, with their old ids, marked ``suspect``. They count once in any case.

    1. Lock the log. 2. Send. 3. Remove from the store what Kafka has taken. A crash before step 3 sends them again on
    the next retry.

    Args:
        folder: of the log.
        publisher: not started yet.
        ids: event ids to send; empty sends all.
        progress: called with the number of answered events and the total.
        timeout_s: longest time to wait for Kafka.

    Raises:
        EnvironmentProblem: a node has the log open.
        BrokerUnavailable: Kafka is unreachable or too slow; nothing was changed.
    """
    with _alone(folder):
        store = FailedStore(folder, folder.name)
        wanted = [item for item in store if item.event is not None and (not ids or _id_of(item) in ids)]
        outcomes: dict[int, SendOutcome] = {}
        done = asyncio.Event()

        def deliver(batch: Sequence[SendOutcome]) -> None:
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
    lane = SourceLane(event.lane, "", envelope.source)
    return LoggedEvent(item.seq, lane, envelope, event.key, event.payload, LogSegment(0, Path()), 0, None)


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
    """As text if it is UTF-8, else in base64."""
    try:
        return {"payload": data.decode("utf-8")}
    except UnicodeDecodeError:
        return {"payload_base64": base64.b64encode(data).decode()}


def _id_of(item: FailedItem) -> str:
    return item.event.envelope.event_id if item.event is not None else ""


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold the log's lock, unless the folder has no log."""
    if not any(folder.glob(f"*{SUFFIX}")) and not (folder / "failed").exists():
        yield
        return
    handle = lock_folder(folder)
    try:
        yield
    finally:
        os.close(handle)

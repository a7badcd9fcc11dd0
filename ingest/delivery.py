"""From the log to Kafka: in order, bounded in flight, sent again if Kafka's answer is unknown.

While Kafka keeps up, events go from :meth:`KafkaDelivery.offer` straight to the publisher. If too much is in flight, or
the broker is away, events wait: the newest in memory (the *tail*), older ones only on disk, from where they are read
back in order. Recovery is the same case: a log that begins with unread events.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections import deque
from collections.abc import Callable, Sequence

from ingest.kafka import HELD_BACK, KafkaPublisher, SendOutcome
from ingest.log.message_log import AHEAD, MessageLog
from ingest.log.segments import Cursor, LoggedEvent
from lakehouse.contract.envelope import about

logger = logging.getLogger(__name__)

IN_FLIGHT_EVENTS = 50_000  # that the publisher has and Kafka has not acknowledged
IN_FLIGHT_BYTES = 32 * 1024 * 1024  # of their payloads
TAIL_BYTES = 8 * 1024 * 1024  # of payloads that wait in memory, not counting those that are not on disk yet
HAND_OVER_S = 0.01  # waking the publisher costs more than an event; Kafka's linger is shortened by this
HAND_OVER_EVENTS = 256
READ_BYTES = 2 * 1024 * 1024
_BACKOFF_MAX_S = 5.0


class KafkaDelivery:
    """Moves the events of one log to Kafka.

    Args:
        publisher: started by the caller.
        known: called with the outcome of each event.
        hand_over_s: longest time before an event is handed to the publisher.
        guarantee: of a source by its name (:attr:`lakehouse.contract.pipeline.source.Source.guarantee`).

    Attributes:
        to_replay: events of an earlier run that Kafka has not acknowledged yet.
    """

    def __init__(
        self,
        log: MessageLog,
        publisher: KafkaPublisher,
        known: Callable[[SendOutcome], None],
        hand_over_s: float = HAND_OVER_S,
        guarantee: Callable[[str], str] = lambda _: "exactly_once",
    ) -> None:
        self._guarantee = guarantee
        self._renew = False  # the publisher holds back until it is started afresh
        self._log = log
        self._publisher = publisher
        self._known = known
        self._hand_over_s = hand_over_s
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._sent: dict[int, LoggedEvent] = {}  # by sequence number, which is also their order
        self._sent_bytes = 0
        self._outbox: list[LoggedEvent] = []
        self._tail: deque[LoggedEvent] = deque()
        self._tail_bytes = 0
        self._again: list[LoggedEvent] = []  # to be sent again once nothing else is in flight
        self._failing = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._attempts = 0
        self._wake = asyncio.Event()
        self._change = asyncio.Event()
        self._recovered = asyncio.Event()
        self.to_replay = log.recovery.to_replay
        self._suspect_before = log.next_seq if log.recovery.to_replay else 0
        self._next = log.recovery.acked if log.recovery.to_replay else log.next_seq  # first event that is not sent
        self._cursor: Cursor | None = log.cursor() if log.recovery.to_replay else None
        self._live = self._cursor is None
        log.on_durable = self._on_durable
        if self._live:
            self._recovered.set()
        else:
            self._wake.set()

    @property
    def in_flight(self) -> int:
        """Events that the publisher has and Kafka has not acknowledged."""
        return len(self._sent)

    @property
    def oldest_at(self) -> int:
        """``received_at`` of the oldest unacknowledged event in memory, microseconds; 0 if none."""
        oldest = next(iter(self._sent.values()), self._tail[0] if self._tail else None)
        return oldest.envelope.received_at if oldest is not None else 0

    async def recovered(self) -> None:
        """Return when Kafka has what an earlier run left in the log."""
        await self._recovered.wait()

    def hold(self) -> None:
        """Send nothing before :meth:`run`: events wait in the log."""
        self._live = False
        self._wake.set()

    def offer(self, event: LoggedEvent) -> None:
        """Take an event that was just appended, in the order of the log."""
        if self._live and self._may_send(event):
            self._send(event)
            return
        self._put_aside((event,))

    def offer_all(self, events: Sequence[LoggedEvent]) -> None:
        """Take events that were just appended, like :meth:`offer` of each."""
        if not events:
            return
        size = sum([len(event.payload) for event in events])
        if (
            self._live
            and self._sent_bytes + size <= IN_FLIGHT_BYTES
            and len(self._sent) + len(events) <= IN_FLIGHT_EVENTS
            and events[-1].seq - self._log.durable_seq <= AHEAD
        ):
            self._send_all(events, size)
        elif self._live:
            for event in events:
                self.offer(event)
        else:
            self._put_aside(events)

    def _may_send(self, event: LoggedEvent) -> bool:
        return (
            self._sent_bytes < IN_FLIGHT_BYTES
            and len(self._sent) < IN_FLIGHT_EVENTS
            and event.seq - self._log.durable_seq <= AHEAD
        )

    def _put_aside(self, events: Sequence[LoggedEvent]) -> None:
        self._live = False
        self._log.sending(events[-1].seq)
        self._tail.extend(events)
        self._tail_bytes += sum([len(event.payload) for event in events])
        self._trim()
        self._wake.set()

    async def run(self) -> None:
        """Send what waits and what must be sent again, until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            if self._again or self._renew:
                await self._send_again()
            elif not self._live:
                await self._catch_up()
            self._change.set()

    async def drained(self) -> None:
        """Return when Kafka has everything."""
        while self._sent or not self._live or self._failing:
            self._change.clear()
            await self._change.wait()

    # --- sending

    def _send(self, event: LoggedEvent) -> None:
        self._next = event.seq + 1
        self._sent[event.seq] = event
        self._sent_bytes += len(event.payload)
        self._outbox.append(event)
        if len(self._outbox) >= HAND_OVER_EVENTS:
            self._flush()
        elif self._timer is None:
            self._timer = self._loop.call_later(self._hand_over_s, self._flush)

    def _send_all(self, events: Sequence[LoggedEvent], size: int) -> None:
        """Send events with ``size`` payload bytes in total."""
        self._next = events[-1].seq + 1
        self._sent.update([(event.seq, event) for event in events])
        self._sent_bytes += size
        self._outbox += events
        if len(self._outbox) >= HAND_OVER_EVENTS:
            self._flush()
        elif self._timer is None:
            self._timer = self._loop.call_later(self._hand_over_s, self._flush)

    def _flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        outbox, self._outbox = self._outbox, []
        if outbox:
            self._log.sending(outbox[-1].seq)
            self._publisher.send(outbox)

    async def _catch_up(self) -> None:
        """Send waiting events while there is room; go live when none are left."""
        tail, ahead = self._tail, self._log.durable_seq + AHEAD
        while not self._again and self._sent_bytes < IN_FLIGHT_BYTES and len(self._sent) < IN_FLIGHT_EVENTS:
            if tail and tail[0].seq == self._next:
                if tail[0].seq > ahead:
                    return  # the next write wakes us
                self._cursor = None
                self._send_waiting(ahead)
            elif self._cursor is not None and not await self._read_back(self._cursor):
                return
            elif self._cursor is None:
                self._live = not self._tail
                return

    def _send_waiting(self, ahead: int) -> None:
        """Send from the tail, up to sequence number ``ahead``, while there is room."""
        tail, size = self._tail, 0
        events: list[LoggedEvent] = []
        most = min(len(tail), IN_FLIGHT_EVENTS - len(self._sent))
        room = IN_FLIGHT_BYTES - self._sent_bytes
        while len(events) < most and size < room and tail[0].seq <= ahead:
            event = tail.popleft()
            size += len(event.payload)
            events.append(event)
        self._tail_bytes -= size
        self._send_all(events, size)

    async def _read_back(self, cursor: Cursor) -> bool:
        """Send a batch from disk; False if nothing more is there now."""
        until = self._tail[0].seq if self._tail else self._log.next_seq
        events, after = await asyncio.to_thread(
            self._log.read, cursor, from_seq=self._next, until_seq=until, max_bytes=READ_BYTES
        )
        self._cursor = after
        for event in events:
            if event.seq < self._suspect_before:
                if self._guarantee(event.envelope.source) == "at_most_once":
                    self._give_up(event, "a run that crashed may have sent it")
                    continue
                self._mark(event)
            self._send(event)
        if events:
            return True
        if self._log.durable_seq >= until - 1:  # everything was read; missing events were corrupt
            self._next = max(self._next, until)
            if (
                self._tail[0].seq if self._tail else self._log.next_seq
            ) == until:  # no event was dropped from memory meanwhile
                self._cursor = None
            self._check_recovered()
            return True
        return False

    def _trim(self) -> None:
        """Drop the oldest waiting events from memory if the tail is too long and they are on disk."""
        while self._tail_bytes > TAIL_BYTES and self._tail and self._tail[0].seq <= self._log.durable_seq:
            event = self._tail.popleft()
            self._tail_bytes -= len(event.payload)
            if self._cursor is None:
                self._cursor = Cursor(event.segment.number, event.offset)

    def _on_durable(self) -> None:
        if not self._live:
            self._trim()
            self._wake.set()

    # --- outcomes

    def deliver(self, outcomes: Sequence[SendOutcome]) -> None:
        """Take the publisher's outcomes."""
        done: list[LoggedEvent] = []
        sent, known, freed = self._sent, self._known, 0
        for outcome in outcomes:
            event = outcome.event
            if not outcome.error:
                if sent.pop(event.seq, None) is None:
                    continue
                freed += len(event.payload)
                known(outcome)
                done.append(event)
            elif outcome.final:
                self._fail_soon(outcome)
            elif self._guarantee(event.envelope.source) == "at_most_once" and outcome.error != HELD_BACK:
                self._renew, self._live = True, False
                self._give_up(event, outcome.error)
            else:
                if not self._again:
                    logger.warning(
                        "Kafka's answer for event %d is unknown, it is sent again: %s", event.seq, outcome.error
                    )
                self._again.append(event)
                self._live = False
        if done:
            self._sent_bytes -= freed
            self._attempts = 0
            self._acked(done)
        if not self._live:
            self._wake.set()

    def _give_up(self, event: LoggedEvent, reason: str) -> None:
        """Do not send again, because Kafka may have the event and the source is delivered at most once."""
        if event.seq not in self._sent:
            self._next = event.seq + 1
            self._sent[event.seq] = event
            self._sent_bytes += len(event.payload)
        self._fail_soon(SendOutcome(event, -1, -1, f"at most once: {reason}", final=True))

    def _fail_soon(self, outcome: SendOutcome) -> None:
        self._failing += 1
        task = self._loop.create_task(self._fail(outcome))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _mark(self, event: LoggedEvent) -> None:
        """Mark an event that Kafka may already have as suspect, so that readers find the copy by its id."""
        if self._guarantee(event.envelope.source) == "exactly_once":
            event.envelope = dataclasses.replace(event.envelope, suspect=True)

    async def _fail(self, outcome: SendOutcome) -> None:
        event = outcome.event
        found = about(event.envelope.event_id, event.envelope.source, event.envelope.tenant)
        logger.error("Kafka refuses event %s of %s: %s", found["event_id"], found["source"], outcome.error, extra=found)
        while True:
            try:
                await self._log.fail(event, outcome.error)
                break
            except OSError as error:  # it stays in the log until the failed store takes it
                logger.error("the failed store cannot be written: %s", error)
                await asyncio.sleep(_BACKOFF_MAX_S)
        self._failing -= 1
        if self._sent.pop(event.seq, None) is not None:
            self._sent_bytes -= len(event.payload)
            self._known(outcome)
            self._acked([event])
        if not self._live:
            self._wake.set()

    def _acked(self, events: list[LoggedEvent]) -> None:
        self._log.acked(events, next(iter(self._sent), self._next))
        if self.to_replay:
            self.to_replay -= sum(event.seq < self._suspect_before for event in events)
        self._check_recovered()

    def _check_recovered(self) -> None:
        self._change.set()
        if not self._recovered.is_set() and next(iter(self._sent), self._next) >= self._suspect_before:
            self.to_replay = 0  # corrupt events cannot be sent
            self._recovered.set()

    async def _send_again(self) -> None:
        """Once nothing else is in flight, send failed events in order, which keeps the order within a key."""
        if len(self._sent) > len(self._again):
            return  # the next outcome wakes us
        self._renew = False
        again, self._again = sorted(self._again, key=lambda event: event.seq), []
        self._attempts += 1
        await asyncio.sleep(min(_BACKOFF_MAX_S, 0.05 * 2 ** min(self._attempts, 10)))
        for event in again:
            self._mark(event)
        self._publisher.send(again, afresh=True)
        self._wake.set()

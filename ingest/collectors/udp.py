"""Events by UDP, one way: nothing is acknowledged, losses are tolerated and counted, and it is cheap.

A datagram is an event, or holds one event a line. Counted for ``/v1/stats`` and ``/metrics``: datagrams that the kernel
dropped, events that the message log had no room for, and events that never came, if the pipeline names a counter in
the event (``sequence``). Losses are derived from the counters like in RTP (RFC 3550, A.3): a sender's expected events
are those between the lowest and the highest counter seen; those that did not come are lost; copies are detected in a
window of the last 64.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
import sys
from collections import Counter, OrderedDict
from dataclasses import dataclass

import orjson

from ingest.collectors import CollectorContext, UpstreamStatus
from ingest.errors import LogFull, LogUnavailable
from lakehouse.contract.errors import EnvironmentProblem
from lakehouse.contract.pipeline.source import CollectorSpec, Template

logger = logging.getLogger(__name__)

MAX_DATAGRAM = 65_535
MAX_SENDERS = 100_000
RESTART = 100_000  # a counter that jumps by more belongs to a restarted sender
_AT_ONCE = 256  # datagrams a turn of the event loop
_SO_MEMINFO, _DROPS = 55, 8  # Linux: the ninth number counts dropped datagrams


class UdpCollector:
    """Takes datagrams until cancelled. Raises EnvironmentProblem: the address cannot be bound."""

    def __init__(self, spec: CollectorSpec, context: CollectorContext) -> None:
        self._spec = spec
        self._intake = context.intake
        self._counts: Counter[str] = Counter()
        self._losses = LossCount() if spec.sequence else None
        self._sequence = Template(spec.sequence)
        self._sender = Template(spec.sender) if spec.sender else None
        self._buffer = bytearray(MAX_DATAGRAM)
        self._open = True
        self._reading = False
        self._socket = self._bind()
        self.port = int(self._socket.getsockname()[1])

    def status(self) -> UpstreamStatus:
        """Counts since the collector was started."""
        lane = self._intake.lane
        url = f"udp://{self._spec.host}:{self.port}"
        counts = {name: self._counts[name] for name in ("datagrams", "events", "no_room", "kernel_dropped")}
        counts["kernel_dropped"] += self._kernel_drops()
        if self._losses is not None:
            counts |= {"lost": self._losses.lost, "copies": self._losses.copies}
        return UpstreamStatus(lane.name, url, self._reading, None, (), 0, counts=counts)

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_reader(self._socket, self._read)
        self._reading = True
        try:
            await loop.create_future()  # until cancelled
        finally:
            self._reading = False
            loop.remove_reader(self._socket)

    def close(self) -> None:
        if self._open:
            self._counts["kernel_dropped"] += self._kernel_drops()
            self._open = False
            self._socket.close()

    def _bind(self) -> socket.socket:
        host = self._spec.host
        bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._spec.buffer_bytes)
            bound.bind((host, self._spec.port))
        except OSError as error:
            bound.close()
            raise EnvironmentProblem(
                f"udp://{host}:{self._spec.port} cannot be bound: {error.strerror}",
                f"Stop what uses it, or change the port of a collector of {self._intake.border.source.name}",
            ) from None
        bound.setblocking(False)
        given = bound.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) // 2  # Linux reports twice the size
        if given < self._spec.buffer_bytes:
            logger.warning(
                "udp port %d has a buffer of %d bytes; net.core.rmem_max allows no more", bound.getsockname()[1], given
            )
        return bound

    def _read(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                size, address = self._socket.recvfrom_into(self._buffer)
            except BlockingIOError:
                return
            except OSError as error:  # e.g. an ICMP error
                logger.info("udp port %d: %s", self.port, error)
                continue
            self._counts["datagrams"] += 1
            data = bytes(memoryview(self._buffer)[:size])
            events = data.splitlines() if self._spec.framing == "lines" else (data,)
            for event in events:
                if event:
                    self._take(event, address)

    def _take(self, payload: bytes, address: tuple[object, ...]) -> None:
        self._counts["events"] += 1
        if self._losses is not None:
            self._count(payload, address)
        try:
            self._intake.take(self._intake.border.admit(payload))
        except (LogFull, LogUnavailable) as error:
            if not self._counts["no_room"]:
                logger.warning("udp port %d drops events: %s", self.port, error)
            self._counts["no_room"] += 1

    def _count(self, payload: bytes, address: tuple[object, ...]) -> None:
        assert self._losses is not None
        try:
            fields = orjson.loads(payload)
        except orjson.JSONDecodeError:
            return
        number = self._sequence.render(fields) if isinstance(fields, dict) else None
        if number is None or not number.isdecimal():
            return
        sender = self._sender.render(fields) if self._sender is not None else f"{address[0]}:{address[1]}"
        self._losses.seen(sender or "", int(number))

    def _kernel_drops(self) -> int:
        if not self._open or sys.platform != "linux":
            return 0
        try:
            found = self._socket.getsockopt(socket.SOL_SOCKET, _SO_MEMINFO, 9 * 4)
        except OSError:
            return 0
        return int(struct.unpack_from("I", found, _DROPS * 4)[0]) if len(found) >= 9 * 4 else 0


@dataclass(slots=True)
class _Sender:
    first: int
    highest: int
    came: int  # different counters
    window: int  # bit n: highest - n has come

    @property
    def missing(self) -> int:
        return self.highest - self.first + 1 - self.came


class LossCount:
    """Counts missing numbers per sender. Senders are bounded; the oldest are closed.

    Attributes:
        copies: events that came again.
    """

    def __init__(self, senders: int = MAX_SENDERS) -> None:
        self._most = senders
        self._senders: OrderedDict[str, _Sender] = OrderedDict()
        self._closed = 0
        self.copies = 0

    @property
    def lost(self) -> int:
        """Events that have not come so far; a late event counts until it comes."""
        return self._closed + sum(sender.missing for sender in self._senders.values())

    def seen(self, name: str, number: int) -> None:
        """An event with this number came from this sender."""
        sender = self._senders.get(name)
        if sender is None or abs(number - sender.highest) > RESTART:
            if sender is not None:
                self._closed += sender.missing
            self._senders[name] = _Sender(number, number, 1, 1)
            self._senders.move_to_end(name)
            if len(self._senders) > self._most:
                self._closed += self._senders.popitem(last=False)[1].missing
            return
        ahead = number - sender.highest
        if ahead > 0:
            sender.window = (sender.window << ahead | 1) & (1 << 64) - 1 if ahead < 64 else 1
            sender.highest = number
            sender.came += 1
        elif -ahead >= 64 or sender.window >> -ahead & 1:
            self.copies += 1  # or too late to tell
        else:
            sender.window |= 1 << -ahead
            sender.came += 1
            sender.first = min(sender.first, number)

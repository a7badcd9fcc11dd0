"""Just enough of Kafka's protocol to send record batches that were made beforehand (KIP-98's format 2, no compression).

Any client library makes its batches when they are sent, and so costs the machine that is measured as much as the
collector that it stands for. Source: the protocol guide of Apache Kafka (Produce version 3, Metadata version 4).
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Mapping, Sequence
from types import TracebackType

from crc32c import crc32c

_PRODUCE, _METADATA = 0, 3
_CLIENT = b"bench"
_HEAD = struct.Struct(">qiibIhiqqqhii")  # of a batch
_CRC_FROM = 21  # what the checksum covers begins here
_ACKS_ALL, _TIMEOUT_MS = -1, 30_000


def varint(number: int) -> bytes:
    """Zigzag, seven bits a byte."""
    value = (number << 1) ^ (number >> 63)
    out = bytearray()
    while value > 0x7F:
        out.append(0x80 | (value & 0x7F))
        value >>= 7
    out.append(value)
    return bytes(out)


_VARINTS = [varint(number) for number in range(16_384)]


def _size(number: int) -> bytes:
    return _VARINTS[number] if number < len(_VARINTS) else varint(number)


class RecordBatch:
    """Records that are sent together."""

    def __init__(self) -> None:
        self._records = bytearray()
        self._stamps: list[int] = []
        self._count = 0

    def add(self, key: bytes, value: bytes, headers: Sequence[tuple[str, bytes]], blank: bytes) -> None:
        """One more record. Its time is the batch's; where it has ``blank``, that time is to be written as a text."""
        parts = [b"\0\0", _size(self._count), _size(len(key)), key, _size(len(value)), value, _size(len(headers))]
        for name, content in headers:
            parts += (_size(len(name)), name.encode(), _size(len(content)), content)
        body = b"".join(parts)
        self._records += _size(len(body))
        self._stamps.append(len(self._records) + body.index(blank))
        self._records += body
        self._count += 1

    def stamped(self, at_ms: int, stamp: bytes) -> tuple[bytes, bytearray]:
        """The batch as Kafka stores it, of this time, with ``stamp`` in each record: its head, and its records."""
        for start in self._stamps:
            self._records[start : start + len(stamp)] = stamp
        size = _HEAD.size - 12 + len(self._records)
        ids = (-1, -1, -1)  # no producer that has one
        head = bytearray(_HEAD.pack(0, size, -1, 2, 0, 0, self._count - 1, at_ms, at_ms, *ids, self._count))
        head[17:21] = struct.pack(">I", crc32c(self._records, crc32c(bytes(head[_CRC_FROM:]))))
        return bytes(head), self._records


class Connection:
    """A connection to a broker that leads all partitions of the topic.

    Attributes:
        partitions: how many the topic has.
    """

    def __init__(self, servers: str, topic: str) -> None:
        host, _, port = servers.partition(",")[0].rpartition(":")
        self._socket = socket.create_connection((host, int(port)), timeout=60)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._topic = topic.encode()
        self._number = 0
        self.partitions = self._count()

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._socket.close()

    def produce(self, batches: Mapping[int, tuple[bytes, bytearray]]) -> dict[int, int]:
        """Send a batch to each of these partitions; their first offsets, once the broker has acknowledged all.

        Raises:
            RuntimeError: the broker refuses one.
        """
        parts: list[bytes | bytearray] = [struct.pack(">hhi", -1, _ACKS_ALL, _TIMEOUT_MS), struct.pack(">i", 1)]
        parts += [_text(self._topic), struct.pack(">i", len(batches))]
        for partition, (head, records) in batches.items():
            parts += (struct.pack(">ii", partition, len(head) + len(records)), head, records)
        answer = self._ask(_PRODUCE, 3, *parts)
        at = 4 + 2 + len(self._topic)
        [count] = struct.unpack_from(">i", answer, at)
        found = {}
        for n in range(count):
            partition, error, offset = struct.unpack_from(">ihq", answer, at + 4 + n * 22)
            if error:
                raise RuntimeError(f"the broker refused a batch for partition {partition}: error {error}")
            found[partition] = offset
        return found

    def _count(self) -> int:
        answer = self._ask(_METADATA, 4, struct.pack(">i", 1) + _text(self._topic) + b"\0")
        at = 4
        [brokers] = struct.unpack_from(">i", answer, at)
        at += 4
        for _ in range(brokers):
            at = _behind(answer, at + 4) + 4
            at = _behind(answer, at)
        at = _behind(answer, at) + 4 + 4  # cluster id, controller, how many topics
        [error] = struct.unpack_from(">h", answer, at)
        if error:
            raise RuntimeError(f"the broker does not know the topic {self._topic.decode()}: error {error}")
        at = _behind(answer, at + 2) + 1
        [partitions] = struct.unpack_from(">i", answer, at)
        return int(partitions)

    def _ask(self, api: int, version: int, *body: bytes | bytearray) -> bytes:
        self._number += 1
        head = struct.pack(">hhi", api, version, self._number) + _text(_CLIENT)
        size = len(head) + sum(map(len, body))
        for part in (struct.pack(">i", size) + head, *body):
            self._socket.sendall(part)
        [size] = struct.unpack(">i", self._read(4))
        answer = self._read(size)
        assert struct.unpack_from(">i", answer)[0] == self._number
        return answer[4:]

    def _read(self, size: int) -> bytes:
        found = bytearray()
        while len(found) < size:
            data = self._socket.recv(size - len(found))
            if not data:
                raise RuntimeError("the broker closed the connection")
            found += data
        return bytes(found)


def _text(value: bytes) -> bytes:
    return struct.pack(">h", len(value)) + value


def _behind(answer: bytes, at: int) -> int:
    """Where what follows a text begins."""
    [size] = struct.unpack_from(">h", answer, at)
    return at + 2 + max(0, int(size))

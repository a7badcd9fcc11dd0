"""The client of a WebSocket upstream: one message is one event.

With ``resume_param`` the upstream is asked for the message after the last one in the log; see
:mod:`ingest.collectors.upstream`.
"""

from __future__ import annotations

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, WebSocketException
from websockets.frames import CloseCode

from ingest.collectors import Place
from ingest.collectors.upstream import UpstreamClient, shown_url
from ingest.errors import UpstreamEnded
from lakehouse.contract.collector import CollectorSpec

__all__ = ["WebSocketCollector", "build", "shown_url"]

MAX_MESSAGE_BYTES = 16 * 1024 * 1024  # larger ones than the source allows are kept as rejected, up to this
_CLOSE_S = 1.0  # an upstream that was slowed down does not get to its close frame in time anyway


def build(spec: CollectorSpec, place: Place) -> WebSocketCollector:
    """The collector that the pipeline declares."""
    return WebSocketCollector(
        place.url, place.intake, resume_param=spec.resume_param, backoff_max_s=place.backoff_max_s
    )


class WebSocketCollector(UpstreamClient):
    """Reads one WebSocket upstream until cancelled. Arguments are those of :class:`UpstreamClient`."""

    async def _session(self) -> None:
        try:
            async with connect(
                self._address(),
                max_size=MAX_MESSAGE_BYTES,
                compression=None,
                close_timeout=_CLOSE_S,
                user_agent_header="millrace",
            ) as connection:
                self._opened()
                await self._read(connection)
        except ConnectionClosed as error:
            if self._resume_param and error.sent is not None and error.sent.code == CloseCode.MESSAGE_TOO_BIG:
                await self._skip_oversize()
            raise UpstreamEnded(str(error)) from None
        except (OSError, WebSocketException) as error:  # TimeoutError is an OSError
            raise UpstreamEnded(f"{type(error).__name__}: {error}") from None

    async def _read(self, connection: ClientConnection) -> None:
        while True:
            await self._received(await connection.recv(decode=False))

    @property
    def _most_bytes(self) -> int:
        return MAX_MESSAGE_BYTES

"""The WebSocket endpoint of publishers against the Autobahn Testsuite, which knows only how to talk to an echo."""

from __future__ import annotations

from pathlib import Path

import pytest
from websockets.frames import Frame

from ingest.answers import stream
from ingest.broker import EmbeddedBroker
from tests.autobahn import COMPRESSION, LARGEST, fuzzed
from tests.ingest.conftest import pipeline_of, running_node, settings_of

pytestmark = [pytest.mark.soak, pytest.mark.broker]


class Echo(stream.StreamProtocol):
    """The endpoint as it is, handshake, frames and close, but that it says back what it hears."""

    def _take(self, message: bytes) -> None:
        self._transport.write(Frame(self._opcode, message).serialize(mask=False))


async def test_every_case_passes(broker: EmbeddedBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "StreamProtocol", Echo)
    monkeypatch.setattr(stream, "MAX_MESSAGE_BYTES", LARGEST)
    pipeline = pipeline_of("autobahn", "http")
    async with running_node(settings_of(tmp_path, max_connections=40), pipeline, broker.bootstrap) as url:
        # It compresses nothing, so the cases of RFC 7692 have nothing to look at.
        found = await fuzzed(url.replace("http", "ws", 1) + stream.PATH, tmp_path, ("*",), COMPRESSION)
    assert found["OK, OK"] >= 280, found

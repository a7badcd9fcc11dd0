"""The WebSocket endpoint of subscribers against the Autobahn Testsuite, which knows only how to talk to an echo."""

from __future__ import annotations

from pathlib import Path

import pytest

from serve import app
from serve.core.messages import header
from serve.push import websocket
from tests.autobahn import COMPRESSION, LARGEST, fuzzed
from tests.serve.conftest import serving

pytestmark = pytest.mark.soak


class Echo(websocket.SubscriberWebSocket):
    """The endpoint as it is, handshake, frames, compression and close, but that it says back what it hears."""

    def _begin(self, query: str, bits: int) -> None:
        """Nobody subscribes."""

    def _message(self, message: bytes) -> None:
        self.write(header(0x80 | self._opcode, len(message)) + message)


@pytest.mark.parametrize(
    ("cases", "exclude", "least"), [(("*",), COMPRESSION, 280), (("12.*",), (), 90), (("13.*",), (), 126)]
)
async def test_every_case_passes(
    root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cases: tuple[str, ...],
    exclude: tuple[str, ...],
    least: int,
) -> None:
    monkeypatch.setattr(app, "SubscriberWebSocket", Echo)
    monkeypatch.setattr(websocket, "MAX_INCOMING_BYTES", LARGEST)
    monkeypatch.setattr(websocket, "_MAX_UNREAD_BYTES", 4 * LARGEST)
    async with serving(root, cut_after_ms=600_000) as url:
        found = await fuzzed(url.replace("http", "ws", 1) + websocket.PATH, tmp_path, cases, exclude)
    assert found["OK, OK"] >= least, found

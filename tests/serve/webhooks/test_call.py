"""One attempt, on real sockets: names that are not ASCII, certificates, faults of our own."""

from __future__ import annotations

import asyncio
import socket
import ssl
from pathlib import Path
from typing import Any

import httpx
import pytest

from serve.webhooks.call import WebhookCaller, new_secret
from tests.serve.conftest import serving
from tests.serve.lakes import top_topics, topics, window
from tests.serve.security.test_gate import certificate
from tests.serve.webhooks.receiver import receiving
from tests.serve.webhooks.test_webhooks import added

SECRET = new_secret()


@pytest.fixture
def resolving(monkeypatch: pytest.MonkeyPatch) -> None:
    """A DNS in which every name of ``.example`` is this machine."""
    resolve = socket.getaddrinfo

    def found(host: Any, *rest: Any, **more: Any) -> Any:
        text = host.decode() if isinstance(host, bytes) else host
        return resolve("127.0.0.1" if text and text.endswith(".example") else host, *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", found)


@pytest.mark.usefixtures("resolving")
async def test_a_name_that_is_not_ascii_is_asked_for_as_http_has_it() -> None:
    trust = ssl.create_default_context()
    async with receiving() as receiver, WebhookCaller(60, private=True, trust=trust) as caller:
        url = receiver.url.replace("127.0.0.1", "Bücher.example")
        outcome = await caller.post(url, SECRET, "msg_1", "change", b'{"type": "ping"}')
        assert (outcome.status, outcome.error) == (204, "")
        [(_, headers, _)] = receiver.requests
        assert headers["host"] == f"xn--bcher-kva.example:{url.rsplit(':', 1)[1].split('/')[0]}"


async def test_what_fails_on_our_side_is_an_outcome() -> None:
    async with WebhookCaller(60, private=True, trust=ssl.create_default_context()) as caller:
        outcome = await caller.post("http://127.0.0.1:1/", "no secret", "msg_1", "change", b"{}")
    assert (outcome.status, outcome.error[:11]) == (0, "ValueError:")


@pytest.mark.usefixtures("resolving")
async def test_a_connection_serves_the_name_whose_certificate_it_has_shown(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cert, key = certificate(tmp_path)  # for 127.0.0.1, not for other.example, which has the same address
    monkeypatch.setattr(httpx, "create_ssl_context", lambda **_: ssl.create_default_context(cafile=cert))
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(cert, key)
    handshakes: list[str | None] = []
    server.sni_callback = lambda _, name, __: handshakes.append(name)
    product = top_topics(root)
    async with (
        receiving(server) as good,
        serving(root, webhook_private=True, webhook_attempts=1) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as client,
    ):
        made = await added(client, good)
        bad = await added(client, good, url=good.url.replace("127.0.0.1", "other.example"), secret=made["secret"])
        for count in range(3):
            product.overwrite(topics(0, [count]), [window(0)])
            await good.wait(count + 2)
        assert handshakes.count(None) == 1, "one connection for what comes in turn"
        for hook, taken in ((made, True), (bad, False)):
            answer = (await client.post(f"/v1/webhooks/{hook['id']}/ping")).json()
            assert answer["delivered"] is taken
        assert "not valid for 'other.example'" in answer["error"]
        async with asyncio.timeout(60):
            while len(dead := (await client.get(f"/v1/webhooks/{bad['id']}/dead")).json()["deliveries"]) < 4:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert all("not valid for 'other.example'" in letter["error"] for letter in dead)
        assert len(good.taken) == 4

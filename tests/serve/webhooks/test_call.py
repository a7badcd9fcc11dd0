"""Addresses that webhooks call, signatures, and attempts on real sockets: names, certificates, faults of our own."""

from __future__ import annotations

import asyncio
import base64
import socket
import ssl
from pathlib import Path
from typing import Any

import httpx
import pytest

from serve.webhooks.call import (
    ForbiddenTarget,
    WebhookCaller,
    checked_url,
    secret_text,
    signature,
    target_of,
)
from tests.serve.conftest import serving
from tests.serve.lakes import top_topics, topics, window
from tests.serve.test_access import certificate
from tests.serve.webhooks.receiver import receiving
from tests.serve.webhooks.test_webhooks import added

SECRET = bytes(range(32))


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
        assert await caller.post(url, SECRET, "msg_1", "change", b'{"type": "ping"}') == (204, "")
        [(_, headers, _)] = receiver.requests
        assert headers["host"] == f"xn--bcher-kva.example:{url.rsplit(':', 1)[1].split('/')[0]}"


async def test_what_fails_on_our_side_is_an_outcome() -> None:
    async with WebhookCaller(60, private=True, trust=ssl.create_default_context()) as caller:
        status, error = await caller.post("http://127.0.0.1:1/", SECRET, "msg_1", "change", b"{}")
    assert (status, error[:11]) == (0, "ConnectErro")


@pytest.mark.usefixtures("resolving")
async def test_a_connection_serves_the_name_whose_certificate_it_has_shown(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cert, key = certificate(tmp_path)  # for 127.0.0.1, not for other.example, which has the same address
    monkeypatch.setattr("serve.webhooks.runner.MAX_ATTEMPTS", 1)
    monkeypatch.setattr(httpx, "create_ssl_context", lambda **_: ssl.create_default_context(cafile=cert))
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(cert, key)
    handshakes: list[str | None] = []
    server.sni_callback = lambda _, name, __: handshakes.append(name)
    product = top_topics(root)
    async with (
        receiving(server) as good,
        serving(root, webhook_private=True) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as client,
    ):
        made = await added(client, good)
        bad = await added(client, good, url=good.url.replace("127.0.0.1", "other.example"))
        good.secret = made["secret"]
        for count in range(3):
            product.overwrite(topics(0, [count]), [window(0)])
            await good.wait(count + 2)
        assert handshakes.count(None) == 1, "one connection for what comes in turn"
        async with asyncio.timeout(60):
            while len(dead := (await client.get(f"/v1/webhooks/{bad['id']}/dead")).json()["deliveries"]) < 4:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert all("not valid for 'other.example'" in letter["error"] for letter in dead)
        assert len(good.taken) == 4


@pytest.mark.parametrize(
    "url",
    ["", "x", "http://", "ftp://a/", "file:///etc/passwd", "http://a b/", "http://a/\r\nX: y", "http://u@a/", "http://a:0/",
     "http://a:99999/", "http://a/#f", "http://[::1/", "http://" + "a" * 3_000 + "/",
     "http://☃.net/", "http://" + "ü" * 70 + ".de/", "http://\u200d.de/"],
)  # fmt: skip
def test_what_is_no_url_of_a_webhook(url: str) -> None:
    with pytest.raises(ForbiddenTarget):
        checked_url(url)


async def test_a_request_goes_to_the_address_that_was_judged() -> None:
    assert checked_url("https://Bücher.example:81/ü").netloc == "xn--bcher-kva.example:81"
    assert checked_url("http://[::1]/").netloc == "[::1]"
    url, host, name = await target_of("http://localhost:81/a?b=c", private=True)
    assert url in ("http://127.0.0.1:81/a?b=c", "http://[::1]:81/a?b=c")
    assert (host, name) == ("localhost:81", "localhost")
    with pytest.raises(ForbiddenTarget, match="not on the public internet"):
        await target_of("http://localhost:81/", private=False)
    with pytest.raises(ForbiddenTarget, match="no address"):
        await target_of("http://no-such-host.invalid/", private=True)


def test_a_signature_of_the_specification() -> None:
    """The example of the Standard Webhooks reference implementations."""
    key = base64.b64decode("MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
    body = b'{"test": 2432232314}'
    signed = signature(key, "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, body)
    assert signed == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="
    assert secret_text(key) == "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"

"""Security on real sockets: every route and transport, keys and their rows, tickets, origins, limits, TLS."""

from __future__ import annotations

import asyncio
import datetime
import json
import re
import ssl
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from starlette.routing import Route
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.typing import Subprotocol

from lakehouse.contract.access import KeyFile
from lakehouse.contract.errors import ConfigError
from lakehouse.contract.lake import Lake
from lakehouse.contract.settings import ServeSettings, Settings
from serve.access import PUBLIC, ReaderKey, needs_key
from serve.app import run_server
from serve.http.routes import ROUTES
from tests.serve.conftest import serving
from tests.serve.lakes import city, rsvps_by_city, top_topics, topics, window
from tests.serve.push.clients import TRANSPORTS, Client, Closed, PollClient, SseClient, WebSocketClient

ZERO = "0" * 64
EVENTS = {"Accept": "text/event-stream"}


def keys(root: Path) -> KeyFile[ReaderKey]:
    return KeyFile(Lake(root).state / "readers.toml", ReaderKey)


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def lake(root: Path) -> None:
    top_topics(root).overwrite(topics(0, [5, 4, 3]), [window(0)])
    rsvps_by_city(root).append([city(0, "Berlin", 1), city(0, "Bonn", 2)])


async def answers(client: httpx.AsyncClient, path: str, key: str, status: int) -> None:
    """Ask until it answers so."""
    while (await client.get(path, headers=bearer(key))).status_code != status:  # noqa: ASYNC110 - the server says nothing by itself
        await asyncio.sleep(0.05)


def routes() -> list[tuple[str, str]]:
    """Every route with each of its methods."""
    return [
        (method, re.sub(r"\{\w+(:\w+)?\}", "x", route.path))
        for route in ROUTES
        if isinstance(route, Route)
        for method in sorted(route.methods or {"GET"})
    ]


async def test_nothing_comes_before_authentication_on_any_route(root: Path) -> None:
    lake(root)
    keys(root).new(ReaderKey(ZERO, "somebody"))
    assert len(routes()) > 15
    async with serving(root) as url, httpx.AsyncClient(base_url=url, timeout=60) as client:
        for method, path in routes():
            for headers in ({}, bearer("mr_x_y"), {"Authorization": "Basic eDp5"}):
                answer = await client.request(method, path, headers=headers)
                if path in PUBLIC:
                    assert answer.status_code == 200, path
                    assert "topics" not in answer.text and "Berlin" not in answer.text
                else:
                    assert needs_key(path), path
                    assert answer.status_code == 401, (method, path, answer.text)
                    assert answer.headers["www-authenticate"].startswith("Bearer")
                    assert method == "HEAD" or answer.json()["code"] == "unauthorized"
        assert (await client.get("/")).status_code == 200, "the dashboard's files hold no data"


@pytest.mark.parametrize("name", [name for name in TRANSPORTS if not name.startswith("rpc")])
async def test_nothing_comes_before_authentication_on_any_transport(root: Path, name: str) -> None:
    lake(root)
    keys(root).new(ReaderKey(ZERO, "somebody"))
    async with serving(root) as url, TRANSPORTS[name](url, {"table": "top_topics"}) as client:
        message = await client.receive()
        assert (message["type"], message["code"]) == ("error", "unauthorized")
        assert (await client.closed())[0] in (4401, 401, 0)


async def test_nothing_is_called_before_authentication(root: Path) -> None:
    lake(root)
    keys(root).new(ReaderKey(ZERO, "somebody"))
    async with serving(root) as url:
        stream = f"{url.replace('http', 'ws')}/v1/subscribe"
        async with connect(stream, subprotocols=[Subprotocol("millrace.rpc")]) as calls:
            said = json.loads(await calls.recv())
            assert said["code"] == "unauthorized"
            with pytest.raises(ConnectionClosed) as closed:
                await calls.recv()
            assert closed.value.rcvd is not None and closed.value.rcvd.code == 4401


async def ticket(client: httpx.AsyncClient, key: str) -> str:
    made = await client.post("/v1/tickets", headers=bearer(key))
    assert made.status_code == 201
    return str(made.json()["ticket"])


@pytest.mark.parametrize("kind", [WebSocketClient, SseClient, PollClient])
async def test_a_ticket_opens_one_stream(root: Path, kind: Callable[[str, dict[str, str]], Client]) -> None:
    lake(root)
    key = keys(root).new(ReaderKey(ZERO, "somebody"))
    async with serving(root) as url, httpx.AsyncClient(base_url=url, timeout=60) as http:
        shown = {"table": "top_topics", "ticket": await ticket(http, key)}
        async with kind(url, dict(shown)) as client:
            assert len((await client.receive("snapshot"))["rows"]) == 3
        async with kind(url, dict(shown)) as client:
            assert (await client.receive("error"))["code"] == "unauthorized"
        for wrong in ("", "x", shown["ticket"][:-2], "A" * 60):
            assert (await http.get("/v1/tables", params={"ticket": wrong})).status_code == 401
        assert (await http.get("/v1/tables", params={"ticket": key})).status_code == 401, "a key is no ticket"


async def test_a_key_sees_its_tables_and_rows_only(root: Path) -> None:
    lake(root)
    key = keys(root).new(ReaderKey(ZERO, "b", tables=("rsvps_by_city",), rows={"*": "city = 'Bonn'"}))
    async with serving(root) as url, httpx.AsyncClient(base_url=url, headers=bearer(key), timeout=60) as client:
        [listed] = (await client.get("/v1/tables")).json()["tables"]
        assert listed["table"] == "rsvps_by_city" and "rows" not in listed
        rows = (await client.get("/v1/tables/rsvps_by_city")).json()["rows"]
        assert [row["city"] for row in rows] == ["Bonn"]
        assert (await client.get("/v1/tables/top_topics")).status_code == 404
        assert (await client.get("/v1/tables", headers={"Authorization": "", "X-API-Key": key})).json()["tables"]
        assert (await client.get("/metrics")).status_code == 403
        assert (await client.post("/v1/queries", json={})).status_code == 403
        async with connect(
            f"{url.replace('http', 'ws')}/v1/subscribe?table=rsvps_by_city", additional_headers=bearer(key)
        ) as stream:
            snapshot = json.loads(await stream.recv())
            assert [row["city"] for row in snapshot["rows"]] == ["Bonn"]


async def test_a_revoked_key_ends_what_it_holds_open(root: Path) -> None:
    lake(root)
    file = keys(root)
    key, other = file.new(ReaderKey(ZERO, "a")), file.new(ReaderKey(ZERO, "b"))
    async with serving(root) as url:
        address = f"{url.replace('http', 'ws')}/v1/subscribe?table=top_topics"
        async with (
            connect(address, additional_headers=bearer(key)) as revoked,
            connect(address, additional_headers=bearer(other)) as stays,
        ):
            for stream in (revoked, stays):
                assert json.loads(await stream.recv())["type"] == "snapshot"
            file.revoke(key.split("_")[1])
            with pytest.raises(ConnectionClosed) as closed:
                async with asyncio.timeout(60):
                    while True:
                        await revoked.recv()
            assert closed.value.rcvd is not None and closed.value.rcvd.code == 4401
            await (await stays.ping())
        file.revoke(other.split("_")[1])
        async with asyncio.timeout(60), httpx.AsyncClient(base_url=url, timeout=60) as client:
            await answers(client, "/v1/tables", other, 401)
            assert (await client.get("/v1/tables")).status_code == 401, "the last key revoked opens nothing"


@pytest.mark.parametrize("name", TRANSPORTS)
async def test_a_key_that_expires_ends_what_it_holds_open(root: Path, name: str) -> None:
    lake(root)
    file = keys(root)
    key = file.new(ReaderKey(ZERO, "a"))
    async with serving(root) as url, TRANSPORTS[name](url, {"table": "top_topics", "key": key}) as client:
        await client.receive("snapshot")
        until = time.time() + 2
        named = f"[keys.{key.split('_')[1]}]"
        file.path.write_text(file.path.read_text().replace(named, f"{named}\nuntil = {until}"))
        with pytest.raises(Closed) as closed:
            while True:
                await client.receive()
        assert time.time() >= until
        assert closed.value.args[0] == (401 if name == "poll" else 4401)
        async with httpx.AsyncClient(base_url=url, timeout=60) as http:
            assert (await http.get("/v1/tables", headers=bearer(key))).status_code == 401


async def test_a_keys_connections_and_rate_are_bounded(root: Path) -> None:
    lake(root)
    few = keys(root).new(ReaderKey(ZERO, "few", connections=1))
    slow = keys(root).new(ReaderKey(ZERO, "slow", rate=2))
    async with serving(root) as url, httpx.AsyncClient(base_url=url, timeout=60) as client:
        address = f"{url.replace('http', 'ws')}/v1/subscribe?table=top_topics"
        async with connect(address, additional_headers=bearer(few)) as first:
            assert json.loads(await first.recv())["type"] == "snapshot"
            async with connect(address, additional_headers=bearer(few)) as second:
                assert json.loads(await second.recv())["code"] == "full"
            poll = await client.get("/v1/poll?table=top_topics", headers=bearer(few))
            assert (poll.status_code, poll.json()["code"]) == (503, "full")
        async with asyncio.timeout(60):  # the server hears of the end in its own time
            await answers(client, "/v1/poll?table=top_topics", few, 200)
        found = await asyncio.gather(*[client.get("/v1/tables", headers=bearer(slow)) for _ in range(40)])
        refused = [each for each in found if each.status_code == 429]
        assert refused and refused[0].headers["retry-after"] == "1"
        assert len(refused) < 40


async def test_pages_of_other_sites_and_foreign_names(root: Path) -> None:
    lake(root)
    mine = {"Origin": "https://shop.example"}
    async with (
        serving(root, origins="https://shop.example") as url,  # type: ignore[arg-type]
        httpx.AsyncClient(base_url=url, timeout=60) as client,
    ):
        assert (await client.get("/v1/tables", headers={"Origin": "https://elsewhere.example"})).status_code == 403
        assert (await client.get("/v1/tables", headers={"Origin": "null"})).status_code == 403
        assert (await client.get("/v1/tables", headers={"Host": "rebound.example"})).status_code == 403
        assert (await client.get("/v1/tables", headers={"Host": "localhost:1"})).status_code == 200
        read = await client.get("/v1/tables", headers=mine)
        assert (read.status_code, read.headers["access-control-allow-origin"]) == (200, mine["Origin"])
        asked = {**mine, "Access-Control-Request-Method": "GET", "Access-Control-Request-Headers": "authorization"}
        preflight = await client.options("/v1/tables", headers=asked)
        assert preflight.status_code == 200
        assert "authorization" in preflight.headers["access-control-allow-headers"]
        async with client.stream("GET", "/v1/subscribe?table=top_topics", headers=mine | EVENTS) as events:
            assert events.headers["access-control-allow-origin"] == mine["Origin"]
        foreign = {"Origin": "https://elsewhere.example"}
        assert (await client.get("/v1/subscribe?table=top_topics", headers=foreign | EVENTS)).status_code == 403
        stream = f"{url.replace('http', 'ws')}/v1/subscribe?table=top_topics"
        with pytest.raises(InvalidStatus) as refused:
            await connect(stream, additional_headers={"Host": "rebound.example"})
        assert refused.value.response.status_code in (400, 403)
        async with connect(stream, additional_headers=mine) as allowed:
            assert json.loads(await allowed.recv())["type"] == "snapshot"


@pytest.mark.parametrize(
    ("changed", "key", "says"),
    [
        ({"host": "0.0.0.0"}, "serve.host", "no readers' keys"),
        ({"tls_cert": "x.pem"}, "serve.tls_key", "come together"),
        ({"tls_cert": "x.pem", "tls_key": "y.pem"}, "serve.tls_cert", "no file"),
        ({"origins": "shop.example"}, "serve.origins", "no origin"),
    ],
)
async def test_what_would_be_unsafe_does_not_start(root: Path, changed: dict[str, Any], key: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        await run_server(Settings(lake=root, serve=ServeSettings(**{"port": 0} | changed)))
    assert caught.value.key == key and caught.value.remedy


async def test_keys_that_are_wrong_are_named_at_start(root: Path) -> None:
    path = keys(root).path
    path.parent.mkdir(parents=True)
    path.write_text(f"[keys.a]\nhash = '{ZERO}'\nrows = {{ t = 'count(*) > 1' }}\n")
    with pytest.raises(ConfigError, match=r"readers\.toml.*keys\.a\.rows\.t.*not taken"):
        await run_server(Settings(lake=root, serve=ServeSettings(port=0)))


async def test_tls(root: Path, tmp_path: Path) -> None:
    lake(root)
    cert, key = certificate(tmp_path)
    context = ssl.create_default_context(cafile=str(cert))
    async with serving(root, tls_cert=str(cert), tls_key=str(key)) as url:  # type: ignore[arg-type]
        assert url.startswith("https://")
        async with httpx.AsyncClient(base_url=url, verify=context, timeout=60) as client:
            assert len((await client.get("/v1/tables/top_topics")).json()["rows"]) == 3
            async with client.stream("GET", "/v1/subscribe?table=top_topics", headers=EVENTS) as events:
                async for line in events.aiter_lines():
                    if line.startswith("data: "):
                        assert json.loads(line[6:])["type"] == "snapshot"
                        break
        stream = f"{url.replace('https', 'wss')}/v1/subscribe?table=top_topics"
        async with connect(stream, ssl=context) as secure:
            assert json.loads(await secure.recv())["type"] == "snapshot"


def certificate(folder: Path) -> tuple[Path, Path]:
    """A certificate of our own for 127.0.0.1, good for a day."""
    import ipaddress

    private = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(private.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), True)
        .sign(private, hashes.SHA256())
    )
    cert, key = folder / "cert.pem", folder / "key.pem"
    cert.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    key.write_bytes(
        private.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    return cert, key

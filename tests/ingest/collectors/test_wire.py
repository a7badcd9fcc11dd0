"""The HTTP face against clients that are plain, odd or hostile: real sockets, a real log; Kafka is the test's hand."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
import uvicorn
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.applications import Starlette
from uvicorn.server import ServerState

from ingest import intake
from ingest.answers.acks import RecentEvents, Signer
from ingest.answers.respond import Answers, Responder
from ingest.answers.tables import ProductTables
from ingest.border.access import ApiKey, SenderGate
from ingest.border.admission import Border
from ingest.collectors import wire
from ingest.collectors.http import HttpServer, NodeStats, check_exposure, make_app
from ingest.collectors.wire import Head, parse_head
from ingest.delivery import KafkaDelivery
from ingest.intake import Intake, RequestIntake
from ingest.kafka import SendOutcome
from ingest.log.message_log import MessageLog
from ingest.log.segments import LoggedEvent
from lakehouse.contract.access import KeyFile, KeyRing
from lakehouse.contract.errors import ConfigError
from lakehouse.contract.lake import Lake
from lakehouse.contract.settings import CollectSettings
from tests.ingest.conftest import LIMIT, event, eventually, pipeline_of, request

JSON = {"content_type": "application/json"}
LINES = {"content_type": "application/x-ndjson"}


class Taking:
    """A publisher that has everything at once."""

    def __init__(self) -> None:
        self.got: list[LoggedEvent] = []
        self.deliver: Callable[[Sequence[SendOutcome]], None] = lambda _: None

    def start(self, deliver: Callable[[Sequence[SendOutcome]], None]) -> None:
        self.deliver = deliver

    def send(self, events: Sequence[LoggedEvent], *, afresh: bool = False) -> None:
        self.got += events
        outcomes = [SendOutcome(found, 0, found.seq) for found in events]
        asyncio.get_running_loop().call_soon(self.deliver, outcomes)

    def close(self, timeout_s: float) -> None: ...


@dataclass
class Served:
    url: str
    port: int
    log: MessageLog
    gate: SenderGate
    publisher: Taking
    server: HttpServer
    stats: NodeStats

    @property
    def ids(self) -> list[str]:
        return [found.envelope.event_id for found in self.publisher.got]


ONE = SimpleNamespace(names=["clicks"], shedders={}, statuses=list)


@contextlib.asynccontextmanager
async def serving(
    folder: Path,
    gate: SenderGate | None = None,
    settings: CollectSettings | None = None,
    log: MessageLog | None = None,
    **source: Any,
) -> AsyncIterator[Served]:
    pipeline = pipeline_of("t", "http", **{"max_event_bytes": 100_000, **source})
    log = log or MessageLog(folder / "log", "n1", limit=LIMIT)
    publisher, recent = Taking(), RecentEvents({"clicks": "t"})
    delivery = KafkaDelivery(log, publisher, recent.known, hand_over_s=0)
    publisher.start(delivery.deliver)
    lane = log.lane("clicks/http/0", "clicks")
    border = Border(pipeline.sources["clicks"], tenant="default", collector="n1")
    gate = gate or SenderGate()
    intakes = {"clicks": Intake(border, lane, log, delivery, recent)}
    requests = RequestIntake(intakes, lambda: log.problem or ("full" if log.full else ""), gate, Signer.of_lake(folder))
    stats = NodeStats("n1", log, delivery, ONE, requests)
    answers = Answers(pipeline.sources.get, recent, ProductTables(Lake(folder), 0.02), 10)
    app = make_app(requests, stats, Responder(answers, pipeline, requests, folder / "callbacks"))
    server = HttpServer(app, requests, settings or CollectSettings(port=0))
    tasks = [asyncio.create_task(delivery.run()), asyncio.create_task(server.serve())]
    try:
        yield Served(server.url, int(server.url.rpartition(":")[2]), log, gate, publisher, server, stats)
    finally:
        server.stop()
        await tasks[1]
        tasks[0].cancel()
        await log.close()


def post(body: bytes, *lines: bytes, kind: bytes = b"application/json", path: bytes = b"/v1/clicks") -> bytes:
    head = b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Type: %b\r\nContent-Length: %d\r\n" % (path, kind, len(body))
    return head + b"".join(line + b"\r\n" for line in lines) + b"\r\n" + body


async def talk(port: int, *pieces: bytes, answers: int = 1, pause_s: float = 0.0) -> list[tuple[int, bytes]]:
    """Send the pieces, read so many answers, or as many as come before the end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    found: list[tuple[int, bytes]] = []
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(pause_s)
        while len(found) < answers:
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)
            lowered = head.lower()
            length = 0
            if b"content-length: " in lowered:
                length = int(lowered.partition(b"content-length: ")[2].partition(b"\r")[0])
            found.append((int(head.split()[1]), await reader.readexactly(length)))
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
    return found


# --- heads


def test_a_plain_head() -> None:
    head = (
        b"POST /v1/clicks HTTP/1.1\r\nHost: x\r\nUSER-AGENT:  me \r\nContent-Type: Application/JSON; charset=utf-8\r\n"
        b"Content-Length: 17\r\nAuthorization: bearer mr_a_b\r\nConnection: Keep-Alive"
    )
    assert parse_head(head) == Head("clicks", "application/json", 17, "mr_a_b")
    assert parse_head(b"POST /v1/c HTTP/1.1\r\nHost:\r\nContent-Length: 0\r\nX-API-Key: k") == Head("c", "", 0, "k")


PLAIN = b"POST /v1/clicks HTTP/1.1\r\nHost: x\r\nContent-Length: 2"


@pytest.mark.parametrize(
    "head",
    [
        PLAIN.replace(b"1.1", b"1.0"),
        PLAIN.replace(b"POST", b"GET"),
        PLAIN.replace(b"POST", b"post"),
        PLAIN.replace(b"clicks", b"clicks?ack=none"),
        PLAIN.replace(b"clicks", b"../v1/clicks"),
        PLAIN.replace(b"clicks", b"cl%69cks"),
        PLAIN.replace(b" HTTP", b"  HTTP"),
        PLAIN.replace(b"/v1", b"http://x/v1"),
        PLAIN.replace(b"Host: x\r\n", b""),
        PLAIN.replace(b"\r\nHost", b"\nHost"),
        PLAIN.replace(b"Host: x", b"Host: x\r\nHost: y"),
        PLAIN.replace(b"Host: x", b"Host: x\r\n folded: y"),
        PLAIN.replace(b"Host: x", b"Host : x"),
        PLAIN.replace(b"Host: x", b"Host: x\ny"),
        PLAIN.replace(b"Host: x", b"Host: x\0"),
        PLAIN.replace(b"Host: x", b"Host: \xff"),
        PLAIN.replace(b"Content-Length: 2", b""),
        PLAIN + b"\r\nContent-Length: 2",
        PLAIN + b"\r\ncontent-length: 3",
        PLAIN + b", 2",
        PLAIN.replace(b"Length: 2", b"Length: +2"),
        PLAIN.replace(b"Length: 2", b"Length: 0x2"),
        PLAIN.replace(b"Length: 2", b"Length: -2"),
        PLAIN.replace(b"Length: 2", b"Length: 99999999999"),
        PLAIN.replace(b"Length: 2", b"Length: \xb2"),
        PLAIN + b"\r\nTransfer-Encoding: chunked",
        PLAIN + b"\r\nTransfer-Encoding : chunked",
        PLAIN + b"\r\nContent-Encoding: gzip",
        PLAIN + b"\r\nExpect: 100-continue",
        PLAIN + b"\r\nUpgrade: websocket",
        PLAIN + b"\r\nConnection: close",
        PLAIN + b"\r\nConnection: keep-alive, Transfer-Encoding",
        PLAIN + b"\r\nTrailer: x",
        b"",
    ],
)
def test_a_head_that_is_not_plain_is_the_web_servers(head: bytes) -> None:
    assert parse_head(head) is None


@settings(max_examples=200)
@given(st.integers(0, len(PLAIN) - 1), st.binary(min_size=1, max_size=3))
def test_a_changed_head_is_read_as_the_same_request_or_not_at_all(at: int, junk: bytes) -> None:
    found = parse_head(PLAIN[:at] + junk + PLAIN[at:])
    assert found is None or (found.length >= 2 and b"\n" not in junk and b"\r" not in junk)


# --- requests


async def test_pipelined_requests_are_answered_in_order_in_whatever_pieces_they_come(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        requests = [post(event(n)) for n in range(40)]
        requests[7] = post(b"{", kind=b"application/json")
        requests[9] = post(b"\n".join(event(n) for n in (100, 101)), kind=b"application/x-ndjson")
        stream = b"".join(requests)
        rng = random.Random(1)
        pieces, at = [], 0
        while at < len(stream):
            size = rng.choice((1, 2, 3, 50, 400, 3000))
            pieces.append(stream[at : at + size])
            at += size
        found = await talk(served.port, *pieces, answers=40)
        assert [status for status, _ in found] == [400 if n == 7 else 202 for n in range(40)]
        signer = Signer.of_lake(tmp_path)
        for n, (status, body) in enumerate(found):
            answer = orjson.loads(body)
            if status == 202 and n != 9:
                assert signer.open(answer["token"]).event_id == str(n)
        assert [signer.open(token).event_id for token in orjson.loads(found[9][1])["tokens"]] == ["100", "101"]
        await eventually(lambda: len(served.publisher.got) == 41)
        assert [name for name in served.ids if not name.startswith("~")] == [
            *map(str, range(7)), "8", "100", "101", *map(str, range(10, 40)),
        ]  # fmt: skip
        assert served.publisher.got[0].payload == event(0)


async def test_one_connection_goes_over_to_the_web_server_and_nothing_is_lost(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        chunked = (
            b"POST /v1/clicks HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
            + b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (event(2)[:9], event(2)[9:])) + b"0\r\n\r\n"
        )  # fmt: skip
        pieces = [post(event(1)), chunked, b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n", post(event(3))]
        found = await talk(served.port, b"".join(pieces), answers=4)
        assert [status for status, _ in found] == [202, 202, 200, 202]
        await eventually(lambda: served.ids == ["1", "2", "3"])
        assert served.gate.connections <= 1
    assert served.gate.connections == 0


@pytest.mark.parametrize(
    ("hostile", "taken"),
    [
        # Two lengths, a length and chunks, a length that is none, a chunk size that is none: the smugglers' shapes.
        (post(event(1), b"Content-Length: 5"), False),
        (post(event(1), b"Transfer-Encoding: chunked"), False),
        (post(event(1), b"Transfer-Encoding: xchunked"), False),
        (post(event(1), b"Transfer-Encoding:\tchunked"), False),
        (post(event(1), b"Transfer-Encoding: identity, chunked"), False),
        (post(b"zz\r\nabc\r\n0\r\n\r\n").replace(b"Content-Length: 14", b"Transfer-Encoding: chunked"), False),
        (post(event(1)).replace(b"Content-Length: ", b"Content-Length: -"), False),
        (post(event(1)).replace(b"Content-Length: ", b"Content-Length: +"), False),
        (post(event(1)).replace(b"\r\n", b"\n"), False),
        (post(event(1)).replace(b"Host: x", b"Host: x\r\n y"), False),
        (b"\r\n" + post(event(1)), True),  # RFC 9112 §2.2 asks servers to pass over one
    ],
)
async def test_a_request_that_could_be_read_in_two_ways_smuggles_nothing(
    tmp_path: Path, hostile: bytes, taken: bool
) -> None:
    async with serving(tmp_path) as served:
        found = await talk(served.port, hostile + post(event(66)), answers=2)
        if taken:
            assert [status for status, _ in found] == [202, 202]
        else:
            assert all(status >= 400 for status, _ in found), found
            assert not served.publisher.got, "neither it nor what stood behind it"


@settings(max_examples=60)
@given(st.lists(st.binary(max_size=120) | st.sampled_from([PLAIN, b"\r\n", b"\r\n\r\n", post(event(1))]), max_size=6))
def test_rubbish_never_breaks_the_server(pieces: list[bytes]) -> None:
    """The protocol itself, without a socket: whatever comes, it answers, closes, waits or hands over."""

    class Transport:
        closed = False
        out = b""

        def write(self, data: bytes) -> None:
            self.out += data

        def close(self) -> None:
            self.closed = True

        def is_closing(self) -> bool:
            return self.closed

        def pause_reading(self) -> None: ...

        def resume_reading(self) -> None: ...

        def get_extra_info(self, name: str) -> None: ...

    class Protocol(wire.CollectorHttpProtocol):
        got = b""

        def _to_uvicorn(self, data: bytes) -> None:
            self.got += data

    transport = Transport()
    requests = RequestIntake({}, lambda: "", SenderGate(), Signer(b"k" * 32))
    config = uvicorn.Config(Starlette(), log_config=None)
    config.load()
    loop = SimpleNamespace(time=lambda: 1.0)
    protocol = Protocol(requests, config=config, server_state=ServerState(), app_state={}, _loop=loop)
    protocol.connection_made(transport)  # type: ignore[arg-type]
    for piece in pieces:
        protocol.data_received(piece)
    sent = b"".join(pieces)
    plain = sent.startswith(post(event(1)))
    assert not plain or transport.out.startswith(b"HTTP/1.1 404"), "the requests has no source"
    assert not protocol.got or sent.endswith(protocol.got), "what is handed over is the rest of what came"


async def test_answers_wait_for_the_disk_and_those_behind_them_wait_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = MessageLog(tmp_path / "log", "n1", limit=LIMIT)
    async with serving(tmp_path, log=log) as served:
        monkeypatch.setattr(served.publisher, "send", lambda events, afresh=False: None)  # Kafka is away
        held = asyncio.Event()
        loop = asyncio.get_running_loop()
        disk = log._commit.worker.submit(lambda: asyncio.run_coroutine_threadsafe(held.wait(), loop).result(60))
        answer = asyncio.create_task(talk(served.port, post(event(1)), post(b"["), answers=2))
        await eventually(lambda: log.next_seq == 3)
        await asyncio.sleep(0.1)
        assert not answer.done(), "not before it is durable"
        held.set()
        assert [status for status, _ in await asyncio.wait_for(answer, 60)] == [202, 400]
        disk.result()


async def test_a_client_that_does_not_read_its_answers_is_not_read_any_more(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        with socket.create_connection(("127.0.0.1", served.port)) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            requests = post(b"{}") * 500  # each refused with a long answer
            sent = 0

            def push() -> bool:
                nonlocal sent
                with contextlib.suppress(BlockingIOError):
                    while True:
                        sent += client.send(requests)
                return False

            loop = asyncio.get_running_loop()
            stalled, before = 0, -1
            while stalled < 8:  # it stands still: nothing is taken from us for a while
                await loop.run_in_executor(None, push)
                stalled = stalled + 1 if sent == before else 0
                before = sent
                await asyncio.sleep(0.1)
            (connection,) = served.server._server.server_state.connections
            assert isinstance(connection, wire.CollectorHttpProtocol)
            assert connection._paused
            assert connection.transport.get_write_buffer_size() < 4_000_000
            assert len(connection._buffer) < 1_000_000
        await eventually(lambda: served.gate.connections == 0)


async def test_slow_clients_are_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ingest.collectors.http.REQUEST_TIMEOUT_S", 1.0)
    slow = CollectSettings(port=0, idle_timeout_s=1.0)
    async with serving(tmp_path, settings=slow) as served:
        heads = [
            b"POST /v1/clicks HTT",  # plain so far
            post(event(1))[:-5],  # the body never ends
            b"GET /healthz HTTP/1.1\r\nHost",  # the web server's
            b"POST /v1/clicks HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n5\r\nab",
            b"",  # nothing at all
        ]
        found = await asyncio.gather(*(talk(served.port, head) for head in heads))
        assert [[status for status, _ in answers] for answers in found] == [[408], [408], [], [], []]
        assert served.server.expired == 4
        # One byte now and then does not help.
        drips = [bytes((byte,)) for byte in post(event(1))[:60]]
        assert (await talk(served.port, *drips, pause_s=0.03))[:1] in ([], [(408, found[0][0][1])])
        await eventually(lambda: served.gate.connections == 0)
        assert not served.publisher.got


async def test_who_may_not_send_takes_no_room_from_those_who_may(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    key = KeyFile(path, ApiKey).new(ApiKey("0" * 64)).encode()
    async with serving(tmp_path, gate=SenderGate(KeyRing(KeyFile(path, ApiKey))), max_event_bytes=100_000) as served:
        head = post(b"").replace(b"Content-Length: 0", b"Content-Length: %d" % intake.MAX_BODY_BYTES)
        strangers = [await asyncio.open_connection("127.0.0.1", served.port) for _ in range(33)]
        for _, writer in strangers:
            writer.write(head)
        large = b'{"id":1,"who":"a","pad":"' + b"x" * 80_000 + b'"}'
        request_ = post(large, b"X-API-Key: " + key)
        assert [status for status, _ in await talk(served.port, request_[:500], request_[500:])] == [202]
        for reader, writer in strangers:
            answer = await asyncio.wait_for(reader.read(), 60)  # to its end: no other request is answered
            assert answer.startswith(b"HTTP/1.1 401 ")
            writer.write(b"x" * 300_000 + post(event(2)))  # what it sends all the same is thrown away
            await writer.drain()
            writer.close()
        await eventually(lambda: served.gate.connections == 0)
        assert len(served.publisher.got) == 1
        assert served.gate.refused["clicks", "unauthorized"] == 33
        assert served.gate.reserved == 0


async def test_too_large_too_many_and_heads_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(tmp_path, gate=SenderGate(max_connections=2)) as served:
        large = b"POST /v1/clicks HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        ((status, body),) = await talk(served.port, large % (intake.MAX_BODY_BYTES + 1), answers=2)
        assert (status, orjson.loads(body)["type"]) == (413, "urn:millrace:problem:body-too-large")
        endless = b"POST /v1/clicks HTTP/1.1\r\nX: " + b"y" * 16_384
        assert [status for status, _ in await talk(served.port, endless, answers=2)] == [431]
        endless = b"GET /healthz HTTP/1.1\r\nX: " + b"y" * 3_000
        found = await talk(served.port, endless, b"y" * 70_000, answers=2, pause_s=0.2)
        assert [status for status, _ in found] == [400], "by the web server, which has it by then"
        await eventually(lambda: served.gate.connections == 0)
        monkeypatch.setattr("ingest.border.access.MOST_INCOMING_BYTES", 100_000)
        ((status, body),) = await talk(served.port, large % 200_000, answers=2)
        assert (status, orjson.loads(body)["type"]) == (503, "urn:millrace:problem:busy")
        assert served.gate.reserved == 0
        held = [await asyncio.open_connection("127.0.0.1", served.port) for _ in range(2)]
        await eventually(lambda: served.gate.connections == 2)
        ((status, body),) = await talk(served.port, post(event(1)), answers=2) or [(503, b'{"type":"cut"}')]
        assert status == 503
        for _, writer in held:
            writer.close()
        await eventually(lambda: served.gate.connections == 0)
        assert [status for status, _ in await talk(served.port, post(event(1)))] == [202]


# --- keys, rates, kinds


async def test_keys_tenants_and_limits(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    good = KeyFile(path, ApiKey).new(
        ApiKey("0" * 64, tenant="acme", sources=("clicks",), max_event_bytes=500, connections=1)
    )
    other = KeyFile(path, ApiKey).new(ApiKey("0" * 64, sources=("others",)))
    async with serving(tmp_path, gate=SenderGate(KeyRing(KeyFile(path, ApiKey)))) as served:

        async def send(body: bytes, **headers: str) -> tuple[int, dict[str, str], Any]:
            return await request(served.url, "POST", "/v1/clicks", body, **JSON, **headers)

        status, headers, answer = await send(event(1))
        assert (status, answer["type"]) == (401, "urn:millrace:problem:unauthorized")
        assert headers["www-authenticate"] == "Bearer"
        assert (await send(event(1), authorization=f"Bearer {good}x"))[0] == 401
        assert (await send(event(1), x_api_key=other))[0] == 403
        assert (await send(event(1), authorization=f"Bearer {good}"))[0] == 202
        assert (await send(event(2), x_api_key=good, content_encoding="identity"))[0] == 202, "by the web server too"
        assert (await send(event(3), content_encoding="identity"))[0] == 401
        status, _, answer = await send(b'{"id":4,"who":"a","pad":"%s"}' % (b"x" * 600), x_api_key=good)
        assert (status, answer["type"]) == (413, "urn:millrace:problem:too-large")
        await eventually(lambda: len(served.publisher.got) == 3)
        assert {found.envelope.tenant for found in served.publisher.got} == {"acme"}
        assert served.gate.refused["clicks", "unauthorized"] == 3
        assert served.gate.refused["clicks", "forbidden"] == 1
        # Of this key one connection may be open.
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(post(event(5), b"X-API-Key: " + good.encode()))
        assert b" 202 " in await reader.readuntil(b"\r\n\r\n")
        status, headers, answer = await send(event(6), x_api_key=good)
        assert (status, answer["type"]) == (429, "urn:millrace:problem:too-many-connections")
        writer.close()


async def test_a_rate_is_kept_and_told(tmp_path: Path) -> None:
    async with serving(tmp_path, max_rate=10) as served:
        found = [await request(served.url, "POST", "/v1/clicks", event(n), **JSON) for n in range(60)]
        assert [status for status, _, _ in found[:10]] == [202] * 10
        refused = [headers for status, headers, _ in found if status == 429]
        assert refused and all(int(headers["retry-after"]) >= 1 for headers in refused)
        taken = sum(status == 202 for status, _, _ in found)
        await eventually(lambda: len(served.publisher.got) == taken)
        assert served.gate.refused["clicks", "too-fast"] == 60 - taken


async def test_content_types_of_a_source(tmp_path: Path) -> None:
    async with serving(tmp_path, content_types=("application/x-ndjson",)) as served:
        status, _, answer = await request(served.url, "POST", "/v1/clicks", event(1), **JSON)
        assert (status, answer["type"]) == (415, "urn:millrace:problem:content-type")
        assert (await request(served.url, "POST", "/v1/clicks", event(1), **LINES))[0] == 202


async def test_refused_events_beyond_the_limit_are_counted_only(tmp_path: Path) -> None:
    async with serving(tmp_path, gate=SenderGate(rejects_per_s=5, clock=lambda: 1.0)) as served:
        body = b"\n".join([b"{"] * 50 + [event(1)])
        status, _, answer = await request(served.url, "POST", "/v1/clicks", body, **LINES)
        assert status == 202
        assert len(answer["rejected"]) == 50
        assert [token is not None for token in answer["tokens"]].count(True) == 6
        await eventually(lambda: len(served.publisher.got) == 6)
        assert served.gate.not_kept["clicks"] == 45
        stats = served.stats.stats()
        assert stats["sources"]["clicks"]["not_kept"] == 45


NASTY = [
    (b'{"id":1,"who":"\xff"}', "not-json"),
    (b'{"id":1,"who":"\xed\xa0\x80"}', "not-json"),  # a surrogate in UTF-8
    (b'{"id":1,"who":"\\ud800"}', "not-json"),  # a lone surrogate
    (b'{"id":1,"who":"a","x":NaN}', "not-json"),
    (b'{"id":1,"who":"a","x":-Infinity}', "not-json"),
    (b'{"id":1,"who":"a","x":1e999}', "not-json"),
    (b'{"id":01,"who":"a"}', "not-json"),
    (b'{"id":1,"who":"a"}}', "not-json"),
    (b'{"id":1,"who":"a",}', "not-json"),
    (b"\xef\xbb\xbf" + b'{"id":1,"who":"a"}', "not-json"),  # a byte order mark
    (b"[" * 100_000, "not-json"),
    (b'{"id":1,"who":"a","x":' + b"[" * 500 + b"]" * 500 + b"}", "too-deep"),
    (b'{"id":1,"who":"a","x":' + b'{"y":' * 500 + b"1" + b"}" * 500 + b"}", "too-deep"),
    (b'{"id":123456789012345678901234567890,"who":"a"}', "bad-id"),
    (b'{"id":1.5e300,"who":"a"}', "bad-id"),
    (b'{"id":null,"who":"a"}', "bad-id"),
    (b'{"id":[1],"who":"a"}', "bad-id"),
    (b'{"id":1,"who":"' + b"x" * 600 + b'"}', "bad-id"),
    (b'"text"', "not-an-object"),
    (b'{"id":1,"who":"a","pad":"' + b"x" * 100_001 + b'"}', "too-large"),
    (b'{"id":1,"who":"a"}', "missing-field"),
    (b'{"id":1,"who":"a","n":null}', "missing-field"),
    (b'{"id":"5","who":"a","n":1}', "schema"),
    (b'{"id":true,"who":"a","n":1}', "schema"),
]  # fmt: skip


async def test_nasty_payloads_are_named_and_kept(tmp_path: Path) -> None:
    async with serving(tmp_path, required=("id", "n")) as served:
        for body, code in NASTY:
            path = "/v1/clicks"
            status, headers, answer = await request(served.url, "POST", path, body, **JSON)
            assert (headers["content-type"], answer.get("type")) == (
                "application/problem+json", f"urn:millrace:problem:{code}",
            ), body[:60]  # fmt: skip
            assert answer["status"] == status
        # The last of two equal keys counts, here as with every reader after it.
        status, _, answer = await request(served.url, "POST", "/v1/clicks", b'{"id":1,"id":2,"who":"a","n":1}', **JSON)
        assert Signer.of_lake(tmp_path).open(answer["token"]).event_id == "2"
        await eventually(lambda: len(served.publisher.got) == len(NASTY) + 1)
        for (body, _), found in zip(NASTY, served.publisher.got, strict=False):
            assert found.envelope.reject
            assert body.startswith(found.payload)


def test_another_address_needs_keys(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    for host in ("127.0.0.1", "127.8.9.1", "::1", "localhost"):
        check_exposure(CollectSettings(host=host), KeyRing(KeyFile(path, ApiKey)))
    for host in ("0.0.0.0", "::", "10.0.0.1", "example.org"):
        with pytest.raises(ConfigError, match="millrace key new"):
            check_exposure(CollectSettings(host=host), KeyRing(KeyFile(path, ApiKey)))
        check_exposure(CollectSettings(host=host, allow_anonymous=True), KeyRing(KeyFile(path, ApiKey)))
    KeyFile(path, ApiKey).new(ApiKey("0" * 64))
    check_exposure(CollectSettings(host="0.0.0.0"), KeyRing(KeyFile(path, ApiKey)))

"""Server-sent events on the wire: read by a parser that follows the EventSource rules, and what only they have."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from serve.core.messages import Message
from serve.core.position import Position
from serve.push.sse import SSE, wants_events
from tests.serve.conftest import receive, serving, subscribed
from tests.serve.lakes import top_topics, topics, window


def dispatched(stream: str) -> tuple[list[dict[str, str]], int | None]:
    """Events and reconnection time by WHATWG HTML, 9.2.6: one BOM, three line ends, one space taken away."""
    stream = stream.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    events, data, kind, ident, retry = [], [], "", "", None
    for line in stream.split("\n")[:-1]:  # what is not ended is not dispatched
        if not line:
            if data:
                events.append({"data": "\n".join(data), "type": kind or "message", "id": ident})
            data, kind = [], ""
            continue
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "data":
            data.append(value)
        elif name == "event":
            kind = value
        elif name == "id" and "\0" not in value:
            ident = value
        elif name == "retry" and value.isascii() and value.isdigit():
            retry = int(value)
    return events, retry


@pytest.mark.parametrize(
    "text", ["plain", "a\nb", "a\r\nb", "a\rb", ": no comment", "data: x", "\ufeffü€😀", " x", "\x00"]
)
def test_no_text_in_a_row_breaks_the_framing(text: str) -> None:
    body = json.dumps({"type": "change", "item": text}).encode()
    message = Message("change", body, {"type": "change", "position": "abc"}, Position("id", 1))
    events, _ = dispatched((SSE.frame(message) * 2).decode())
    assert [(json.loads(event["data"])["item"], event["type"], event["id"]) for event in events] == [
        (text, "message", "abc")
    ] * 2
    without = Message("heartbeat", body, {"type": "heartbeat"})
    events, _ = dispatched((SSE.frame(message) + SSE.heartbeat(without)).decode())
    assert events[-1]["id"] == "abc", "what moves no position leaves the last event's id"


EVENTS = {"Accept": "text/event-stream"}


async def talk(url: str, request: str, until: str) -> tuple[str, str]:
    """Head and body of the answer, as far as a text in it."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(request.replace("\n", "\r\n").replace("Host: x", f"Host: {host}:{port}").encode())
    answer = b""
    async with asyncio.timeout(60):
        while until.encode() not in answer:
            more = await reader.read(65_536)
            if not more:
                break
            answer += more
    writer.close()
    await writer.wait_closed()
    head, _, body = answer.decode().partition("\r\n\r\n")
    return head, body


def get(path: str, **headers: str) -> str:
    lines = "".join(f"{name.replace('_', '-')}: {value}\n" for name, value in headers.items())
    return f"GET {path} HTTP/1.1\nHost: x\n{lines}\n"


async def test_a_stream_as_a_browser_sees_it(root: Path) -> None:
    product = top_topics(root)
    product.overwrite(topics(0, [3]), [window(0)])
    async with serving(root) as url:
        head, body = await talk(url, get("/v1/subscribe?table=top_topics", **EVENTS), '"snapshot"')
        assert head.splitlines()[0] == "HTTP/1.1 200 OK"
        assert "content-type: text/event-stream" in head
        events, retry = dispatched(body)
        assert retry is not None
        assert 500 <= retry <= 1_500
        [event] = events
        product.overwrite(topics(0, [4]), [window(0)])
        # a browser comes back with its first address and the last id, which is newer
        stale = json.loads(event["data"])["position"]
        again = get(f"/v1/subscribe?table=top_topics&from={stale}", Last_Event_ID=event["id"], **EVENTS)
        _, body = await talk(url, again, '"change"')
        events, _ = dispatched(body)
        assert [json.loads(each["data"])["type"] for each in events] == ["resumed", "change"]
        assert events[-1]["id"] == json.loads(events[-1]["data"])["position"]


@pytest.mark.parametrize(
    ("path", "headers", "status", "code"),
    [
        ("/v1/subscribe?table=nope", EVENTS, 404, "no_such_table"),
        ("/v1/subscribe?table=top_topics&window=3", EVENTS, 400, "bad_request"),
        ("/v1/subscribe?table=top_topics", EVENTS | {"Last_Event_ID": "x"}, 400, "bad_position"),
        ("/v1/subscribe?table=top_topics", EVENTS | {"Origin": "https://elsewhere.example"}, 403, "forbidden"),
        ("/v1/subscribe?table=top_topics", {"Accept": "text/html"}, 406, None),
    ],
)
async def test_what_is_no_stream_is_a_problem(
    root: Path, path: str, headers: dict[str, str], status: int, code: str | None
) -> None:
    top_topics(root)
    async with serving(root) as url:
        head, body = await talk(url, get(path, **headers), "}")
        problem: dict[str, Any] = json.loads(body)
        assert head.startswith(f"HTTP/1.1 {status} ")
        assert "application/problem+json" in head
        assert (problem["status"], problem.get("code")) == (status, code)


async def test_a_request_behind_another_and_one_in_pieces(root: Path) -> None:
    top_topics(root)
    async with serving(root) as url:
        host, port = url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        at = f"Host: {host}:{port}"
        writer.write(get("/healthz").replace("\n", "\r\n").replace("Host: x", at).encode())
        async with asyncio.timeout(60):
            assert b"ok" in await reader.readuntil(b"}")
            asked = get("/v1/subscribe?table=top_topics", Accept="text/event-stream")
            for letter in asked.replace("\n", "\r\n").replace("Host: x", at):
                writer.write(letter.encode())
                await writer.drain()
            assert b'"snapshot"' in await reader.readuntil(b'"snapshot"')
        writer.close()
        await writer.wait_closed()


def test_what_asks_for_events() -> None:
    assert wants_events(b"GET", b"/v1/subscribe", {"accept": "text/event-stream, */*"})
    assert not wants_events(b"POST", b"/v1/subscribe", {"accept": "text/event-stream"})
    assert not wants_events(b"GET", b"/v1/tables", {"accept": "text/event-stream"})


async def test_a_connection_whose_request_does_not_come_in_is_closed_and_one_with_a_request_is_not(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serve.push.sse.REQUEST_S", 0.2)
    top_topics(root)
    async with serving(root, heartbeat_ms=100) as url, subscribed(url, "top_topics") as good:
        host, port = url.removeprefix("http://").split(":")
        whole, part = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n", b"GET /healthz HTTP/1.1\r\nHost:"
        body = b"POST /v1/sql HTTP/1.1\r\nHost: localhost\r\nContent-Length: 20\r\n\r\n{"
        for sent, answers in ((b"", 0), (part, 0), (whole + part, 1), (body, 0), (whole + body, 1)):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(sent)
            async with asyncio.timeout(60):
                assert (await reader.read()).count(b"HTTP/1.1 200") == answers
            writer.close()
            await writer.wait_closed()
        for _ in range(5):
            await receive(good, "heartbeat" if _ else "snapshot")

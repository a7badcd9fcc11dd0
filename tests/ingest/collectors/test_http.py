"""Events by HTTP, through a real server, log and broker: what is taken, what is refused, and what is kept of that."""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson
import pytest
import pytest_asyncio
from cloudevents.core.bindings import http
from cloudevents.core.bindings.kafka import KafkaMessage, from_binary_event
from cloudevents.core.v1.event import CloudEvent

from ingest import intake
from ingest.answers.acks import Signer, Token
from ingest.broker import EmbeddedBroker
from lakehouse.contract.envelope import Envelope
from lakehouse.contract.pipeline.expectations import Expectation
from tests.ingest.conftest import consume, event, get, pipeline_of, request, running_node, settings_of

pytestmark = pytest.mark.broker
JSON = {"content_type": "application/json"}
WHEN = datetime(2026, 3, 1, 10, tzinfo=UTC)
LINES = {"content_type": "application/x-ndjson; charset=utf-8"}


_NUMBERS = itertools.count()


@pytest_asyncio.fixture
async def node(
    broker: EmbeddedBroker, tmp_path: Path, request: pytest.FixtureRequest
) -> AsyncIterator[tuple[str, str, str]]:
    """URL of a node, bootstrap and topic."""
    topic = f"http-{next(_NUMBERS)}"
    pipeline = pipeline_of(topic, "http", max_event_bytes=10_000)
    async with running_node(settings_of(tmp_path), pipeline, broker.bootstrap) as url:
        yield url, broker.bootstrap, topic


async def records(node: tuple[str, str, str], at_least: int) -> dict[str, tuple[Envelope, bytes]]:
    found = await asyncio.to_thread(consume, node[1], node[2], at_least)
    return {(e := Envelope.from_headers(record.headers)).event_id: (e, record.value) for record in found}


def opened(folder: Path, text: str) -> Token:
    return Signer.of_lake(folder / "_millrace").open(text)


async def test_one_event(node: tuple[str, str, str], tmp_path: Path) -> None:
    body = b' { "id": 1,  "who":"a" }\n'
    status, headers, answer = await request(node[0], "POST", "/v1/clicks", body, **JSON)
    assert (status, headers["content-type"]) == (202, "application/json")
    token = opened(tmp_path, answer["token"])
    assert (token.source, token.event_id) == ("clicks", "1")
    envelope, payload = (await records(node, 1))["1"]
    assert payload == body, "byte for byte"
    assert envelope.received_at == token.received_at
    state = {"state": "logged"}
    while state["state"] == "logged":  # the record may be seen before Kafka's answer for it
        _, _, state = await get(node[0], f"/v1/acks/{answer['token']}")
    assert state == {
        "event_id": "1", "source": "clicks", "state": "queued", "topic": node[2],
        "partition": state["partition"], "offset": 0,
    }  # fmt: skip


async def test_cloud_events_of_the_official_sdk_in_each_mode(broker: EmbeddedBroker, tmp_path: Path) -> None:
    """Sent by its HTTP binding and read back by its Kafka binding."""
    sent = [
        CloudEvent(
            {"id": f"é-{n}", "source": "/shop/1", "type": "com.shop.click", "time": WHEN, "tries": 3},
            {"id": n, "who": "a"},
        )
        for n in range(4)
    ]
    pipeline = pipeline_of("cloud", "http", event_id="")
    async with running_node(settings_of(tmp_path), pipeline, broker.bootstrap) as url:
        messages = [http.to_structured_event(sent[0]), http.to_binary_event(sent[1])]
        batch = b"[%b]" % b",".join(http.to_structured_event(one).body for one in sent[2:])
        messages.append(http.HTTPMessage({"content-type": "application/cloudevents-batch+json; charset=utf-8"}, batch))
        tokens = []
        for message in messages:
            headers = {name.replace("-", "_"): value for name, value in message.headers.items()}
            status, _, answer = await request(url, "POST", "/v1/clicks", message.body, **headers)
            assert status == 202, answer
            tokens += answer.get("tokens") or [answer["token"]]
        assert [opened(tmp_path, token).event_id for token in tokens] == [f"/shop/1 é-{n}" for n in range(4)]
    found = await asyncio.to_thread(consume, broker.bootstrap, "cloud", 4)
    events = [from_binary_event(KafkaMessage(dict(r.headers), None, r.value)) for r in found]
    assert {e.get_id(): (e.get_type(), e.get_source(), e.get_time(), e.get_data()) for e in events} == {
        e.get_id(): (e.get_type(), e.get_source(), e.get_time(), e.get_data()) for e in sent
    }
    assert {e.get_extension("tries") for e in events} == {"3"}


async def test_bad_cloud_events(node: tuple[str, str, str]) -> None:
    good = {"specversion": "1.0", "id": "1", "source": "/s", "type": "t", "data": {"id": 1, "who": "a"}}
    body = orjson.dumps(good | {"specversion": "0.3"})
    status, _, answer = await request(node[0], "POST", "/v1/clicks", body, content_type="application/cloudevents+json")
    assert (status, answer["detail"]) == (422, "not a CloudEvent: specversion is not 1.0")
    assert answer["type"].endswith("cloudevent") and answer["token"]
    batch = orjson.dumps([good, good | {"type": ""}, good | {"data": [1]}])
    kind = "application/cloudevents-batch+json"
    status, _, answer = await request(node[0], "POST", "/v1/clicks", batch, content_type=kind)
    assert (status, [bad["code"] for bad in answer["rejected"]]) == (202, ["cloudevent", "not-an-object"])
    status, _, answer = await request(node[0], "POST", "/v1/clicks", b"{}", ce_id="1", ce_specversion="1.0", **JSON)
    assert (status, answer["detail"]) == (422, "not a CloudEvent: source is missing")
    kept = {envelope.reject: payload for envelope, payload in (await records(node, 5)).values() if envelope.reject}
    assert kept["not a CloudEvent: specversion is not 1.0"] == body
    assert len(kept) == 4


async def test_many_events(node: tuple[str, str, str], tmp_path: Path) -> None:
    lines = b"\r\n".join(event(n) for n in range(50)) + b"\n\n"
    status, _, answer = await request(node[0], "POST", "/v1/clicks", lines, **LINES)
    assert status == 202
    assert [opened(tmp_path, token).event_id for token in answer["tokens"]] == [str(n) for n in range(50)]
    assert answer["rejected"] == []
    array = b'[ {"id": 50, "who": "a", "n": 0.12345678901234567890123}, {"id":51,"who":"b"} ]'
    status, _, answer = await request(node[0], "POST", "/v1/clicks", array, **JSON)
    assert (status, len(answer["tokens"])) == (202, 2)
    found = await records(node, 52)
    assert found["7"][1] == event(7)
    assert found["50"][1] == array[2:56], "each element byte for byte"


@pytest.mark.parametrize(
    ("body", "status", "detail"),
    [
        (b'{"id":', 400, "not JSON: "),
        (b'[{"id":1]', 400, "not JSON: "),
        (b"17", 422, "an event is a JSON object, not a number"),
        (b'{"id":1}', 422, "the key {who} needs fields"),
        (b'{"id":1,"pad":"' + b"x" * 10_000 + b'"}', 413, "the event has 10017 bytes, more than the 10000"),
    ],
)
async def test_a_refused_event_is_named_and_kept(
    node: tuple[str, str, str], body: bytes, status: int, detail: str
) -> None:
    got, headers, answer = await request(node[0], "POST", "/v1/clicks", body, **JSON)
    assert (got, headers["content-type"]) == (status, "application/problem+json")
    assert answer["status"] == status
    assert answer["detail"].startswith(detail)
    ((envelope, payload),) = (await records(node, 1)).values()
    assert envelope.reject == answer["detail"]
    assert payload == body
    _, _, state = await get(node[0], f"/v1/acks/{answer['token']}")
    assert state["state"] == "rejected"
    assert state["reason"] == answer["detail"]
    _, _, stats = await get(node[0], "/v1/stats")
    assert stats["sources"]["clicks"]["rejected"] == 1


async def test_some_of_many_are_refused(node: tuple[str, str, str]) -> None:
    body = b"\n".join([event(0), b"{", event(2)])
    status, _, answer = await request(node[0], "POST", "/v1/clicks", body, **LINES)
    assert status == 202
    assert len(answer["tokens"]) == 3
    assert [item["index"] for item in answer["rejected"]] == [1]
    found = await records(node, 3)
    assert [envelope.reject is None for envelope, _ in found.values()].count(False) == 1
    status, _, answer = await request(node[0], "POST", "/v1/clicks", b"{\n}\n", **LINES)
    assert (status, len(answer["tokens"]), len(answer["rejected"])) == (422, 2, 2)


async def test_an_expectation_that_is_judged_at_the_border(broker: EmbeddedBroker, tmp_path: Path) -> None:
    expected = {"id_is_small": Expectation("id < 100", at="border")}
    pipeline = pipeline_of(f"http-{next(_NUMBERS)}", "http", expectations=expected)
    async with running_node(settings_of(tmp_path), pipeline, broker.bootstrap) as url:
        status, headers, answer = await request(url, "POST", "/v1/clicks", event(100), **JSON)
        assert (status, headers["content-type"]) == (422, "application/problem+json")
        assert (answer["type"], answer["detail"]) == (
            "urn:millrace:problem:expectation",
            "expectation id_is_small failed",
        )
        _, _, state = await get(url, f"/v1/acks/{answer['token']}")
        assert (state["state"], state["reason"]) == ("rejected", "expectation id_is_small failed")
        lines = b"\n".join(event(n) for n in (1, 101, 2))
        status, _, answer = await request(url, "POST", "/v1/clicks", lines, **LINES)
        assert (status, len(answer["tokens"])) == (202, 3)
        assert answer["rejected"] == [{"index": 1, "code": "expectation", "detail": "expectation id_is_small failed"}]
        states = [(await get(url, f"/v1/acks/{token}"))[2]["state"] for token in answer["tokens"]]
        assert [state == "rejected" for state in states] == [False, True, False]
        found = await records((url, broker.bootstrap, pipeline.sources["clicks"].topic), 4)
        assert {name: envelope.reject for name, (envelope, _) in found.items()} == {
            "1": None, "2": None, "100": "expectation id_is_small failed", "101": "expectation id_is_small failed",
        }  # fmt: skip
        assert found["100"][1] == event(100), "kept, byte for byte"


async def test_requests_that_are_refused_whole(node: tuple[str, str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    async def refused(path: str = "/v1/clicks", body: bytes = b"{}", method: str = "POST", **headers: str) -> Any:
        status, found, answer = await request(node[0], method, path, body, **(headers or JSON))
        assert found["content-type"] == "application/problem+json"
        assert answer["status"] == status
        return status, answer["detail"]

    assert await refused("/v1/nothing") == (404, "there is no source 'nothing' that takes events by HTTP")
    assert (await refused(method="PUT"))[0] == 405
    assert (await refused(content_type="text/plain"))[0] == 415
    assert (await refused(content_type="application/json", content_encoding="gzip"))[0] == 415
    assert await refused(body=b" \n", **LINES) == (400, "there is no event in the body")
    assert await refused(body=b"[]") == (400, "there is no event in the body")
    assert (await refused(body=b"[" + b"{}," * intake.MAX_EVENTS + b"{}]"))[0] == 413
    monkeypatch.setattr(intake, "MAX_BODY_BYTES", 1000)
    assert await refused(body=b"x" * 1001) == (413, "the body has more than 1000 bytes")
    _, _, stats = await get(node[0], "/v1/stats")
    assert stats["sources"]["clicks"]["received"] == 0


async def test_a_body_without_a_length_is_bounded_too(
    node: tuple[str, str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake, "MAX_BODY_BYTES", 1000)
    host, port = node[0].removeprefix("http://").split(":")

    def post() -> bytes:
        with socket.create_connection((host, int(port)), timeout=60) as connection:
            connection.sendall(
                b"POST /v1/clicks HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                b"Transfer-Encoding: chunked\r\n\r\n" + b"190\r\n" + b"x" * 400 + b"\r\n190\r\n" + b"x" * 400
                + b"\r\n190\r\n" + b"x" * 400 + b"\r\n"
            )  # fmt: skip
            return connection.recv(65536)

    assert b"HTTP/1.1 413" in await asyncio.to_thread(post)


async def test_a_full_log_pushes_back(broker: EmbeddedBroker, tmp_path: Path) -> None:
    pipeline = pipeline_of("http-full", "http", max_event_bytes=60_000)
    async with running_node(settings_of(tmp_path, log_bytes=100_000), pipeline, broker.bootstrap) as url:
        large = orjson.dumps([{"id": n, "who": "a", "pad": "x" * 50_000} for n in range(4)])
        status, headers, answer = await request(url, "POST", "/v1/clicks", large, **JSON)
        assert (status, headers["retry-after"]) == (503, "1")
        assert "the message log is full" in answer["detail"]
        status, _, _ = await request(url, "POST", "/v1/clicks", event(1), **JSON)
        assert status == 202, "what fits is taken"


async def test_not_ready_while_kafka_is_away(tmp_path: Path) -> None:
    """In a process of its own, since kafka-python leaves refused sockets to the garbage collector."""
    from tests.ingest.test_node import free_node

    async with free_node(tmp_path, "127.0.0.1:1", "http-away") as url:
        for path in ("/readyz", "/v1/stats", "/healthz"):
            status, headers, answer = await get(url, path)
            if path == "/readyz":
                assert (status, headers["retry-after"]) == (503, "1")
            else:
                assert (status, answer.get("ready", False)) == (200, False)
        status, headers, _ = await request(url, "POST", "/v1/clicks", event(1), **JSON)
        assert (status, headers["retry-after"]) == (503, "1")


async def test_health_metrics_and_tokens_of_others(node: tuple[str, str, str], tmp_path: Path) -> None:
    assert (await get(node[0], "/healthz"))[0] == 200
    assert (await get(node[0], "/readyz"))[0] == 200
    await request(node[0], "POST", "/v1/clicks", event(1), **JSON)
    _, _, text = await get(node[0], "/metrics")
    assert 'millrace_collector_received_total{lane="clicks/http/0",source="clicks"} 1.0' in text
    assert 'millrace_collector_acknowledged_total{lane="clicks/http/0",source="clicks"} 1.0' in text
    assert "millrace_collector_commit_seconds_count 1.0" in text
    for rubbish in ("rubbish", "AAAA", "%ff", "a" * 2000):
        status, headers, _ = await get(node[0], f"/v1/acks/{rubbish}")
        assert (status, headers["content-type"]) == (400, "application/problem+json")
    never = Envelope("never", "clicks", "default", 1_700_000_000_000_000, "n1", "")
    token = Signer.of_lake(tmp_path / "_millrace").sign(never).decode()
    _, _, state = await get(node[0], f"/v1/acks/{token}")
    assert state["state"] == "unknown"

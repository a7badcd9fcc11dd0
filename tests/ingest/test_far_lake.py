"""A collector whose lake is in an object store that does not answer: events are acknowledged and reach Kafka."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path

import pytest

from ingest.answers.acks import Signer
from ingest.broker import EmbeddedBroker
from jobs.local.stack import free_port
from lakehouse.contract.envelope import Envelope
from lakehouse.contract.settings import Settings
from lakehouse.contract.storage import lake_path
from tests.ingest.conftest import consume, event, get, pipeline_of, request, running_node, settings_of

pytestmark = [pytest.mark.broker, pytest.mark.soak]
TOPIC = "far-lake"


@pytest.fixture
def away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Settings with a lake in a store that nobody runs."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION"):
        monkeypatch.setenv(name, "none")
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    return replace(settings_of(tmp_path), lake=lake_path("s3://away/lake"), work=str(tmp_path / "work"))


async def test_events_reach_kafka(away: Settings, broker: EmbeddedBroker, tmp_path: Path) -> None:
    pipeline, tokens = pipeline_of(TOPIC, "http"), []
    async with running_node(away, pipeline, broker.bootstrap) as url:
        for number in range(3):
            status, _, answer = await request(url, "POST", "/v1/clicks", event(number), content_type="application/json")
            assert status == 202
            tokens.append(answer["token"])
        await asyncio.to_thread(consume, broker.bootstrap, TOPIC, 3)
        async with asyncio.timeout(60):
            while True:
                _, _, known = await get(url, f"/v1/acks/{tokens[0]}")
                if known["state"] != "logged":  # Kafka has it, and its answer may be on the way
                    break
                await asyncio.sleep(0.05)
        assert (known["state"], known["topic"]) == ("queued", TOPIC)
        # Of an event that another node took only the lake knows.
        other = Envelope("other", "clicks", "default", time.time_ns() // 1000, "collector-2", "")
        text = Signer.of_lake(tmp_path / "work").sign(other).decode()
        status, headers, problem = await get(url, f"/v1/acks/{text}")
        assert status == 503 and headers["retry-after"] and "object store" in problem["detail"]
    async with running_node(away, pipeline, broker.bootstrap) as url:  # the key of tokens is the same after a restart
        status, _, _ = await get(url, f"/v1/acks/{tokens[0]}")
        assert status == 503

"""Reference data in an event's headers: from files that change, from a compacted topic."""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import replace
from pathlib import Path

import orjson
import pytest
from kafka import KafkaProducer
from websockets.asyncio.client import connect

from ingest import enrich
from ingest.answers.stream import PATH
from ingest.border.admission import Border
from ingest.broker import EmbeddedBroker
from ingest.enrich import Enricher, read_rows
from ingest.kafka import ensure_topics
from lakehouse.contract.errors import ConfigError
from lakehouse.contract.pipeline import Pipeline
from lakehouse.contract.pipeline.source import EnrichSpec, Source
from lakehouse.contract.settings import KafkaSettings
from tests.ingest.conftest import consume, eventually, pipeline_of, request, running_node, settings_of
from tests.ingest.streams import SOURCE


def source(**specs: EnrichSpec) -> Source:
    return replace(SOURCE, enrich=specs)


def test_a_row_and_its_version_go_with_the_event(tmp_path: Path) -> None:
    (tmp_path / "people.csv").write_text("who,team,age\na,red,7\nb,blue,8\n", encoding="utf-8")
    made = source(people=EnrichSpec("{who}", "who", "people.csv", fields=("team",)))
    enricher = Enricher(made, tmp_path, KafkaSettings())
    border = Border(made, tenant="default", collector="n1")
    headers = dict(enricher(border.admit(b'{"id":1,"who":"a"}')))
    assert headers == {"people": '{"team":"red"}', "people_version": enricher.references["people"].version}
    assert dict(enricher(border.admit(b'{"id":1,"who":"z"}'))).keys() == {"people_version"}, "looked for, and not there"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("p.json", '[{"who":"a","n":1},{"who":"b","n":2},{"who":"a","n":3}]'),
        ("p.jsonl", '{"who":"a","n":1}\n\n{"who":"b","n":2}\n{"who":"a","n":3}\n'),
        ("p.csv", "\ufeffwho,n\na,1\nb,2\na,3\n"),
    ],
)
def test_forms_of_files(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    rows = read_rows(tmp_path / name, EnrichSpec("{who}", "who", name))
    assert {key: str(orjson.loads(row)["n"]) for key, row in rows.items()} == {"a": "3", "b": "2"}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "No such file"),
        ("[1]", "row 1 has no 'who'"),
        ('{"wo":1}', "row 1 has no 'who'"),
        ("{", "unexpected end"),
        ('[{"who":"a","n":"' + "x" * 9_000 + '"}]', "more than 8192 bytes"),
    ],
)
def test_files_that_are_no_reference_are_refused_at_start(tmp_path: Path, text: str | None, says: str) -> None:
    if text is not None:
        (tmp_path / "p.json").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=says) as caught:
        Enricher(source(people=EnrichSpec("{who}", "who", "p.json")), tmp_path, KafkaSettings())
    assert caught.value.key == "sources.clicks.enrich.people.file"


async def test_a_file_that_changes_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(enrich, "REFRESH_S", 0.02)
    path = tmp_path / "p.json"
    path.write_text('[{"who":"a","n":1}]', encoding="utf-8")
    enricher = Enricher(source(people=EnrichSpec("{who}", "who", "p.json")), tmp_path, KafkaSettings())
    first = enricher.references["people"].version
    following = asyncio.create_task(enricher.run())
    await enricher.complete()
    for text, same in (("[broken", True), ('[{"who":"a","n":2}]', False)):
        (tmp_path / "new").write_text(text, encoding="utf-8")
        os.utime(tmp_path / "new", (time.time() + 5, time.time() + 5 + len(text)))
        (tmp_path / "new").replace(path)  # at once: a file that is just being written would be read empty
        if not same:
            await eventually(lambda: enricher.references["people"].version != first, 60)
        else:
            await asyncio.sleep(0.1)
            assert enricher.references["people"].version == first, "what cannot be read changes nothing"
    assert dict(enricher.headers({"who": "a"}))["people"] == '{"who":"a","n":2}'
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)


@pytest.mark.broker
async def test_a_compacted_topic(broker: EmbeddedBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(enrich, "_POLL_MS", 1)  # too short for the first records to be there
    topic = "enrich-people"
    await asyncio.to_thread(ensure_topics, broker.bootstrap, [replace(SOURCE, topic=topic)])
    producer = await asyncio.to_thread(lambda: KafkaProducer(bootstrap_servers=broker.bootstrap, metrics_enabled=False))

    def put(key: str, value: bytes | None) -> None:
        producer.send(topic, key=key.encode(), value=value)
        producer.flush()

    await asyncio.to_thread(put, "a", b'{"team":"red"}')
    await asyncio.to_thread(put, "b", b"rubbish")
    enricher = Enricher(
        source(people=EnrichSpec("{who}", topic=topic)), tmp_path, KafkaSettings(bootstrap=broker.bootstrap)
    )
    assert enricher.missing == "people"
    following = asyncio.create_task(enricher.run())
    async with asyncio.timeout(60):
        await enricher.complete()
    assert enricher.missing == ""
    assert dict(enricher.headers({"who": "a"}))["people"] == '{"team":"red"}'
    version = enricher.references["people"].version
    assert version.startswith(f"{topic}@")
    await asyncio.to_thread(put, "a", b'{"team":"blue"}')
    await eventually(lambda: "blue" in str(enricher.headers({"who": "a"})), 60)
    assert enricher.references["people"].version != version
    await asyncio.to_thread(put, "a", None)
    await eventually(lambda: len(enricher.headers({"who": "a"})) == 1, 60)
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    await asyncio.to_thread(producer.close)


@pytest.mark.broker
async def test_nothing_is_taken_before_its_reference_is_there(
    broker: EmbeddedBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(enrich, "REFRESH_S", 0.05)
    spec = {"people": EnrichSpec("{who}", topic="enrich-late-people")}
    pipeline = pipeline_of("enrich-late", "http", enrich=spec)
    pipeline = Pipeline({**pipeline.sources, "plain": replace(pipeline.sources["clicks"], name="plain", enrich={})})
    json = {"content_type": "application/json"}
    async with (
        running_node(settings_of(tmp_path), pipeline, broker.bootstrap) as url,
        connect(url.replace("http", "ws") + PATH) as publisher,
    ):
        status, headers, answer = await request(url, "POST", "/v1/clicks", b'{"id":1,"who":"a"}', **json)
        assert (status, headers["retry-after"], answer["type"]) == (503, "1", "urn:millrace:problem:not-ready")
        assert "people" in answer["detail"]
        status, _, _ = await request(url, "POST", "/v1/plain", b'{"id":2,"who":"a"}', **json)
        assert status == 202, "a source without it goes on"
        await publisher.send('{"publish":"clicks","event":{"id":3,"who":"a"},"id":3}')
        await asyncio.to_thread(ensure_topics, broker.bootstrap, [replace(SOURCE, topic="enrich-late-people")])
        async with asyncio.timeout(60):
            assert orjson.loads(await publisher.recv())["ack"] == 3, "it was held, and not refused"
            status, _, _ = await request(url, "POST", "/v1/clicks", b'{"id":4,"who":"a"}', **json)
        assert status == 202
    records = await asyncio.to_thread(consume, broker.bootstrap, "enrich-late", 3)
    assert {
        orjson.loads(record.value)["id"]: dict(record.headers).get("people_version", b"")[:18] for record in records
    } == {2: b"", 3: b"enrich-late-people", 4: b"enrich-late-people"}

"""Topics, and which broker a command uses."""

from __future__ import annotations

import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest
from kafka import KafkaAdminClient
from kafka.admin import ConfigResource, ConfigResourceType

from ingest.broker import EmbeddedBroker
from jobs.local.broker import embedded, ensure_topics, resolve_bootstrap
from jobs.local.stack import free_port
from lakehouse.contract.errors import EnvironmentProblem
from lakehouse.contract.pipeline import Pipeline, Source
from lakehouse.contract.settings import KafkaSettings, Settings

ROOT = Path(__file__).parents[3]
UNANSWERED = """
import sys
from jobs.local.broker import ensure_topics
from lakehouse.contract.errors import EnvironmentProblem
from tests.jobs.local.test_broker import pipeline
try:
    ensure_topics(pipeline("t").sources.values(), sys.argv[1], timeout_s=1.0)
except EnvironmentProblem as error:
    print(error.problem, error.remedy, sep="\\n")
"""


def pipeline(*topics: str, **options: Any) -> Pipeline:
    sources = [
        Source(topic=topic, schema="a INT", event_time="received_at", name=f"s{number}", **options)
        for number, topic in enumerate(topics)
    ]
    return Pipeline({source.name: source for source in sources})


@pytest.mark.broker
def test_topics_are_created_once_with_their_settings(broker: EmbeddedBroker) -> None:
    names = [f"t-{uuid.uuid4().hex[:8]}" for _ in range(2)]
    ensure_topics(pipeline(names[0], partitions=3, retention="2 hours").sources.values(), broker.bootstrap)
    ensure_topics(pipeline(*names, partitions=1).sources.values(), broker.bootstrap)  # the first stays as it is
    ensure_topics(pipeline(*names).sources.values(), broker.bootstrap)
    admin = KafkaAdminClient(bootstrap_servers=broker.bootstrap)
    try:
        described = {topic["name"]: len(topic["partitions"]) for topic in admin.describe_topics(names)}
        assert described == {names[0]: 3, names[1]: 1}
        resource = ConfigResource(ConfigResourceType.TOPIC, names[0])
        assert "7200000" in str(admin.describe_configs([resource]))
    finally:
        admin.close()


def test_a_broker_that_does_not_answer() -> None:
    """In a process of its own: kafka-python leaves sockets open when it cannot connect."""
    bootstrap = f"127.0.0.1:{free_port()}"
    done = subprocess.run(
        [sys.executable, "-c", UNANSWERED, bootstrap], cwd=ROOT, capture_output=True, text=True, timeout=300, check=True
    )
    problem, remedy = done.stdout.splitlines()
    assert bootstrap in problem
    assert "millrace kafka status" in remedy


def test_which_broker(tmp_path: Path) -> None:
    assert resolve_bootstrap(Settings(lake=tmp_path, kafka=KafkaSettings(bootstrap="h:1"))) == "h:1"
    with pytest.raises(EnvironmentProblem) as caught:
        resolve_bootstrap(Settings(lake=tmp_path))
    assert f"millrace kafka start --lake {tmp_path}" in caught.value.remedy
    assert not embedded(Settings(lake=tmp_path)).running()

"""Where in Kafka: how far a topic goes, how much of it waits, and where a query of it begins."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark.sql import SparkSession

from lakehouse.bronze.table import Progress, progress
from lakehouse.checkpoint import offset_of
from lakehouse.contract.lake import Lake
from lakehouse.contract.pipeline import Source
from lakehouse.contract.settings import Settings
from lakehouse.errors import TopicReplaced

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Topic:
    """A topic as the broker has it now.

    Attributes:
        name: its name.
        id: given by the broker when it made it; another one of the same name has another.
        ends: ``TOPIC/PARTITION`` to the offset behind its last record, of all its partitions.
    """

    name: str
    id: str
    ends: Mapping[str, int]


_NOT_FOR_LONG = {"request.timeout.ms": "5000", "default.api.timeout.ms": "10000"}


def events_waiting(spark: SparkSession, settings: Settings, source: Source, bootstrap: str) -> int:
    """How many events the topic holds that bronze has not taken; 0 where the broker does not tell.

    Only for the pace to begin with: why a broker does not answer, the query says better.
    """
    done = progress(Lake(settings.lake).bronze(source.name)).offsets
    options = {"bootstrap.servers": bootstrap, **settings.kafka.security.for_java(), **_NOT_FOR_LONG}
    try:
        ends = topic_now(spark, source.topic, options).ends
    except Py4JError:
        log.debug("how much waits in %s is not known", source.topic, exc_info=True)
        return 0
    return sum(max(0, end - done.get(place, 0)) for place, end in ends.items())


def topic_now(spark: SparkSession, topic: str, options: Mapping[str, str]) -> Topic:
    """Ask the broker for a topic.

    Args:
        options: of Kafka's Java client, which asks.
    """
    jvm = spark._jvm
    assert jvm is not None
    properties = jvm.java.util.Properties()
    for name, value in options.items():
        properties.setProperty(name, value)
    kafka = jvm.org.apache.kafka
    admin = kafka.clients.admin.AdminClient.create(properties)
    try:
        described = admin.describeTopics(jvm.java.util.Collections.singletonList(topic)).allTopicNames().get()[topic]
        wanted = jvm.java.util.HashMap()
        places = [kafka.common.TopicPartition(topic, number) for number in range(len(described.partitions()))]
        for place in places:
            wanted[place] = kafka.clients.admin.OffsetSpec.latest()
        found = admin.listOffsets(wanted).all().get()
        ends = {f"{topic}/{place.partition()}": int(found[place].offset()) for place in places}
        return Topic(topic, described.topicId().toString(), ends)
    finally:
        admin.close()


def check_topic(source: Source, topic: Topic, done: Progress) -> None:
    """Refuse to go on by offsets that count another topic's records.

    Args:
        done: how far bronze is. Where its commits name no id of the topic, only offsets that went back tell.

    Raises:
        TopicReplaced: it was made again, or a partition of it ends before what bronze has taken.
    """
    known = done.topics.get(topic.name, topic.id)
    if known != topic.id:
        raise TopicReplaced(source.name, topic.name, f"its id was {known} and is {topic.id}")
    for place, taken in sorted(done.offsets.items()):
        if place.rpartition("/")[0] == topic.name and topic.ends.get(place, 0) < taken:
            detail = f"{place} ends at offset {topic.ends.get(place, 0)}, and bronze has taken {taken}"
            raise TopicReplaced(source.name, topic.name, detail)


def planned_topics(checkpoint: Path) -> set[str]:
    """Topics that a query's newest batch, done or not, was to read; none for a new query."""
    batches = [int(path.name) for path in (checkpoint / "offsets").glob("[0-9]*") if path.name.isdigit()]
    return set(json.loads(offset_of(checkpoint, max(batches)))) if batches else set()


def starting_offsets(topic: str, partitions: int, offsets: Mapping[str, int]) -> str:
    """Spark's ``startingOffsets``: what bronze says, the earliest for a partition it does not know.

    Args:
        partitions: that the topic has now: Spark wants each of them named, and no other.
        offsets: ``TOPIC/PARTITION`` to the next offset.
    """
    if not offsets:
        return "earliest"
    known = {int(place.rpartition("/")[2]): end for place, end in offsets.items() if place.startswith(f"{topic}/")}
    return json.dumps({topic: {str(number): known.get(number, -2) for number in range(partitions)}})

"""Where in Kafka: how far a topic goes, and where a query of it begins."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pyspark.sql import SparkSession

from lakehouse.bronze.table import Progress
from lakehouse.contract.pipeline import Source
from lakehouse.errors import TopicReplaced


@dataclass(frozen=True, slots=True)
class Topic:
    """A topic as the broker has it now.

    Attributes:
        id: given by the broker when it made it; another one of the same name has another.
        ends: ``TOPIC/PARTITION`` to the offset behind its last record, of all its partitions.
    """

    name: str
    id: str
    ends: Mapping[str, int]


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


def offset_of(checkpoint: Path, batch: int) -> str:
    """The offset (JSON) behind a batch of a query with one source, from the query's write-ahead log."""
    return (checkpoint / "offsets" / str(batch)).read_text(encoding="utf-8").splitlines()[-1]


def is_outdated(checkpoint: Path, topic: str, taken: Mapping[str, int]) -> bool:
    """Whether a query's newest batch, done or not, is of another topic, or ends before what bronze has taken.

    The latter is so once another machine has gone on. Kafka need not have those records any more.

    Args:
        taken: ``TOPIC/PARTITION`` to the next offset.
    """
    batches = [int(path.name) for path in (checkpoint / "offsets").glob("[0-9]*") if path.name.isdigit()]
    planned = json.loads(offset_of(checkpoint, max(batches))) if batches else {}
    ends = [taken.get(f"{name}/{number}", 0) > end for name in planned for number, end in planned[name].items()]
    return bool(planned.keys() - {topic}) or any(ends)


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

"""Where in Kafka: how far a topic goes, how much of it waits, and where a query of it begins."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping

from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark.sql import SparkSession

from lakehouse.bronze.table import progress
from lakehouse.contract.lake import Lake
from lakehouse.contract.pipeline import Source
from lakehouse.contract.settings import Settings

log = logging.getLogger(__name__)

_NOT_FOR_LONG = {"request.timeout.ms": "5000", "default.api.timeout.ms": "10000"}


def events_waiting(spark: SparkSession, settings: Settings, source: Source, bootstrap: str) -> int:
    """How many events the topic holds that bronze has not taken; 0 where the broker does not tell.

    Only for the pace to begin with: why a broker does not answer, the query says better.
    """
    done = progress(Lake(settings.lake).bronze(source.name)).offsets
    options = {"bootstrap.servers": bootstrap, **settings.kafka.security.for_java(), **_NOT_FOR_LONG}
    try:
        ends = topic_ends(spark, source.topic, options)
    except Py4JError:
        log.debug("how much waits in %s is not known", source.topic, exc_info=True)
        return 0
    return sum(max(0, end - done.get(place, 0)) for place, end in ends.items())


def topic_ends(spark: SparkSession, topic: str, options: Mapping[str, str]) -> dict[str, int]:
    """``TOPIC/PARTITION`` to the offset behind its last record, of the partitions that the topic has now.

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
        described = admin.describeTopics(jvm.java.util.Collections.singletonList(topic)).allTopicNames().get()
        wanted = jvm.java.util.HashMap()
        places = [kafka.common.TopicPartition(topic, number) for number in range(len(described[topic].partitions()))]
        for place in places:
            wanted[place] = kafka.clients.admin.OffsetSpec.latest()
        found = admin.listOffsets(wanted).all().get()
        return {f"{topic}/{place.partition()}": int(found[place].offset()) for place in places}
    finally:
        admin.close()


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

"""Whether everything that was sent has come through: Kafka's end offsets, the products' tables, the subscriber."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from lakehouse.contract.kafkasecurity import PLAINTEXT, ClientSecurity
from lakehouse.contract.lake import Lake
from lakehouse.contract.pipeline import Pipeline, Product


def followed(pipeline: Pipeline) -> dict[str, Product]:
    """The product whose pushes are timed, by source: a ``top_n`` if there is one, else the first with a channel."""
    found: dict[str, Product] = {}
    for name in pipeline.sources:
        mine = [p for p in pipeline.products.values() if p.channel and name in (p.source, p.right)]
        mine.sort(key=lambda product: (product.operator != "top_n", product.layer != "gold"))
        if mine:
            found[name] = mine[0]
    return found


def end_offsets(bootstrap: str, topics: Iterable[str], security: ClientSecurity = PLAINTEXT) -> dict[str, int] | None:
    """``TOPIC/PARTITION`` to the offset behind the last event; None while the broker is away."""
    from kafka import KafkaConsumer, TopicPartition
    from kafka.errors import KafkaError

    try:
        consumer = KafkaConsumer(bootstrap_servers=bootstrap, enable_auto_commit=False, **security.for_kafka_python())
        try:
            partitions = [
                TopicPartition(topic, number)
                for topic in topics
                for number in consumer.partitions_for_topic(topic) or ()
            ]
            return {f"{p.topic}/{p.partition}": end for p, end in consumer.end_offsets(partitions).items() if end}
        finally:
            consumer.close()
    except (KafkaError, OSError):
        return None


def tables_through(lake: Lake, pipeline: Pipeline, ends: Mapping[str, int]) -> bool:
    """Whether every product holds everything before these offsets, as far as it is of its sources."""
    from lakehouse.gold.store import ProductStore

    for product in pipeline.products.values():
        mark = ProductStore(product, lake.table(product.layer, product.name), pipeline.name).mark()
        topics = {pipeline.sources[name].topic for name in (product.source, product.right) if name in pipeline.sources}
        wanted = {place: end for place, end in ends.items() if place.rpartition("/")[0] in topics}
        if wanted and (mark is None or not covers(mark.through, wanted)):
            return False
    return True


def covers(through: Mapping[str, int], ends: Mapping[str, int]) -> bool:
    """Whether ``through`` reaches all of these offsets."""
    return all(through.get(place, 0) >= end for place, end in ends.items())

"""Which broker a command uses, and the topics it must have."""

from __future__ import annotations

import dataclasses
import time

from kafka import KafkaAdminClient
from kafka.errors import KafkaError

from ingest import kafka as publish
from ingest.border.admission import front_source, raw_topic
from ingest.broker import EmbeddedBroker
from ingest.broker_security import Grants
from ingest.errors import BrokerUnavailable
from ingest.kafka import TopicRemark
from lakehouse.contract.errors import EnvironmentProblem
from lakehouse.contract.kafkasecurity import PLAINTEXT, ClientSecurity
from lakehouse.contract.lake import Lake
from lakehouse.contract.pipeline import Pipeline, Source
from lakehouse.contract.settings import KafkaSettings, Settings


def embedded(settings: Settings, *, die_with_parent: bool = False) -> EmbeddedBroker:
    """The lake's own broker, whether it runs or not."""
    folder = Lake(settings.lake).broker()
    kafka = settings.kafka
    return EmbeddedBroker(folder, heap_mb=kafka.heap_mb, die_with_parent=die_with_parent, secure=kafka.secure)


def resolve_kafka(settings: Settings, user: str) -> Settings:
    """The settings with the broker's address and with how this process logs in there.

    Args:
        settings: of the process.
        user: which of the embedded broker's users it is (:data:`ingest.broker_security.USERS`); of a broker elsewhere
            the settings name the user.

    Raises:
        EnvironmentProblem: there is no broker.
        ConfigError: the settings of security do not fit together, or the password cannot be read.
    """
    bootstrap = resolve_bootstrap(settings)
    kafka = dataclasses.replace(settings.kafka, bootstrap=bootstrap)
    own = embedded(settings)
    if kafka.secure and own.exists() and bootstrap == own.bootstrap:
        kafka = kafka.secured_by(own.security(user))
    kafka.security.for_kafka_python()  # what is wrong is said now
    return dataclasses.replace(settings, kafka=kafka)


def apply_topics(settings: Settings, pipeline: Pipeline, *, timeout_s: float = 60.0) -> list[TopicRemark]:
    """Make the pipeline's topics as the broker's administrator and, where it is the secure embedded one, grant them.

    Raises:
        EnvironmentProblem: the broker does not answer, refuses, or a topic would lose events.
    """
    found = resolve_kafka(settings, "admin").kafka
    fronts = [front_source(source) for source in pipeline.sources.values()]
    declared = list(pipeline.sources.values())
    if found.user != "admin" or settings.kafka.user:  # a broker elsewhere, or one that asks nobody
        return _ensure(declared, found, timeout_s)
    remarks = _ensure(declared + fronts, found, timeout_s)
    grant(found, grants(pipeline))
    return remarks


def grants(pipeline: Pipeline) -> Grants:
    """Who may do what with the topics of a pipeline."""
    sources = pipeline.sources.values()
    return Grants(
        written=tuple(source.topic for source in sources),
        raw=tuple(raw_topic(source) for source in sources),
        latest=tuple(source.latest for source in sources if source.latest_topic),
        referenced=tuple(spec.topic for source in sources for spec in source.enrich.values() if spec.topic),
    )


def grant(kafka: KafkaSettings, wanted: Grants) -> None:
    """Tell the broker, as its administrator.

    Raises:
        EnvironmentProblem: it does not answer, or refuses.
    """
    try:
        admin = KafkaAdminClient(bootstrap_servers=kafka.bootstrap, **kafka.security.for_kafka_python())
    except (KafkaError, OSError) as error:
        raise EnvironmentProblem(f"{kafka.bootstrap}: {error}", "Is it running? millrace kafka status") from None
    try:
        wanted.apply(admin)
    except KafkaError as error:
        raise EnvironmentProblem(f"the broker does not take access rules: {error}") from None
    finally:
        admin.close()


def resolve_bootstrap(settings: Settings) -> str:
    """``host:port`` of the broker that the settings name, else of the lake's embedded one.

    Raises:
        EnvironmentProblem: neither is there.
    """
    if settings.kafka.bootstrap:
        return settings.kafka.bootstrap
    try:
        return embedded(settings).bootstrap
    except EnvironmentProblem as error:
        raise EnvironmentProblem(
            str(error.problem), f"Run: millrace kafka start --lake {settings.lake}; or set MILLRACE_KAFKA=host:port"
        ) from None


def ensure_topics(
    pipeline: Pipeline, bootstrap: str, *, security: ClientSecurity = PLAINTEXT, timeout_s: float = 60.0
) -> None:
    """Create the pipeline's topics where they are absent, waiting for the broker.

    Raises:
        EnvironmentProblem: the broker did not answer in time, or a topic would lose events.
    """
    kafka = KafkaSettings(bootstrap=bootstrap).secured_by(security)
    _ensure(list(pipeline.sources.values()), kafka, timeout_s)


def _ensure(sources: list[Source], kafka: KafkaSettings, timeout_s: float) -> list[TopicRemark]:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return publish.ensure_topics(kafka.bootstrap, sources, kafka.security)
        except BrokerUnavailable as error:
            if time.monotonic() > deadline:
                raise EnvironmentProblem(str(error), "Is it running? millrace kafka status") from None
            time.sleep(0.5)

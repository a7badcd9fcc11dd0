"""Settings: ``conf/default.toml``, then ``MILLRACE_SECTION_KEY`` from the environment, then the command line."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lakehouse.contract.errors import ConfigError, did_you_mean
from lakehouse.contract.storage import LakePath, StorePath, lake_path
from lakehouse.contract.tomlfile import at_least, build, one_of, read_toml

PREFIX = "MILLRACE_"
LOG_VARIABLE = "MILLRACE_LOG"
"""``text`` or ``json``: how every process of ours writes its log."""


@dataclass(frozen=True, slots=True)
class ClientSecurity:
    """How a client of ours proves to Kafka who it is, given to each client library in its own words.

    The attributes are those of :class:`KafkaSettings`. They name files only: the password is read when a client is
    made, and is no part of what this prints.
    """

    protocol: str = "PLAINTEXT"
    mechanism: str = "SCRAM-SHA-512"
    user: str = ""
    password_file: str = ""
    ca_file: str = ""
    cert_file: str = ""

    def __post_init__(self) -> None:
        one_of("kafka.protocol", self.protocol, ("PLAINTEXT", "SSL", "SASL_SSL", "SASL_PLAINTEXT"))
        one_of("kafka.mechanism", self.mechanism, ("SCRAM-SHA-512", "SCRAM-SHA-256", "PLAIN"))
        if self.sasl and not (self.user and self.password_file):
            raise ConfigError(
                f"{self.protocol} needs a user and a password",
                key="kafka.user, kafka.password_file",
                remedy="Name the user, and a file with the password in it",
            )
        if not self.protocol.endswith("SSL") and (self.ca_file or self.cert_file):
            raise ConfigError(
                f"{self.protocol} has no use for certificates", key="kafka.protocol", remedy="Set SSL or SASL_SSL"
            )

    @property
    def sasl(self) -> bool:
        """Whether there is a user and a password."""
        return self.protocol.startswith("SASL")

    def read_password(self) -> str:
        """The password. Raises ConfigError."""
        remedy = f"Put the password of {self.user} there; for the embedded broker: millrace kafka start"
        found = _read(self.password_file, "it is not UTF-8", "kafka.password_file", remedy).strip()
        if not found:
            raise ConfigError(f"{self.password_file} is empty", key="kafka.password_file")
        return found

    def _options(self, *names: str) -> dict[str, Any]:
        """What is set, by a library's names for protocol, mechanism, user, password, authority and certificate."""
        protocol = "" if self.protocol == "PLAINTEXT" else self.protocol
        login = (self.mechanism, self.user, self.read_password()) if self.sasl else ("", "", "")
        values = (protocol, *login, self.ca_file, self.cert_file)
        return {name: value for name, value in zip(names, values, strict=True) if value}

    def for_kafka_python(self) -> dict[str, Any]:
        """Keyword arguments of kafka-python's clients; none for PLAINTEXT."""
        login = ("sasl_mechanism", "sasl_plain_username", "sasl_plain_password")
        return self._options("security_protocol", *login, "ssl_cafile", "ssl_certfile")

    def for_librdkafka(self) -> dict[str, str]:
        """Settings of librdkafka (confluent-kafka); none for PLAINTEXT."""
        login = ("sasl.mechanism", "sasl.username", "sasl.password")
        options = self._options("security.protocol", *login, "ssl.ca.location", "ssl.certificate.location")
        if self.cert_file:
            options["ssl.key.location"] = self.cert_file
        return options

    def for_java(self) -> dict[str, str]:
        """Settings of the Java client, as Spark's reader takes them behind ``kafka.``; none for PLAINTEXT.

        They hold the authority's certificate itself, because executors may be on machines without the file.

        Raises:
            ConfigError: the password or the certificate cannot be read.
        """
        options: dict[str, str] = {}
        if self.protocol != "PLAINTEXT":
            options["security.protocol"] = self.protocol
        if self.sasl:
            scram = self.mechanism.startswith("SCRAM")
            module = "scram.ScramLoginModule" if scram else "plain.PlainLoginModule"
            user, password = _quoted(self.user), _quoted(self.read_password())
            options["sasl.mechanism"] = self.mechanism
            options["sasl.jaas.config"] = (
                f"org.apache.kafka.common.security.{module} required username={user} password={password};"
            )
        if self.ca_file:
            remedy = "Name the PEM file of the authority that signed the broker's certificate"
            authority = _read(self.ca_file, "it is no PEM file", "kafka.ca_file", remedy)
            options |= {"ssl.truststore.type": "PEM", "ssl.truststore.certificates": authority}
        if self.cert_file:
            options |= {"ssl.keystore.type": "PEM", "ssl.keystore.location": self.cert_file}
        return options


PLAINTEXT = ClientSecurity()


def _read(file: str, no_text: str, key: str, remedy: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else no_text
        raise ConfigError(f"{file} cannot be read: {reason}", key=key, remedy=remedy) from None


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


@dataclass(frozen=True, slots=True)
class KafkaSettings:
    """The broker. ``MILLRACE_KAFKA=host:port`` is short for ``MILLRACE_KAFKA_BOOTSTRAP``.

    Attributes:
        bootstrap: ``host:port`` of a broker that runs elsewhere; empty: the embedded one.
        linger_ms: how long a producer gathers a batch.
        secure: TLS, passwords and access rules on the embedded broker.
        protocol: how to talk to a broker elsewhere: ``PLAINTEXT``, ``SSL``, ``SASL_SSL`` or ``SASL_PLAINTEXT``.
        mechanism: of SASL: ``SCRAM-SHA-512``, ``SCRAM-SHA-256`` or ``PLAIN``.
        user: user of SASL.
        password_file: file that holds the user's password and nothing else.
        ca_file: PEM file of the authority that signed the broker's certificate; empty: those that the system trusts.
        cert_file: PEM file of a client certificate, with its private key in front.
        schema_registry: address of the registry that payloads in Avro name their schemas by, http(s)://[USER:PASSWORD@]HOST.
    """

    bootstrap: str = ""
    linger_ms: int = 20
    secure: bool = False
    protocol: str = "PLAINTEXT"
    mechanism: str = "SCRAM-SHA-512"
    user: str = ""
    password_file: str = ""
    ca_file: str = ""
    cert_file: str = ""
    schema_registry: str = field(default="", repr=False)

    @property
    def security(self) -> ClientSecurity:
        """How our clients prove who they are. Raises ConfigError: the settings do not fit together."""
        return ClientSecurity(**{each.name: getattr(self, each.name) for each in dataclasses.fields(ClientSecurity)})

    def secured_by(self, security: ClientSecurity) -> KafkaSettings:
        """The same settings with this proof."""
        return dataclasses.replace(self, **dataclasses.asdict(security))


@dataclass(frozen=True, slots=True)
class CollectSettings:
    """Collectors.

    Attributes:
        host: address that HTTP collectors bind.
        port: port that HTTP collectors bind; 0: any free one.
        keys: file of the API keys (``millrace key``); empty: ``_millrace/keys.toml`` in the lake.
        allow_anonymous: bind another address than a loopback one although there are no keys.
        max_connections: connections by HTTP and WebSocket at a time.
        idle_timeout_s: a connection without a request is closed after this.
        protocol: how events are logged: ``hml``, ``rbml`` or ``sbml``.
        log_bytes: bound of the message log on disk; when it is full the collector pushes back.
        group_commit_ms: the longest an event waits for its group to be made durable.
        backoff_max_s: the longest pause before a reconnect.
    """

    host: str = "127.0.0.1"
    port: int = 8401
    keys: str = ""
    allow_anonymous: bool = False
    max_connections: int = 20_000
    idle_timeout_s: float = 75.0
    protocol: str = "hml"
    log_bytes: int = 1_073_741_824
    group_commit_ms: int = 5
    backoff_max_s: float = 10.0

    def __post_init__(self) -> None:
        one_of("collect.protocol", self.protocol, ("hml", "rbml", "sbml"))
        at_least("collect.max_connections", self.max_connections, 1)
        if self.idle_timeout_s <= 0:
            raise ConfigError("must be more than 0", key="collect.idle_timeout_s")


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """The serving tier.

    Attributes:
        host: address to bind.
        port: port to bind; 0: any free one.
        poll_ms: how often the tail looks for a new version.
        ring_frames: frames kept per channel for subscribers that lag.
        ring_bytes: bytes kept per channel for subscribers that lag.
        max_filters: distinct filters that one process keeps up to date.
        slow_after_ms: a subscriber this far behind is told so.
        cut_after_ms: a subscriber that reads nothing for this long is cut.
        heartbeat_ms: pause between heartbeats.
        max_subscribers: connections of one process.
        processes: server processes on the port.
        keys: file of the readers' API keys (``millrace key new --may read``); empty: ``_millrace/readers.toml`` in the
            lake.
        allow_anonymous: bind another address than a loopback one although there are no readers' keys.
        origins: whose pages may connect beside the server's own, e.g. ``https://shop.example``; separated by commas.
        tls_cert: PEM file of the certificate and its chain; empty: no TLS.
        tls_key: PEM file of the certificate's private key.
        max_sql: statements of ``POST /v1/sql`` that run at a time, and reads of older versions.
        sql_timeout_s: the longest that a statement runs, in seconds.
        sql_memory_mb: memory of one statement, in MiB.
        webhook_private: let webhooks call loopback, private and link-local addresses.
        webhook_backoff_ms: the longest pause after a first failed attempt; it doubles with each one, up to five
            minutes.
    """

    host: str = "127.0.0.1"
    port: int = 8400
    poll_ms: int = 15
    ring_frames: int = 1_024
    ring_bytes: int = 16_777_216
    max_filters: int = 2_000
    slow_after_ms: int = 5_000
    cut_after_ms: int = 30_000
    heartbeat_ms: int = 5_000
    max_subscribers: int = 20_000
    processes: int = 1
    keys: str = ""
    allow_anonymous: bool = False
    origins: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    max_sql: int = 4
    sql_timeout_s: float = 10.0
    sql_memory_mb: int = 512
    webhook_private: bool = False
    webhook_backoff_ms: int = 1_000

    def __post_init__(self) -> None:
        for name in ("processes", "max_sql", "sql_memory_mb"):
            at_least(f"serve.{name}", getattr(self, name), 1)

    @property
    def origin_list(self) -> tuple[str, ...]:
        """The origins, one by one."""
        return tuple(text.strip().rstrip("/") for text in self.origins.split(",") if text.strip())


@dataclass(frozen=True, slots=True)
class SparkSettings:
    """The Spark driver.

    Attributes:
        master: as of spark-submit; ignored where spark-submit gives one.
        driver_memory: heap of the driver.
        batch_interval_ms: from the start of one micro-batch to that of the next, at least; 0: one after the other.
        max_offsets_per_trigger: events that a micro-batch takes at most.
        max_bytes_per_trigger: compressed bytes of bronze that are read at once, at most, e.g. ``48m``.
        rehearse: run the queries over made-up rows before the driver says that it is ready.
        conf: a table of further Spark settings, in the file only; they go before Millrace's own.
    """

    master: str = "local[4]"
    driver_memory: str = "2g"
    batch_interval_ms: int = 600
    max_offsets_per_trigger: int = 100_000
    max_bytes_per_trigger: str = "48m"
    rehearse: bool = True
    conf: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class QuerySettings:
    """Queries and alerts that are added at run time, and views: what they may be at the most.

    Attributes:
        max_queries: queries that are added at run time, and as many alerts.
        max_view_rows: rows of a view; more make it fail, alone.
        max_base_rows: rows of a product that a view or an alert looks at.
    """

    max_queries: int = 16
    max_view_rows: int = 20_000
    max_base_rows: int = 500_000


@dataclass(frozen=True, slots=True)
class ControlSettings:
    """The control plane, and how the other processes reach it.

    Attributes:
        url: where the control plane is, e.g. ``http://127.0.0.1:8403``; empty: there is none, and key files say who may
            what.
        key: file of the key that is shown to it; empty: ``_millrace/control/machine.key`` in the lake.
        state: folder of the last good state; empty: ``_millrace/control/state`` in the lake.
        refresh_ms: the longest pause between two looks at it.
        host: address that ``millrace control`` binds.
        port: port that it binds; 0: any free one.
        database: URL of its database, e.g. ``postgresql://millrace@db/millrace``; empty: SQLite in the lake.
        serve_url: where apps reach the servers; empty: ``serve.host`` and ``serve.port``.
    """

    url: str = ""
    key: str = ""
    state: str = ""
    refresh_ms: int = 1_000
    host: str = "127.0.0.1"
    port: int = 8403
    database: str = ""
    serve_url: str = ""

    def __post_init__(self) -> None:
        if not 100 <= self.refresh_ms <= 60_000:
            raise ConfigError("must be from 100 to 60,000", key="control.refresh_ms")


@dataclass(frozen=True, slots=True)
class Settings:
    """All settings of one process.

    Attributes:
        lake: root folder of the tables, or the URL of a prefix in an object store, e.g. ``s3://bucket/lake``.
        work: folder of this machine for what is not a table; empty: ``_millrace`` in the lake, or for a lake in an
            object store a folder below ``.local/state/millrace`` in the home folder.
        pipeline: name of a folder below ``conf/pipelines``, or a path to one.
        tenant: tenant that events belong to when nobody says otherwise.
        lineage: address of an OpenLineage receiver that runs are told to, http(s)://HOST; empty: to nobody.
        metrics_port: port of ``/metrics`` on the loopback address for ``run``, ``load``, ``refine`` and ``latest``; 0:
            any free one, which ``millrace status`` names.
        kafka: the broker.
        collect: collectors.
        serve: the serving tier.
        spark: the Spark driver.
        queries: queries and alerts of the run time.
        control: the control plane.
    """

    lake: LakePath = Path("lake")
    work: str = ""
    pipeline: str = "meetup"
    tenant: str = "default"
    lineage: str = ""
    metrics_port: int = 0
    kafka: KafkaSettings = field(default_factory=KafkaSettings)
    collect: CollectSettings = field(default_factory=CollectSettings)
    serve: ServeSettings = field(default_factory=ServeSettings)
    spark: SparkSettings = field(default_factory=SparkSettings)
    queries: QuerySettings = field(default_factory=QuerySettings)
    control: ControlSettings = field(default_factory=ControlSettings)

    @property
    def control_state(self) -> Path:
        """Folder of the last good state of the control plane; sources of the run time are in ``sources`` in it."""
        return Path(self.control.state) if self.control.state else self.work_folder() / "control" / "state"

    def work_folder(self) -> Path:
        """Folder of this machine for what is not a table."""
        if self.work:
            return Path(self.work)
        if isinstance(self.lake, Path):
            return self.lake / "_millrace"
        return Path.home() / ".local" / "state" / "millrace" / re.sub(r"[^\w.-]+", "-", str(self.lake))

    def pipeline_folder(self) -> Path:
        """The folder of the chosen pipeline. Raises ConfigError: there is none."""
        for folder in (Path(self.pipeline), conf_dir() / "pipelines" / self.pipeline):
            if (folder / "pipeline.toml").is_file():
                return folder
        known = sorted(p.parent.name for p in (conf_dir() / "pipelines").glob("*/pipeline.toml"))
        raise ConfigError(
            f"there is no pipeline {self.pipeline!r}",
            key="pipeline",
            remedy=f"Known: {', '.join(known)}; or give a path",
        )


def conf_dir() -> Path:
    """The ``conf`` folder: ``MILLRACE_CONF``, the checkout's, or the one installed beside the packages.

    Raises ConfigError: none of them exists.
    """
    named = os.environ.get("MILLRACE_CONF")
    beside = Path(__file__).resolve().parents[2]
    for folder in [Path(named)] if named else [beside / "conf", beside / "millrace_conf"]:
        if (folder / "default.toml").is_file():
            return folder
    raise ConfigError("no conf folder with a default.toml", key="MILLRACE_CONF", remedy="Set MILLRACE_CONF to its path")


def load_settings(
    environ: Mapping[str, str] | None = None, assignments: Sequence[str] = (), **overrides: Any
) -> Settings:
    """Settings of this process.

    Args:
        environ: the environment, ``os.environ`` by default.
        assignments: ``section.key=value`` each, as ``--set`` takes them.
        overrides: values by field name, ``section__key`` for nested ones; None is passed over.

    Raises:
        ConfigError: a file, variable, assignment or value is wrong.
    """
    path = conf_dir() / "default.toml"
    settings = build(Settings, read_toml(path), file=path)
    environ = os.environ if environ is None else environ
    values = _from_environment(environ) | dict(map(_assignment, assignments))
    values |= {name: value for name, value in overrides.items() if value is not None}
    for name, value in values.items():
        settings = _replace(settings, name.split("__"), value)
    return settings


def leaves(node: Any, at: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted key and value of every setting."""
    for one in dataclasses.fields(node):
        value = getattr(node, one.name)
        if dataclasses.is_dataclass(value) and not isinstance(value, StorePath):
            yield from leaves(value, f"{at}{one.name}.")
        else:
            yield f"{at}{one.name}", value


def child_arguments(settings: Settings) -> list[str]:
    """Options of ``millrace`` that give these settings to a child process, which inherits file and environment."""
    inherited = dict(leaves(load_settings()))
    arguments = ["--lake", str(settings.lake), "--pipeline", settings.pipeline]
    for key, value in leaves(settings):
        if value != inherited[key] and key not in ("lake", "pipeline") and not isinstance(value, dict):
            arguments += ["--set", f"{key}={value}"]
    return arguments


_SHORT = {"kafka": "kafka__bootstrap"}
_NOT_SETTINGS = {"conf", "key", "jars_dir", "maven_url", "shared_data", "crash_at", "parent", "mark", "log"}


def _assignment(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"{text!r} is not KEY=VALUE", key="--set", remedy="Write e.g. --set serve.port=9000")
    name = key.strip().replace(".", "__")
    return _SHORT.get(name, name), value


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    sections = {f.name for f in dataclasses.fields(Settings)}
    found: dict[str, Any] = {}
    for variable, text in sorted(environ.items()):
        if not variable.startswith(PREFIX):
            continue
        name = variable.removeprefix(PREFIX).lower()
        if name in _NOT_SETTINGS:
            continue
        if name in _SHORT:
            name = _SHORT[name]
        elif name not in sections:
            section, _, key = name.partition("_")
            name = f"{section}__{key}" if key else section
        found[name] = text
    return found


def _truth(value: Any) -> bool:
    return {"true": True, "1": True, "false": False, "0": False}[str(value).lower()]


def _replace(node: Any, path: list[str], value: Any, variable: str = "") -> Any:
    variable = variable or PREFIX + "_".join(path).upper()
    name, *rest = path
    known = [f.name for f in dataclasses.fields(node)]
    if name not in known or bool(rest) != dataclasses.is_dataclass(getattr(node, name)):
        raise ConfigError("no such setting", key=variable, remedy=did_you_mean(name, known, "Known here"))
    old = getattr(node, name)
    if rest:
        return dataclasses.replace(node, **{name: _replace(old, rest, value, variable)})
    try:
        kind = lake_path if isinstance(old, Path | StorePath) else _truth if isinstance(old, bool) else type(old)
        new = kind(value)
    except (TypeError, ValueError, KeyError):
        raise ConfigError(f"{value!r} is not of type {type(old).__name__}", key=variable) from None
    return dataclasses.replace(node, **{name: new})

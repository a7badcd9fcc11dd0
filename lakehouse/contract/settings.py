"""Settings: ``conf/default.toml``, then ``MILLRACE_SECTION_KEY`` from the environment, then the command line."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lakehouse.contract.errors import ConfigError
from lakehouse.contract.tomlfile import build, read_toml

PREFIX = "MILLRACE_"


@dataclass(frozen=True, slots=True)
class KafkaSettings:
    """The broker. ``MILLRACE_KAFKA=host:port`` is short for ``MILLRACE_KAFKA_BOOTSTRAP``.

    Attributes:
        bootstrap: ``host:port`` of a broker that runs elsewhere; empty: the embedded one.
        heap_mb: heap of the embedded broker in MiB.
        linger_ms: how long a producer gathers a batch.
        batch_bytes: the largest batch of a producer.
    """

    bootstrap: str = ""
    heap_mb: int = 320
    linger_ms: int = 20
    batch_bytes: int = 262_144


@dataclass(frozen=True, slots=True)
class CollectSettings:
    """Collectors.

    Attributes:
        host: address that HTTP collectors bind.
        port: port that HTTP collectors bind; 0: any free one.
        log_bytes: bound of the message log on disk; when it is full the collector pushes back.
        group_commit_ms: the longest an event waits for its group to be made durable.
        backoff_max_s: the longest pause before a reconnect.
    """

    host: str = "127.0.0.1"
    port: int = 8401
    log_bytes: int = 1_073_741_824
    group_commit_ms: int = 5
    backoff_max_s: float = 10.0


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """The serving tier.

    Attributes:
        host: address to bind.
        port: port to bind; 0: any free one.
        poll_ms: how often the tail looks for a new version.
        ring_frames: frames kept per channel for subscribers that lag.
        ring_bytes: bytes kept per channel for subscribers that lag.
        slow_after_ms: a subscriber this far behind is told so.
        cut_after_ms: a subscriber that reads nothing for this long is cut.
        heartbeat_ms: pause between heartbeats.
        max_subscribers: connections of one process.
    """

    host: str = "127.0.0.1"
    port: int = 8400
    poll_ms: int = 15
    ring_frames: int = 1_024
    ring_bytes: int = 16_777_216
    slow_after_ms: int = 5_000
    cut_after_ms: int = 30_000
    heartbeat_ms: int = 5_000
    max_subscribers: int = 20_000


@dataclass(frozen=True, slots=True)
class SparkSettings:
    """The Spark driver.

    Attributes:
        master: as of spark-submit; ignored where spark-submit gives one.
        driver_memory: heap of the driver.
        bronze_interval_ms: from the start of one bronze micro-batch to that of the next, at least.
        max_offsets_per_trigger: events a bronze micro-batch takes at most.
        max_bytes_per_trigger: bytes of bronze that a live micro-batch takes at most, e.g. ``256m``.
        rehearse: run the queries once on a scratch lake before the driver says that it is ready.
        conf: any further Spark setting.
    """

    master: str = "local[4]"
    driver_memory: str = "2g"
    bronze_interval_ms: int = 400
    max_offsets_per_trigger: int = 200_000
    max_bytes_per_trigger: str = "256m"
    rehearse: bool = True
    conf: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Settings:
    """All settings of one process.

    Attributes:
        lake: root folder of the lake.
        pipeline: name of a folder below ``conf/pipelines``, or a path to one.
        tenant: tenant that events belong to when nobody says otherwise.
        kafka: the broker.
        collect: collectors.
        serve: the serving tier.
        spark: the Spark driver.
    """

    lake: Path = Path("lake")
    pipeline: str = "meetup"
    tenant: str = "default"
    kafka: KafkaSettings = field(default_factory=KafkaSettings)
    collect: CollectSettings = field(default_factory=CollectSettings)
    serve: ServeSettings = field(default_factory=ServeSettings)
    spark: SparkSettings = field(default_factory=SparkSettings)

    def pipeline_folder(self) -> Path:
        """The folder of the chosen pipeline.

        Raises:
            ConfigError: there is none.
        """
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

    Raises:
        ConfigError: none of them exists.
    """
    named = os.environ.get("MILLRACE_CONF")
    beside = Path(__file__).resolve().parents[2]
    for folder in [Path(named)] if named else [beside / "conf", beside / "millrace_conf"]:
        if (folder / "default.toml").is_file():
            return folder
    raise ConfigError("no conf folder with a default.toml", key="MILLRACE_CONF", remedy="Set MILLRACE_CONF to its path")


def load_settings(environ: Mapping[str, str] | None = None, **overrides: Any) -> Settings:
    """Settings of this process.

    Args:
        environ: the environment, ``os.environ`` by default.
        overrides: values of the command line by field name, ``section__key`` for nested ones; None is passed over.

    Raises:
        ConfigError: a file, variable or value is wrong.
    """
    path = conf_dir() / "default.toml"
    settings = build(Settings, read_toml(path), file=path)
    environ = os.environ if environ is None else environ
    values = dict(_from_environment(environ))
    values |= {name: value for name, value in overrides.items() if value is not None}
    for name, value in values.items():
        settings = _replace(settings, name.split("__"), value)
    return settings


_SHORT = {"kafka": "kafka__bootstrap"}
_NOT_SETTINGS = {"conf", "jars_dir", "maven_url", "shared_data", "crash_at", "parent"}


def _from_environment(environ: Mapping[str, str]) -> list[tuple[str, Any]]:
    sections = {f.name for f in dataclasses.fields(Settings)}
    found: list[tuple[str, Any]] = []
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
        found.append((name, text))
    return found


def _truth(value: Any) -> bool:
    if str(value).lower() not in ("true", "false", "1", "0"):
        raise ValueError
    return str(value).lower() in ("true", "1")


def _replace(node: Any, path: list[str], value: Any, variable: str = "") -> Any:
    variable = variable or PREFIX + "_".join(path).upper()
    name, *rest = path
    known = [f.name for f in dataclasses.fields(node)]
    if name not in known or bool(rest) != dataclasses.is_dataclass(getattr(node, name)):
        raise ConfigError("no such setting", key=variable, remedy=f"Known here: {', '.join(known)}")
    old = getattr(node, name)
    if rest:
        return dataclasses.replace(node, **{name: _replace(old, rest, value, variable)})
    try:
        new = _truth(value) if isinstance(old, bool) else type(old)(value)
    except (TypeError, ValueError):
        raise ConfigError(f"{value!r} is not of type {type(old).__name__}", key=variable) from None
    return dataclasses.replace(node, **{name: new})

"""This machine: whether it has what Millrace needs, and what is made once before the first run.

A class-data archive comes out of a run that does what the real one does: for Spark a driver that rehearses the shipped
pipeline, for Kafka a broker that starts. Each JVM writes its archive when it ends, which takes some seconds.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from lakehouse.contract.errors import ConfigError, EnvironmentProblem, MillraceError, install_extra
from lakehouse.contract.jvm import JAR_SETS, archive, find_java, jar_paths, jars_dir, locked_jars, making, missing_jars
from lakehouse.contract.lake import Lake
from lakehouse.contract.pipeline import load_pipeline
from lakehouse.contract.settings import Settings, conf_dir, load_settings
from lakehouse.contract.storage import write_whole

logger = logging.getLogger(__name__)

GIB = 1 << 30
MEMORY_BYTES = 4 * GIB  # Spark driver 2.5, broker 0.5, the Python processes together 0.5, and air
DISK_BYTES = 5 * GIB  # Kafka's and the collector's logs are bounded to a few GiB
_PATIENCE_S = 300.0  # for a class archive
_PACKAGES = {
    "ingest": ("kafka", "deltalake", "pyarrow", "sqlglot", "starlette", "uvicorn", "websockets"),
    "serve": ("datasketches", "deltalake", "duckdb", "sqlglot", "starlette", "uvicorn", "websockets"),
    "lakehouse": ("pyspark", "delta", "deltalake", "pyarrow", "pandas", "numpy", "lmdb", "datasketches", "sqlglot"),
}


@dataclass(frozen=True, slots=True)
class MachineCheck:
    """One thing that was looked at.

    Attributes:
        detail: what was found.
        remedy: what to do; empty where it is ok.
        optional: whether Millrace works without it, or mends it by itself.
    """

    name: str
    ok: bool
    detail: str
    remedy: str = ""
    optional: bool = False


def checks(load: Callable[[], Settings] = load_settings) -> list[MachineCheck]:
    """Look at everything; takes about a second.

    Args:
        load: reads the settings.
    """
    try:
        settings = load()
    except MillraceError:
        settings = Settings()  # _configuration says it
    found = [_attempt("Python", _python), _attempt("Java", _java)]
    found += [_attempt(f"packages for {extra}", partial(_packages, extra)) for extra in _PACKAGES]
    found += _configuration(load)
    found += [_attempt(f"jars for {name}", partial(_jars, name), optional=True) for name in JAR_SETS]
    found.append(_attempt("memory", _memory, optional=True))
    disk = _attempt("disk", lambda: str(_writable(settings.work_folder())))
    found.append(_attempt("disk", partial(_disk, settings.work_folder()), optional=True) if disk.ok else disk)
    found += _ports(settings)
    if settings.kafka.bootstrap:
        found.append(_attempt("Kafka", partial(_reach_kafka, settings.kafka.bootstrap)))
    return found


def before_start(
    settings: Settings, *, ports: bool = True, kafka: bool = True
) -> list[ConfigError | EnvironmentProblem]:
    """All that can be known to be wrong before anything starts, without a JVM; takes some tenths of a second.

    Args:
        ports: whether the configured ports are to be bound.
        kafka: whether the broker is to be reached.
    """
    with ThreadPoolExecutor(2) as beside:
        java = beside.submit(_raised, find_java)
        broker = beside.submit(_raised, _reach_kafka, settings.kafka.bootstrap if kafka else "")
        from jobs.local.check import pipeline_problems  # while Java starts

        found: list[ConfigError | EnvironmentProblem] = []
        try:
            found += pipeline_problems(load_pipeline(settings.pipeline_folder()))
        except ConfigError as error:
            found.append(error)
        found += _raised(_lake_writable, settings)
        for set_name in JAR_SETS:
            found += _raised(locked_jars, set_name)
        for check in _ports(settings) if ports else ():
            if not check.ok and not _is_ours(settings, check.detail.split()[0]):
                found.append(EnvironmentProblem(f"the {check.name}, {check.detail}", check.remedy))
        return [*found, *java.result(), *broker.result()]


def _raised(look: Callable[..., object], *arguments: object) -> list[ConfigError | EnvironmentProblem]:
    try:
        look(*arguments)
    except (ConfigError, EnvironmentProblem) as error:
        return [error]
    return []


def _lake_writable(settings: Settings) -> None:
    """Raises EnvironmentProblem: nothing can be written to the lake, or to the work folder."""
    if isinstance(settings.lake, Path):
        _writable(settings.lake)
        if settings.work:
            _writable(settings.work_folder())
        return
    _writable(settings.work_folder())
    mark = Lake.of(settings).shared / "check"
    try:
        write_whole(mark, b"")
        mark.unlink()
    except Exception as error:  # noqa: BLE001 - a store's errors have no common base
        problem = f"the lake {settings.lake} cannot be written: {str(error).strip().splitlines()[0]}"
        remedy = "Set the store's variables, such as AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_ENDPOINT_URL"
        raise EnvironmentProblem(problem, remedy) from None


def _writable(lake: Path) -> Path:
    """The lake's folder, or the nearest folder above that exists, once something could be made there.

    Raises EnvironmentProblem: nothing can be.
    """
    folder, remedy = lake.absolute(), "Set MILLRACE_LAKE, or --lake, to a folder that can be written"
    while not os.path.lexists(folder):
        folder = folder.parent
    if not folder.is_dir():
        raise EnvironmentProblem(f"the lake {lake} cannot be made: {folder} is not a folder", remedy)
    try:
        tempfile.TemporaryDirectory(prefix=".millrace-check-", dir=folder).cleanup()
    except OSError as error:
        raise EnvironmentProblem(f"the lake {lake} cannot be written: {folder}: {error.strerror}", remedy) from None
    return folder


def _is_ours(settings: Settings, address: str) -> bool:
    """Whether a part of this lake listens there."""
    from jobs.local.stack import parts

    return any(part.running and part.address.endswith(f"//{address}") for part in parts(Lake.of(settings)))


def _attempt(name: str, look: Callable[[], str], *, optional: bool = False) -> MachineCheck:
    """The check of something that says its problem by raising."""
    try:
        return MachineCheck(name, True, look(), optional=optional)
    except EnvironmentProblem as error:
        return MachineCheck(name, False, error.problem, error.remedy, optional)
    except MillraceError as error:
        return MachineCheck(name, False, str(error), "Correct the file")


def _python() -> str:
    version = ".".join(map(str, sys.version_info[:3]))
    if not (3, 11) <= sys.version_info[:2] < (3, 13):
        raise EnvironmentProblem(version, "Use Python 3.11 or 3.12")
    return version


def _java() -> str:
    java = find_java()
    return f"{java.major} ({java.path})"


def _packages(extra: str) -> str:
    names = _PACKAGES[extra]
    if missing := [name for name in names if importlib.util.find_spec(name) is None]:
        raise EnvironmentProblem(f"missing: {', '.join(missing)}", install_extra(extra))
    return f"{len(names)} found"


def _configuration(load: Callable[[], Settings]) -> Iterator[MachineCheck]:
    folders: set[Path] = set()

    def settings() -> str:
        folders.add(load().pipeline_folder())
        return str(conf_dir())

    yield _attempt("settings", settings)
    try:
        folders |= {path.parent for path in (conf_dir() / "pipelines").glob("*/pipeline.toml")}
    except ConfigError:
        return  # the settings said so
    for folder in sorted(folders):
        yield _attempt(f"pipeline {folder.name}", partial(_pipeline, folder))


def _pipeline(folder: Path) -> str:
    from jobs.local.check import pipeline_problems

    pipeline = load_pipeline(folder)
    for problem in pipeline_problems(pipeline):
        raise problem
    return f"sources: {', '.join(pipeline.sources)}; products: {', '.join(pipeline.products) or 'none'}"


def _jars(set_name: str) -> str:
    missing, total = missing_jars(set_name), len(locked_jars(set_name))
    if missing:
        remedy = "They are fetched on first use; or now: millrace prepare"
        raise EnvironmentProblem(f"{len(missing)} of {total} are not in {jars_dir()}", remedy)
    return f"{total} in {jars_dir()}"


def _memory() -> str:
    free = _free_memory()
    if free is None:
        return "cannot be told on this system"
    if free < MEMORY_BYTES:
        remedy = f"Have {MEMORY_BYTES / GIB:.0f} GiB free, or lower MILLRACE_SPARK_DRIVER_MEMORY"
        raise EnvironmentProblem(f"{free / GIB:.1f} GiB free", remedy)
    return f"{free / GIB:.1f} GiB free"


def _free_memory() -> int | None:
    """Bytes that can be had, also within a container's limit; None where it is not known."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return None
    group = Path("/sys/fs/cgroup")
    try:
        limit = int((group / "memory.max").read_text(encoding="ascii"))
        return min(free, limit - int((group / "memory.current").read_text(encoding="ascii")))
    except (OSError, ValueError):
        return free  # no limit


def _disk(lake: Path) -> str:
    free = shutil.disk_usage(_writable(lake)).free
    detail = f"{free / GIB:.1f} GiB free for {lake.absolute()}"
    if free < DISK_BYTES:
        remedy = f"Have {DISK_BYTES / GIB:.0f} GiB free, or set MILLRACE_LAKE to a folder on another disk"
        raise EnvironmentProblem(detail, remedy)
    return detail


def _ports(settings: Settings) -> Iterator[MachineCheck]:
    for what, host, port, variable in (
        ("port for serving", settings.serve.host, settings.serve.port, "MILLRACE_SERVE_PORT"),
        ("port for collecting", settings.collect.host, settings.collect.port, "MILLRACE_COLLECT_PORT"),
    ):
        free = port == 0 or is_free(host, port)
        detail = f"{host}:{port} is {'free' if free else 'taken, perhaps by Millrace itself'}"
        remedy = "" if free else f"Set {variable}, or stop what listens there"
        yield MachineCheck(what, free, detail, remedy, optional=True)


def is_free(host: str, port: int) -> bool:
    """Whether this process could listen there now."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError:
            return False
    return True


def _reach_kafka(bootstrap: str) -> str:
    """Connect to the first broker that answers; nothing if none is named. Raises EnvironmentProblem: none answers."""
    reason = ""
    for address in filter(None, bootstrap.split(",")):
        host, _, port = address.strip().rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=3).close()
            return f"{bootstrap} answers"
        except (OSError, ValueError) as error:
            reason = f"Kafka does not answer at {bootstrap}: {error}"
    if reason:
        raise EnvironmentProblem(reason, "Start it, or unset MILLRACE_KAFKA to use the embedded broker")
    return ""


def prepare(tell: Callable[[str], None]) -> None:
    """Do what is not done yet.

    Args:
        tell: is told, in a few words, what takes a while.

    Raises:
        EnvironmentProblem: no Java, or jars that cannot be fetched. Archives that cannot be made are only logged.
    """
    jars_of = {set_name: jar_paths(set_name) for set_name in JAR_SETS}
    from lakehouse.session import class_path as spark_class_path

    for kind, jars, record in (
        ("kafka", jars_of["kafka"], _record_kafka),
        ("spark", spark_class_path(jars_of["spark"]), _record_spark),
    ):
        if archive(kind, jars) is not None:
            continue
        tell(f"Preparing Java's classes of {kind.capitalize()} (once, up to a minute) …")
        try:
            with making(kind, jars) as path, tempfile.TemporaryDirectory(prefix="millrace-prepare-") as folder:
                if path is not None:  # another process may just have made it
                    record(path, Path(folder))
        except (OSError, subprocess.SubprocessError, EnvironmentProblem) as error:
            logger.warning("the classes of %s could not be prepared, so it starts slower: %s", kind, error)


def _record_kafka(path: Path, folder: Path) -> None:
    from ingest.broker import EmbeddedBroker

    embedded = EmbeddedBroker(folder / "broker", die_with_parent=True, record_classes=path)
    embedded.start()
    embedded.stop(_PATIENCE_S)


def _record_spark(path: Path, folder: Path) -> None:
    """In a process of its own: a Spark session is one for its process's life."""
    command = [sys.executable, "-m", "lakehouse.session", str(path), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_S, check=False)
    if done.returncode != 0:
        raise OSError(done.stderr.strip().rpartition("\n")[2] or f"it ended with code {done.returncode}")

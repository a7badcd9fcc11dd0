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
from dataclasses import dataclass
from pathlib import Path

from ingest import broker
from lakehouse.contract.classdata import archive, making
from lakehouse.contract.errors import ConfigError, EnvironmentProblem, MillraceError
from lakehouse.contract.jars import JAR_SETS, jar_paths, jars_dir, locked_jars, missing_jars
from lakehouse.contract.java import find_java
from lakehouse.contract.pipeline import load_pipeline
from lakehouse.contract.settings import Settings, conf_dir, load_settings

GIB = 1 << 30
MEMORY_BYTES = 4 * GIB  # Spark driver 2.5, broker 0.5, the Python processes together 0.5, and air
DISK_BYTES = 5 * GIB  # Kafka's and the collector's logs are bounded to a few GiB
PLAYER_PORT = 8402
_PACKAGES = {
    "ingest": ("kafka", "deltalake", "pyarrow", "sqlglot", "starlette", "uvicorn", "websockets"),
    "serve": ("datasketches", "deltalake", "duckdb", "sqlglot", "starlette", "uvicorn", "websockets"),
    "lakehouse": ("pyspark", "delta", "deltalake", "pyarrow", "pandas", "numpy", "lmdb", "datasketches", "sqlglot"),
}


@dataclass(frozen=True, slots=True)
class MachineCheck:
    """One thing that was looked at.

    Attributes:
        name: what.
        ok: whether it is as needed.
        detail: what was found.
        remedy: what to do; empty where it is ok.
        optional: whether Millrace works without it, or mends it by itself.
    """

    name: str
    ok: bool
    detail: str
    remedy: str = ""
    optional: bool = False


def checks() -> list[MachineCheck]:
    """Look at everything; takes about a second."""
    found = [_python(), _attempt("Java", _java), *_packages(), *_configuration()]
    found += [_jars(set_name) for set_name in JAR_SETS]
    try:
        settings = load_settings()
    except MillraceError:
        settings = Settings()  # said already, by _configuration
    found += [_memory(), _disk(settings.lake), *_ports(settings)]
    if settings.kafka.bootstrap:
        found.append(_kafka(settings.kafka.bootstrap))
    return [*found, _browser()]


def _attempt(name: str, look: Callable[[], str]) -> MachineCheck:
    """The check of something that says its problem by raising."""
    try:
        return MachineCheck(name, True, look())
    except EnvironmentProblem as error:
        return MachineCheck(name, False, error.problem, error.remedy)
    except MillraceError as error:
        return MachineCheck(name, False, str(error), "Correct the file")


def _python() -> MachineCheck:
    version = ".".join(map(str, sys.version_info[:3]))
    ok = (3, 11) <= sys.version_info[:2] < (3, 13)
    return MachineCheck("Python", ok, version, "" if ok else "Use Python 3.11 or 3.12")


def _java() -> str:
    java = find_java()
    return f"{java.major} ({java.path})"


def _packages() -> Iterator[MachineCheck]:
    for extra, names in _PACKAGES.items():
        missing = [name for name in names if importlib.util.find_spec(name) is None]
        detail = f"missing: {', '.join(missing)}" if missing else f"{len(names)} found"
        remedy = f"pip install 'millrace[{extra}]'" if missing else ""
        yield MachineCheck(f"packages for {extra}", not missing, detail, remedy)


def _configuration() -> Iterator[MachineCheck]:
    def settings() -> str:
        load_settings()
        return str(conf_dir())

    yield _attempt("settings", settings)
    try:
        folders = sorted(path.parent for path in (conf_dir() / "pipelines").glob("*/pipeline.toml"))
    except ConfigError:
        return  # the settings said so
    for folder in folders:
        yield _attempt(f"pipeline {folder.name}", lambda folder=folder: _pipeline(folder))  # type: ignore[misc]


def _pipeline(folder: Path) -> str:
    pipeline = load_pipeline(folder)
    return f"sources: {', '.join(pipeline.sources)}; products: {', '.join(pipeline.products) or 'none'}"


def _jars(set_name: str) -> MachineCheck:
    name = f"jars for {set_name}"
    try:
        missing, total = missing_jars(set_name), len(locked_jars(set_name))
    except ConfigError as error:
        return MachineCheck(name, False, str(error), "Correct the file")
    if not missing:
        return MachineCheck(name, True, f"{total} in {jars_dir()}")
    remedy = "They are fetched on first use; or now: millrace prepare"
    return MachineCheck(name, False, f"{len(missing)} of {total} are not in {jars_dir()}", remedy, optional=True)


def _memory() -> MachineCheck:
    free = _free_memory()
    if free is None:
        return MachineCheck("memory", True, "cannot be told on this system")
    ok = free >= MEMORY_BYTES
    remedy = "" if ok else f"Have {MEMORY_BYTES / GIB:.0f} GiB free, or lower MILLRACE_SPARK_DRIVER_MEMORY"
    return MachineCheck("memory", ok, f"{free / GIB:.1f} GiB free", remedy, optional=True)


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


def _disk(lake: Path) -> MachineCheck:
    folder = lake.absolute()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    writable = os.access(folder, os.W_OK)
    remedy = ""
    if not writable:
        remedy = f"Give write access to {folder}, or set MILLRACE_LAKE to another folder"
    elif free < DISK_BYTES:
        remedy = f"Have {DISK_BYTES / GIB:.0f} GiB free, or set MILLRACE_LAKE to a folder on another disk"
    detail = f"{free / GIB:.1f} GiB free for {lake.absolute()}" + ("" if writable else ", which cannot be written")
    return MachineCheck("disk", not remedy, detail, remedy, optional=writable)


def _ports(settings: Settings) -> Iterator[MachineCheck]:
    wanted = (
        ("serving", settings.serve.host, settings.serve.port, "Set MILLRACE_SERVE_PORT, or stop what listens there"),
        ("collecting", settings.collect.host, settings.collect.port, "Set MILLRACE_COLLECT_PORT, or stop what listens"),
        ("simulating", "127.0.0.1", PLAYER_PORT, "Use simulate --port, or stop what listens there"),
    )
    for what, host, port, remedy in wanted:
        free = port == 0 or _is_free(host, port)
        detail = f"{host}:{port} is {'free' if free else 'taken, perhaps by Millrace itself'}"
        yield MachineCheck(f"port for {what}", free, detail, "" if free else remedy, optional=True)


def _is_free(host: str, port: int) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError:
            return False
    return True


def _kafka(bootstrap: str) -> MachineCheck:
    host, _, port = bootstrap.split(",")[0].rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=3).close()
    except (OSError, ValueError) as error:
        remedy = "Start it, or unset MILLRACE_KAFKA to use the embedded broker"
        return MachineCheck("Kafka", False, f"{bootstrap}: {error}", remedy)
    return MachineCheck("Kafka", True, f"{bootstrap} answers")


def _browser() -> MachineCheck:
    name = "Chromium for browser tests"
    for command in ("chromium", "chromium-browser", "google-chrome"):
        if path := shutil.which(command):
            return MachineCheck(name, True, path, optional=True)
    installed = _playwright_browser()
    if installed is not None and installed.exists():
        return MachineCheck(name, True, str(installed), optional=True)
    return MachineCheck(
        name, False, "not found", "apt-get install chromium, or: playwright install chromium", optional=True
    )


def _playwright_browser() -> Path | None:
    if importlib.util.find_spec("playwright") is None:
        return None
    from playwright.sync_api import Error, sync_playwright

    try:
        with sync_playwright() as playwright:
            return Path(playwright.chromium.executable_path)
    except Error:
        return None


logger = logging.getLogger(__name__)

_PATIENCE_S = 300.0


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
    embedded = broker.EmbeddedBroker(folder / "broker", die_with_parent=True, record_classes=path)
    embedded.start()
    embedded.stop(_PATIENCE_S)


def _record_spark(path: Path, folder: Path) -> None:
    """In a process of its own: a Spark session is one for its process's life."""
    command = [sys.executable, "-m", "lakehouse.class_archive", str(path), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_S, check=False)
    if done.returncode != 0:
        raise OSError(done.stderr.strip().rpartition("\n")[2] or f"it ended with code {done.returncode}")

"""This machine: whether it has what Millrace needs, and what is made once before the first run.

A class-data archive comes out of a run that does what the real one does: for Spark a driver that rehearses the shipped
pipeline, for Kafka a broker that starts. Each JVM writes its archive when it ends, which takes some seconds.
"""

from __future__ import annotations

import difflib
import importlib.util
import logging
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ingest import broker
from lakehouse.contract.classdata import archive, making
from lakehouse.contract.errors import ConfigError, EnvironmentProblem, MillraceError, QueryRefused, install_extra
from lakehouse.contract.jars import JAR_SETS, jar_paths, jars_dir, locked_jars, missing_jars
from lakehouse.contract.java import find_java
from lakehouse.contract.lake import Lake
from lakehouse.contract.pipeline import Pipeline, Source, View, load_pipeline
from lakehouse.contract.pipeline.added import MAX_COLUMNS, SQL_COLUMNS
from lakehouse.contract.pipeline.folder import in_order
from lakehouse.contract.pipeline.product import TAKEN_BY
from lakehouse.contract.settings import Settings, conf_dir, load_settings
from lakehouse.contract.sql.ddl import Field, find_field, parse_ddl, unknown_type
from lakehouse.contract.sql.spark import (
    VIEW_FUNCTIONS,
    check_columns,
    check_functions,
    check_relations,
    check_spark_query,
    grouped,
    outputs,
    parse_condition,
    parse_query,
)
from lakehouse.contract.tomlfile import line_of, read_toml

GIB = 1 << 30
MEMORY_BYTES = 4 * GIB  # Spark driver 2.5, broker 0.5, the Python processes together 0.5, and air
DISK_BYTES = 5 * GIB  # Kafka's and the collector's logs are bounded to a few GiB
PLAYER_PORT = 8402
_PLAYER = "port for simulating"
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


def before_start(settings: Settings, *, ports: bool = True) -> list[ConfigError | EnvironmentProblem]:
    """All that can be known to be wrong before anything starts, without a JVM; takes some tenths of a second.

    Args:
        settings: of what is to start.
        ports: whether the configured ports are to be bound.
    """
    with ThreadPoolExecutor(2) as beside:
        java = beside.submit(_raised, find_java)
        kafka = beside.submit(_raised, _reach_kafka, settings.kafka.bootstrap)
        found: list[ConfigError | EnvironmentProblem] = []
        try:
            found += _pipeline_problems(load_pipeline(settings.pipeline_folder()))
        except ConfigError as error:
            found.append(error)
        found += [*_raised(_write_into, settings.lake), *_raised(_jar_locks)]
        for check in _ports(settings) if ports else ():
            if not check.ok and check.name != _PLAYER and not _is_ours(settings, check.detail.split()[0]):
                found.append(EnvironmentProblem(f"the {check.name}, {check.detail}", check.remedy))
        return [*found, *java.result(), *kafka.result()]


def _raised(look: Callable[..., object], *arguments: object) -> list[ConfigError | EnvironmentProblem]:
    try:
        look(*arguments)
    except (ConfigError, EnvironmentProblem) as error:
        return [error]
    return []


def _jar_locks() -> None:
    for set_name in JAR_SETS:
        locked_jars(set_name)


def _write_into(lake: Path) -> None:
    """Try to make something in the lake's folder, or in the nearest folder above that exists.

    Raises:
        EnvironmentProblem: it cannot be done.
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


def _is_ours(settings: Settings, address: str) -> bool:
    """Whether a part of this lake listens there."""
    from jobs.local.stack import parts

    return any(part.running and part.address.endswith(f"//{address}") for part in parts(Lake(settings.lake)))


class _Statements:
    """Checks the SQL of one pipeline, and knows which line of which file each text is."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._raw = read_toml(pipeline.path)
        self.problems: list[ConfigError | EnvironmentProblem] = []

    def check(self, key: str, look: Callable[[], tuple[str, ...]]) -> tuple[str, ...]:
        """The names that ``look`` returns; none if it refuses, which is then a problem of the dotted key."""
        try:
            return look()
        except QueryRefused as refused:
            file, line = self._place(key, refused.line)
            self.problems.append(ConfigError(refused.problem, key=key, remedy=refused.remedy, file=file, line=line))
            return ()

    def refuse(self, key: str, problem: str, remedy: str, word: str = "") -> None:
        """Note a problem of the dotted key, on the first line from there on that has the word."""
        line = line_of(self._pipeline.path, key) or 1
        text = self._pipeline.path.read_text(encoding="utf-8").splitlines()
        there = next((n for n in range(line, len(text) + 1) if re.search(rf"\b{re.escape(word)}\b", text[n - 1])), line)
        found = ConfigError(problem, key=key, remedy=remedy, file=self._pipeline.path, line=there)
        self.problems.append(found)

    def _place(self, key: str, line: int) -> tuple[Path, int | None]:
        path, value = self._pipeline.path, self._raw
        for step in key.split("."):
            value = value.get(step, {}) if isinstance(value, dict) else {}
        if key.endswith(".sql") and isinstance(value, str) and value.endswith(".sql"):
            return path.parent / value, line or 1
        first = line_of(path, key) or 1
        lines = path.read_text(encoding="utf-8").splitlines()
        opens = re.search(r"""(\"{3}|'{3})\s*$""", lines[first - 1])  # TOML drops the line break behind it
        return path, first + max(line, 1) - 1 + bool(opens)


def _pipeline_problems(pipeline: Pipeline) -> list[ConfigError | EnvironmentProblem]:
    """What Spark and DuckDB would certainly refuse of a pipeline's types, SQL and names of columns."""
    found = _Statements(pipeline)
    inputs = {name: _source_columns(found, source) for name, source in pipeline.sources.items()}
    results: dict[str, Mapping[str, Field]] = {}
    for name, product in pipeline.products.items():
        key, columns = f"products.{name}", inputs[product.source]
        if product.operator == "join":
            columns = {side: Field("STRUCT", "", inputs[side]) for side in (product.source, product.right)}
        if product.sql:
            relation = "joined" if product.operator == "join" else product.source
            names = found.check(f"{key}.sql", partial(check_spark_query, product.sql, relation, columns))
            columns = dict.fromkeys(names, Field("", ""))
        for option in ("time", "item", "version", "value", "by"):
            given = getattr(product, option)
            if option not in TAKEN_BY or product.operator not in TAKEN_BY[option]:
                continue
            for wanted in (given,) if isinstance(given, str) else given:
                if columns and wanted and wanted.lower() not in map(str.lower, columns):
                    near = difflib.get_close_matches(wanted, columns, n=1)
                    remedy = f"Did you mean {near[0]!r}?" if near else f"There are: {', '.join(columns)}"
                    found.refuse(f"{key}.{option}", f"there is no column {wanted!r}", remedy)
        for aggregate, text in product.aggregates.items():
            look = partial(check_spark_query, text, "", columns)
            found.check(f"{key}.aggregates.{aggregate}", look)
        results[name] = columns if not product.operator else {}
    for view in in_order(pipeline.views):
        look_at = partial(_view_columns, view, results.get(view.base, {}))
        results[view.name] = dict.fromkeys(found.check(f"products.{view.name}.sql", look_at), Field("", ""))
    conditions = [(f"alerts.{n}.{k}", a.product, getattr(a, k)) for n, a in pipeline.alerts.items() for k in _OF_ALERT]
    conditions += [(f"staging.{name}.where", copy.product, copy.where) for name, copy in pipeline.staging.items()]
    for key, table, text in conditions:
        if text:
            found.check(key, partial(_condition, text, results.get(table, {})))
    return found.problems


_VIEW_BYTES = 1_000_000
_OF_ALERT = ("when", "clear", "value")


def _source_columns(found: _Statements, source: Source) -> Mapping[str, Field]:
    """The columns that SQL over the source may use; empty: they are not known."""
    key, payload = f"sources.{source.name}", parse_ddl(source.schema)
    if not payload:
        found.refuse(f"{key}.schema", "not a Spark DDL schema", "Write e.g. id BIGINT, member STRUCT<name: STRING>")
    elif wrong := unknown_type(payload):
        word, near = wrong
        remedy = f"Did you mean {near}?" if near else "Use e.g. BIGINT, DOUBLE, STRING, BOOLEAN, TIMESTAMP, STRUCT<…>"
        found.refuse(f"{key}.schema", f"{word} is not a type of Spark", remedy, word)
    else:
        template = source.event_id_template
        paths = {"required": source.required, "event_id": template.fields if template else ()}
        for option, path in ((option, path) for option, given in paths.items() for path in given):
            if find_field(payload, tuple(path.split("."))) is None:
                near = next(iter(difflib.get_close_matches(path.split(".")[0], payload, n=1)), "")
                remedy = f"Did you mean {near!r}?" if near and "." not in path else f"Fields: {', '.join(payload)}"
                found.refuse(f"{key}.{option}", f"the schema has no field {path!r}", remedy)
    if not payload:
        return {}
    columns = {**payload, **dict.fromkeys((*source.enrich, *SQL_COLUMNS), Field("", ""))}
    hidden = dict.fromkeys(("payload", "headers", "key", "topic", "partition", "offset", "fingerprint"), Field("", ""))
    texts = {"event_time": source.event_time}
    texts |= {f"expectations.{name}": expected.sql for name, expected in source.expectations.items()}
    for option, text in texts.items():
        if text:
            found.check(f"{key}.{option}", partial(check_spark_query, text, "", {**columns, **hidden}))
    return columns


def _view_columns(view: View, columns: Collection[str]) -> tuple[str, ...]:
    tree = parse_query(view.sql, max_bytes=_VIEW_BYTES)
    check_relations(tree, [view.base])
    check_functions(tree, VIEW_FUNCTIONS)
    if columns:
        check_columns(tree, columns)
    if not (view.key or grouped(tree)):
        raise QueryRefused("key", "which columns name one row?", 'Add key = ["…"]')
    return outputs(tree, limit=MAX_COLUMNS)


def _condition(text: str, columns: Collection[str]) -> tuple[str, ...]:
    tree = parse_condition(text)
    if columns:
        check_columns(tree, columns)
    return ()


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
        remedy = install_extra(extra) if missing else ""
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
    for problem in _pipeline_problems(pipeline):
        raise problem
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
    writable = not _raised(_write_into, lake)
    remedy = ""
    if not writable:
        remedy = f"Give write access to {folder}, or set MILLRACE_LAKE to another folder"
    elif free < DISK_BYTES:
        remedy = f"Have {DISK_BYTES / GIB:.0f} GiB free, or set MILLRACE_LAKE to a folder on another disk"
    detail = f"{free / GIB:.1f} GiB free for {lake.absolute()}" + ("" if writable else ", which cannot be written")
    return MachineCheck("disk", not remedy, detail, remedy, optional=writable)


def _ports(settings: Settings) -> Iterator[MachineCheck]:
    wanted = (
        (
            "port for serving",
            settings.serve.host,
            settings.serve.port,
            "Set MILLRACE_SERVE_PORT, or stop what listens there",
        ),
        (
            "port for collecting",
            settings.collect.host,
            settings.collect.port,
            "Set MILLRACE_COLLECT_PORT, or stop what listens",
        ),
        (_PLAYER, "127.0.0.1", PLAYER_PORT, "Use simulate --port, or stop what listens there"),
    )
    for what, host, port, remedy in wanted:
        free = port == 0 or _is_free(host, port)
        detail = f"{host}:{port} is {'free' if free else 'taken, perhaps by Millrace itself'}"
        yield MachineCheck(what, free, detail, "" if free else remedy, optional=True)


def _is_free(host: str, port: int) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError:
            return False
    return True


def _kafka(bootstrap: str) -> MachineCheck:
    return next(
        (MachineCheck("Kafka", False, found.problem, found.remedy) for found in _raised(_reach_kafka, bootstrap)),
        MachineCheck("Kafka", True, f"{bootstrap} answers"),
    )


def _reach_kafka(bootstrap: str) -> None:
    """Connect to the first broker that answers; nothing to do if none is named.

    Raises:
        EnvironmentProblem: none answers.
    """
    reason = ""
    for address in filter(None, bootstrap.split(",")):
        host, _, port = address.strip().rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=3).close()
            return
        except (OSError, ValueError) as error:
            reason = f"Kafka does not answer at {bootstrap}: {error}"
    if reason:
        raise EnvironmentProblem(reason, "Start it, or unset MILLRACE_KAFKA to use the embedded broker")


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

"""All of Millrace under one supervisor, and the notes that tell other processes which parts run and where."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import random
import socket
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from ingest.broker import EmbeddedBroker
from jobs.local.broker import apply_topics, embedded, resolve_kafka
from jobs.local.supervise import Child, Supervisor
from lakehouse.contract.errors import ConfigError, EnvironmentProblem, MillraceError
from lakehouse.contract.lake import Lake
from lakehouse.contract.pipeline.folder import PipelineFiles, declared_pipeline
from lakehouse.contract.pipeline.source import metrics_file
from lakehouse.contract.settings import ClientSecurity, Settings, child_arguments
from lakehouse.contract.storage import write_whole

log = logging.getLogger(__name__)

PARTS = "parts.json"  # note: process id by part, or null
ADDRESSES = "addresses.json"  # note: base URL by part, and the broker's ``host:port``
DRIVER = "lakehouse.json"  # note of the Spark driver, written when its queries run
CONTROL = "control"  # the control plane's part, and its command
FEEDS = "feeds"  # the part that fetches feeds
INBOX = "inbox-"  # begins the name of a part that loads what arrives in a folder; the source's name follows
_PORTS = range(20_000, 32_000)  # below those that Linux takes for outgoing connections


@dataclass(frozen=True, slots=True)
class StackPart:
    """A part of a stack.

    Attributes:
        pid: of its process; None while there is none.
        address: where it listens; empty: nowhere.
        metrics: URL of its metrics in Prometheus form; empty: it has none.
        remarks: what else is to be said.
    """

    name: str
    pid: int | None
    address: str = ""
    metrics: str = ""
    remarks: str = ""

    @property
    def running(self) -> bool:
        return self.pid is not None


def parts(lake: Lake) -> list[StackPart]:
    """The parts that a supervisor started here, whether they run or not."""
    folder = lake.state / "run"
    addresses, driver = _read(folder / ADDRESSES), _read(folder / DRIVER)
    found = []
    for name, pid in _read(folder / PARTS).items():
        alive = pid if pid and _alive(int(pid)) else None
        address = str(addresses.get(name, ""))
        metrics = f"{address}/metrics" if address.startswith("http") and name != CONTROL else ""
        remarks = ""
        if name == "lakehouse":
            ready = alive is not None and driver.get("pid") == alive  # else the note is of the process before
            metrics = str(driver.get("metrics", "")) if ready else ""
            remarks = _too_late(lake) if ready or alive is None else "not ready yet"
        elif name == FEEDS or name.startswith(INBOX):
            remarks = _loaded(folder / metrics_file(name))
        found.append(StackPart(name, alive, address, metrics, remarks))
    return found


def _too_late(lake: Lake) -> str:
    """What the driver has counted of late events, e.g. ``too late: rsvps 1,204 (10 minutes)``."""
    from lakehouse.bronze.readers import too_late

    found = {table.name: too_late(lake, table) for table in lake.tables() if table.layer == "bronze"}
    told = [
        f"{source} {count:,} ({text})" for source, totals in found.items() for text, count in totals.items() if count
    ]
    return f"too late: {', '.join(told)}" if told else ""


def _loaded(file: Path) -> str:
    """What a loader says of its files, e.g. ``files: 1 failed, 3 loaded; 900 rows``."""
    try:
        families = {f.name: f for f in text_string_to_metric_families(file.read_text(encoding="utf-8"))}
    except (OSError, ValueError):
        return "nothing loaded yet"
    states: Counter[str] = Counter()
    for sample in families["millrace_loader_files"].samples:
        if sample.name.endswith("_total"):
            states[sample.labels["state"]] += int(sample.value)
    rows = sum(int(s.value) for s in families["millrace_loader_rows"].samples if s.name.endswith("_total"))
    if not states:
        return "nothing loaded yet"
    return f"files: {', '.join(f'{count} {state}' for state, count in sorted(states.items()))}; {rows:,} rows"


def write_note(path: Path, value: Mapping[str, Any]) -> None:
    """Write a note, whole or not at all."""
    write_whole(path, json.dumps(value).encode())


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _alive(pid: int) -> bool:
    """Whether the process runs; one that ended and waits for its parent does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return not Path("/proc/self").exists()


class Stack:
    """The parts of one lake, started together and stopped together.

    Args:
        upstreams: URL that is read instead of the pipeline's, by source.
        feeds: fetch the feeds that the pipeline declares.
        inboxes: folders whose files are loaded, by source.

    Attributes:
        where: base URL by part once they are started; of the broker ``host:port``.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        upstreams: Mapping[str, str] | None = None,
        feeds: bool = False,
        inboxes: Mapping[str, Path] | None = None,
    ) -> None:
        self._settings = settings
        self._lake = Lake.of(settings)
        self._feeds = feeds
        self._inboxes = dict(inboxes or {})
        self._urls = [f"{name}={url}" for name, url in (upstreams or {}).items()]
        self._broker: EmbeddedBroker | None = None
        self._broker_due = 0.0
        self._broker_starting: threading.Thread | None = None
        self._broker_refused: EnvironmentProblem | None = None
        self._granted: PipelineFiles | None = None  # of the secure broker, which grants each topic
        self.supervisor = Supervisor()
        self.restarts_of_broker = 0
        self._parts: dict[str, int | None] = {}
        self._unnoted: dict[str, int | None] = {}
        self.where: dict[str, str] = {}

    def start(self) -> None:
        """Start every part; returns while they are still getting ready (:meth:`waiting_for`)."""
        settings = self._settings
        state = self._lake.state / "run"
        state.mkdir(parents=True, exist_ok=True)
        (state / DRIVER).unlink(missing_ok=True)
        self._settings = settings = dataclasses.replace(
            settings,
            kafka=dataclasses.replace(settings.kafka, bootstrap=self._start_broker()),
            serve=dataclasses.replace(settings.serve, port=settings.serve.port or free_port()),
            collect=dataclasses.replace(settings.collect, port=settings.collect.port or free_port()),
        )
        self._child("lakehouse", ["run"])
        self._child("serve", ["serve"])
        urls = [argument for url in self._urls for argument in ("--url", url)]
        # A player that is about to start on this machine is not waited for with long pauses.
        soon = ["--set", "collect.backoff_max_s=0.3"] if self._urls else []
        self._child("collect", ["collect", *urls, *soon])
        if any(source.latest_topic for source in declared_pipeline(settings).sources.values()):
            self._measured_child("latest", ["collect", "--role", "latest"])
        self.start_loaders()
        self.where["serve"] = f"http://{settings.serve.host}:{settings.serve.port}"
        self.where["collect"] = f"http://{settings.collect.host}:{settings.collect.port}"
        self.where["broker"] = settings.kafka.bootstrap

    def start_control(self) -> None:
        """Start a control plane, which says who may what in the other parts; call it before :meth:`start`."""
        control = self._settings.control
        port = control.port or free_port()
        url = f"http://{control.host}:{port}"
        self._settings = dataclasses.replace(
            self._settings, control=dataclasses.replace(control, port=port, url=control.url or url)
        )
        self.where[CONTROL] = url
        self._child(CONTROL, [CONTROL])

    def start_loaders(self) -> None:
        """Start what loads files: one process for all feeds, and one for each inbox."""
        sources = declared_pipeline(self._settings).sources
        if self._feeds and any(source.feeds for source in sources.values()):
            self._measured_child(FEEDS, ["load", "--feeds", "--node", FEEDS])
        for source, folder in self._inboxes.items():
            name = f"{INBOX}{source}"
            self._measured_child(name, ["load", "--watch", str(folder), "--source", source, "--node", name])

    def security(self) -> ClientSecurity:
        """How who only reads logs in to the broker."""
        return resolve_kafka(self._settings, "lakehouse").kafka.security

    def waiting_for(self) -> list[str]:
        """Parts that are not ready yet."""
        parts = {
            "the Spark driver": (self._lake.state / "run" / DRIVER).is_file(),
            "the server": _is_ready(self.where["serve"]),
            "the collector": _is_ready(self.where["collect"]),
        }
        return [name for name, ready in parts.items() if not ready]

    def tend(self) -> None:
        """Look after every part once; call it a few times a second.

        Raises:
            PartRefused: a part ended with a configuration error.
            EnvironmentProblem: the machine lacks something for a part, or for the broker, which has not worked yet.
        """
        self.supervisor.tend()
        self._note_parts()
        if self._granted is not None and not self._is_starting() and (changed := self._granted.changed()) is not None:
            try:
                apply_topics(self._settings, changed, timeout_s=5.0)
            except MillraceError as error:
                log.warning("%s", error)
        broker = self._broker
        if broker is None or self._is_starting() or broker.running():
            return
        if self._broker_refused is not None and not self.restarts_of_broker:
            raise self._broker_refused
        if time.monotonic() >= self._broker_due:
            log.warning("the broker ended; starting it again")
            self.restarts_of_broker += 1
            self._begin_start()

    def stop(self, each: Callable[[str], None] = lambda _: None) -> None:
        """Stop every part, sources first; returns when nothing of them is left."""
        loaders = [name for name in self.supervisor.restarts if name == FEEDS or name.startswith(INBOX)]
        for name in ("player", "collect", *loaders, "latest", "lakehouse", "serve", CONTROL):
            each(name)
            self.supervisor.stop(name)
        if self._broker is not None:
            each("broker")
            if self._broker_starting is not None:
                self._broker_starting.join()
            self._broker.stop()

    def _note_parts(self) -> None:
        """Keep ``_millrace/run/parts.json`` true: process id by part; and beside it where the parts listen."""
        parts = {name: self.supervisor.pid(name) for name in self.supervisor.restarts}
        parts["broker"] = self._broker.pid if self._broker is not None else None
        if parts != self._parts:
            try:
                write_note(self._lake.state / "run" / ADDRESSES, self.where)
                write_note(self._lake.state / "run" / PARTS, parts)
            except OSError as error:  # on a full disk the parts go on; the next call tries again
                if parts != self._unnoted:
                    log.warning("cannot note which parts run: %s", error)
                self._unnoted = parts
                return
            self._parts = parts

    def log_file(self, name: str) -> Path:
        """Where a part writes what it prints."""
        return self._lake.state / "logs" / f"{name}.log"

    def _start_broker(self) -> str:
        if self._settings.kafka.bootstrap:
            return self._settings.kafka.bootstrap
        broker = embedded(self._settings, die_with_parent=True)
        bootstrap = broker.settle()
        if not broker.running():
            self._broker = broker  # ours to stop; one that ran before is left running
            self._begin_start()
        return bootstrap

    def _begin_start(self) -> None:
        """Beside everything else: it takes seconds, and the other parts are to be looked after meanwhile."""
        self._broker_starting = threading.Thread(target=self._start_own_broker, name="start of the broker")
        self._broker_starting.start()

    def _is_starting(self) -> bool:
        return self._broker_starting is not None and self._broker_starting.is_alive()

    def _start_own_broker(self) -> None:
        assert self._broker is not None
        try:
            self._broker.start()
            if self._settings.kafka.secure:
                self._granted = PipelineFiles.of(self._settings)
                apply_topics(self._settings, self._granted.load())
        except MillraceError as error:
            log.warning("%s", error)
            self._broker_refused = error if isinstance(error, EnvironmentProblem) else None
            self._broker_due = time.monotonic() + 2.0

    def _measured_child(self, name: str, command: list[str]) -> None:
        """A part that has no HTTP but its metrics."""
        port = free_port()
        self.where[name] = f"http://127.0.0.1:{port}"
        self._child(name, [*command, "--set", f"metrics_port={port}"])

    def _child(self, name: str, command: list[str]) -> None:
        self.supervisor.start(Child(name, [*command, *child_arguments(self._settings)], self.log_file(name)))


def inbox_folders(given: Sequence[str], sources: Sequence[str]) -> dict[str, Path]:
    """Folder by source from ``DIR`` (where there is one source) and ``SOURCE=DIR``.

    Raises ConfigError: there is no such source or folder, or it is not clear whose files they are.
    """
    found: dict[str, Path] = {}
    for text in given:
        name, equals, folder = text.partition("=")
        if not equals:
            name, folder = sources[0] if len(sources) == 1 else "", text
        if name not in sources:
            problem = f"there is no source {name!r}" if equals else "whose files are they?"
            raise ConfigError(
                problem, key="--inbox", remedy=f"Write SOURCE=DIR with one of the sources {', '.join(sources)}"
            )
        if not Path(folder).is_dir():
            raise ConfigError(f"there is no folder {folder}", key="--inbox", remedy="Make it, or name another")
        found[name] = Path(folder)
    return found


def free_port() -> int:
    """A free port of the loopback address, so that a part which is started again finds it free (as the broker's)."""
    for port in [*random.sample(_PORTS, 200), 0]:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return int(probe.getsockname()[1])
    raise AssertionError("port 0 is always free")


def get_json(url: str, timeout_s: float = 5.0) -> Any:
    """The JSON at a loopback URL, or None where nobody answers."""
    try:
        with urllib.request.urlopen(url, timeout=timeout_s) as answer:  # noqa: S310 - http, an address of ours
            return json.loads(answer.read())
    except (urllib.error.URLError, OSError, ValueError):
        return None


def _is_ready(base: str) -> bool:
    try:
        with urllib.request.urlopen(f"{base}/readyz", timeout=1.0) as answer:  # noqa: S310 - http, an address of ours
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False

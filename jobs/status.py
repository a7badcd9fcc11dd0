"""The parts of a stack, as their supervisor notes them in ``LAKE/_millrace/run``."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from lakehouse.contract.feed import metrics_file
from lakehouse.contract.lake import Lake

PARTS = "parts.json"
"""Process id by part, or null."""
ADDRESSES = "addresses.json"
"""Where the parts listen: base URLs, and the broker's ``host:port``."""
FEEDS = "feeds"
"""Name of the part that fetches feeds."""
INBOX = "inbox-"
"""Begins the name of a part that loads what arrives in a folder; the source's name follows."""
DRIVER = "lakehouse.json"
"""Of the Spark driver, written when its queries run."""


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a stack.

    Attributes:
        name: as the supervisor calls it.
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
        """Whether its process lives."""
        return self.pid is not None


def parts(lake: Lake) -> list[Part]:
    """The parts that a supervisor started here, whether they run or not."""
    folder = lake.state / "run"
    addresses, driver = _read(folder / ADDRESSES), _read(folder / DRIVER)
    found = []
    for name, pid in _read(folder / PARTS).items():
        alive = pid if pid and _alive(int(pid)) else None
        address = str(addresses.get(name, ""))
        metrics = f"{address}/metrics" if address.startswith("http") else ""
        remarks = ""
        if name == "lakehouse":
            ready = alive is not None and driver.get("pid") == alive  # else the note is of the process before
            metrics = str(driver.get("metrics", "")) if ready else ""
            remarks = "" if ready or alive is None else "not ready yet"
        elif name == FEEDS or name.startswith(INBOX):
            remarks = _loaded(folder / metrics_file(name))
        found.append(Part(name, alive, address, metrics, remarks))
    return found


def _loaded(file: Path) -> str:
    """What a loader says of its files, e.g. ``files: 1 failed, 3 loaded; 900 rows``."""
    try:
        families = {f.name: f for f in text_string_to_metric_families(file.read_text(encoding="utf-8"))}
    except (OSError, ValueError):
        return "nothing loaded yet"
    states: Counter[str] = Counter()
    rows = 0
    for sample in families["millrace_loader_files"].samples:
        if sample.name.endswith("_total"):
            states[sample.labels["state"]] += int(sample.value)
    for sample in families["millrace_loader_rows"].samples:
        rows += int(sample.value) if sample.name.endswith("_total") else 0
    if not states:
        return "nothing loaded yet"
    return f"files: {', '.join(f'{count} {state}' for state, count in sorted(states.items()))}; {rows:,} rows"


def write_note(path: Path, value: Mapping[str, Any]) -> None:
    """Write a note, whole or not at all."""
    draft = path.with_suffix(".new")
    draft.write_text(json.dumps(value), encoding="utf-8")
    draft.replace(path)


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

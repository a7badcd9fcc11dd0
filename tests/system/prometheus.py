"""A real Prometheus with our rules, which watches the parts of a demo."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

from jobs.local.stack import free_port
from lakehouse.contract.settings import conf_dir

RULES = conf_dir() / "deploy" / "prometheus" / "alerts.yml"
DASHBOARD = conf_dir() / "deploy" / "grafana" / "millrace.json"
REMEDY = "no Prometheus is installed: apt-get install prometheus"


def require_tool(name: str) -> str:
    """Path of ``prometheus`` or ``promtool``; skips the test where it is absent."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(REMEDY)
    return found


class Prometheus:
    """It scrapes every second; alerts fire at once, because ``promtool`` tests their times.

    Args:
        folder: for its data.
        targets: ``host:port`` each.
    """

    def __init__(self, folder: Path, targets: list[str]) -> None:
        folder.mkdir()
        rules = [line for line in RULES.read_text(encoding="utf-8").splitlines() if not line.startswith("        for:")]
        (folder / "alerts.yml").write_text("\n".join(rules))
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": ["alerts.yml"],
            "scrape_configs": [{"job_name": "millrace", "static_configs": [{"targets": targets}]}],
        }
        (folder / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
        self._url = f"http://127.0.0.1:{free_port()}"
        arguments = [f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
        listen = f"--web.listen-address={self._url.removeprefix('http://')}"
        with (folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [require_tool("prometheus"), *arguments, listen], stdout=log, stderr=log, cwd=folder
            )

    def __enter__(self) -> Prometheus:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._process.terminate()
        self._process.wait()

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The series of an instant query; none while it starts."""
        try:
            query = urllib.parse.urlencode({"query": expression})
            with urllib.request.urlopen(f"{self._url}/api/v1/query?{query}", timeout=30) as answer:
                found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{expression}: {error.read().decode()}") from None
        except OSError:
            return []
        return [series for series in found if series["value"][1] != "NaN"]

    def until(self, expression: str, timeout_s: float = 60.0) -> bool:
        """Whether the query gives something before the time is over."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self.query(expression):
                return True
            time.sleep(0.5)
        return False


def panels() -> dict[str, str]:
    """Each query of the Grafana dashboard, by panel and place, as Grafana would send it for the last minute."""
    board = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    return {
        f"{panel['title']} {target['refId']}": target["expr"].replace("$__rate_interval", "1m")
        for panel in board["panels"]
        for target in panel.get("targets", ())
    }

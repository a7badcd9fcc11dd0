"""``/metrics`` of processes without HTTP of their own."""

from __future__ import annotations

import socket
import urllib.request

import pytest

from jobs.metrics import Counts, metrics_server
from lakehouse.contract.errors import EnvironmentProblem


def test_counts_are_read_when_somebody_asks() -> None:
    copied = {"clicks": 1}
    with metrics_server(0, Counts("millrace_latest_copied", "Records copied", lambda: copied)) as url:
        copied["clicks"] = 7
        text = urllib.request.urlopen(url, timeout=60).read().decode()
    assert url.startswith("http://127.0.0.1:")
    assert 'millrace_latest_copied_total{source="clicks"} 7.0' in text
    assert "process_cpu_seconds_total" in text
    with pytest.raises(OSError):
        urllib.request.urlopen(url, timeout=60)


def test_the_port_is_taken() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(EnvironmentProblem, match=rf"127.0.0.1:{port}.*metrics_port"), metrics_server(port):
            pytest.fail("it listens")

"""Fetching jars, with the real Ivy against a repository on the loopback address."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from lakehouse.contract.errors import ConfigError, EnvironmentProblem
from lakehouse.contract.jars import JAR_SETS, jar_paths, locked_jars, missing_jars

JARS = {"org.example:alpha:1.0": b"alpha" * 5_000, "org.example.deep:beta_2.13:4.2.0": b"beta" * 7_000}


class _Handler(SimpleHTTPRequestHandler):
    def do_GET(self) -> None:
        assert isinstance(self.server, _Repository)
        self.server.served.append(self.path)
        super().do_GET()

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


class _Repository(ThreadingHTTPServer):
    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), partial(_Handler, directory=str(folder)))
        self.served: list[str] = []


@dataclass
class Setup:
    """A repository, a conf folder whose lock names its jars, and an empty cache."""

    repository: _Repository
    files: Path
    lock: Path
    cache: Path
    expected: dict[str, bytes] = field(default_factory=lambda: dict(JARS))


def repository_path(coordinates: str) -> str:
    group, artifact, version = coordinates.split(":")
    return f"{group.replace('.', '/')}/{artifact}/{version}/{artifact}-{version}.jar"


@pytest.fixture
def setup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Setup]:
    files = tmp_path / "repository"
    for coordinates, content in JARS.items():
        path = files / repository_path(coordinates)
        path.parent.mkdir(parents=True)
        path.write_bytes(content)
    lock = tmp_path / "conf" / "jars.lock"
    lock.parent.mkdir()
    (lock.parent / "default.toml").touch()
    lines = [f"kafka {name} {hashlib.sha256(content).hexdigest()}" for name, content in JARS.items()]
    lock.write_text("# a comment\n\n" + "\n".join(lines) + "\n")
    repository = _Repository(files)
    thread = threading.Thread(target=repository.serve_forever, args=(0.02,))
    thread.start()
    monkeypatch.setenv("MILLRACE_CONF", str(lock.parent))
    monkeypatch.setenv("MILLRACE_JARS_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("MILLRACE_MAVEN_URL", f"http://127.0.0.1:{repository.server_port}")
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)
    yield Setup(repository, files, lock, tmp_path / "cache")
    repository.shutdown()
    thread.join()
    repository.server_close()


def test_fetches_once_then_needs_nobody(setup: Setup) -> None:
    paths = jar_paths("kafka")
    assert [path.read_bytes() for path in paths] == list(JARS.values())
    assert not (setup.cache / ".staging").exists()
    before = len(setup.repository.served)
    assert jar_paths("kafka") == paths
    assert len(setup.repository.served) == before


def test_a_damaged_jar_is_fetched_anew_and_the_others_are_left(setup: Setup) -> None:
    alpha, beta = jar_paths("kafka")
    times = beta.stat().st_mtime_ns
    alpha.write_bytes(b"cut short")
    assert [jar.artifact for jar in missing_jars("kafka")] == ["alpha"]
    assert jar_paths("kafka")[0].read_bytes() == JARS["org.example:alpha:1.0"]
    assert beta.stat().st_mtime_ns == times


def test_what_the_lock_does_not_name_stays_out(setup: Setup) -> None:
    (setup.files / repository_path("org.example:alpha:1.0")).write_bytes(b"something else")
    with pytest.raises(EnvironmentProblem, match=r"org\.example:alpha:1\.0.*SHA-256") as caught:
        jar_paths("kafka")
    assert caught.value.remedy
    assert [jar.artifact for jar in missing_jars("kafka")] == ["alpha"]
    # the wrong one is not kept for the next try either
    (setup.files / repository_path("org.example:alpha:1.0")).write_bytes(JARS["org.example:alpha:1.0"])
    assert len(jar_paths("kafka")) == 2


def test_goes_on_after_a_failure(setup: Setup) -> None:
    beta = setup.files / repository_path("org.example.deep:beta_2.13:4.2.0")
    beta.rename(beta.with_suffix(".away"))
    with pytest.raises(EnvironmentProblem, match="beta_2"):
        jar_paths("kafka")
    beta.with_suffix(".away").rename(beta)
    assert [path.read_bytes() for path in jar_paths("kafka")] == list(JARS.values())


def test_offline_says_what_to_do(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLRACE_MAVEN_URL", "http://127.0.0.1:9")
    with pytest.raises(EnvironmentProblem) as caught:
        jar_paths("kafka")
    assert "refused" in caught.value.problem
    assert "MILLRACE_JARS_DIR" in caught.value.remedy


def test_two_processes_at_once_fetch_once(setup: Setup) -> None:
    command = [sys.executable, "-c", "from lakehouse.contract.jars import jar_paths; jar_paths('kafka')"]
    both = [subprocess.Popen(command, stderr=subprocess.PIPE) for _ in range(2)]
    said = [process.communicate(timeout=300)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert sorted(set(setup.repository.served)) == sorted(setup.repository.served)
    assert missing_jars("kafka") == []


def test_a_set_that_does_not_exist() -> None:
    with pytest.raises(ConfigError, match="spark, kafka"):
        jar_paths("flink")


@pytest.mark.parametrize("line", ["kafka org.example:alpha:1.0", "flink org.example:alpha:1.0 " + "0" * 64])
def test_a_wrong_line_is_named(setup: Setup, line: str) -> None:
    lock = setup.lock.parent / "jars.lock"
    lock.write_text(f"# a comment\n{line}\n")
    with pytest.raises(ConfigError) as caught:
        locked_jars("kafka")
    assert (caught.value.file, caught.value.line) == (lock, 2)


def test_shipped_lock_names_each_jar_once() -> None:
    for set_name in JAR_SETS:
        jars = locked_jars(set_name)
        assert len({(jar.group, jar.artifact) for jar in jars}) == len(jars) > 10

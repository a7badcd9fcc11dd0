"""Finding Java; fetching jars, with the real Ivy against a repository on the loopback address; class-data archives."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from lakehouse.contract.errors import ConfigError, EnvironmentProblem
from lakehouse.contract.jvm import (
    JAR_SETS,
    MINIMUM_JAVA,
    archive,
    find_java,
    jar_paths,
    jvm_proxy_flags,
    locked_jars,
    log_flags,
    making,
    missing_jars,
    recording,
    sharing,
)


def fake_java(home: Path, version: str) -> None:
    command = home / "bin" / "java"
    command.parent.mkdir(parents=True)
    command.write_text(f"#!/bin/sh\necho '{version}' >&2\n")
    command.chmod(0o755)


def test_finds_one_that_is_new_enough() -> None:
    java = find_java()
    assert java.path.is_file()
    assert java.major >= MINIMUM_JAVA


@pytest.mark.parametrize(("said", "expected"), [('openjdk version "21" 2023-09-19', 21), ('java version "17.0.1"', 17)])
def test_java_home_goes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, expected: int) -> None:
    fake_java(tmp_path, said)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    assert find_java().major == expected


@pytest.mark.parametrize(
    ("said", "problem"), [('java version "1.8.0_402"', "Java 8 .* too old"), ("hello", "does not say its version")]
)
def test_others_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, problem: str) -> None:
    fake_java(tmp_path, said)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(EnvironmentProblem, match=problem) as caught:
        find_java()
    assert "JAVA_HOME" in caught.value.remedy


def test_none_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EnvironmentProblem, match="not installed"):
        find_java()


def test_proxies_of_the_environment() -> None:
    assert jvm_proxy_flags({"https": "http://user:word@proxy.example:3128", "no": "localhost, .example"}) == [
        "-Dhttps.proxyHost=proxy.example",
        "-Dhttps.proxyPort=3128",
        "-Dhttp.nonProxyHosts=localhost|*.example",
    ]
    assert jvm_proxy_flags({}) == []


def test_a_jvm_logs_as_its_process_does(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {}
    for kind in ("text", "json"):
        monkeypatch.setenv("MILLRACE_LOG", kind)
        [flag] = log_flags()
        file = Path(unquote(urlsplit(flag.removeprefix("-Dlog4j2.configurationFile=")).path))
        lines = file.read_text(encoding="utf-8").splitlines()
        found[kind] = [line for line in lines if not line.startswith("#") and ".layout." not in line]
    assert found["text"] == found["json"], "they differ in how a line looks, and in nothing else"
    assert "logger.native.level = error" in found["json"]


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
    command = [sys.executable, "-c", "from lakehouse.contract.jvm import jar_paths; jar_paths('kafka')"]
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


@pytest.fixture
def jars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    monkeypatch.setenv("MILLRACE_JARS_DIR", str(tmp_path / "cache"))
    found = [tmp_path / name for name in ("a.jar", "b.jar")]
    for jar in found:
        jar.write_bytes(b"x")
    return found


def make(kind: str, jars: list[Path], content: bytes = b"classes") -> Path:
    with making(kind, jars) as path:
        assert path is not None
        path.write_bytes(content)
    found = archive(kind, jars)
    assert found is not None
    return found


def test_an_archive_is_of_one_class_path(jars: list[Path]) -> None:
    assert sharing("spark", jars) == []
    path = make("spark", jars)
    assert sharing("spark", jars)[0] == f"-XX:SharedArchiveFile={path}"
    with making("spark", jars) as again:
        assert again is None
    for others in (jars[::-1], jars[:1]):
        assert sharing("spark", others) == []
    assert sharing("kafka", jars) == []
    jars[0].write_bytes(b"another")
    assert sharing("spark", jars) == []
    jars[0].unlink()
    assert sharing("spark", jars) == []


def test_one_that_is_cut_off_is_none(jars: list[Path]) -> None:
    path = make("spark", jars)
    path.write_bytes(b"class")
    assert sharing("spark", jars) == []


def test_the_oldest_go_and_a_failure_leaves_nothing(jars: list[Path]) -> None:
    made = []
    for number in range(5):
        jars[0].write_bytes(b"x" * number)
        made.append(make("spark", jars))
        os.utime(made[-1], (number, number))
    assert {path for path in made if path.exists()} == set(made[2:])
    jars[0].write_bytes(b"y")
    with pytest.raises(OSError, match="full"), making("spark", jars) as path:
        assert path is not None
        path.write_bytes(b"half")
        raise OSError("full")
    assert sharing("spark", jars) == []
    assert not list(made[0].parent.glob("*.part"))


def test_a_java_writes_one_and_starts_from_it_and_from_one_that_is_none(jars: list[Path]) -> None:
    java = str(find_java().path)
    with making("spark", jars) as path:
        assert path is not None
        subprocess.run([java, *recording(path), "--list-modules"], check=True, capture_output=True)
    found = archive("spark", jars)
    assert found is not None
    for content in (found.read_bytes(), bytes(found.stat().st_size)):
        found.chmod(0o644)
        found.write_bytes(content)
        flags = sharing("spark", jars)
        assert flags
        done = subprocess.run([java, *flags, "--list-modules"], capture_output=True, text=True, check=True)
        assert (done.stderr, "java.base" in done.stdout) == ("", True)

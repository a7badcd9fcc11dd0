"""Finding Java."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from lakehouse.contract.errors import EnvironmentProblem
from lakehouse.contract.java import MINIMUM_JAVA, find_java, jvm_proxy_flags, log_flags


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

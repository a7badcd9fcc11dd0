"""Class-data archives: found by JVM and class path, and never in the way."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from lakehouse.contract.classdata import archive, making, recording, sharing
from lakehouse.contract.java import find_java


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

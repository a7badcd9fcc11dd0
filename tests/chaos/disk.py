"""A disk that runs out of room."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def small_disk(folder: Path, size: str = "16m") -> Iterator[Path]:
    """A small file system; the test is skipped where none may be mounted."""
    mount, umount = shutil.which("mount"), shutil.which("umount")
    folder.mkdir()
    if not (mount and umount):
        pytest.skip("there is no mount")
    if subprocess.run([mount, "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("mounting a tmpfs needs more rights")
    try:
        yield folder
    finally:
        subprocess.run([umount, "--lazy", folder], check=True)

"""The wheel in an environment of its own, beside the packages that the tests run with: what a user installs."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tempfile
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
_FOLDER = tempfile.TemporaryDirectory(prefix="millrace-installed-")  # until the tests end


@cache
def distributions() -> tuple[Path, Path]:
    """The wheel and the sdist of this tree."""
    folder = Path(_FOLDER.name) / "dist"
    _run(sys.executable, "-m", "hatchling", "build", "-d", str(folder), cwd=ROOT)
    return next(folder.glob("*.whl")), next(folder.glob("*.tar.gz"))


@cache
def millrace() -> Path:
    """The installed command. Its environment has Millrace from the wheel alone."""
    home = Path(_FOLDER.name) / "environment"
    _run(sys.executable, "-m", "venv", "--without-pip", str(home))
    python = home / "bin" / "python"
    packages = Path(_run(str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    # A path in a .pth file is searched, and .pth files in it are not read: no editable install gets in.
    (packages / "locked.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    wheel, _ = distributions()
    _run(
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(python),
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        str(wheel),
    )
    return home / "bin" / "millrace"


def user_environment() -> dict[str, str]:
    """The environment variables of somebody who has no checkout and sets nothing."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("MILLRACE_", "PYTHON"))}


def _run(*command: str, cwd: Path | None = None) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout

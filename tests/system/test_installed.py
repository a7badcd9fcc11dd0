"""What is built and installed: names, contents, and a command that needs no checkout."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

from lakehouse.contract.errors import DISTRIBUTION
from tests.system.installed import ROOT, distributions, millrace, user_environment


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(millrace()), *arguments], cwd=folder, env=user_environment(), capture_output=True, text=True, check=False
    )


def test_no_text_installs_the_project_of_the_same_name() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["name"] == DISTRIBUTION
    assert project["scripts"].keys() == {"millrace"}
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    kinds = (".py", ".md", ".toml", ".yaml", "Makefile", "Containerfile")
    texts = [ROOT / name for name in listed.split("\0") if name.endswith(kinds)]
    wrong = re.compile(r"install (?:--?\S+ )*['\"]?millrace(?![-\w])|['\"`]millrace\[\w")
    assert [str(path) for path in texts if path.is_file() and wrong.search(path.read_text(encoding="utf-8"))] == []


def test_wheel_and_sdist_hold_all_that_runs() -> None:
    wheel, sdist = distributions()
    tracked = subprocess.run(
        ["git", "ls-files", "ingest", "lakehouse", "serve", "jobs", "conf"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    with zipfile.ZipFile(wheel) as archive:
        installed = {re.sub("^millrace_conf/", "conf/", name) for name in archive.namelist()}
    with tarfile.open(sdist) as archive:
        sources = {name.partition("/")[2] for name in archive.getnames()}
    assert set(tracked) - installed == set()
    assert set(tracked) - sources == set()
    assert [name for name in sources if name.startswith(("tests", "docs", "."))] == [".gitignore"]


def test_installed_command_needs_no_checkout(tmp_path: Path) -> None:
    for name in ("jobs", "lakehouse", "conf"):  # a user's own folders of these names are not imported
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError('the folder of the user')\n")
    code = "import jobs.cli, lakehouse.contract.settings as s; print(jobs.cli.__file__, s.conf_dir())"
    python = millrace().with_name("python")
    found = subprocess.run(
        [python, "-P", "-c", code], cwd=tmp_path, env=user_environment(), capture_output=True, text=True, check=True
    )
    assert all(path.startswith(str(millrace().parents[1])) for path in found.stdout.split())
    checked = run(tmp_path, "check", "meetup", "--json", "--set", "serve.port=0", "--set", "collect.port=0")
    assert (json.loads(checked.stdout), checked.returncode) == ([], 0), checked.stderr
    checks = {row["name"]: row for row in json.loads(run(tmp_path, "check", "--json").stdout)}
    assert checks["settings"]["detail"].startswith(str(millrace().parents[1]))
    assert all(row["ok"] for name, row in checks.items() if name.startswith(("packages", "pipeline", "Java")))


def test_sdist_builds_the_same_wheel(tmp_path: Path) -> None:
    wheel, sdist = distributions()
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
    subprocess.run([*pip, "-w", ".", str(sdist)], cwd=tmp_path, check=True)
    assert (tmp_path / wheel.name).read_bytes() == wheel.read_bytes()

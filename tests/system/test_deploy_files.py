"""The files for containers, Kubernetes and systemd: linters accept them, and they name what exists."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import kubernetes_validate
import pytest
import typer
import yaml

from jobs.cli import app
from lakehouse.contract.settings import conf_dir, load_settings
from tests.system.installed import ROOT

DEPLOY = conf_dir() / "deploy"
UNITS = sorted((DEPLOY / "systemd").iterdir())
COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]
NO_SETTINGS = {"MILLRACE_JARS_DIR", "MILLRACE_LOG", "MILLRACE_KAFKA"}


def check_settings(found: dict[str, str]) -> None:
    """Unknown names and values of another type are refused."""
    load_settings({name: value for name, value in found.items() if name not in NO_SETTINGS})


def test_containerfile() -> None:
    file = DEPLOY / "Containerfile"
    hadolint = Path(sys.executable).with_name("hadolint")
    if not hadolint.exists():
        pytest.skip("hadolint has no binary for this machine")
    done = subprocess.run([hadolint, file], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    text = file.read_text(encoding="utf-8")
    copied = [name for names in re.findall(r"^COPY (?!--)(.*) \S+$", text, re.MULTILINE) for name in names.split()]
    assert [name for name in copied if not (ROOT / name).exists()] == []
    check_settings(dict(re.findall(r"(MILLRACE_\w+)=(\S+)", text.partition("ENV ")[2])))


def test_kubernetes_manifests() -> None:
    kinds = {}
    for manifest in yaml.safe_load_all((DEPLOY / "kubernetes" / "millrace.yaml").read_text(encoding="utf-8")):
        kubernetes_validate.validate(manifest, "1.31", strict=True)
        kinds[manifest["kind"]] = manifest
    check_settings(kinds["ConfigMap"]["data"])
    containers = kinds["StatefulSet"]["spec"]["template"]["spec"]["containers"]
    assert {one["args"][0] for one in containers} == {"collect", "run", "serve"} <= set(COMMANDS)
    named = {port["name"]: port["containerPort"] for one in containers for port in one.get("ports", ())}
    assert {(one["targetPort"], one["port"]) for one in kinds["Service"]["spec"]["ports"]} == set(named.items())


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_systemd_units(unit: Path, tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("there is no systemd-analyze: apt-get install systemd")
    text = unit.read_text(encoding="utf-8")
    command, *_ = re.findall(r"^ExecStart=/opt/millrace/bin/millrace (\S+)", text, re.MULTILINE)
    assert command in COMMANDS or (command == "$COMMAND" and "\nEnvironment=COMMAND=%i\n" in text)
    check_settings(dict(re.findall(r"(MILLRACE_\w+)=(\S+)", "".join(re.findall(r"^Environment=.*$", text, re.M)))))
    here = tmp_path / unit.name.replace("@", "@run")  # verified as an instance, with a program that this machine has
    here.write_text(text.replace("/opt/millrace/bin/millrace", sys.executable).replace("User=millrace", "User=root"))
    done = subprocess.run([analyze, "verify", "--man=no", here], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")

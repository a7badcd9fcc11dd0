"""The folder of the client for browsers is an npm package, whose types name what the module has."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[3] / "serve" / "web" / "client"


def test_the_types_name_what_the_module_exports() -> None:
    module = (FOLDER / "millrace.js").read_text()
    [listed] = re.findall(r"^export \{(.*)\};", module, re.MULTILINE)
    exported = {name.strip() for name in listed.split(",")} | set(
        re.findall(r"^export (?:class|function) (\w+)", module, re.M)
    )
    types = (FOLDER / "millrace.d.ts").read_text()
    assert set(re.findall(r"^export (?:class|function) (\w+)", types, re.MULTILINE)) == exported


def test_states_of_the_types_are_those_of_the_module() -> None:
    module = (FOLDER / "millrace.js").read_text()
    [states] = re.findall(r"export type State =(.*?);", (FOLDER / "millrace.d.ts").read_text(), re.DOTALL)
    assert all(f'"{state}"' in module for state in re.findall(r'"(\w+)"', states))


def test_npm_packs_the_whole_folder_without_a_build() -> None:
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("npm is not installed")
    packed = subprocess.run(
        [npm, "pack", "--dry-run", "--json", "--offline"], cwd=FOLDER, capture_output=True, check=True
    )
    [package] = json.loads(packed.stdout)
    assert {each["path"] for each in package["files"]} == {path.name for path in FOLDER.iterdir()}
    content = json.loads((FOLDER / "package.json").read_text())
    assert not content.keys() & {"dependencies", "scripts"}

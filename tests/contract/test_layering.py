"""The import contracts name every module that they are about."""

from __future__ import annotations

import pkgutil
import tomllib
from pathlib import Path

import lakehouse

ROOT = Path(__file__).parents[2]


def test_all_of_the_lakehouse_but_its_contract_is_closed_to_the_other_tiers() -> None:
    linted = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    [forbidden] = [each["forbidden_modules"] for each in linted if each.get("source_modules") == ["ingest", "serve"]]
    modules = {f"lakehouse.{found.name}" for found in pkgutil.iter_modules(lakehouse.__path__)}
    assert set(forbidden) == modules - {"lakehouse.contract"}

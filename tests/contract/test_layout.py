"""The shape of the project: imports without circles, unique class names, bounds on modules and on packages."""

from __future__ import annotations

import ast
from collections import Counter
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parents[2]
TIERS = ("ingest", "lakehouse", "serve", "jobs")
MODULES = sorted(path for tier in TIERS for path in (ROOT / tier).rglob("*.py"))
MOST_MODULES = 12  # of a package


@pytest.mark.parametrize("tier", TIERS)
def test_no_module_imports_itself_by_way_of_others(tier: str) -> None:
    graph = grimp.build_graph(tier, exclude_type_checking_imports=True, cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    circle = ""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        circle = f"a circle of imports: {' → '.join(error.args[1])}"
    assert not circle, circle


def test_a_class_name_is_used_once() -> None:
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in MODULES]
    names = Counter(node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    assert [name for name, count in names.items() if count > 1] == []


def test_a_package_has_at_most_a_dozen_modules() -> None:
    widths = Counter(path.parent for path in MODULES if path.name != "__init__.py")
    assert [str(folder.relative_to(ROOT)) for folder, count in widths.items() if count > MOST_MODULES] == []


def test_there_are_no_more_modules_than_somebody_can_know() -> None:
    assert len(MODULES) <= 220


def test_the_log_is_named_by_its_reader_only() -> None:
    found = [path for path in MODULES if "_delta_log" in path.read_text(encoding="utf-8")]
    assert found == [ROOT / "lakehouse" / "contract" / "deltalog.py"]

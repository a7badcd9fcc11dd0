"""The shape of the package: no circle of imports, no name for two classes, no package too wide."""

from __future__ import annotations

import ast
from collections import Counter
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp
import pytest

SERVE = Path(__file__).parents[2] / "serve"
MODULES = sorted(SERVE.rglob("*.py"))


def test_no_module_imports_itself_by_way_of_others() -> None:
    graph = grimp.build_graph("serve", exclude_type_checking_imports=True, cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as circle:
        pytest.fail(f"a circle of imports: {' → '.join(circle.args[1])}")


def test_a_class_name_is_used_once() -> None:
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in MODULES]
    names = Counter(node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    assert [name for name, count in names.items() if count > 1] == []


def test_a_package_has_at_most_a_dozen_modules() -> None:
    widths = Counter(path.parent for path in MODULES if path.name != "__init__.py")
    assert {folder.name: count for folder, count in widths.items() if count > 12} == {}


def test_the_log_is_named_by_its_reader_only() -> None:
    root = SERVE.parent
    modules = [path for package in ("ingest", "lakehouse", "serve", "jobs") for path in (root / package).rglob("*.py")]
    found = [path for path in modules if "_delta_log" in path.read_text(encoding="utf-8")]
    assert found == [root / "lakehouse" / "contract" / "deltalog.py"]

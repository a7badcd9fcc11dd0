"""The documentation names only files, modules and settings that exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from lakehouse.contract.settings import Settings, leaves
from tests.bench.scale import table

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
TOPS = ("ingest", "lakehouse", "serve", "jobs", "conf", "tests", "docs")
SECTIONS = ("kafka", "collect", "serve", "queries")  # not spark: it has settings of its own
SETTINGS = {key for key, _ in leaves(Settings())}


def code_of(page: Path) -> Iterator[str]:
    """The words that the page shows as code."""
    for piece in re.findall(r"```.*?```|`[^`\n]+`", page.read_text(encoding="utf-8"), re.DOTALL):
        yield from (word.rstrip("./") for word in re.findall(r"[\w./@-]+", piece.strip("`")))


def exists(word: str) -> bool:
    """Whether this is a path of the project, a module, or a name in one."""
    if "/" in word:
        return (ROOT / word).exists() or (ROOT / f"{word}.py").exists()
    module = word.replace(".", "/")
    return word in SETTINGS or any((ROOT / found).exists() for found in (module, f"{module}.py")) or _defines(module)


def _defines(word: str) -> bool:
    module, _, name = word.rpartition("/")
    files = (ROOT / f"{module}.py", ROOT / module / "__init__.py")
    return any(name in file.read_text(encoding="utf-8") for file in files if file.exists())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_names_what_exists(page: Path) -> None:
    named = {word for word in code_of(page) if re.split(r"[./]", word)[0] in (*TOPS, *SECTIONS)}
    unknown = {word for word in named if re.search(r"\w[./]\w", word) and not exists(word)}
    assert not unknown


def test_scale_page_has_the_table_of_the_simulation() -> None:
    assert table() in (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")

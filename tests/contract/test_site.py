"""The docs as a site: it builds without a warning or a network, and its reference says what the code has."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lakehouse.contract.pipeline import OPERATORS
from lakehouse.contract.settings import Settings, leaves
from tests.contract.test_docs import PAGES, ROOT

SITE = ROOT / "docs" / "site"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site; ``--strict`` makes a broken link, a missing anchor or a page without a place an error."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", SITE / "mkdocs.yml", "-d", folder],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
    )
    assert done.returncode == 0, done.stderr
    return folder


def text_of(page: Path) -> str:
    return re.sub(r"<[^>]+>", "", page.read_text(encoding="utf-8"))


def test_pages_load_nothing_from_elsewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 40
    for page in pages:
        text = page.read_text(encoding="utf-8")
        loaded = re.findall(
            r"<(?:script|img|iframe|link rel=\"(?:stylesheet|preload|preconnect)\")[^>]*(?:src|href)=\"([^\"]+)", text
        )
        assert loaded, page
        assert [address for address in loaded if "//" in address] == []
        assert "generated:" not in text
    assert [style for style in site.rglob("*.css") if "url(http" in style.read_text(encoding="utf-8")] == []


def test_reference_has_each_name(site: Path) -> None:
    settings, operators = (text_of(site / "reference" / f"{name}.html") for name in ("configuration", "operators"))
    assert [key for key, _ in leaves(Settings()) if key not in settings] == []
    assert [name for name in OPERATORS if name not in operators] == []
    metrics, routes, commands = (
        text_of(site / "reference" / f"{name}.html") for name in ("metrics", "routes", "commands")
    )
    for name in ("millrace_collector_received_total", "millrace_lakehouse_spark_up", "millrace_serve_subscribers"):
        assert name in metrics
    assert "POST /v1/sql" in routes
    assert "millrace key rotate" in commands
    assert "POST /v1/subscriptions" in routes


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    targets = {target for target in re.findall(r"\]\(([^)#\s]+)", text) if "://" not in target}
    assert [target for target in targets if not (page.parent / target).exists()] == []

"""Data Docs as plain pages: without scripts, and with nothing from elsewhere, so that the dashboard can link them.

great-expectations writes pages that load Bootstrap and more from the web, and an index that a script fills. Here the
pages keep their content and get ``bootstrap.min.css`` from beside this module (4.3.1 of npm's ``bootstrap``, MIT,
sha256 60b19e5d…8d8d36); the index is written anew.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from datetime import datetime
from html import escape
from pathlib import Path
from urllib.parse import quote

_SHEET = "bootstrap.min.css"
_SCRIPT = re.compile(r"<script\b.*?</script\s*>", re.DOTALL | re.IGNORECASE)
_REMOTE = re.compile(r"<(?:link|img)\b[^>]*\b(?:href|src)\s*=\s*[\"']https?://[^>]*>", re.IGNORECASE)
_OPEN = "<style>.collapse, .tab-pane { display: block !important; opacity: 1 !important }</style>"  # nothing opens them
_INDEX = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>Data Docs</title><link rel="stylesheet" href="{sheet}"></head><body class="container py-4">
<h1 class="h3 mb-4">Data Docs</h1>
<table class="table"><thead>
<tr><th scope="col">Checked</th><th scope="col">When</th><th scope="col">Expectations met</th></tr></thead>
<tbody>{rows}</tbody></table></body></html>
"""


def make_plain(report: Path, met: Mapping[str, tuple[int, int]]) -> None:
    """Rewrite the pages below ``report``.

    Args:
        met: expectations that are met, and all of them, by the title of the checkpoint.
    """
    sheet = report / "static" / "styles" / _SHEET
    sheet.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(Path(__file__).with_name(_SHEET), sheet)
    for page in report.rglob("*.html"):
        up = "../" * (len(page.relative_to(report).parts) - 1)
        head = f'<link rel="stylesheet" href="{up}static/styles/{_SHEET}">{_OPEN}</head>'
        text = _REMOTE.sub("", _SCRIPT.sub("", page.read_text(encoding="utf-8")))
        page.write_text(text.replace("</head>", head, 1), encoding="utf-8")
    pages = sorted(
        (report / "validations").rglob("*.html"), key=lambda page: (page.parent.name, page.name), reverse=True
    )
    rows = "".join(_row(page, report, met) for page in pages)
    index = _INDEX.format(sheet=f"static/styles/{_SHEET}", rows=rows)
    (report / "index.html").write_text(index, encoding="utf-8")


def _row(page: Path, report: Path, met: Mapping[str, tuple[int, int]]) -> str:
    title = page.stem.removeprefix("millrace-")
    link = quote(str(page.relative_to(report)))
    good, every = met.get(title, (0, 0))
    tone = "success" if good == every else "danger"
    told = f'<span class="badge badge-{tone}">{good} of {every}</span>' if every else ""
    return f'<tr><td><a href="{link}">{escape(title)}</a></td><td>{_when(page.parent.name)}</td><td>{told}</td></tr>'


def _when(run: str) -> str:
    try:
        return f"{datetime.strptime(run, '%Y%m%dT%H%M%S.%f%z'):%Y-%m-%d %H:%M:%S} UTC"
    except ValueError:
        return escape(run)

"""great-expectations: checkpoints over pandas frames, and Data Docs of all checkpoints of a run.

Only this module uses the library. Its context lives in memory; it sends no usage statistics.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from lakehouse.contract.pipeline import Source
from lakehouse.contract.pipeline.expectations import FAIL, FRESH, HALT, WARN, Check
from lakehouse.contract.tomlfile import duration_ms
from lakehouse.errors import QualityProblem

if TYPE_CHECKING:
    import pandas as pd  # type: ignore[import-untyped]

EVENT = "event"  # kind of an expectation on events, on which the stream acts by itself
TABLE = "table"
TYPE_OF = "expect_column_values_to_be_of_type"
_SHAPE = ("expect_table_column", "expect_column_to_exist")  # about the columns of the table, not their values
_NAME = "millrace_expectation"
_SITE = "report"
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


@dataclass(frozen=True, slots=True)
class BoundCheck:
    """One expectation for one subject."""

    check: Check
    kind: str  # EVENT or TABLE
    blocking: bool  # the subject fails if it is not met

    @property
    def computed(self) -> str:
        """Name of the computed column with the verdict on each row; empty if there is none."""
        if self.check.sql:
            return f"expectation {self.check.name}"
        return f"type of {dict(self.check.arguments).get('column')}" if self.check.expect == TYPE_OF else ""

    @property
    def about_shape(self) -> bool:
        """Whether it is about the columns of the table, not their values."""
        return self.check.expect.startswith(_SHAPE)


def bound_checks(checks: Sequence[Check], source: Source | None = None, *, gate: bool = False) -> list[BoundCheck]:
    """All expectations for a subject.

    Args:
        source: adds its expectations on events.
        gate: before a commit: rows that would halt the stream must not get in.
    """
    found = [BoundCheck(check, TABLE, check.action == FAIL) for check in checks]
    for name, expectation in source.expectations.items() if source else ():
        check = Check(name, sql=expectation.sql, action=expectation.action)
        found.append(BoundCheck(check, EVENT, gate and expectation.action == HALT))
    return found


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of an expectation."""

    expectation: str
    kind: str
    expected: str  # predicate, or type with its arguments
    action: str
    success: bool
    blocking: bool
    total: int
    unexpected: int  # rows that do not meet it
    observed: str  # the value found instead, or why it could not be evaluated


class ExpectationEngine:
    """One run of checkpoints, with a ``report`` in HTML if there is a folder for it; freshness counts from ``now``."""

    def __init__(self, report: Path | None = None, now: datetime | None = None) -> None:
        os.environ.setdefault("GX_ANALYTICS_ENABLED", "false")
        self._report = report
        self._met: dict[str, tuple[int, int]] = {}
        self._now = now or datetime.now(UTC)
        with _quiet():
            import great_expectations as gx
            from great_expectations.data_context.types.base import ProgressBarsConfig

            self._gx: Any = gx
            self._context: Any = gx.get_context(mode="ephemeral")
            self._context.variables.progress_bars = ProgressBarsConfig(globally=False, metric_calculations=False)
            for site in list(self._context.get_site_names()):
                self._context.delete_data_docs_site(site)
            if report is not None:
                store = {"class_name": "TupleFilesystemStoreBackend", "base_directory": str(report.resolve())}
                index = {"class_name": "DefaultSiteIndexBuilder"}
                pages: Any = {"class_name": "SiteBuilder", "store_backend": store, "site_index_builder": index}
                self._context.add_data_docs_site(_SITE, pages)
            self._source = self._context.data_sources.add_pandas("millrace")

    def check(self, title: str, table: str, frame: pd.DataFrame, asked: Sequence[BoundCheck]) -> list[Finding]:
        """Run one checkpoint.

        Args:
            title: of the checkpoint in the report, unique in this run.
            frame: the columns that the expectations need.

        Raises:
            QualityProblem: an expectation has arguments that it does not take.
        """
        with _quiet():
            suite = self._gx.ExpectationSuite(title)
            for item in asked:
                suite.add_expectation(self._expectation(table, item))
            batch = self._source.add_dataframe_asset(title).add_batch_definition_whole_dataframe("all")
            definition = self._gx.ValidationDefinition(name=title, data=batch, suite=self._context.suites.add(suite))
            checkpoint = self._gx.Checkpoint(
                name=title,
                validation_definitions=[self._context.validation_definitions.add(definition)],
                result_format="SUMMARY",
            )
            found = self._context.checkpoints.add(checkpoint).run(batch_parameters={"dataframe": frame})
        results = {
            result.expectation_config.meta[_NAME]: result
            for run in found.run_results.values()
            for result in run.results
        }
        findings = [_finding(item, results[item.check.name], len(frame)) for item in asked]
        self._met[title] = sum(finding.success for finding in findings), len(findings)
        return findings

    def write_report(self) -> None:
        """Write Data Docs of all checkpoints, if there is a folder for them."""
        if self._report is not None:
            with _quiet():
                self._context.build_data_docs(site_names=[_SITE])
            _make_plain(self._report, self._met)

    def _expectation(self, table: str, item: BoundCheck) -> Any:
        from great_expectations.expectations.registry import get_expectation_impl

        kind, arguments = _compiled(item, self._now)
        about: dict[str, Any] = {"meta": {_NAME: item.check.name}, "notes": _expected(item.check)}
        if item.check.action == WARN or not item.blocking:
            about["severity"] = "warning"
        try:
            return get_expectation_impl(kind)(**arguments, **about)
        except (ValueError, TypeError) as error:  # pydantic's errors are ValueErrors
            detail = "; ".join(line.strip() for line in str(error).splitlines()[1:] if line.strip())
            raise QualityProblem(
                table, f"expectation {item.check.name} ({kind}): {detail or error}", "Correct its arguments"
            ) from None


def _expected(check: Check) -> str:
    """The expectation as text."""
    if check.sql:
        mostly = dict(check.arguments).get("mostly")
        return check.sql if mostly is None else f"{check.sql} (mostly {mostly})"
    return f"{check.expect} {json.dumps(dict(check.arguments), default=str, sort_keys=True)}"


def _compiled(item: BoundCheck, now: datetime) -> tuple[str, dict[str, Any]]:
    """Type name and arguments of the library's expectation."""
    check, arguments = item.check, dict(item.check.arguments)
    if check.sql:
        return "expect_column_values_to_be_in_set", {"column": item.computed, "value_set": [True], **arguments}
    if check.expect == TYPE_OF:
        wanted = str(arguments.pop("type_", "")).lower()
        return "expect_column_values_to_be_in_set", {**arguments, "column": item.computed, "value_set": [wanted]}
    if check.expect == FRESH:
        oldest = (now - timedelta(milliseconds=duration_ms(str(arguments["within"])))).replace(tzinfo=None)
        return "expect_column_max_to_be_between", {"column": arguments["column"], "min_value": oldest}
    return check.expect, arguments


def _finding(item: BoundCheck, result: Any, rows: int) -> Finding:
    said = result.result or {}
    observed: Any = said.get("observed_value")
    if not result.success and not said:
        observed = _why(result.exception_info)
    elif observed is None and said.get("unexpected_count"):
        observed = "" if item.computed else said.get("partial_unexpected_list", [])[:5]
    text = "" if observed is None or observed == "" else str(observed)
    return Finding(
        item.check.name,
        item.kind,
        _expected(item.check),
        item.check.action,
        bool(result.success),
        item.blocking,
        int(said.get("element_count", rows)),
        int(said.get("unexpected_count", 0)),
        text[:500],
    )


def _why(info: Any) -> str:
    """Why an expectation could not be evaluated."""
    if not isinstance(info, dict):
        return "it could not be evaluated"
    messages = [info] if "exception_message" in info else [v for v in info.values() if isinstance(v, dict)]
    return next((str(m["exception_message"]) for m in messages if m.get("exception_message")), "not evaluated")


def _quiet() -> warnings.catch_warnings[None]:
    """Hides the library's warnings of its own use of deprecated features."""
    return warnings.catch_warnings(action="ignore")


def _make_plain(report: Path, met: Mapping[str, tuple[int, int]]) -> None:
    """Rewrite the pages below ``report`` without scripts and without anything from elsewhere, for the dashboard.

    great-expectations writes pages that load Bootstrap and more from the web, and an index that a script fills. Here
    the pages keep their content and get ``bootstrap.min.css`` from beside this module (4.3.1 of npm's ``bootstrap``,
    MIT, sha256 60b19e5d…8d8d36); the index is written anew.

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
    checked = sorted((report / "validations").rglob("*.html"), key=lambda page: (page.parent.name, page.name))
    rows = "".join(_row(page, report, met) for page in reversed(checked))
    index = _INDEX.format(sheet=f"static/styles/{_SHEET}", rows=rows)
    (report / "index.html").write_text(index, encoding="utf-8")


def _row(page: Path, report: Path, met: Mapping[str, tuple[int, int]]) -> str:
    title = page.stem.removeprefix("millrace-")
    link = quote(str(page.relative_to(report)))
    good, every = met.get(title, (0, 0))
    tone = "success" if good == every else "danger"
    told = f'<span class="badge badge-{tone}">{good} of {every}</span>' if every else ""
    when = datetime.strptime(page.parent.name, "%Y%m%dT%H%M%S.%f%z")
    return f'<tr><td><a href="{link}">{escape(title)}</a></td><td>{when:%Y-%m-%d %H:%M:%S} UTC</td><td>{told}</td></tr>'

"""great-expectations: a checkpoint over a frame, and Data Docs of all checkpoints of a run.

Everything of the library stands here. Its context lives in memory; it sends no usage statistics.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lakehouse.contract.pipeline.expectations import FRESH, WARN, Check
from lakehouse.contract.tomlfile import duration_ms
from lakehouse.errors import QualityProblem
from lakehouse.quality.frame import TYPE_OF, Asked, frames_of
from lakehouse.quality.subject import Subject

if TYPE_CHECKING:
    import pandas as pd  # type: ignore[import-untyped]

_NAME = "millrace_expectation"
_SITE = "report"


@dataclass(frozen=True, slots=True)
class Finding:
    """What an expectation found.

    Attributes:
        expectation: its name.
        kind: ``event`` or ``table``.
        expected: predicate, or type with its arguments.
        action: as declared.
        success: whether it is met.
        blocking: whether the subject fails where it is not.
        total: rows that were looked at.
        unexpected: rows that do not meet it.
        observed: what was seen instead, or why it could not be evaluated.
    """

    expectation: str
    kind: str
    expected: str
    action: str
    success: bool
    blocking: bool
    total: int
    unexpected: int
    observed: str


class Engine:
    """One run of checkpoints.

    Args:
        report: folder of the HTML report; None for none.
        now: the time that freshness is measured against.
    """

    def __init__(self, report: Path | None = None, now: datetime | None = None) -> None:
        self._gx = _library()
        self._report = report
        self._now = now or datetime.now(UTC)
        with _quiet():
            self._context = self._gx.get_context(mode="ephemeral")
            self._context.variables.progress_bars = _no_bars()
            for site in list(self._context.get_site_names()):
                self._context.delete_data_docs_site(site)
            if report is not None:
                self._context.add_data_docs_site(_SITE, _site(report))
            self._source = self._context.data_sources.add_pandas("millrace")

    def check(self, title: str, table: str, frame: pd.DataFrame, asked: Sequence[Asked]) -> list[Finding]:
        """Run one checkpoint.

        Args:
            title: of the checkpoint in the report, unique in this run.
            table: whose rows they are, for messages.
            frame: the columns that the expectations look at.
            asked: the expectations.

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
        return [_finding(item, results[item.check.name], len(frame)) for item in asked]

    def look(self, title: str, subject: Subject, asked: Sequence[Asked]) -> list[Finding]:
        """Ask a subject everything, in the order of ``asked``.

        Raises:
            QualityProblem: an expectation cannot be evaluated, or has arguments that it does not take.
        """
        found: list[Finding] = []
        for suffix, frame, items in frames_of(subject, asked):
            found += self.check(title + suffix, subject.table, frame, items)
        order = [item.check.name for item in asked]
        return sorted(found, key=lambda finding: order.index(finding.expectation))

    def write_report(self) -> Path | None:
        """Write Data Docs of all checkpoints; returns the page to open."""
        if self._report is None:
            return None
        with _quiet():
            self._context.build_data_docs(site_names=[_SITE])
        return self._report / "index.html"

    def _expectation(self, table: str, item: Asked) -> Any:
        from great_expectations import expectations

        kind, arguments = _compiled(item, self._now)
        about = {"meta": {_NAME: item.check.name}, "notes": expected_of(item.check)}
        if item.check.action == WARN or not item.blocking:
            about["severity"] = "warning"
        try:
            return getattr(expectations, _class_name(kind))(**arguments, **about)
        except (ValueError, TypeError) as error:  # pydantic's errors are ValueErrors
            detail = "; ".join(line.strip() for line in str(error).splitlines()[1:] if line.strip())
            raise QualityProblem(
                table, f"expectation {item.check.name} ({kind}): {detail or error}", "Correct its arguments"
            ) from None


def expected_of(check: Check) -> str:
    """What is expected, for people."""
    if check.sql:
        mostly = dict(check.arguments).get("mostly")
        return check.sql if mostly is None else f"{check.sql} (mostly {mostly})"
    return f"{check.expect} {json.dumps(dict(check.arguments), default=str, sort_keys=True)}"


def _compiled(item: Asked, now: datetime) -> tuple[str, dict[str, Any]]:
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


def _finding(item: Asked, result: Any, rows: int) -> Finding:
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
        expected_of(item.check),
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


def _class_name(type_name: str) -> str:
    special = {"expect_column_pair_values_a_to_be_greater_than_b": "ExpectColumnPairValuesAToBeGreaterThanB"}
    return special.get(type_name) or "".join(part.title() for part in type_name.split("_"))


def _library() -> Any:
    os.environ.setdefault("GX_ANALYTICS_ENABLED", "false")
    with _quiet():
        import great_expectations

    return great_expectations


def _no_bars() -> Any:
    from great_expectations.data_context.types.base import ProgressBarsConfig

    return ProgressBarsConfig(globally=False, metric_calculations=False)


def _site(folder: Path) -> dict[str, Any]:
    return {
        "class_name": "SiteBuilder",
        "store_backend": {"class_name": "TupleFilesystemStoreBackend", "base_directory": str(folder.resolve())},
        "site_index_builder": {"class_name": "DefaultSiteIndexBuilder"},
    }


class _quiet(warnings.catch_warnings):
    """The library warns of its own use of deprecated things."""

    def __enter__(self) -> Any:
        entered = super().__enter__()
        warnings.simplefilter("ignore")
        return entered

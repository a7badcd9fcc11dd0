"""``millrace quality``: expectations of tables and batches; and letting an event pass that stopped a query."""

from __future__ import annotations

import dataclasses
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table
from typer.core import TyperGroup

from jobs.console import JsonOption, LakeOption, PipelineOption, err, out, print_json
from lakehouse.contract.errors import ConfigError
from lakehouse.contract.lake import Lake
from lakehouse.contract.settings import load_settings


class _CheckByDefault(TyperGroup):
    """``millrace quality rsvps`` is ``millrace quality check rsvps``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or (args[0] not in self.commands and args[0] not in ("-h", "--help")):
            args = ["check", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(help="Expectations of tables and batches.", cls=_CheckByDefault)


@app.command("check")
def check(
    tables: Annotated[
        list[str] | None, typer.Argument(help="Sources and products; none: all that expect anything.")
    ] = None,
    batch: Annotated[str, typer.Option(help="Of a source: latest, a version of bronze, or FROM..TO.")] = "",
    report: Annotated[Path | None, typer.Option(help="Write an HTML report (Data Docs) into this folder.")] = None,
    history: Annotated[bool, typer.Option(help="Keep what was found in table quality.")] = True,
    engine: Annotated[str, typer.Option(help="duckdb, or spark for predicates that only Spark knows.")] = "duckdb",
    lake: LakeOption = None,
    pipeline: PipelineOption = None,
    as_json: JsonOption = False,
) -> None:
    """Look whether tables are as expected (the default); exit status 1 where one is not."""
    from lakehouse.contract.pipeline import load_pipeline
    from lakehouse.quality.run import look

    if engine not in ("duckdb", "spark"):
        raise ConfigError(f"{engine!r} is no engine", key="--engine", remedy="Use duckdb or spark")
    settings = load_settings(lake=lake, pipeline=pipeline)
    loaded = load_pipeline(settings.pipeline_folder())
    with ExitStack() as held:
        status = held.enter_context(err.status("…"))
        verdicts = None
        if engine == "spark":
            from lakehouse.quality.onspark import OnSpark
            from lakehouse.session import build_session

            status.update("starting Spark …")
            spark = build_session(settings, "millrace-quality")
            held.callback(spark.stop)
            verdicts = OnSpark(spark)
        found = look(
            Lake(settings.lake),
            loaded,
            tables or (),
            batch=batch,
            report=report,
            keep=history,
            verdicts=verdicts,
            step=lambda text: status.update(text + " …"),
        )
    if as_json:
        print_json([_plain(looked) for looked in found])
    else:
        _show(found)
        if report is not None:
            err.print(f"report: {report.resolve() / 'index.html'}", highlight=False)
    raise typer.Exit(0 if all(looked.passed for looked in found) else 1)


@app.command("accept")
def accept(
    source: Annotated[str, typer.Argument(help="The source.")],
    event: Annotated[str, typer.Argument(help="Id of the event, as the error named it.")],
    lake: LakeOption = None,
    pipeline: PipelineOption = None,
) -> None:
    """Let an event count although it fails an expectation that halts its source's query."""
    from lakehouse.contract.pipeline import load_pipeline
    from lakehouse.quality.accepted import accept as let_pass

    settings = load_settings(lake=lake, pipeline=pipeline)
    known = load_pipeline(settings.pipeline_folder()).sources
    if source not in known:
        raise ConfigError(f"there is no source {source!r}", remedy=f"Sources: {', '.join(known)}")
    let_pass(Lake(settings.lake), source, event)
    err.print(f"event {event} of {source} counts from the next start of the query", highlight=False)


def _plain(looked: Any) -> dict[str, Any]:
    subject = looked.subject
    about = {"table": subject.table, "layer": subject.layer, "version": subject.version, "batch": subject.batch}
    findings = [dataclasses.asdict(finding) for finding in looked.findings]
    return {**about, "passed": looked.passed, "findings": findings, "unknown_fields": dict(looked.unknown)}


def _show(found: list[Any]) -> None:
    shown = Table("table", "batch", "expectation", "expected", "rows", "unexpected", "met")
    for looked in found:
        for f in looked.findings:
            met = "[green]yes[/]" if f.success else "[red]NO[/]" if f.blocking else "[yellow]no[/] (" + f.action + ")"
            what = (looked.subject.table, looked.subject.batch, f.expectation, escape(f.expected[:60]))
            shown.add_row(*what, f"{f.total:,}", escape(f.observed[:40]) or f"{f.unexpected:,}", met)
    out.print(shown)
    for looked in found:
        if looked.unknown:
            fields = ", ".join(f"{path} ({count})" for path, count in looked.unknown.items())
            err.print(f"{looked.subject.table}: fields that the schema has not: {escape(fields)}", highlight=False)

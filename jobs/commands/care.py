"""``quality``, ``maintain`` and ``replay``: whether tables are as expected, their care, and the proof by bronze."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from jobs.console import (
    JsonOption,
    chosen_pipeline,
    err,
    log_to_stderr,
    print_json,
    print_table,
    stopped_by_signals,
)
from lakehouse.contract.errors import ConfigError
from lakehouse.contract.lake import Lake

_EVERY_S = 600.0  # small files do little harm for ten minutes, and a round reads the log of every table


def quality(
    tables: Annotated[
        list[str] | None, typer.Argument(help="Sources and products; default: all that have expectations.")
    ] = None,
    batch: Annotated[
        str, typer.Option(help="Check this batch of a source: latest, a bronze version, or FROM..TO.")
    ] = "",
    report: Annotated[
        Path | None, typer.Option(help="Folder of the HTML report (Data Docs), instead of the lake's.")
    ] = None,
    history: Annotated[bool, typer.Option(help="Keep the results in table quality.")] = True,
    engine: Annotated[str, typer.Option(help="duckdb, or spark for predicates that only Spark knows.")] = "duckdb",
    accept: Annotated[
        str | None, typer.Option(help="Check nothing; let the event with this id of the one source given count.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Check the expectations of tables and batches. Exit status 1: one is not met.

    --accept lets an event pass that halted its source's query.
    """
    if accept is not None:
        _accept(tables or [], accept)
        return
    if engine not in ("duckdb", "spark"):
        raise ConfigError(f"{engine!r} is no engine", key="--engine", remedy="Use duckdb or spark")
    from lakehouse.quality.run import QualityRun, check_tables

    settings, loaded = chosen_pipeline()
    with ExitStack() as held:
        status = held.enter_context(err.status("checking …"))
        spark = None
        if engine == "spark":
            from lakehouse.session import build_session

            status.update("starting Spark …")
            spark = build_session(settings, "millrace-quality")
            held.callback(spark.stop)
            status.update("checking …")
        lake = Lake.of(settings)
        if report is None and history:
            report = lake.data_docs
            shutil.rmtree(report, ignore_errors=True)
        run = QualityRun(tables or (), batch=batch, report=report, keep=history, spark=spark)
        found = check_tables(lake, loaded, run)
    if as_json:
        print_json([_plain(looked) for looked in found])
    else:
        _show(found)
        if report is not None:
            err.print(f"report: {report.resolve() / 'index.html'}", highlight=False)
    raise typer.Exit(0 if all(looked.passed for looked in found) else 1)


def _accept(sources: Sequence[str], event: str) -> None:
    from lakehouse.quality.notes import accept

    settings, pipeline = chosen_pipeline()
    if len(sources) != 1 or sources[0] not in pipeline.sources:
        raise ConfigError(
            f"there is no source {' '.join(sources)!r}",
            key="--accept",
            remedy=f"Name one source: {', '.join(pipeline.sources)}",
        )
    accept(Lake.of(settings), sources[0], event)
    err.print(f"event {event} of {sources[0]} counts from the next start of the query", highlight=False)


def _plain(looked: Any) -> dict[str, Any]:
    subject = looked.subject
    about = {"table": subject.table, "layer": subject.layer, "version": subject.version, "batch": subject.batch}
    findings = [dataclasses.asdict(finding) for finding in looked.findings]
    return {**about, "passed": looked.passed, "findings": findings, "unknown_fields": dict(looked.unknown)}


def _show(found: list[Any]) -> None:
    rows = []
    for looked in found:
        for f in looked.findings:
            met = "[green]yes[/]" if f.success else "[red]NO[/]" if f.blocking else "[yellow]no[/] (" + f.action + ")"
            what = (looked.subject.table, looked.subject.batch, f.expectation, escape(f.expected[:60]))
            rows.append((*what, f"{f.total:,}", escape(f.observed[:40]) or f"{f.unexpected:,}", met))
    numbers = ("rows", "unexpected")
    print_table(("table", "batch", "expectation", "expected", *numbers, "met"), rows, right=numbers)
    for looked in found:
        if looked.unknown:
            fields = ", ".join(f"{path} ({count})" for path, count in looked.unknown.items())
            err.print(f"{looked.subject.table}: fields that the schema has not: {escape(fields)}", highlight=False)


def maintain(
    once: Annotated[bool, typer.Option("--once", help="Maintain every table once, then end.")] = False,
    everything: Annotated[
        bool, typer.Option("--all", help="Compact every table that has small files, not only where it pays.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Compact files, fold partial rows and apply retention, every ten minutes, for a lake whose driver does not run.

    A table whose writer runs is left to its writer.
    """
    from lakehouse.maintain.caretaker import maintain as look_after

    settings, loaded = chosen_pipeline()
    log_to_stderr()
    stop = stopped_by_signals()
    while True:
        done = []
        with err.status("looking …") as status:
            for item in look_after(Lake.of(settings), loaded, everything=everything):
                done.append(item)
                status.update(f"{item.table} …")
        if as_json:
            print_json([dataclasses.asdict(item) for item in done])
        else:
            for item in done:
                said = "left to its writer, which runs" if item.busy else item.said or "nothing to do"
                err.print(f"{item.table}: {escape(said)}", highlight=False)
        if once or stop.wait(_EVERY_S):
            return


def replay(
    verify: Annotated[
        bool, typer.Option("--verify", help="Build every product again from bronze and compare digests.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Prove that bronze alone gives the same products. Exit status 1: a digest differs."""
    if not verify:
        raise ConfigError("say what to do", key="replay", remedy="millrace replay --verify")
    from jobs.lineage import replay_step, told
    from lakehouse.replay import verify as compare
    from lakehouse.session import build_session

    settings, loaded = chosen_pipeline()
    lake = Lake.of(settings)
    if not any(lake.bronze(source).exists() for source in loaded.sources):
        problem = f"no source of pipeline {loaded.name} has events in lake {settings.lake}"
        raise ConfigError(problem, key="replay", remedy="Name the lake with --lake, and its pipeline with --pipeline")
    with err.status("starting Spark …") as status:
        spark = build_session(settings, "millrace-replay")
        try:
            with told(settings, [replay_step(lake, loaded)]) as problems:
                found = list(compare(spark, settings, loaded, step=lambda text: status.update(text + " …")))
                problems += [f"{item.table} differs from what bronze gives" for item in found if not item.equal]
        finally:
            spark.stop()
    if as_json:
        print_json([{**dataclasses.asdict(item), "equal": item.equal} for item in found])
    else:
        numbers = ("version", "bronze", "rows live", "rows replayed")
        rows = [
            (
                item.table,
                *(f"{count:,}" for count in (item.version, item.bronze, *item.rows)),
                item.live[:16],
                "[green]yes[/]" if item.equal else "[red]NO[/]",
            )
            for item in found
        ]
        print_table(("table", *numbers, "digest", "equal"), rows, right=numbers)
    raise typer.Exit(0 if found and all(item.equal for item in found) else 1)

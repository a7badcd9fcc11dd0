"""``load`` and ``staging``: files into bronze, and copies of products for slow readers. No Java."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from jobs.console import (
    JsonOption,
    chosen_pipeline,
    err,
    log_to_stderr,
    out,
    print_json,
    print_table,
    stopped_by_signals,
)
from jobs.lineage import LineageStep, told
from jobs.metrics import metrics_server
from lakehouse.contract.errors import ConfigError
from lakehouse.contract.lake import Lake
from lakehouse.contract.pipeline import Pipeline, Source
from lakehouse.contract.pipeline.source import LOADER
from lakehouse.contract.settings import Settings
from lakehouse.contract.tomlfile import duration_ms

if TYPE_CHECKING:
    from lakehouse.load.loader import Load, LoaderService
    from lakehouse.load.worker import FileReport, LoadJob, LoadListener, LoadProgress

log = logging.getLogger(__name__)

LATE = 4
"""Exit status of a load whose rows are all in, but after its deadline."""
_SHOWN = 20  # rows of the table on the screen


def load(
    paths: Annotated[list[str] | None, typer.Argument(help="Files, folders or globs.", show_default=False)] = None,
    source: Annotated[
        str | None, typer.Option(help="Source of the rows; may be left out if the pipeline has only one.")
    ] = None,
    format: Annotated[
        str, typer.Option(help="auto, csv, tsv, jsonl, parquet or an installed one; gzip is recognized.")
    ] = "auto",
    encoding: Annotated[str, typer.Option(help="Encoding of CSV and JSON lines, as Python names it.")] = "utf-8",
    delimiter: Annotated[str, typer.Option(help="Delimiter of CSV.")] = ",",
    workers: Annotated[int, typer.Option(help="Number of processes.", min=1)] = min(4, os.cpu_count() or 1),
    max_rejects: Annotated[
        float, typer.Option(help="Refuse a file when this share of its rows is rejected.", min=0, max=1)
    ] = 1.0,
    gate: Annotated[bool, typer.Option("--gate", help="Check the source's expectations before each commit.")] = False,
    sla: Annotated[str | None, typer.Option(help="Deadline of the load, e.g. '1 hour'.")] = None,
    node: Annotated[str, typer.Option(help="Id of this process; each one needs its own.")] = LOADER,
    watch: Annotated[Path | None, typer.Option(help="Load what arrives in this folder, until stopped.")] = None,
    feeds: Annotated[bool, typer.Option("--feeds", help="Fetch the pipeline's feeds, until stopped.")] = False,
    once: Annotated[
        bool, typer.Option("--once", help="With --watch or --feeds: end when all present is loaded.")
    ] = False,
    settle: Annotated[
        float, typer.Option(help="With --watch: seconds without a change after which a file is complete.", min=0)
    ] = 2.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Read and count, and write nothing.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Load feed files into bronze, each once by its content; resume inside a file after a crash.

    Exit status: 0 every file is loaded; 1 a file is not; 4 every file is loaded, but after the deadline.
    """
    from lakehouse.load.files import FORMATS, own_readers
    from lakehouse.load.loader import LoaderService
    from lakehouse.load.worker import LoadJob, check_extensions

    settings, pipeline = chosen_pipeline()
    _check(paths, watch, feeds, format, (*FORMATS, *own_readers()), encoding, delimiter)
    check_extensions(gates=gate)
    log_to_stderr()
    jobs = [
        LoadJob(
            Lake.of(settings),
            one,
            tenant=settings.tenant,
            kind=format,
            encoding=encoding,
            delimiter=delimiter,
            node=node,
            trial=dry_run,
            max_rejects=max_rejects,
            gate=gate,
        )
        for one in (_fed(pipeline, source) if feeds else [_source(pipeline, source)])
    ]
    allowed_s = _seconds(sla) if sla else None
    if paths:
        raise typer.Exit(_load_now(settings, jobs[0], paths, workers, allowed_s, as_json=as_json))
    if dry_run:
        raise ConfigError("a dry run takes files", key="--dry-run", remedy="Give paths instead of --watch or --feeds")
    service = LoaderService(stopped_by_signals(), workers=workers, allowed_s=allowed_s, once=once)
    with metrics_server(settings.metrics_port, service.metrics) as url:
        log.info("metrics at %s", url)
        if watch is not None:
            status = _serve_inbox(settings, service, jobs[0], watch, settle, as_json=as_json)
        else:
            status = _serve_feeds(settings, service, jobs, as_json=as_json)
    raise typer.Exit(status if once else 0)


def _load_now(
    settings: Settings, job: LoadJob, paths: Sequence[str], workers: int, allowed_s: float | None, *, as_json: bool
) -> int:
    from lakehouse.load.files import find
    from lakehouse.load.loader import load as run

    files = find(paths)
    step = _step(job, *(Path(file.path) for file in files))
    with (
        _bar(sum(file.size for file in files), len(files), quiet=as_json) as tell,
        told(settings, [step]) as problems,
    ):
        done = run(job, files, workers=workers, allowed_s=allowed_s, notify=tell)
        problems += [f"{report.name}: {report.reason}" for report in done.reports if not report.ok]
    _say(done, as_json)
    return status_of(done)


def _serve_inbox(
    settings: Settings, service: LoaderService, job: LoadJob, folder: Path, settle_s: float, *, as_json: bool
) -> int:
    from lakehouse.load.loader import Inbox

    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder}", key="--watch", remedy="Make it, or name another")
    err.print(f"watching {folder}; done files go to {folder}/done, others to {folder}/failed")
    statuses = {0}
    with told(settings, [_step(job, folder)], streaming=True):
        for done in service.watch(job, Inbox(folder, settle_s)):
            _say(done, as_json)
            statuses.add(status_of(done))
    return worst(statuses)


def _serve_feeds(settings: Settings, service: LoaderService, jobs: Sequence[LoadJob], *, as_json: bool) -> int:
    statuses = {0}
    steps = [_step(job, *(feed.url for feed in job.source.feeds)) for job in jobs]
    with told(settings, steps, streaming=True):
        for found in service.fetch(jobs):
            if found.load is not None:
                _say(found.load, as_json)
                statuses.add(status_of(found.load))
            if found.problem:
                statuses.add(1)
    return worst(statuses)


def _step(job: LoadJob, *inputs: Path | str) -> LineageStep:
    return LineageStep(f"load.{job.source.name}", inputs, (job.lake.bronze(job.source.name),))


def status_of(load: Load) -> int:
    """Exit status: 0 all is in, 1 a file is not, 4 all is in but late."""
    if not load.ok:
        return 1
    return LATE if load.late else 0


def worst(statuses: Collection[int]) -> int:
    """The status of several loads: a file that is not in counts more than a deadline."""
    return 1 if 1 in statuses else max(statuses)


@contextmanager
def _bar(total: int, files: int, *, quiet: bool) -> Iterator[LoadListener]:
    """A bar for all files together, ``total`` bytes, which moves by what the load tells."""
    from lakehouse.load.worker import FileReport

    read: dict[str, int] = {}
    rows: dict[str, int] = {}
    finished: set[str] = set()
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[rows]:>12,} rows"),
    )
    with Progress(*columns, console=err, disable=quiet, transient=True) as progress:
        bar = progress.add_task(f"0 of {files} files", total=max(1, total), rows=0)

        def tell(message: LoadProgress | FileReport) -> None:
            if isinstance(message, FileReport):
                finished.add(message.name)
                read[message.name] = message.bytes
            else:
                read[message.name], rows[message.name] = message.read, message.rows
            done = f"{len(finished)} of {files} files"
            progress.update(bar, completed=sum(read.values()), rows=sum(rows.values()), description=done)

        yield tell


def _say(done: Load, as_json: bool) -> None:
    reports = list(done.reports)
    if as_json:
        print_json(
            {
                "load": done.id,
                "source": done.source,
                "ok": done.ok,
                "late": done.late,
                "seconds": round(done.seconds, 3),
                "rows": done.new_rows,
                "files": [dataclasses.asdict(report) for report in reports],
            }
        )
        return
    bad = [report for report in reports if not report.ok]
    shown = bad + [report for report in reports if report.ok][: max(0, _SHOWN - len(bad))]
    names = _short([report.name for report in reports])
    numbers = ("rows", "rejects", "seconds")
    rows = [
        (
            escape(names[report.name]),
            f"[{'green' if report.ok else 'red'}]{report.state}[/]",
            f"{report.rows:,}",
            f"{report.rejects:,}",
            f"{report.seconds:.1f}",
            escape(report.reason),
        )
        for report in shown
    ]
    print_table(("file", "state", *numbers, "reason"), rows, right=numbers)
    if len(reports) > len(shown):
        where = "" if shown[0].state == "would load" else "; table [bold]loads[/] has them all"
        out.print(f"… and {len(reports) - len(shown):,} more{where}")
    rate = done.new_rows / done.seconds if done.seconds else 0.0
    late = "; [red]after the deadline[/]" if done.late else ""
    out.print(f"{len(reports):,} files, {done.new_rows:,} rows in {done.seconds:.1f} s ({rate:,.0f} rows/s){late}")


def _short(names: Sequence[str]) -> dict[str, str]:
    """Names without the folder that all have in common."""
    common = os.path.commonpath([str(Path(name).parent) for name in names]) if names else ""
    return {name: os.path.relpath(name, common) for name in names}


def _check(
    paths: Sequence[str] | None,
    watch: Path | None,
    feeds: bool,
    kind: str,
    kinds: Sequence[str],
    encoding: str,
    delimiter: str,
) -> None:
    import codecs

    if sum((bool(paths), watch is not None, feeds)) != 1:
        raise ConfigError("say what to load", key="load", remedy="Give paths, or --watch DIR, or --feeds")
    if kind not in kinds:
        raise ConfigError(f"{kind!r} is no format", key="--format", remedy=f"Use one of: {', '.join(kinds)}")
    try:
        codecs.lookup(encoding)
    except LookupError:
        raise ConfigError(f"{encoding!r} is no encoding", key="--encoding", remedy="Use e.g. utf-8, cp1252") from None
    if len(delimiter) != 1:
        raise ConfigError("must be one character", key="--delimiter", remedy="Use e.g. ';'")


def _seconds(sla: str) -> float:
    try:
        return duration_ms(sla) / 1000
    except ValueError as error:
        raise ConfigError(str(error), key="--sla") from None


def _fed(pipeline: Pipeline, only: str | None) -> list[Source]:
    """The sources that have feeds, or the one that is named."""
    sources = [_source(pipeline, only)] if only else [s for s in pipeline.sources.values() if s.feeds]
    if not any(source.feeds for source in sources):
        raise ConfigError("no source has feeds", key="feeds", remedy="Add [[sources.NAME.feeds]] to the pipeline")
    return sources


def _source(pipeline: Pipeline, name: str | None) -> Source:
    if name is None and len(pipeline.sources) == 1:
        return next(iter(pipeline.sources.values()))
    if name not in pipeline.sources:
        problem = f"there is no source {name!r}" if name else f"pipeline {pipeline.name} has several sources"
        raise ConfigError(problem, key="--source", remedy=f"Sources: {', '.join(pipeline.sources)}")
    return pipeline.sources[name]


class StagingAction(StrEnum):
    """What ``millrace staging`` does."""

    REBUILD = "rebuild"
    REFRESH = "refresh"


def staging(
    action: Annotated[
        StagingAction, typer.Argument(help="rebuild: make it anew from the record; refresh: bring it up to date.")
    ],
    name: Annotated[str | None, typer.Argument(help="Name of the staging table; default: all of the pipeline.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Copy parts of products into staging tables for slow readers; each copy is one commit."""
    from lakehouse.load.staging import refresh

    settings, loaded = chosen_pipeline()
    if name is not None and name not in loaded.staging:
        remedy = f"There are: {', '.join(loaded.staging) or 'none; add [staging.NAME] to the pipeline'}"
        raise ConfigError(f"there is no staging table {name!r}", key="staging", remedy=remedy)
    found = []
    with err.status("copying …"):
        for wanted in [loaded.staging[name]] if name else loaded.staging.values():
            found.append(refresh(Lake.of(settings), loaded, wanted, rebuild=action is StagingAction.REBUILD))
    if as_json:
        print_json([dataclasses.asdict(one) for one in found])
        return
    numbers = ("at version", "rows")
    rows = [
        (one.name, one.product, str(one.product_version), f"{one.rows:,}", "made" if one.changed else "as it was")
        for one in found
    ]
    print_table(("staging table", "of", *numbers, ""), rows, right=numbers)

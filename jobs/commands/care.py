"""``log``, ``audit``, ``quality``, ``maintain`` and ``replay``: what became of events, and the care of tables."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.progress import Progress

from jobs.commands.tables import Engine
from jobs.console import (
    JsonOption,
    chosen_pipeline,
    chosen_settings,
    err,
    log_to_stderr,
    out,
    print_json,
    print_table,
    spark_session,
    stopped_by_signals,
)
from lakehouse.contract.errors import ConfigError
from lakehouse.contract.lake import Lake
from lakehouse.contract.pipeline import Pipeline
from lakehouse.contract.settings import Settings

if TYPE_CHECKING:
    from ingest.audit import SourceAudit, TraceStep
    from lakehouse.maintain.report import Backlog

_SHOWN = 60  # characters of a payload, and refused events
_ROWS = 20
_EVERY_S = 600.0  # small files do little harm for ten minutes, and a round reads the log of every table


def log(
    node: Annotated[
        str | None, typer.Argument(help="Id of a node, to show its failed events; default: list nodes.")
    ] = None,
    transient: Annotated[
        bool, typer.Option("--transient", help="Show events that Kafka has not acknowledged instead of failed ones.")
    ] = False,
    retry: Annotated[
        bool, typer.Option("--retry", help="Send failed events to Kafka again, under their ids; the node must not run.")
    ] = False,
    event_id: Annotated[
        list[str] | None, typer.Option("--id", help="With --retry: send only this event; may be repeated.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show the message logs of collecting nodes: events under way, failed ones with reasons, damage.

    With NODE it shows the first 20; --json prints all, one object a line: payload (base64 if it is not text), reason
    and envelope.
    Exit status of --retry: 1 Kafka refused some events again.
    """
    folder = Lake.of(chosen_settings()).state / "log"
    if node is None:
        _list_nodes(folder, as_json)
    elif retry:
        _retry(folder, node, event_id or (), as_json)
    else:
        _show_events(folder, node, transient, as_json)


def _list_nodes(folder: Path, as_json: bool) -> None:
    from ingest.log.recovery import look, nodes

    found = [look(folder / node) for node in nodes(folder)]
    if as_json:
        print_json([dataclasses.asdict(view) for view in found])
        return
    numbers = ("under way", "failed", "bytes", "files")
    rows = [
        (
            escape(view.node),
            "running" if view.running else "closed" if view.clean else "[yellow]not closed properly[/]",
            *(f"{count:,}" for count in (view.transient, view.failed, view.bytes, view.segments)),
        )
        for view in found
    ]
    print_table(("node", "state", *numbers), rows, right=numbers)
    for view in found:
        for reason, count in view.reasons.items():
            out.print(f"{view.node}: {count:,} failed: {reason}", markup=False)
        for text in view.damage:
            out.print(f"{view.node}: damage: {text}", markup=False)


def _show_events(folder: Path, node: str, under_way: bool, as_json: bool) -> None:
    from ingest.log.recovery import failed, log_of, transient

    found = log_of(folder, node)
    items = transient(found) if under_way else failed(found)
    if as_json:
        for item in items:
            print_json(item)
        return
    rows = [
        (
            *(escape(str(item.get(name, ""))) for name in ("seq", "source", "event_id", "reason")),
            escape(item.get("payload", item.get("payload_base64", ""))[:_SHOWN]),
        )
        for item in itertools.islice(items, _ROWS)
    ]
    print_table(("seq", "source", "event id", "reason", "payload"), rows, right=("seq",))


def _retry(logs: Path, node: str, ids: Sequence[str], as_json: bool) -> None:
    from ingest.kafka import KafkaPublisher
    from ingest.log.recovery import Retried, log_of
    from ingest.log.recovery import retry as send_again
    from jobs.local.broker import resolve_kafka

    settings, pipeline = chosen_pipeline()
    folder = log_of(logs, node)
    topics = {name: source.topic for name, source in pipeline.sources.items()}
    settings = resolve_kafka(settings, "collector")

    async def run(bars: Progress) -> Retried:
        bar = bars.add_task("sending", total=None)

        def advance(done: int, of: int) -> None:
            bars.update(bar, completed=done, total=of)

        return await send_again(folder, KafkaPublisher(settings.kafka, topics), ids=ids, progress=advance)

    with Progress(console=err, transient=True) as progress:
        found = asyncio.run(run(progress))
    if as_json:
        print_json(dataclasses.asdict(found))
    else:
        out.print(f"{found.sent:,} sent, {len(found.refused):,} refused again")
        for name, reason in list(found.refused.items())[:_SHOWN]:
            out.print(f"{name}: {reason}", markup=False)
    raise typer.Exit(1 if found.refused else 0)


def audit(
    source: Annotated[str | None, typer.Option(help="Audit only this source.")] = None,
    event: Annotated[str | None, typer.Option(help="Show the way of the event with this id instead.")] = None,
    hours: Annotated[float, typer.Option(help="Audit this many hours back.", min=0.01)] = 24.0,
    producer_s: Annotated[
        float | None, typer.Option(help="Report producers slower than this.", show_default="learned")
    ] = None,
    consumer_s: Annotated[
        float | None, typer.Option(help="Report consumers slower than this.", show_default="learned")
    ] = None,
    metrics: Annotated[
        Path | None, typer.Option(help="Also write the figures to this file, for Prometheus' textfile collector.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Audit the way of events: time of each hop, slow producers and consumers, duplicates, and Kafka's retention.

    Exit status 1: Kafka may soon delete, or has deleted, events that bronze does not have.
    """
    from ingest.audit import AuditPeriod, audit_source, trace

    settings, loaded = chosen_pipeline()
    if event is not None:
        _show_way(trace(Lake.of(settings), loaded, event), event, as_json)
        return
    if source is not None and source not in loaded.sources:
        raise ConfigError(
            f"there is no source {source!r}", key="--source", remedy=f"Sources: {', '.join(loaded.sources)}"
        )
    period = AuditPeriod(timedelta(hours=hours), producer_s=producer_s, consumer_s=consumer_s)
    found = [
        audit_source(Lake.of(settings), loaded, one, period)
        for name, one in loaded.sources.items()
        if source in (None, name)
    ]
    backlogs = _backlogs(settings, loaded, found)
    if metrics is not None:
        _write_metrics(metrics, found, backlogs)
    if as_json:
        print_json([_as_dict(one, backlogs[one.source]) for one in found])
    else:
        for one in found:
            _show_audit(one, backlogs[one.source])
    raise typer.Exit(1 if any(retention(backlog) == "alarm" for backlog in backlogs.values()) else 0)


def retention(backlog: Backlog | None) -> str:
    """``ok``, ``warn`` or ``alarm``: how near Kafka's retention is to what bronze has not taken."""
    from lakehouse.maintain.report import OK

    return OK if backlog is None else backlog.health


def _backlogs(settings: Settings, loaded: Pipeline, found: list[SourceAudit]) -> dict[str, Backlog | None]:
    """By source; None where there is no broker to ask."""
    from jobs.local.broker import Topics
    from lakehouse.bronze.table import progress

    topics, bronze = Topics.of(settings), Lake.of(settings).bronze
    return {one.source: topics.backlog(loaded.sources[one.source], progress(bronze(one.source))) for one in found}


def _as_dict(one: SourceAudit, backlog: Backlog | None) -> dict[str, Any]:
    lag = None if backlog is None else dataclasses.asdict(backlog)
    return {**dataclasses.asdict(one), "lag": lag, "retention": retention(backlog)}


def _show_audit(one: SourceAudit, backlog: Backlog | None) -> None:
    numbers = ("events", "min s", "avg s", "max s")
    rows = [
        (hop.name, f"{hop.count:,}", f"{hop.min_s:.3f}", f"{hop.avg_s:.3f}", f"{hop.max_s:.3f}") for hop in one.hops
    ]
    print_table((f"{one.source} ({one.topic})", *numbers), rows, right=numbers)
    double = one.duplicates
    out.print(
        f"taken twice {double.by_coordinates:,}, sent again {double.sent_again:,}, "
        f"same payload under another id {double.same_payload:,}"
    )
    for slow in one.slow:
        how = "learnt" if slow.learnt else "declared"
        text = f"slow {slow.kind} {slow.name}: {slow.avg_s:.3f} s, {how} threshold {slow.threshold_s:.3f} s"
        out.print(escape(text), style="yellow")
    if backlog is None:
        err.print("no broker answers: lag and retention are not known", style="dim")
        return
    text = f"lag {backlog.records:,} records, the oldest of {backlog.oldest_s:.0f} s; kept {backlog.retention_s:.0f} s"
    out.print(text, style={"ok": "", "warn": "yellow", "alarm": "red"}[retention(backlog)])
    if backlog.lost:
        out.print(f"{backlog.lost:,} records are gone that bronze never took", style="red")
    if backlog.anew:
        out.print("the topic began anew: bronze's offsets say nothing of it", style="red")


def _show_way(steps: list[TraceStep], event: str, as_json: bool) -> None:
    if as_json:
        print_json([dataclasses.asdict(step) for step in steps])
    elif steps:
        rows = [
            (
                step.hop,
                datetime.fromtimestamp(step.at / 1e6, UTC).isoformat(timespec="milliseconds"),
                f"{(step.at - steps[0].at) / 1e6:.3f}",
                escape(step.where),
            )
            for step in steps
        ]
        print_table(("hop", "time (UTC)", "after s", "where"), rows, right=("after s",))
    else:
        err.print(f"no bronze table has an event {escape(event)}; a collector's log may: millrace log NODE")
    raise typer.Exit(0 if steps else 1)


def _write_metrics(path: Path, found: list[SourceAudit], backlogs: dict[str, Backlog | None]) -> None:
    from prometheus_client import CollectorRegistry, Gauge, write_to_textfile

    registry = CollectorRegistry()

    def gauge(name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"millrace_audit_{name}", text, labels, registry=registry)

    hop_s = gauge("hop_seconds", "Time of a hop", "source", "hop", "figure")
    double = gauge("duplicates", "Rows beyond the first of their kind", "source", "kind")
    slow = gauge("slow", "Who is slow now", "source", "kind", "name")
    lag = gauge("lag_records", "Records that bronze has not taken", "source")
    oldest = gauge("oldest_seconds", "Age of the oldest of them", "source")
    share = gauge("retention_share", "That age as a share of the topic's retention", "source")
    lost = gauge("lost_records", "Records that are gone and bronze never took", "source")
    for one in found:
        for hop in one.hops:
            for figure in ("min_s", "avg_s", "max_s"):
                hop_s.labels(one.source, hop.name, figure[:3]).set(getattr(hop, figure))
        for kind, count in dataclasses.asdict(one.duplicates).items():
            double.labels(one.source, kind).set(count)
        for item in one.slow:
            slow.labels(one.source, item.kind, item.name).set(1)
        backlog = backlogs[one.source]
        if backlog is not None:
            lag.labels(one.source).set(backlog.records)
            oldest.labels(one.source).set(backlog.oldest_s)
            share.labels(one.source).set(backlog.share)
            lost.labels(one.source).set(backlog.lost)
    write_to_textfile(str(path), registry)


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
    engine: Annotated[
        Engine, typer.Option(help="duckdb, or spark for predicates that only Spark knows.")
    ] = Engine.DUCKDB,
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
    from lakehouse.quality.run import QualityRun, check_tables

    settings, loaded = chosen_pipeline()
    with ExitStack() as held:
        spark = None
        if engine is Engine.SPARK:
            spark, status = held.enter_context(spark_session(settings, "millrace-quality"))
            status.update("checking …")
        else:
            held.enter_context(err.status("checking …"))
        lake = Lake.of(settings)
        if report is None and history:
            report = lake.data_docs
            shutil.rmtree(report, ignore_errors=True)
        run = QualityRun(tables or (), batch=batch, report=report, keep=history, spark=spark)
        found = check_tables(lake, loaded, run)
    if as_json:
        print_json([_plain(looked) for looked in found])
    else:
        _show_quality(found)
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


def _show_quality(found: list[Any]) -> None:
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
    from lakehouse.maintain.care import maintain as look_after

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
        bool,
        typer.Option("--verify", help="Build every product again and compare digests: all that it does."),
    ] = True,
    as_json: JsonOption = False,
) -> None:
    """Prove that bronze alone gives the same products. Exit status 1: a digest differs.

    Nothing is written.
    """
    from jobs.lineage import replay_step, told
    from lakehouse.replay import verify as compare

    settings, loaded = chosen_pipeline()
    lake = Lake.of(settings)
    if not any(lake.bronze(source).exists() for source in loaded.sources):
        problem = f"no source of pipeline {loaded.name} has events in lake {settings.lake}"
        raise ConfigError(problem, key="replay", remedy="Name the lake with --lake, and its pipeline with --pipeline")
    with (
        spark_session(settings, "millrace-replay") as (spark, status),
        told(settings, [replay_step(lake, loaded)]) as problems,
    ):
        found = list(compare(spark, settings, loaded, step=lambda text: status.update(text + " …")))
        problems += [f"{item.table} differs from what bronze gives" for item in found if not item.equal]
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

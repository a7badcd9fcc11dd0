"""``millrace audit``: hop by hop, who is slow, what is double, and what Kafka may delete before bronze has it."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from jobs.console import JsonOption, KafkaOption, LakeOption, PipelineOption, err, out, print_json
from lakehouse.contract.errors import ConfigError, MillraceError
from lakehouse.contract.lake import Lake
from lakehouse.contract.settings import Settings, load_settings

if TYPE_CHECKING:
    from ingest.audit import SourceAudit, TraceStep
    from lakehouse.maintain.backlog import Backlog


def audit(
    lake: LakeOption = None,
    pipeline: PipelineOption = None,
    kafka: KafkaOption = None,
    source: Annotated[str | None, typer.Option(help="This source only.")] = None,
    event: Annotated[str | None, typer.Option(help="The way of the event with this id.")] = None,
    hours: Annotated[float, typer.Option(help="How far back.", min=0.01)] = 24.0,
    producer_s: Annotated[float | None, typer.Option(help="A slower producer is named; learnt without.")] = None,
    consumer_s: Annotated[float | None, typer.Option(help="A slower consumer is named; learnt without.")] = None,
    metrics: Annotated[
        Path | None, typer.Option(help="Write the figures here too, as Prometheus text (textfile collector).")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Audit the way of events. Exit status 1: Kafka may soon delete, or has deleted, what bronze has not taken."""
    from ingest.audit import audit_source, trace
    from lakehouse.contract.pipeline import load_pipeline

    settings = load_settings(lake=lake, pipeline=pipeline, kafka__bootstrap=kafka)
    loaded = load_pipeline(settings.pipeline_folder())
    if event is not None:
        _show_way(trace(Lake(settings.lake), loaded, event), event, as_json)
        return
    if source is not None and source not in loaded.sources:
        raise ConfigError(
            f"there is no source {source!r}", key="--source", remedy=f"Sources: {', '.join(loaded.sources)}"
        )
    found = [
        audit_source(
            Lake(settings.lake),
            loaded,
            one,
            since=timedelta(hours=hours),
            producer_s=producer_s,
            consumer_s=consumer_s,
        )
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
            _show(one, backlogs[one.source])
    raise typer.Exit(1 if any(retention(backlog) == "alarm" for backlog in backlogs.values()) else 0)


def retention(backlog: Backlog | None) -> str:
    """``ok``, ``warn`` or ``alarm``: how near Kafka's retention is to what bronze has not taken."""
    from lakehouse.maintain.backlog import OK

    return OK if backlog is None else backlog.health


def _backlogs(settings: Settings, loaded: Any, found: list[SourceAudit]) -> dict[str, Backlog | None]:
    """By source; None where there is no broker to ask."""
    from jobs.local.broker import Topics, resolve_kafka
    from lakehouse.bronze.table import progress

    try:
        kafka = resolve_kafka(settings, "lakehouse").kafka
        topics = Topics(kafka.bootstrap, kafka.security)
    except MillraceError:
        topics = Topics("")
    bronze = Lake(settings.lake).bronze
    return {one.source: topics.backlog(loaded.sources[one.source], progress(bronze(one.source))) for one in found}


def _as_dict(one: SourceAudit, backlog: Backlog | None) -> dict[str, Any]:
    lag = None if backlog is None else dataclasses.asdict(backlog)
    return {**dataclasses.asdict(one), "lag": lag, "retention": retention(backlog)}


def _show(one: SourceAudit, backlog: Backlog | None) -> None:
    table = Table(f"{one.source} ({one.topic})", "events", "min s", "avg s", "max s", box=None)
    for hop in one.hops:
        table.add_row(hop.name, f"{hop.count:,}", f"{hop.min_s:.3f}", f"{hop.avg_s:.3f}", f"{hop.max_s:.3f}")
    out.print(table)
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
        table = Table("hop", "time (UTC)", "after s", "where", box=None)
        for step in steps:
            at = datetime.fromtimestamp(step.at / 1e6, UTC).isoformat(timespec="milliseconds")
            table.add_row(step.hop, at, f"{(step.at - steps[0].at) / 1e6:.3f}", escape(step.where))
        out.print(table)
    else:
        err.print(f"no bronze table has an event {escape(event)}; a collector's log may: millrace log show")
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

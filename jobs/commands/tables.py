"""``millrace tables``: what there is, how much, how far behind, and whether all is well."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from jobs.console import JsonOption, KafkaOption, LakeOption, PipelineOption, err, out, print_json
from lakehouse.contract.errors import MillraceError
from lakehouse.contract.lake import Lake
from lakehouse.contract.settings import Settings, load_settings

if TYPE_CHECKING:
    from jobs.local.broker import Topics

_COLOURS = {"ok": "green", "warn": "yellow", "alarm": "red"}


def tables(
    lake: LakeOption = None,
    pipeline: PipelineOption = None,
    kafka: KafkaOption = None,
    check: Annotated[bool, typer.Option("--check", help="Exit status 1 where something is in alarm.")] = False,
    as_json: JsonOption = False,
) -> None:
    """List the lake's tables: size, files, versions, lag, retention, and what is not as it should be."""
    from lakehouse.contract.pipeline import load_pipeline
    from lakehouse.maintain.backlog import ALARM
    from lakehouse.maintain.look import look

    settings = load_settings(lake=lake, pipeline=pipeline, kafka__bootstrap=kafka)
    loaded = load_pipeline(settings.pipeline_folder())
    found = look(Lake(settings.lake), loaded, _topics(settings).backlog)
    if as_json:
        print_json([{"table": facts.name, **dataclasses.asdict(facts)} for facts in found])
    else:
        shown = Table(box=None, pad_edge=False)
        for heading in ("table", "rows", "bytes", "files", "versions", "kept", "behind", "committed", "health"):
            shown.add_column(heading, no_wrap=True, justify="left" if heading in ("table", "health") else "right")
        for facts in found:
            behind = "" if facts.behind is None else f"{facts.behind:,}"
            colour = _COLOURS[facts.health]
            shown.add_row(
                *(f"{facts.layer}/{facts.name}", "" if facts.rows is None else f"{facts.rows:,}", _size(facts.bytes)),
                *(f"{facts.files:,}", f"{facts.oldest}–{facts.version}", _span(facts.log_s), behind),
                *(f"{_span(max(0.0, time.time() - facts.committed))} ago", f"[{colour}]{facts.health}[/]"),
            )
        out.print(shown)
        for facts in found:
            for remark in facts.remarks:
                err.print(f"{facts.name}: {escape(remark)}", highlight=False)
    raise typer.Exit(1 if check and any(facts.health == ALARM for facts in found) else 0)


def _topics(settings: Settings) -> Topics:
    """The broker's, where there is one; tables are shown without it too."""
    from jobs.local.broker import Topics, resolve_kafka

    try:
        kafka = resolve_kafka(settings, "lakehouse").kafka
    except MillraceError:
        return Topics("")
    return Topics(kafka.bootstrap, kafka.security)


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return ""


def _span(seconds: float) -> str:
    """A length of time, short."""
    for unit, size in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"

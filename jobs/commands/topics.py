"""``millrace topics`` and ``millrace latest``: the pipeline's topics, and the compacted ones beside them."""

from __future__ import annotations

import dataclasses
import signal
import threading
from typing import Annotated

import typer
from rich.markup import escape

from jobs.console import JsonOption, KafkaOption, LakeOption, PipelineOption, err, log_to_stderr, out, print_json
from jobs.metrics import Counts, MetricsPortOption, metrics_server
from lakehouse.contract.settings import load_settings


def topics(
    lake: LakeOption = None,
    pipeline: PipelineOption = None,
    kafka: KafkaOption = None,
    apply: Annotated[
        bool, typer.Option("--apply", help="Make what is absent and, on a secure embedded broker, the access rules.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Compare the topics with what the pipeline declares. Exit status 1: events would be lost or never taken."""
    from ingest.kafka.topics import ALARM, check_topics
    from jobs.local.broker import apply_topics, resolve_kafka
    from lakehouse.contract.pipeline import load_pipeline

    settings = load_settings(lake=lake, pipeline=pipeline, kafka__bootstrap=kafka)
    loaded = load_pipeline(settings.pipeline_folder())
    if apply:
        remarks = apply_topics(settings, loaded)
    else:
        found = resolve_kafka(settings, "lakehouse").kafka
        remarks = check_topics(found.bootstrap, list(loaded.sources.values()), found.security)
    if as_json:
        print_json([dataclasses.asdict(remark) for remark in remarks])
    else:
        for remark in remarks:
            out.print(f"[{'red' if remark.severity == ALARM else 'yellow'}]{remark.severity}[/] {escape(str(remark))}")
        if not remarks:
            out.print("all topics are as declared")
    raise typer.Exit(1 if any(remark.severity == ALARM for remark in remarks) else 0)


def latest(
    lake: LakeOption = None,
    pipeline: PipelineOption = None,
    kafka: KafkaOption = None,
    metrics_port: MetricsPortOption = None,
) -> None:
    """Keep the newest event of each key in TOPIC.latest, for the sources that say latest_topic."""
    from ingest.latest import LatestMirror
    from jobs.local.broker import resolve_kafka
    from lakehouse.contract.pipeline import load_pipeline

    settings = load_settings(lake=lake, pipeline=pipeline, kafka__bootstrap=kafka)
    settings = resolve_kafka(settings, "lakehouse")
    mirror = LatestMirror(load_pipeline(settings.pipeline_folder()), settings.kafka.bootstrap, settings.kafka.security)
    log_to_stderr()
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    counts = Counts("millrace_latest_copied", "Records copied to TOPIC.latest", lambda: mirror.copied)
    with metrics_server(metrics_port, counts):
        mirror.run(stop, ready=lambda: err.print("copying"))

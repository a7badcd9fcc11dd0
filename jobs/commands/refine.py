"""``millrace refine``: the second step of a two-step collection."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from jobs.console import KafkaOption, LakeOption, PipelineOption, err, run_async
from lakehouse.contract.settings import load_settings


def refine(
    lake: LakeOption = None,
    pipeline: PipelineOption = None,
    kafka: KafkaOption = None,
    node: Annotated[str, typer.Option(help="Id of this process, kept with each event.")] = "refiner-1",
    metrics_port: Annotated[int, typer.Option(help="Port of /metrics on the loopback address; 0: none.")] = 0,
) -> None:
    """Validate and enrich what front collectors took in (TOPIC.raw), and put it into the sources' topics."""
    from ingest.refine import RefineNode
    from ingest.stats import serve_metrics
    from jobs.local.broker import resolve_kafka
    from lakehouse.contract.pipeline import load_pipeline

    settings = load_settings(lake=lake, pipeline=pipeline, kafka__bootstrap=kafka)
    loaded = load_pipeline(settings.pipeline_folder())
    settings = resolve_kafka(settings, "collector")
    bootstrap = settings.kafka.bootstrap

    async def main(stop: asyncio.Event) -> None:
        refiner = RefineNode(settings, loaded, node=node, bootstrap=bootstrap)
        with serve_metrics(refiner, metrics_port):
            await refiner.run(lambda: err.print("refining"), stop)

    run_async(main)

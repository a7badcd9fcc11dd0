"""A pipeline in one driver: ``spark-submit jobs/run_pipeline.py --lake DIR``, all of it or one layer (``--only``)."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from jobs.console import log_to_stderr, print_problems, stopped_by_signals
from jobs.local.broker import ensure_topics, resolve_kafka
from jobs.local.machine import before_start
from lakehouse.contract.access import following
from lakehouse.contract.errors import MillraceError
from lakehouse.contract.lake import Lake
from lakehouse.contract.pipeline import Source
from lakehouse.contract.pipeline.folder import PipelineFiles
from lakehouse.contract.settings import Settings, load_settings
from lakehouse.stages import Stages

log = logging.getLogger(__name__)

_LAYERS = {
    "bronze": Stages(layers=()),
    "products": Stages(bronze=False),
    "silver": Stages(bronze=False, layers=("silver",)),
    "gold": Stages(bronze=False, layers=("gold",)),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a pipeline as a process of its own (spark-submit or python); returns the exit status."""
    parser = argparse.ArgumentParser(description="Run a pipeline in one Spark driver")
    parser.add_argument("--lake", help="root folder of the tables, or a URL such as s3://BUCKET/PREFIX")
    parser.add_argument("--pipeline", help="folder below conf/pipelines, or a path")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting; may be repeated")
    parser.add_argument("--accept-loss", action="store_true", help="go on where Kafka lost what bronze had not taken")
    parser.add_argument("--only", choices=_LAYERS, help="Kafka to bronze, or bronze to products, of a layer or all")
    options = parser.parse_args(argv)
    stages = _LAYERS.get(options.only, Stages())
    log_to_stderr()
    try:
        settings = load_settings(lake=options.lake, pipeline=options.pipeline, assignments=options.set)
        if found := before_start(settings, ports=False, kafka=stages.bronze):
            print_problems(found)
            return 1
        run_stages(settings, stages, accept_loss=options.accept_loss)
    except MillraceError as error:
        print_problems([error])
        return 1
    return 0


def run_stages(
    settings: Settings, stages: Stages, *, accept_loss: bool = False, started: Callable[[str], None] | None = None
) -> None:
    """Run the stages of the settings' pipeline until SIGINT or SIGTERM.

    Args:
        accept_loss: go on where Kafka lost what bronze had not taken.
        started: called with the URL of the driver's metrics once all queries run.
    """
    files = PipelineFiles.of(settings)
    pipeline = files.load()
    stop = stopped_by_signals()
    if stages.bronze:
        settings = resolve_kafka(settings, "lakehouse")
    bootstrap = settings.kafka.bootstrap if stages.bronze else ""
    from lakehouse.session import build_session

    with ThreadPoolExecutor(1) as starting:
        session = starting.submit(build_session, settings, f"millrace-{pipeline.name}")
        # Imported while the JVM starts.
        from pyspark.errors import AnalysisException

        from jobs.lineage import driver_steps, told
        from jobs.local.broker import asking
        from jobs.metrics import serve_metrics
        from lakehouse.errors import QueryFailed
        from lakehouse.maintain.care import Caretaker
        from lakehouse.prepared import start_workers
        from lakehouse.stream import KafkaAccess, PipelineChanges, run

        spark = session.result()
    workers = start_workers(spark)
    try:
        lake = Lake.of(settings)
        ask = asking(settings.kafka) if stages.bronze else None
        with (
            following(settings),
            serve_metrics(spark, lake, settings.metrics_port) as url,
            Caretaker(lake, pipeline, ask) as care,
        ):
            patience_s = 60.0

            def topics(source: Source) -> None:
                ensure_topics([source], bootstrap, security=settings.kafka.security, timeout_s=patience_s)

            def tell() -> None:
                nonlocal patience_s
                patience_s = 5.0  # meanwhile nobody looks after the queries that run
                log.info("metrics at %s", url)
                if started is not None:
                    started(url)

            with told(settings, driver_steps(lake, pipeline, stages), streaming=True):
                run(
                    spark,
                    settings,
                    pipeline,
                    stages,
                    KafkaAccess(bootstrap, accept_loss, topics),
                    stop,
                    changes=PipelineChanges(files, care.declare),
                    started=tell,
                )
    except AnalysisException as error:  # ParseException is one too
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise QueryFailed(f"of pipeline {pipeline.name}", error.getCondition() or "", lines[0]) from None
    finally:
        workers.join()  # cut off in the midst it is told as an error, or aborts the process inside pyarrow
        spark.stop()


if __name__ == "__main__":
    sys.exit(main())

"""Kafka to bronze: ``spark-submit jobs/run_bronze.py --lake DIR``."""

from __future__ import annotations

import sys

from jobs.run_pipeline import main
from lakehouse.stages import Stages

if __name__ == "__main__":
    sys.exit(main("Kafka to bronze", Stages(layers=())))

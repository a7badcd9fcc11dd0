"""All stages of a pipeline in one driver: ``spark-submit jobs/run_pipeline.py --lake DIR``."""

from __future__ import annotations

import sys

from jobs.streams import main
from lakehouse.stages import Stages

if __name__ == "__main__":
    sys.exit(main("All stages of a pipeline in one driver", Stages()))

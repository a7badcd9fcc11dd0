"""Bronze to silver products: ``spark-submit jobs/run_silver.py --lake DIR``."""

from __future__ import annotations

import sys

from jobs.run_pipeline import main
from lakehouse.stages import Stages

if __name__ == "__main__":
    sys.exit(main("Bronze to silver products", Stages(bronze=False, layers=("silver",))))

"""How a process of ours logs: to standard error, without the chatter of its libraries."""

from __future__ import annotations

import logging
import sys


def log_to_stderr() -> None:
    """Log from INFO on; py4j and kafka from WARNING on."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    for noisy in ("py4j", "kafka"):
        logging.getLogger(noisy).setLevel(logging.WARNING)

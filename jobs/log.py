"""How a process of ours logs: to standard error, without the chatter of its libraries, as text or as JSON."""

from __future__ import annotations

import json
import logging
import os
import sys
from datetime import UTC, datetime

from lakehouse.contract.errors import ConfigError
from lakehouse.contract.java import LOG_VARIABLE
from lakehouse.contract.trace import FIELDS

_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class JsonFormatter(logging.Formatter):
    """One JSON object a line: ``at`` (UTC, RFC 3339), ``level``, ``logger``, ``message``, ``process``, ``error``.

    A line about one event has its ``event_id``, ``source`` and ``tenant`` too (:mod:`lakehouse.contract.trace`).
    """

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        line = {
            "at": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            "process": record.process,
        }
        line |= {name: getattr(record, name) for name in FIELDS if hasattr(record, name)}
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line)


def log_to_stderr() -> None:
    """Log from INFO on; py4j and kafka from WARNING on. ``MILLRACE_LOG=json`` makes each line a JSON object.

    Raises:
        ConfigError: the variable says something else.
    """
    kind = os.environ.get(LOG_VARIABLE, "text")
    if kind not in ("text", "json"):
        raise ConfigError(f"{kind!r} is not known", key=LOG_VARIABLE, remedy="Use text or json")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if kind == "json" else logging.Formatter(_TEXT))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    for noisy in ("py4j", "kafka"):
        logging.getLogger(noisy).setLevel(logging.WARNING)

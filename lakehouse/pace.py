"""Compiled or interpreted: what suits the size of a query's micro-batches.

Generating and compiling Java source for each task costs a short batch more than it saves; a long one gains several
times over. The setting is the running query's own, and takes effect with its next batch.
"""

from __future__ import annotations

from collections.abc import Mapping

from pyspark.sql import SparkSession

LONG_BATCH = 20_000  # events
_COMPILED = {"spark.sql.codegen.wholeStage": "true", "spark.sql.codegen.factoryMode": "FALLBACK"}
_INTERPRETED = {"spark.sql.codegen.wholeStage": "false", "spark.sql.codegen.factoryMode": "NO_CODEGEN"}


class Pace:
    """Keeps one query's setting.

    Args:
        given: settings of the user's own, which are left alone.
    """

    def __init__(self, given: Mapping[str, str]) -> None:
        self._fixed = any(key in given for key in _COMPILED)
        self._long: bool | None = None

    def suit(self, session: SparkSession, events: int) -> None:
        """Set what suits a batch of so many events; the session is the query's own (``DataFrame.sparkSession``)."""
        long = events >= LONG_BATCH
        if self._fixed or long == self._long:
            return
        self._long = long
        for key, value in (_COMPILED if long else _INTERPRETED).items():
            session.conf.set(key, value)

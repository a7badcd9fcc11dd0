"""Compiled or interpreted: what suits the size of a query's micro-batches.

Generating and compiling Java source for each task costs a short batch more than it saves; a long one gains several
times over. The setting is the running query's own, and takes effect with its next batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from pyspark.sql import SparkSession

LONG_BATCH = 5_000  # events
_PATIENCE = 8  # short batches in a row that end a time of long ones: at its ends, and between two of them, some are
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
        self._short = 0

    def suit(self, session: SparkSession, events: int) -> None:
        """Set what suits a query whose last batch had so many events.

        Args:
            session: the query's own (``DataFrame.sparkSession``).
        """
        long = events >= LONG_BATCH
        self._short = 0 if long else self._short + 1
        if self._fixed or long == self._long or (self._long and self._short < _PATIENCE):
            return
        self._long = long
        for key, value in (_COMPILED if long else _INTERPRETED).items():
            session.conf.set(key, value)

    @contextmanager
    def begun(self, session: SparkSession, waiting: int) -> Iterator[None]:
        """A block that starts a query with so many events to catch up with: its first batch will be as long.

        Args:
            session: the one that the query is started in, and takes its settings from; it has its own back afterwards.
        """
        if self._fixed or waiting < LONG_BATCH:
            yield
            return
        before = {key: str(session.conf.get(key)) for key in _COMPILED}
        self.suit(session, waiting)
        try:
            yield
        finally:
            for key, value in before.items():
                session.conf.set(key, value)

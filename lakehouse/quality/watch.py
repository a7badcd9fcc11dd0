"""Expectations that do not refuse an event: ``warn`` notes it, ``halt`` stops the query before it counts."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from lakehouse.contract.lake import WARNINGS, Lake
from lakehouse.contract.pipeline import Source
from lakehouse.contract.pipeline.expectations import HALT, WARN
from lakehouse.errors import ExpectationHalt
from lakehouse.quality.notes import accepted
from lakehouse.silver.quarantine import COLUMNS, Quarantine


class Watch:
    """Applies one source's ``warn`` and ``halt`` expectations in its query.

    Args:
        keep_warned: this query writes the source's rows of table ``warnings``.
        again: the expectations have changed: fill the table in again.
    """

    def __init__(self, lake: Lake, source: Source, *, keep_warned: bool, again: bool = False) -> None:
        self._source = source
        self._halts = bool(source.expected(HALT))
        self._accepted = accepted(lake, source.name) if self._halts else frozenset()
        self.warnings: Quarantine | None = None
        self.restore = False
        if keep_warned and source.expected(WARN):
            told = "Events that count although they fail an expectation, which `reason` names"
            table = lake.table("silver", WARNINGS)
            self.restore = again
            self.warnings = Quarantine(table, told, "source,event_id,reason")

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns of conformed events that :meth:`check` and :meth:`warned` need."""
        return (*(("event_id", "halted") if self._halts else ()), *(("warned",) if self.warnings is not None else ()))

    def check(self, first: pa.Table) -> None:
        """Stop if an event that would count fails a ``halt`` expectation.

        Args:
            first: the batch's first copies with :attr:`columns` and their place in bronze.

        Raises:
            ExpectationHalt: the first such event, in bronze's order.
        """
        if not self._halts:
            return
        bad = first.filter(pc.is_valid(first["halted"]))
        if bad.num_rows and self._accepted:
            bad = bad.filter(pc.invert(pc.is_in(bad["event_id"], pa.array(sorted(self._accepted)))))
        if bad.num_rows:
            order = [("bronze_at", "ascending"), ("partition", "ascending"), ("offset", "ascending")]
            row = bad.sort_by(order).slice(0, 1).to_pylist()[0]
            place = f"{row['topic']}/{row['partition']}/{row['offset']}"
            raise ExpectationHalt(self._source.name, row["halted"], row["event_id"], place)

    def check_all(self, events: DataFrame) -> None:
        """:meth:`check`, of more events than are to be fetched. Raises ExpectationHalt."""
        if self._halts:
            bad = events.where(F.col("halted").isNotNull() & ~F.col("event_id").isin(sorted(self._accepted)))
            first = bad.orderBy("bronze_at", "partition", "offset").limit(1)
            self.check(first.select("topic", "partition", "offset", "bronze_at", *self.columns).toArrow())

    def warned(self, first: pa.Table) -> bool:
        """Whether any of these events fails a ``warn`` expectation."""
        return self.warnings is not None and first["warned"].null_count < first.num_rows


def warned_columns(events: DataFrame) -> DataFrame:
    """Rows of table ``warnings``: one for each event and failed expectation."""
    noted = events.where(F.col("warned").isNotNull()).withColumn("reason", F.explode("warned"))
    payload = F.expr("make_valid_utf8(payload)")
    return noted.withColumn("payload", payload).select(*COLUMNS.names)

"""Concept drift: a detector of river's watches a numeric column, for each key in bronze's order.

ADWIN: Bifet and Gavaldà, "Learning from Time-Changing Data with Adaptive Windowing", SDM 2007. Page-Hinkley: Page,
"Continuous Inspection Schemes", Biometrika 1954. KSWIN: Raab et al., "Reactive Soft Prototype Computing for Concept
Drift Streams", Neurocomputing 2020.
"""

from __future__ import annotations

import io
import pickle
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from lakehouse.contract.pipeline import Product
from lakehouse.contract.pipeline.product import DETECTORS
from lakehouse.errors import BadProduct
from lakehouse.operators.base import (
    EVENT_AT,
    TIMESTAMP,
    StatefulOperator,
    among,
    in_bronze_order,
    ordered_sql,
    plain_type,
)

NUMBER, SINCE, AT, VALUES, BEFORE, AFTER, STATE = "number", "since", "at", "values", "before", "after", "state"
RECENT = 10  # values whose mean is "after"
_VALUE = "_value"


@dataclass(slots=True)
class _Watch:
    """What is known of one key since its last alarm."""

    detector: Any
    alarms: int = 0
    since: Any = None
    at: Any = None
    values: int = 0
    total: float = 0.0
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))

    def see(self, at: Any, value: float) -> bool:
        """Take a value in; whether the detector says that the stream is another one now."""
        self.since = at if self.values == 0 else self.since
        self.at = at
        self.values += 1
        self.total += value
        self.recent.append(value)
        self.detector.update(value)
        return bool(self.detector.drift_detected)

    def row(self, number: int) -> dict[str, Any]:
        """The rows' columns, but for key and state."""
        recent = sum(self.recent)
        older = self.values - len(self.recent)
        return {
            NUMBER: number,
            SINCE: self.since,
            AT: self.at,
            VALUES: self.values,
            BEFORE: (self.total - recent) / older if older else None,
            AFTER: recent / len(self.recent) if self.recent else None,
        }

    def alarm(self) -> dict[str, Any]:
        """The row of an alarm at the value seen last; what comes next is counted anew."""
        self.alarms += 1
        row = {**self.row(self.alarms), STATE: None}
        self.since, self.values, self.total = None, 0, 0.0
        self.recent.clear()
        return row


class Drift(StatefulOperator):
    """Alarms, and what runs: ``by``, ``number``, ``since``, ``at``, ``values``, ``before``, ``after``, ``state``.

    A row whose ``number`` is 1 or more is that key's alarm of this number: raised by the value at ``at``, the last of
    ``values`` since ``since``; ``after`` is the mean of the last 10 of them, ``before`` that of the others. Row 0 says
    the same of what came since the last alarm; it alone has a ``state``, from which the next batch goes on.
    """

    ends = AT

    def __init__(self, product: Product) -> None:
        self._product = product
        self._by = product.by
        self.key = (*product.by, NUMBER)
        _detector(product)

    def partial_sql(self) -> str:
        value = f"CAST(`{self._product.value}` AS DOUBLE)"
        return ordered_sql(self._product, f", {value} AS {_VALUE}", f" AND {value} IS NOT NULL AND NOT isnan({value})")

    def describe(self, partial: pa.Schema) -> None:
        by = [pa.field(name, plain_type(partial.field(name).type)) for name in self._by]
        own = [(NUMBER, pa.int64()), (SINCE, TIMESTAMP), (AT, TIMESTAMP), (VALUES, pa.int64())]
        own += [(BEFORE, pa.float64()), (AFTER, pa.float64()), (STATE, pa.binary())]
        self.schema = pa.schema([*by, *(pa.field(*pair) for pair in own)])

    def advance(self, held: pa.Table | None, partial: pa.Table, clock: int | None) -> pa.Table:
        if NUMBER in partial.schema.names:  # rows of the product itself
            return partial
        self.describe(partial.schema)
        held = self.schema.empty_table() if held is None else held.select(self.schema.names).cast(self.schema)
        touched = pa.array(self.live(held, clock) & among(held, partial, self._by))
        running = {self._key(row): row for row in held.filter(touched).to_pylist()}
        alarms: list[dict[str, Any]] = []
        watches: dict[tuple[Any, ...], _Watch] = {}
        ordered = in_bronze_order(partial, (EVENT_AT, _VALUE)).select([*self._by, EVENT_AT, _VALUE]).to_pylist()
        for row in ordered:
            key = self._key(row)
            if key not in watches:
                found = running.get(key)
                watches[key] = _load(found) if found else _Watch(_detector(self._product))
            if watches[key].see(row[EVENT_AT], row[_VALUE]):
                alarms.append({**dict(zip(self._by, key, strict=True)), **watches[key].alarm()})
        now = [
            {**dict(zip(self._by, key, strict=True)), **watch.row(0), STATE: _dump(watch)}
            for key, watch in watches.items()
        ]
        return pa.concat_tables([held.filter(pc.invert(touched)), pa.Table.from_pylist([*alarms, *now], self.schema)])

    def _key(self, row: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(row[name] for name in self._by)

    def live(self, rows: pa.Table, clock: int | None) -> npt.NDArray[np.bool_]:
        """The running rows."""
        return np.asarray(rows[NUMBER].to_numpy() == 0)


def _detector(product: Product) -> Any:
    """A new detector of the product's kind. Raises BadProduct: river refuses a parameter."""
    from river import drift

    classes: dict[str, Any] = {"adwin": drift.ADWIN, "page_hinkley": drift.PageHinkley, "kswin": drift.KSWIN}
    given = {
        name: type(value)(product.parameters.get(name, value)) for name, value in DETECTORS[product.detector].items()
    }
    try:
        return classes[product.detector](**given)
    except (TypeError, ValueError) as error:
        problem = f"{product.detector} refuses its parameters: {error}"
        raise BadProduct(product.name, problem, key="parameters") from None


def _dump(watch: _Watch) -> bytes:
    """What the columns of a running row do not say."""
    return pickle.dumps((watch.detector, watch.alarms, watch.total, list(watch.recent)), protocol=5)


def _load(row: dict[str, Any]) -> _Watch:
    detector, alarms, total, recent = _Reader(io.BytesIO(row[STATE])).load()
    return _Watch(detector, alarms, row[SINCE], row[AT], row[VALUES], total, deque(recent, maxlen=RECENT))


def _method(owner: Any, name: str) -> Any:
    """The one kind of attribute that a detector's state names: Page-Hinkley's choice of test."""
    if not (type(owner).__module__ == "river.drift.page_hinkley" and name.startswith("_test_")):
        raise pickle.UnpicklingError(f"a state does not name {name!r}")
    return getattr(owner, name)


class _Reader(pickle.Unpickler):
    """Reads states and nothing else: whoever can write to the table must not be able to run code here."""

    def find_class(self, module: str, name: str) -> Any:
        """The few classes that detectors are made of."""
        if (module, name) == ("builtins", "getattr"):
            return _method
        if (module, name) in _KNOWN:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"a state does not name {module}.{name}")


_KNOWN = {
    ("river.drift.adwin", "ADWIN"),
    ("river._river_rust.drift", "AdaptiveWindowing"),
    ("river.drift.page_hinkley", "PageHinkley"),
    ("river.stats.mean", "Mean"),
    ("river.drift.kswin", "KSWIN"),
    ("collections", "deque"),
    ("random", "Random"),
    ("numpy", "dtype"),
    ("numpy._core.multiarray", "scalar"),  # a p-value
    ("numpy.core.multiarray", "scalar"),
}

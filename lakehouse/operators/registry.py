"""The operator of a product."""

from __future__ import annotations

from collections.abc import Callable

from lakehouse.contract.pipeline import Product
from lakehouse.operators.aggregate import Aggregate, Join
from lakehouse.operators.base import Operator
from lakehouse.operators.rows import EventRows, Latest, Reservoir
from lakehouse.operators.sketched import Distinct, Frequency, Membership, Quantiles, Skew, TopN
from lakehouse.operators.sql import check_rows, parse
from lakehouse.stateful.drift import Drift
from lakehouse.stateful.windows import CountWindow, Sessions

_STATELESS: dict[str, Callable[[Product], Operator]] = {
    "": Aggregate,
    "top_n": TopN,
    "distinct": Distinct,
    "frequency": Frequency,
    "membership": Membership,
    "quantiles": Quantiles,
    "reservoir": Reservoir,
    "skew": Skew,
    "latest": Latest,
    "events": EventRows,
}
_STATEFUL: dict[str, Callable[[Product], Operator]] = {
    "sessions": Sessions,
    "count_window": CountWindow,
    "drift": Drift,
    "join": Join,
}


def operator_of(product: Product) -> Operator:
    """The operator that keeps a product. Raises BadProduct: its SQL, or an aggregate, cannot be kept up to date."""
    if product.operator in _STATEFUL:
        return _STATEFUL[product.operator](product)
    if product.operator:
        check_rows(parse(product), product)
    return _STATELESS[product.operator](product)

"""How long after their event time the events of a window arrived, and how many came late.

An event is *early* where its time lies behind its arrival, *late* where the window of its own time (of the product's
length) was over when it arrived, *too late* where it arrived longer after its time than the product's lateness. All of
it is in the events themselves, so that a replay counts the same; too late events stay in bronze like any other.
"""

from __future__ import annotations

from lakehouse.contract.pipeline import Product
from lakehouse.operators.quantiles import Quantiles

_SKEW = "(unix_millis(received_at) - unix_millis(event_time))"


class Skew(Quantiles):
    """One row a window: events (named as the source), ``early``, ``late``, ``too_late``; the skew in milliseconds."""

    def __init__(self, product: Product) -> None:
        window = product.window_ms
        over = f"floor(unix_millis(event_time) / {window}) * {window} + {window} <= unix_millis(received_at)"
        too_late = f"{_SKEW} > {product.lateness_ms}" if product.lateness_ms is not None else "false"
        counted = [
            ("early", f"count_if({_SKEW} < 0)"),
            ("late", f"count_if({over})"),
            ("too_late", f"count_if({too_late})"),
        ]
        super().__init__(product, f"CAST({_SKEW} AS DOUBLE)", counted, unit="_ms")
        if not product.slide:
            self.counts = product.source

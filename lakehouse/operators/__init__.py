"""Operators: how a product is aggregated in Spark, and how partial results are merged.

Merging is associative and commutative, and merging nothing changes nothing: any split of the events into batches, in
any order, gives the same rows.
"""

from lakehouse.operators.base import Operator, operator_of

__all__ = ["Operator", "operator_of"]

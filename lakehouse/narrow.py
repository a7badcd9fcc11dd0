"""What of an event a micro-batch keeps in memory: the fields that its products read, and of rejected ones everything.

A batch is read once for each product, and so it is cached; a payload that no product looks at is most of it.
"""

from __future__ import annotations

from collections.abc import Iterable

from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from sqlglot import exp

from lakehouse.contract.expectations import WARN
from lakehouse.contract.pipeline import Product, Source
from lakehouse.operators.sql import parse
from lakehouse.silver.conform import payload_schema


def narrowed(events: DataFrame, source: Source, products: Iterable[Product]) -> DataFrame:
    """Conformed events, null in payload fields that no product names unless the event is rejected.

    Args:
        events: as :func:`lakehouse.silver.conform.conform` gives them.
        source: whose they are.
        products: all that will read them.
    """
    named = names_of(products)
    if named is None or source.expected(WARN):  # of an event that is noted as a warning, all is kept
        return events
    unread = {name for name in payload_schema(source).fieldNames() if name.lower() not in named} | {"payload"}
    rejected = F.col("reason").isNotNull()
    return events.select(*[F.when(rejected, F.col(n)).alias(n) if n in unread else F.col(n) for n in events.columns])


def names_of(products: Iterable[Product]) -> set[str] | None:
    """Every name in the products' SQL, in lower case: their columns and more. None: all (``SELECT *``, no SQL)."""
    found: set[str] = set()
    for product in products:
        if not product.sql.strip():
            return None
        tree = parse(product)
        if any(not isinstance(star.parent, exp.Count) for star in tree.find_all(exp.Star)):
            return None
        found |= {identifier.name.lower() for identifier in tree.find_all(exp.Identifier)}
    return found

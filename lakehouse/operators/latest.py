"""The system of record: of each key the row with the highest version, whatever order the versions arrive in.

Of two rows with the same key and version the one with the greater 64-bit hash of its columns is kept: an arbitrary
choice, but the same in every order, in every replay and after any repetition. Taking the maximum is associative,
commutative and idempotent. A deletion is a row like any other, with a column of the user's own that says so.

For many keys store it with ``storage = "append"``: a batch adds its own keys' latest rows, and readers and maintenance
fold them (lakehouse.contract.rows). ``upsert`` rewrites the table with each batch, and is for small ones.
"""

from __future__ import annotations

import pyarrow as pa

from lakehouse.contract.pipeline import Product
from lakehouse.contract.rows import LATEST, Fold
from lakehouse.errors import BadProduct
from lakehouse.operators.base import plain_type

TIE = "tie"  # the column with the hash


class Latest:
    """One row a key: the columns of the input, and ``tie``."""

    unit: tuple[str, ...] = ()
    counts: str | None = None
    schema: pa.Schema | None = None

    def __init__(self, product: Product) -> None:
        self._product = product
        self.key: tuple[str, ...] = product.by
        self.order: tuple[str, ...] = (product.version, TIE)
        self.fold: dict[str, str] = {}

    def partial_sql(self) -> str:
        key = ", ".join(f"`{name}`" for name in self.key)
        version = f"`{self._product.version}`"
        there = " AND ".join(f"`{name}` IS NOT NULL" for name in (*self.key, self._product.version))
        rows = f"SELECT *, xxhash64(*) AS {TIE} FROM ({self._product.sql.strip().rstrip(';')}) WHERE {there}"  # noqa: S608 - a checked pipeline
        best = f"max_by(struct(*), struct({version}, {TIE})) AS millrace_latest"
        return f"SELECT inline(array(millrace_latest)) FROM (SELECT {best} FROM ({rows}) GROUP BY {key})"  # noqa: S608

    def describe(self, partial: pa.Schema) -> None:
        if absent := [name for name in (*self.key, self._product.version) if name not in partial.names]:
            raise BadProduct(self._product.name, f"its SQL has no column {absent[0]}", "Select it, or name another")
        if partial.names.count(TIE) > 1:
            raise BadProduct(self._product.name, f"its SQL has a column {TIE!r}", f"Call it otherwise: … AS {TIE}_of")
        self.schema = pa.schema([pa.field(field.name, plain_type(field.type)) for field in partial])
        self.fold = {name: LATEST for name in partial.names if name not in self.key}

    def merge(self, old: pa.Table | None, partial: pa.Table) -> pa.Table:
        assert self.schema is not None, "describe() comes first"
        tables = [table.select(self.schema.names).cast(self.schema) for table in (old, partial) if table is not None]
        return Fold(self.key, self.fold, self.order).arrow(pa.concat_tables(tables))

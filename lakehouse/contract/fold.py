"""How rows that are partials of a key become the key's one row: a notion that writers, readers and copies share.

``sum``, ``min`` and ``max`` fold a column by itself. ``latest`` takes the whole row: of a key's rows the one whose
order columns are greatest, compared from the first of them on, null before everything. Folding is associative and
commutative, and idempotent but for ``sum``, which needs each partial once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lakehouse.contract.lake import PROPERTY_FOLD, PROPERTY_KEY, PROPERTY_ORDER

LATEST = "latest"
FOLDS = ("sum", "min", "max", LATEST)


@dataclass(frozen=True, slots=True)
class Fold:
    """The fold of one table.

    Attributes:
        key: columns that name a row.
        how: one of :data:`FOLDS` by column, for every column beside the key.
        order: of a fold by ``latest``: the columns whose greatest values win.
    """

    key: tuple[str, ...]
    how: Mapping[str, str]
    order: tuple[str, ...] = ()

    @classmethod
    def from_properties(cls, properties: Mapping[str, str | None]) -> Fold | None:
        """What a table's metadata says, or None where its rows are no partials."""
        text = properties.get(PROPERTY_FOLD)
        if not text:
            return None
        key, order = (properties.get(name) or "" for name in (PROPERTY_KEY, PROPERTY_ORDER))
        return cls(_names(key), {str(k): str(v) for k, v in json.loads(text).items()}, _names(order))

    @property
    def by_row(self) -> bool:
        """Whether a key's row is one of its partials."""
        return LATEST in self.how.values()

    def sql(self, relation: str, columns: Sequence[str], types: Mapping[str, str] | None = None) -> str:
        """DuckDB's SELECT over the folded rows.

        Args:
            relation: name of the partials, quoted where it needs to be.
            columns: of the table, in order.
            types: of the columns; sums are cast back to them (a sum of BIGINT is HUGEINT).
        """
        group = ", ".join(map(_quoted, self.key))
        if self.by_row:
            order = ", ".join(f"{_quoted(name)} DESC NULLS LAST" for name in self.order)
            return (
                f"SELECT {', '.join(map(_quoted, columns))} FROM {relation} "  # noqa: S608 - names are quoted
                f"QUALIFY row_number() OVER (PARTITION BY {group} ORDER BY {order}) = 1"
            )
        folded = [
            _quoted(name) if name in self.key else self._column(name, (types or {}).get(name)) for name in columns
        ]
        return f"SELECT {', '.join(folded)} FROM {relation} GROUP BY {group}"  # noqa: S608 - names are quoted

    def _column(self, name: str, kind: str | None) -> str:
        folded = f"{self.how.get(name, 'any_value')}({_quoted(name)})"
        return f"CAST({folded} AS {kind}) AS {_quoted(name)}" if kind else f"{folded} AS {_quoted(name)}"


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'

"""Errors of views, alerts and queries added at run time.

::

    LakehouseError
    └── QueryError         one view, alert or query cannot go on; the others do
"""

from __future__ import annotations

from lakehouse.errors import LakehouseError


class QueryError(LakehouseError):
    """One view, alert or query cannot go on.

    Attributes:
        name: of the view, alert or query.
        problem: what is wrong.
        remedy: what to change.
    """

    def __init__(self, name: str, problem: str, remedy: str = "") -> None:
        super().__init__(name, problem)
        self.name = name
        self.problem = problem
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.name}: {self.problem}" + (f". {self.remedy}" if self.remedy else "")

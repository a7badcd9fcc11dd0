"""What a pipeline declares of a product's channel: whether there is one, and what of the table it shows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True)
class ChannelSpec:
    """``channel = false``, or ``[products.NAME.channel]`` with a filter that holds for every subscriber of the table.

    Attributes:
        served: whether the table is served to subscribers.
        where: SQL condition on its rows, as a subscriber's own ``where``; empty: all of them.
        columns: those that there are for subscribers, beside the key's; empty: all of them.
    """

    SHORTHAND: ClassVar[str] = "served"

    served: bool = True
    where: str = ""
    columns: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return self.served

    @property
    def narrows(self) -> bool:
        """Whether subscribers see less than the table."""
        return bool(self.where or self.columns)


EVERYTHING = ChannelSpec()
"""What there is where nothing is declared."""

"""Views of the pipeline model: small products that are recomputed from another product's rows."""

from __future__ import annotations

from dataclasses import dataclass, field

from lakehouse.contract.channel import EVERYTHING, ChannelSpec
from lakehouse.contract.checks import one_of
from lakehouse.contract.errors import ConfigError


@dataclass(frozen=True, slots=True)
class View:
    """A table that is what its SQL gives over another product's current rows: ``[products.NAME] from = "PRODUCT"``.

    Attributes:
        base: the product (or view) whose rows it reads, ``from`` in TOML; the only relation of its SQL.
        sql: one SELECT in Spark SQL, the text of the file named in the TOML.
        key: columns that name one row; empty: what the SQL groups by.
        layer: ``silver`` or ``gold``.
        channel: whether it is served to subscribers, and what of it.
        name: of the table.
    """

    base: str = field(metadata={"key": "from"})
    sql: str
    key: tuple[str, ...] = ()
    layer: str = "gold"
    channel: ChannelSpec = EVERYTHING
    name: str = ""

    def __post_init__(self) -> None:
        one_of("layer", self.layer, ("silver", "gold"))
        if not self.sql.strip():
            raise ConfigError("a view needs SQL", key="sql", remedy="Name a .sql file, or write one SELECT")


def in_order(views: dict[str, View]) -> list[View]:
    """The views, each after the one that it reads.

    Raises:
        ConfigError: a view reads, over others, itself.
    """
    done: dict[str, View] = {}
    waiting = dict(views)
    while waiting:
        ready = [name for name, view in waiting.items() if view.base not in waiting]
        if not ready:
            name = next(iter(waiting))
            raise ConfigError(
                "it reads itself, over other views", key=f"products.{name}.from", remedy="Break the circle"
            )
        for name in ready:
            done[name] = waiting.pop(name)
    return list(done.values())

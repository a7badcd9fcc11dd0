"""Products of the pipeline model: tables kept up to date."""

from __future__ import annotations

from dataclasses import dataclass

from lakehouse.contract.checks import duration, one_of
from lakehouse.contract.errors import ConfigError
from lakehouse.contract.tomlfile import duration_ms

OPERATORS = ("top_n", "distinct")


@dataclass(frozen=True, slots=True)
class Product:
    """A table kept up to date from one source.

    Attributes:
        name: key of the table in the TOML file; also the table's name.
        layer: ``silver`` or ``gold``.
        source: the source it derives from.
        sql: Spark SQL over the source's name, the text of the file named in the TOML: the whole product
            (without ``operator``) or the operator's input.
        operator: one of :data:`OPERATORS`, or empty.
        storage: ``upsert`` (one row a key, the windows a batch touches are rewritten) or ``append`` (rows are
            partials, folded on read and by maintenance; for results of many keys).
        time: column of the input that a window stands on (operators).
        window: length of the tumbling window, e.g. ``1 minute`` (operators).
        item: column that is counted (operators).
        n: rows a window (``top_n``).
        max_items: items tracked a window (``top_n``): counts are exact up to about 3/4 of it.
        lg_k: log2 of the sketch's slots (``distinct``).
        channel: whether it is served to subscribers.
    """

    layer: str
    source: str
    sql: str
    operator: str = ""
    storage: str = "upsert"
    time: str = "received_at"
    window: str = "1 minute"
    item: str = ""
    n: int = 10
    max_items: int = 10_000
    lg_k: int = 12
    channel: bool = True
    name: str = ""

    def __post_init__(self) -> None:
        one_of("layer", self.layer, ("silver", "gold"))
        one_of("storage", self.storage, ("upsert", "append"))
        duration("window", self.window)
        if self.operator:
            one_of("operator", self.operator, OPERATORS)
            if not self.item:
                raise ConfigError("an operator needs the column it counts", key="item", remedy="Add item = '…'")
        if not 1 <= self.n <= 10_000:
            raise ConfigError("must be between 1 and 10000", key="n")
        if not 4 <= self.lg_k <= 21:
            raise ConfigError("must be between 4 and 21", key="lg_k")

    @property
    def window_ms(self) -> int:
        """Length of the window in milliseconds."""
        return duration_ms(self.window)

"""Which part of a pipeline a driver runs."""

from __future__ import annotations

from dataclasses import dataclass

from lakehouse.contract.pipeline import Pipeline, Product, Source

LIVE = ("silver", "gold")


@dataclass(frozen=True, slots=True)
class Stages:
    """Which part of a pipeline a driver runs.

    Attributes:
        bronze: Kafka to bronze.
        layers: products of these layers, from bronze.
    """

    bronze: bool = True
    layers: tuple[str, ...] = LIVE

    def products(self, pipeline: Pipeline, source: Source) -> list[Product]:
        """The products of a source that this driver keeps."""
        return [p for p in pipeline.products_of(source.name) if p.layer in self.layers]

    @property
    def rejected(self) -> bool:
        """Whether this driver keeps the rejected events too: one driver must, and quarantine is in silver."""
        return "silver" in self.layers

    def by_trigger(self, pipeline: Pipeline, source: Source) -> dict[int, list[Product]]:
        """Those products by the pause between their commits in ms, 0 (none) first: a set each."""
        found: dict[int, list[Product]] = {0: []} if self.rejected else {}
        for product in sorted(self.products(pipeline, source), key=lambda p: p.trigger_ms):
            found.setdefault(product.trigger_ms, []).append(product)
        return found

    def set_name(self, source: Source, trigger_ms: int = 0) -> str:
        """Name of the set of products of one trigger; each has an index of seen events of its own."""
        kind = "live" if self.layers == LIVE else "-".join(self.layers)
        return f"{kind}-{source.name}" + (f"-every-{trigger_ms}" if trigger_ms else "")

    def tables(self, pipeline: Pipeline, source: Source) -> list[str]:
        """Tables of a source that the driver writes, those that all sources share apart."""
        return [p.name for p in self.products(pipeline, source)] + ([source.name] if self.bronze else [])

    @property
    def derives_all(self) -> bool:
        """Whether this driver keeps the alerts and the queries that are added at run time: one driver must."""
        return "gold" in self.layers

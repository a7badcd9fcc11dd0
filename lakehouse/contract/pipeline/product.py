"""Products of the pipeline model: tables kept up to date, with the keys of every operator, and their channels."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from lakehouse.contract.envelope import TENANT
from lakehouse.contract.errors import ConfigError
from lakehouse.contract.pipeline.expectations import Check, checks_of
from lakehouse.contract.tomlfile import Milliseconds, at_least, between, duration_ms, durations, one_of

STATEFUL = ("sessions", "count_window", "drift", "join")
"""Operators whose rows are a state that later events go on from."""

DETECTORS: dict[str, dict[str, float]] = {
    "adwin": {"delta": 0.002, "clock": 32, "max_buckets": 5, "min_window_length": 5, "grace_period": 10},
    "page_hinkley": {"min_instances": 30, "delta": 0.005, "threshold": 50.0, "alpha": 0.9999},
    "kswin": {"alpha": 0.005, "window_size": 100, "stat_size": 30, "seed": 1},
}
"""Detectors of drift, and their parameters with the values they have by default."""

EVENTS = "events"
"""The operator whose rows are single events."""

OPERATORS = (
    *("top_n", "distinct", "frequency", "membership", "quantiles", "reservoir", "skew", "latest"),
    EVENTS,
    *STATEFUL,
)
"""Every operator; those of sketches and samples stand first."""

SKETCHES = ("top_n", "distinct", "frequency", "membership", "quantiles", "skew")
"""Operators whose rows carry a sketch."""

SHARED = "*"
"""Value of ``tenant`` for a table that every tenant may see."""

_WINDOWED = (*SKETCHES, "reservoir")
_REMEMBERING = ("sessions", "count_window", "drift")
_COUNTS_AN_ITEM = ("top_n", "distinct", "frequency", "membership", "quantiles")

TAKEN_BY: dict[str, tuple[str, ...]] = {
    "item": _COUNTS_AN_ITEM,
    "time": (*_WINDOWED, *_REMEMBERING),
    "window": _WINDOWED,
    "slide": _WINDOWED,
    "by": (*_WINDOWED, "latest", *_REMEMBERING),
    "version": ("latest",),
    "n": ("top_n", "reservoir", "sessions"),
    "max_items": ("top_n",),
    "lg_k": ("distinct",),
    "depth": ("frequency",),
    "width": ("frequency",),
    "range_bits": ("frequency",),
    "items": ("membership",),
    "fpp": ("membership",),
    "confirm": ("membership",),
    "quantiles": ("quantiles", "skew"),
    "k": ("quantiles", "skew"),
    "seed": ("reservoir",),
    "newest": (EVENTS,),
    "gap": ("sessions",),
    "clock": ("sessions",),
    "size": ("count_window",),
    "aggregates": ("sessions", "count_window"),
    "value": ("drift",),
    "detector": ("drift",),
    "parameters": ("drift",),
    "right": ("join",),
    "on": ("join",),
    "within": ("join",),
    "kind": ("join",),
    "match": ("join",),
}
"""Key of the TOML table to the operators that it says something to."""

MAX_WINDOWS = 1_000
"""Sliding windows that one event may lie in: each of them is written when the event comes."""
_MAX_FILTER_BITS = 2**29
_COLUMN = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,62}")
_CONFIRM = re.compile(r"[a-z][a-z0-9_]{0,62}\.[A-Za-z_][A-Za-z0-9_]{0,62}")


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


@dataclass(frozen=True, slots=True)
class Product:
    """A table kept up to date from one source.

    Attributes:
        name: key of the table in the TOML file; also the table's name.
        layer: ``silver`` or ``gold``.
        source: the source it derives from.
        sql: Spark SQL over the source's name, the text of the file named in the TOML: the whole product
            (without ``operator``) or the operator's input; empty: all events (``sessions``, ``count_window``,
            ``drift``).
        operator: one of :data:`OPERATORS`, or empty.
        storage: ``upsert`` (one row a key, the windows a batch touches are rewritten) or ``append`` (rows are
            partials, folded on read and by maintenance; for results of many keys).
        time: column of the input that a window stands on (operators).
        window: length of the window, e.g. ``1 minute`` (operators).
        slide: how far apart sliding windows start; empty: windows are tumbling (operators).
        by: columns of the input that divide a window into groups (operators); the key (``latest``).
        version: column of the input whose greatest value is a key's latest row (``latest``).
        lateness: an event that arrives (``received_at``) longer after its ``event_time`` is not added to this product;
            ``skew`` adds and counts it as too late. Empty: the source's, which is empty by default: never too late.
        item: column that is counted (operators).
        n: rows a window (``top_n``, ``reservoir``); elements of a list at most (``sessions``).
        max_items: items tracked a window (``top_n``): counts are exact up to about 3/4 of it.
        lg_k: log2 of the sketch's slots (``distinct``).
        depth: hash functions (``frequency``): an estimate is too high by more than ``2 / width`` of all with a
            probability of ``2^-depth``.
        width: counters of each of them.
        range_bits: items are integers from 0 to ``2^range_bits - 1``, and ranges of them can be asked for; 0: items
            are anything, and they cannot.
        items: distinct items expected a window and group (``membership``).
        fpp: share of false positives at that number.
        confirm: ``TABLE.COLUMN`` that holds the items for certain; empty: bronze is asked.
        quantiles: ranks whose values are columns (``quantiles``, ``skew``), e.g. 0.5 for ``p50``.
        k: accuracy of the sketch: 200 is 1.33 % of rank for a single quantile.
        seed: of the draw (``reservoir``): equal seeds draw equal events.
        newest: events that the table keeps at the least (``events``); older ones leave it.
        gap: a session ends when nothing came for so long (``sessions``).
        clock: ``events``: a session ends when a later event, of anybody, shows that the gap is over; ``wall``: also
            when nothing comes at all. Its rows have ``expires_at`` (``sessions``).
        size: events of a window (``count_window``).
        aggregates: column to Spark SQL aggregate over the rows of a session or window; ``count``, ``count_if``,
            ``sum``, ``min`` and ``max`` can be kept up to date, and in sessions ``collect_list``: the ``n`` greatest
            elements, greatest first.
        value: the numeric column that is watched (``drift``).
        detector: one of :data:`DETECTORS`.
        parameters: of the detector; what is left out has the detector's default.
        right: the other source (``join``); ``source`` is the left one.
        on: columns that must be equal, ``name`` or ``left_name = right_name``.
        within: the right event happens at the left one's ``event_time`` or up to so long after it.
        kind: ``inner``, or ``left_outer``: a left event that has no right one stands alone until one comes.
        match: ``all`` pairs, or ``first``: of the right events that fit a left one the earliest alone.
        trigger: at most one commit in so long; empty: a commit whenever there is something new.
        retention: windows that began longer ago, counted back from the newest event, and sessions, windows by count and
            alarms that ended longer ago are removed, and not added to any more; empty: never.
        channel: whether it is served to subscribers, and what of it.
        tenant: column that holds the tenant of each row, so that a tenant's key sees its own; ``*``: every tenant sees
            all rows; empty: for the default tenant only (:mod:`lakehouse.contract.pipeline.tenants`).
        positions: how long a subscriber's position in it lives: versions and files are kept for so long.
        expectations: what is expected of its rows and of the whole table (:attr:`checks`), by name.
    """

    layer: str
    source: str
    sql: str = ""
    operator: str = ""
    storage: str = "upsert"
    time: str = "received_at"
    window: str = "1 minute"
    slide: str = ""
    by: tuple[str, ...] = ()
    version: str = ""
    lateness: str = ""
    item: str = ""
    n: int = 10
    max_items: int = 10_000
    lg_k: int = 12
    depth: int = 8
    width: int = 128
    range_bits: int = 0
    items: int = 10_000
    fpp: float = 0.01
    confirm: str = ""
    quantiles: tuple[float, ...] = (0.5, 0.9, 0.99)
    k: int = 200
    seed: int = 0
    newest: int = 10_000
    gap: str = "30 minutes"
    clock: str = "events"
    size: int = 100
    aggregates: dict[str, str] = field(default_factory=dict, hash=False)
    value: str = ""
    detector: str = "adwin"
    parameters: dict[str, float] = field(default_factory=dict, hash=False)
    right: str = ""
    on: tuple[str, ...] = ()
    within: str = "10 minutes"
    kind: str = "inner"
    match: str = "all"
    trigger: str = ""
    retention: str = ""
    channel: ChannelSpec = EVERYTHING
    tenant: str = ""
    positions: str = "6 hours"
    expectations: dict[str, Any] = field(default_factory=dict, hash=False)
    name: str = ""

    positions_ms = Milliseconds("positions")
    window_ms = Milliseconds("window")
    gap_ms = Milliseconds("gap")
    within_ms = Milliseconds("within")
    trigger_ms = Milliseconds("trigger")

    def __post_init__(self) -> None:
        one_of("layer", self.layer, ("silver", "gold"))
        one_of("storage", self.storage, ("upsert", "append"))
        durations(self, "window", "slide", "lateness", "positions", "gap", "within", "trigger", "retention")
        checks_of(self.expectations, "expectations")
        at_least("window", self.window_ms, 1)
        if self.operator:
            one_of("operator", self.operator, OPERATORS)
        if not self.sql and self.operator not in _REMEMBERING:
            raise ConfigError("key 'sql' is missing", key="", remedy="Add sql = …")
        self._check_state()
        if self.operator in _COUNTS_AN_ITEM and not self.item:
            raise ConfigError("an operator needs the column it counts", key="item", remedy="Add item = '…'")
        if self.operator == "latest" and not (self.by and _COLUMN.fullmatch(self.version)):
            raise ConfigError(
                "latest needs its key and its version", key="version", remedy="Add by = […], version = '…'"
            )
        if self.operator in (*_WINDOWED, EVENTS) and self.storage == "append":
            raise ConfigError(
                f"{self.operator} does not keep partial rows", key="storage", remedy="Leave it out: upsert is meant"
            )
        self._check_slide()
        self._check_by()
        self._check_sizes()

    @property
    def checks(self) -> tuple[Check, ...]:
        return checks_of(self.expectations, f"products.{self.name}.expectations")

    @property
    def tenant_column(self) -> str:
        """Column that holds the tenant of each row, or :data:`SHARED`; empty: there is none."""
        return self.tenant or (TENANT if self.operator == EVENTS else "")

    @property
    def slide_ms(self) -> int:
        """Distance between the starts of two windows in milliseconds; of tumbling ones their length."""
        return duration_ms(self.slide) if self.slide else self.window_ms

    @property
    def lateness_ms(self) -> int | None:
        return duration_ms(self.lateness) if self.lateness else None

    @property
    def retention_ms(self) -> int | None:
        return duration_ms(self.retention) if self.retention else None

    @property
    def columns_on(self) -> tuple[tuple[str, str], ...]:
        """Pairs of left and right column that must be equal."""
        return tuple(
            (left.strip(), right.strip() or left.strip())
            for left, _, right in (text.partition("=") for text in self.on)
        )

    def _check_state(self) -> None:
        for key in ("gap", "within", "trigger", "retention"):
            if text := getattr(self, key):
                at_least(key, duration_ms(text), 1)
        at_least("size", self.size, 1)
        one_of("detector", self.detector, tuple(DETECTORS))
        one_of("kind", self.kind, ("inner", "left_outer"))
        one_of("clock", self.clock, ("events", "wall"))
        one_of("match", self.match, ("all", "first"))
        if self.operator in _REMEMBERING and self.storage != "upsert":
            raise ConfigError(f"{self.operator} keeps no partial rows", key="storage", remedy="Leave it out")
        if self.operator in ("sessions", "count_window") and not self.aggregates:
            remedy = "Add aggregates = { n = 'count(*)' }"
            raise ConfigError(f"{self.operator} needs what to keep", key="aggregates", remedy=remedy)
        if self.operator == "drift":
            self._check_drift()
        if self.operator == "join":
            self._check_join()
        for name in self.aggregates:
            if not _COLUMN.fullmatch(name):
                raise ConfigError(f"{name!r} is no column name", key="aggregates", remedy="Use [A-Za-z_][A-Za-z0-9_]*")

    def _check_drift(self) -> None:
        if not self.value:
            raise ConfigError("drift needs the column it watches", key="value", remedy="Add value = '…'")
        known = DETECTORS[self.detector]
        for name in self.parameters:
            if name not in known:
                raise ConfigError(
                    f"{self.detector} has no parameter {name!r}",
                    key="parameters",
                    remedy=f"Parameters: {', '.join(known)}",
                )

    def _check_join(self) -> None:
        if not self.right:
            raise ConfigError("a join needs its other source", key="right", remedy="Add right = '…'")
        if not self.on:
            raise ConfigError("a join needs the columns that must be equal", key="on", remedy="Add on = ['…']")
        for left, right in self.columns_on:
            for column in (left, right):
                if not _COLUMN.fullmatch(column):
                    raise ConfigError(
                        f"{column!r} is no column name", key="on", remedy="Write 'name' or 'left_name = right_name'"
                    )

    def _check_slide(self) -> None:
        if not self.slide:
            return
        if not 0 < self.slide_ms <= self.window_ms:
            raise ConfigError(
                "windows that start further apart than they are long leave events out",
                key="slide",
                remedy=f"Use more than 0 and at most the window, {self.window!r}",
            )
        if math.ceil(self.window_ms / self.slide_ms) > MAX_WINDOWS:
            raise ConfigError(
                f"each event would lie in more than {MAX_WINDOWS} windows", key="slide", remedy="Use a longer one"
            )

    def _check_by(self) -> None:
        for key in ("item", "time"):
            if "`" in getattr(self, key):
                raise ConfigError(f"{getattr(self, key)!r} is no column name", key=key, remedy="Leave the quotes out")
        for column in self.by:
            if not _COLUMN.fullmatch(column):
                raise ConfigError(f"{column!r} is no column name", key="by", remedy="Name it in the SQL: … AS city")
            if column == self.item or column == self.time:
                raise ConfigError(f"{column!r} is the item or the time already", key="by", remedy="Use other columns")
        if len(set(self.by)) < len(self.by):
            raise ConfigError("a column is named twice", key="by")

    def _check_sizes(self) -> None:
        between("n", self.n, 1, 10_000)
        between("max_items", self.max_items, 1, 1_000_000)
        between("lg_k", self.lg_k, 4, 21)
        between("depth", self.depth, 1, 64)
        between("width", self.width, 3, 1_000_000)
        between("newest", self.newest, 1, 1_000_000)
        between("range_bits", self.range_bits, 0, 40)
        between("k", self.k, 8, 65_535)
        between("items", self.items, 1, 10**9)
        if not 0 < self.fpp < 1:
            raise ConfigError("must lie between 0 and 1", key="fpp", remedy="Use e.g. 0.01")
        if -self.items * math.log(self.fpp) / math.log(2) ** 2 > _MAX_FILTER_BITS:
            raise ConfigError(
                "the filter would be larger than 64 MiB", key="items", remedy="Use fewer, a larger fpp, or groups"
            )
        if self.confirm and not _CONFIRM.fullmatch(self.confirm):
            raise ConfigError(f"{self.confirm!r} is not TABLE.COLUMN", key="confirm", remedy="Write e.g. 'people.id'")
        if not 1 <= len(self.quantiles) <= 50 or not all(0 <= rank <= 1 for rank in self.quantiles):
            raise ConfigError("must be 1 to 50 ranks from 0 to 1", key="quantiles", remedy="Use e.g. [0.5, 0.99]")
        if len(set(self.quantiles)) < len(self.quantiles):
            raise ConfigError("a rank is named twice", key="quantiles")


def check_product_keys(products: Mapping[str, Product], tables: Mapping[str, Any]) -> None:
    """Refuse, by ConfigError, keys in the products' TOML tables that say nothing to their operator.

    The dataclass no longer knows which keys were given.
    """
    for name, product in products.items():
        operator = product.operator
        for key in tables[name]:
            takers = TAKEN_BY.get(key)
            if takers is None or operator in takers:
                continue
            if not operator and key in ("time", "window", "slide", "by", "item"):
                remedy = "Say it in the SQL, e.g. GROUP BY window(event_time, '1 minute'), or name an operator"
            else:
                remedy = f"It belongs to: {', '.join(takers)}"
            problem = f"says nothing to {operator or 'plain SQL'}"
            raise ConfigError(problem, key=f"products.{name}.{key}", remedy=remedy)


def sketch_property(product: Product) -> str:
    """What a table says of its sketches in JSON, so that they are read without the pipeline."""
    said = ("operator", "source", "item", "by", "window", "slide", *_SKETCH_KEYS[product.operator])
    return json.dumps({name: getattr(product, name) for name in said if getattr(product, name)})


_SKETCH_KEYS: dict[str, tuple[str, ...]] = {
    "top_n": ("max_items",),
    "distinct": ("lg_k",),
    "frequency": ("depth", "width", "range_bits"),
    "membership": ("items", "fpp", "confirm"),
    "quantiles": ("k", "quantiles"),
    "skew": ("k", "quantiles"),
}

"""Which rows a tenant sees: the border between tenants, for the server and the collectors alike.

``tenant = "COLUMN"`` in a product or view names the column that holds the tenant of each row, ``tenant = "*"`` shares
the table with every tenant on purpose. Tables that declare neither belong to the default tenant. Nothing is inherited,
but a staging table is a copy of rows and follows its product.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lakehouse.contract.envelope import TENANT
from lakehouse.contract.errors import ConfigError
from lakehouse.contract.lake import ALERTS, QUARANTINE, WARNINGS
from lakehouse.contract.pipeline.product import EVENTS, SHARED, Product

if TYPE_CHECKING:
    from lakehouse.contract.pipeline.folder import Pipeline


@dataclass(frozen=True, slots=True)
class TenantBorder:
    """The border of one lake.

    Attributes:
        home: the default tenant.
        columns: by table the column that holds the tenant, or :data:`~lakehouse.contract.pipeline.product.SHARED`.
    """

    home: str = "default"
    columns: dict[str, str] = field(default_factory=dict)

    def limit(self, tenant: str, table: str) -> str | None:
        """What a tenant sees of a table: every decision about tenants is made here.

        Args:
            tenant: empty: the operator, who sees everything.

        Returns:
            The column that must hold the tenant in each row that it sees. Empty: it sees every row. None: the table
            does not exist for it.
        """
        column = self.columns.get(table, "")
        if not tenant or column == SHARED:
            return ""
        return column or ("" if tenant == self.home else None)


UNDECLARED = TenantBorder()
"""The border where no pipeline says anything: everything is the default tenant's."""


def border_of(pipeline: Pipeline, home: str) -> TenantBorder:
    """The border that a pipeline declares."""
    columns = {**dict.fromkeys(pipeline.sources, TENANT), QUARANTINE: TENANT, WARNINGS: TENANT, ALERTS: TENANT}
    columns |= {name: product.tenant_column for name, product in pipeline.products.items()}
    columns |= {name: view.tenant for name, view in pipeline.views.items()}
    for name, copy in pipeline.staging.items():
        column = columns[copy.product]
        key = pipeline.views[copy.product].key if copy.product in pipeline.views else (column,)
        columns[name] = column if column == SHARED or not copy.columns or column in (*copy.columns, *key) else ""
    return TenantBorder(home, {name: column for name, column in columns.items() if column})


def check_tenants(pipeline: Pipeline) -> None:
    """Refuse, by ConfigError, a tenant column that could hold another tenant than the one that sent the events."""
    for product in pipeline.products.values():
        check_tenant(product)
    for name, view in pipeline.views.items():
        column, key = view.tenant, f"products.{name}.tenant"
        if column in ("", SHARED):
            continue
        base = pipeline.products.get(view.base)
        origin = base.tenant_column if base is not None else pipeline.views[view.base].tenant
        if origin in ("", SHARED):
            remedy = f"Declare products.{view.base}.tenant = 'COLUMN' first"
            raise ConfigError(f"{view.base} declares no column of tenants", key=key, remedy=remedy)
        _check_passes(view.sql, column, origin, key)


def check_tenant(product: Product) -> None:
    """Refuse, by ConfigError, a product with rows of several tenants, or with other names in its tenant column."""
    column, key = product.tenant, f"products.{product.name}.tenant"
    if column in ("", SHARED):
        return
    if product.operator == EVENTS and column != TENANT:
        raise ConfigError("single events carry their tenant in 'tenant'", key=key, remedy="Leave it out, or write '*'")
    if product.operator == "join" and (TENANT, TENANT) not in product.columns_on:
        raise ConfigError("it joins events of different tenants", key=key, remedy=f"Add {TENANT!r} to on")
    if product.operator not in ("", "join", EVENTS) and column not in product.by:
        raise ConfigError(f"its rows are not kept by {column!r}", key=key, remedy=f"Add {column!r} to by")
    if product.operator != EVENTS:
        _check_passes(product.sql, column, TENANT, key)


def _check_passes(sql: str, column: str, origin: str, key: str) -> None:
    """Refuse SQL whose result column ``column`` is not the input's ``origin``, untouched."""
    import sqlglot  # here: collectors need no parser
    from sqlglot import exp

    from lakehouse.contract.sql.spark import spark_text

    try:
        tree = sqlglot.parse_one(spark_text(sql or "SELECT *"), dialect="spark")
    except (sqlglot.errors.SqlglotError, RecursionError):
        return  # the check of the SQL itself says so
    selects = list(tree.find_all(exp.Select))
    outer = [item for item in getattr(tree, "selects", ()) if item.is_star or item.alias_or_name == column]
    changed = [
        item
        for select in selects
        for item in select.expressions
        if item.alias_or_name in (column, origin)
        and not (isinstance(item.unalias(), exp.Column) and item.unalias().name in (column, origin))
    ]
    if not outer or changed or (all(item.is_star for item in outer) and column != origin):
        remedy = f"Select {origin}{f' AS {column}' if column != origin else ''} as it is; in an aggregate group by it"
        raise ConfigError(f"its rows do not carry the tenant in {column!r}", key=key, remedy=remedy)

"""What a pipeline says of tenants, and what each tenant sees by it."""

from __future__ import annotations

from pathlib import Path

import pytest

from lakehouse.contract.errors import ConfigError
from lakehouse.contract.pipeline import Pipeline, load_pipeline
from lakehouse.contract.pipeline.tenants import TenantBorder, border_of

SOURCES = """
[sources.rides]
topic = "rides"
schema = "ride_id BIGINT, at BIGINT, city STRING, amount DOUBLE"
event_id = "{ride_id}"
event_time = "timestamp_millis(at)"

[sources.refunds]
topic = "refunds"
schema = "refund_id BIGINT, at BIGINT, ride_id BIGINT"
event_id = "{refund_id}"
event_time = "timestamp_millis(at)"
"""
BY_CITY = "SELECT tenant, city, count(*) AS n FROM rides GROUP BY tenant, city"


def pipeline(folder: Path, text: str) -> Pipeline:
    (folder / "pipeline.toml").write_text(SOURCES + text)
    return load_pipeline(folder)


def product(sql: str = BY_CITY, tenant: str = "tenant", more: str = "") -> str:
    return f'[products.p]\nlayer = "gold"\nsource = "rides"\nsql = "{sql}"\ntenant = "{tenant}"\n{more}\n'


def view(sql: str, tenant: str) -> str:
    return f'[products.v]\nfrom = "p"\nsql = "{sql}"\nkey = ["city"]\ntenant = "{tenant}"\n'


def test_a_border_by_column_shared_or_neither() -> None:
    border = TenantBorder("home", {"mine": "owner", "all": "*"})
    assert [border.limit("acme", table) for table in ("mine", "all", "other")] == ["owner", "", None]
    assert [border.limit("home", table) for table in ("mine", "all", "other")] == ["owner", "", ""]
    assert [border.limit("", table) for table in ("mine", "all", "other")] == ["", "", ""], "the operator sees all"


def test_every_kind_of_table_has_its_place_in_the_border(tmp_path: Path) -> None:
    found = pipeline(
        tmp_path,
        product()
        + view("SELECT tenant AS owner, city, n FROM p", "owner")
        + '[products.house]\nlayer = "gold"\nsource = "rides"\nsql = "SELECT city, count(*) n FROM rides GROUP BY 1"\n'
        + '[products.latest]\nlayer = "gold"\nsource = "rides"\noperator = "latest"\nby = ["tenant", "city"]\n'
        + 'version = "at"\nsql = "SELECT * FROM rides"\ntenant = "tenant"\n'
        + '[staging.copy]\nproduct = "p"\ncolumns = ["n"]\n[staging.blind]\nproduct = "v"\ncolumns = ["n"]\n',
    )
    border = border_of(found, "default")
    tables = ("rides", "quarantine", "warnings", "alerts", "p", "v", "latest", "copy")
    assert [border.limit("acme", table) for table in tables] == [*["tenant"] * 5, "owner", "tenant", "tenant"]
    for table in ("house", "blind", "quality", "loads", "unheard_of"):
        assert border.limit("acme", table) is None, table


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (product("SELECT city, count(*) AS n FROM rides GROUP BY city"), "do not carry the tenant"),
        (product("SELECT max(tenant) AS tenant, city, count(*) AS n FROM rides GROUP BY city"), "do not carry"),
        (product("SELECT city AS tenant, count(*) AS n FROM rides GROUP BY city"), "do not carry"),
        (
            product("SELECT tenant, count(*) AS n FROM (SELECT 'acme' AS tenant FROM rides) GROUP BY tenant"),
            "do not carry",
        ),
        (product("SELECT * FROM rides", more='operator = "top_n"\nitem = "city"'), "not kept by 'tenant'"),
        (product("SELECT city FROM rides", more='operator = "top_n"\nitem = "city"\nby = ["tenant"]'), "do not carry"),
        (
            product(
                "SELECT rides.tenant, count(*) AS n FROM joined GROUP BY rides.tenant",
                more='operator = "join"\nright = "refunds"\non = ["ride_id"]',
            ),
            "joins events of different tenants",
        ),
        (product(tenant="*") + view("SELECT tenant, city, n FROM p", "tenant"), "p declares no column of tenants"),
        (product() + view("SELECT upper(tenant) AS tenant, city, n FROM p", "tenant"), "do not carry"),
    ],
)
def test_a_column_that_could_hold_something_else_is_refused(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        pipeline(tmp_path, text)
    assert caught.value.key in ("products.p.tenant", "products.v.tenant")
    assert caught.value.line and caught.value.remedy and caught.value.file == tmp_path / "pipeline.toml"


def test_a_join_of_one_tenants_events_is_taken(tmp_path: Path) -> None:
    text = product(
        "SELECT rides.tenant, count(*) AS n FROM joined GROUP BY rides.tenant",
        more='operator = "join"\nright = "refunds"\non = ["ride_id", "tenant"]',
    )
    assert border_of(pipeline(tmp_path, text), "default").limit("acme", "p") == "tenant"

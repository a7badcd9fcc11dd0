"""What is refused of operators when the driver starts."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from lakehouse.contract.pipeline import Product
from lakehouse.errors import BadProduct
from lakehouse.operators.registry import operator_of
from tests.lakehouse.operators.partials import product


@pytest.mark.parametrize(
    ("operator", "options", "says"),
    [
        ("top_n", {"by": ("rank",)}, "column rank would stand for two things"),
        ("distinct", {"by": ("upper",)}, "column upper"),
        ("distinct", {"by": ("p",)}, "column p"),
        ("membership", {"by": ("r",)}, "column r"),
        ("quantiles", {"by": ("window_start",)}, "column window_start"),
        ("frequency", {"by": ("sketch_2",), "range_bits": 3}, "column sketch_2"),
        ("reservoir", {"sql": "SELECT t, city FROM r"}, "does not select event_id"),
        ("reservoir", {"sql": "SELECT t, city, event_id, explode(tags) AS tag FROM r"}, "several rows of an event"),
        ("reservoir", {"sql": "SELECT t, city, event_id, inline(tags) FROM r"}, "several rows of an event"),
        ("reservoir", {"sql": "SELECT * FROM r LATERAL VIEW explode(tags) x AS tag"}, "several rows of an event"),
        ("reservoir", {"sql": "SELECT * FROM r UNION ALL SELECT * FROM r"}, "several rows of an event"),
        ("reservoir", {"sql": "SELECT t, city, event_id, x AS seen FROM r"}, "column seen"),
        ("distinct", {"sql": "SELECT DISTINCT t, city, item FROM r"}, "row by row"),
    ],
)
def test_products_that_cannot_be_kept(operator: str, options: dict[str, Any], says: str) -> None:
    given = {"sql": "SELECT t, city, item, event_id FROM r", **options}
    item = {} if operator == "reservoir" else {"item": "item"}
    declared = Product("gold", "r", operator=operator, time="t", name="p", **{"by": ("city",), **item, **given})
    with pytest.raises(BadProduct, match=says) as caught:
        operator_of(declared)
    assert caught.value.name == "p"


@pytest.mark.parametrize("kind", [pa.float64(), pa.list_(pa.string()), pa.struct([("a", pa.int64())])])
def test_groups_that_do_not_compare(kind: pa.DataType) -> None:
    with pytest.raises(BadProduct, match="it groups by city"):
        operator_of(product("distinct")).describe(pa.schema([("city", kind)]))

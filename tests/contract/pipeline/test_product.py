"""Operators' keys: values that cannot be, keys that say nothing, and what a product takes from its source."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lakehouse.contract.errors import ConfigError
from lakehouse.contract.pipeline import Pipeline, load_pipeline
from lakehouse.contract.pipeline import product as product_module
from lakehouse.contract.pipeline.product import SKETCHES, sketch_property

SOURCE = """
[sources.clicks]
topic = "clicks"
schema = "id BIGINT"
event_time = "received_at"
"""
PRODUCT = """
[products.p]
layer = "gold"
source = "clicks"
sql = "SELECT 1"
"""
TOP = 'operator = "top_n"\nitem = "x"\n'


def load(folder: Path, product: str, source: str = "") -> Pipeline:
    (folder / "pipeline.toml").write_text(SOURCE + source + PRODUCT + product, encoding="utf-8")
    return load_pipeline(folder)


@pytest.mark.parametrize(
    ("product", "key", "says"),
    [
        (TOP + 'window = "0 s"', "window", "at least 1"),
        (TOP + 'slide = "2 minutes"', "slide", "leave events out"),
        (TOP + 'slide = "0 s"', "slide", "leave events out"),
        (TOP + 'slide = "1 ms"', "slide", "more than 1000 windows"),
        (TOP + 'slide = "soon"', "slide", "not a duration"),
        (TOP + 'by = ["a b"]', "by", "no column name"),
        (TOP + 'by = ["x"]', "by", "the item or the time"),
        (TOP + 'by = ["received_at"]', "by", "the item or the time"),
        (TOP + 'by = ["a", "a"]', "by", "named twice"),
        (TOP + 'storage = "append"', "storage", "does not keep partial rows"),
        (TOP + 'time = "`t`"', "time", "no column name"),
        (TOP + "max_items = 0", "max_items", "between 1 and 1000000"),
        (TOP + 'lateness = "never"', "lateness", "not a duration"),
        ('operator = "quantiles"', "item", "needs the column"),
        ('operator = "quantiles"\nitem = "x"\nquantiles = []', "quantiles", "1 to 50 ranks"),
        ('operator = "quantiles"\nitem = "x"\nquantiles = [50]', "quantiles", "from 0 to 1"),
        ('operator = "quantiles"\nitem = "x"\nquantiles = [0.5, 0.5]', "quantiles", "named twice"),
        ('operator = "quantiles"\nitem = "x"\nk = 1', "k", "between 8 and 65535"),
        ('operator = "frequency"\nitem = "x"\ndepth = 0', "depth", "between 1 and 64"),
        ('operator = "frequency"\nitem = "x"\nwidth = 2', "width", "between 3"),
        ('operator = "frequency"\nitem = "x"\nrange_bits = 64', "range_bits", "between 0 and 40"),
        ('operator = "membership"\nitem = "x"\nfpp = 1.0', "fpp", "between 0 and 1"),
        ('operator = "membership"\nitem = "x"\nitems = 900_000_000', "items", "larger than 64 MiB"),
        ('operator = "membership"\nitem = "x"\nconfirm = "people"', "confirm", "not TABLE.COLUMN"),
        ('operator = "membership"\nitem = "x"\nconfirm = "people.id"', "confirm", "no product 'people'"),
        # Keys of another operator, the defaults among them.
        ('operator = "distinct"\nitem = "x"\nn = 10', "n", "says nothing to distinct"),
        (TOP + "lg_k = 12", "lg_k", "says nothing to top_n"),
        (TOP + "seed = 0", "seed", "says nothing to top_n"),
        ('operator = "skew"\nitem = "x"', "item", "says nothing to skew"),
        ('operator = "reservoir"\nmax_items = 5', "max_items", "says nothing to reservoir"),
        ('window = "5 minutes"', "window", "says nothing to plain SQL"),
        ('by = ["city"]', "by", "says nothing to plain SQL"),
    ],
)
def test_what_is_refused(tmp_path: Path, product: str, key: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        load(tmp_path, product)
    assert caught.value.key == f"products.p.{key}"
    assert caught.value.file == tmp_path / "pipeline.toml"


def test_the_line_of_a_key_that_says_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="It belongs to: top_n, reservoir") as caught:
        load(tmp_path, 'operator = "distinct"\nitem = "x"\nn = 3')
    assert caught.value.line == (SOURCE + PRODUCT).count("\n") + 3


def test_lateness_comes_from_the_source_unless_the_product_says_otherwise(tmp_path: Path) -> None:
    assert load(tmp_path, TOP).products["p"].lateness_ms is None
    assert load(tmp_path, TOP, 'lateness = "1 hour"\n').products["p"].lateness_ms == 3_600_000
    assert load(tmp_path, TOP + 'lateness = "2 s"', 'lateness = "1 hour"\n').products["p"].lateness_ms == 2_000
    with pytest.raises(ConfigError, match="not a duration") as caught:
        load(tmp_path, TOP, 'lateness = "long"\n')
    assert caught.value.key == "sources.clicks.lateness"


@pytest.mark.parametrize("operator", SKETCHES)
def test_a_table_says_what_its_sketches_are(tmp_path: Path, operator: str) -> None:
    item = "" if operator == "skew" else 'item = "x"\n'
    product = load(tmp_path, f'operator = "{operator}"\n{item}slide = "30 s"\nby = ["a"]').products["p"]
    said = json.loads(sketch_property(product))
    assert (said["operator"], said["source"], said["by"]) == (operator, "clicks", ["a"])
    assert (said["window"], said["slide"]) == ("1 minute", "30 s")
    assert len(said) > 5  # and what the sketch itself depends on


def test_every_key_of_an_operator_is_in_the_docs() -> None:
    docs = Path(__file__).parents[3] / "docs" / "guide"
    text = "".join((docs / name).read_text(encoding="utf-8") for name in ("pipelines.md", "operators.md"))
    keys = [key for key, takers in product_module.TAKEN_BY.items() if set(takers) & {*SKETCHES, "reservoir"}]
    assert [key for key in [*keys, "lateness"] if f"`{key}`" not in text and f"\n{key} = " not in text] == []

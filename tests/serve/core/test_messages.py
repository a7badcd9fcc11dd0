from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal

import orjson
import pyarrow as pa
import pytest

from serve.core.messages import encode_rows, is_binary, rows_of

CASES = [
    (pa.array([datetime(2026, 1, 1, 12, tzinfo=UTC)], pa.timestamp("us", "UTC")), b'"2026-01-01T12:00:00Z"'),
    (
        pa.array([datetime(2026, 1, 1, 12, 0, 0, 5, tzinfo=UTC)], pa.timestamp("us", "UTC")),
        b'"2026-01-01T12:00:00.000005Z"',
    ),
    (pa.array([0], pa.timestamp("ns")), b'"1970-01-01T00:00:00Z"'),
    (pa.array([date(2026, 1, 1)]), b'"2026-01-01"'),
    (pa.array([2**62]), b"4611686018427387904"),
    (pa.array([Decimal(10**30)], pa.decimal128(38, 0)), b"1" + b"0" * 30),
    (pa.array([Decimal("1.50")], pa.decimal128(5, 2)), b"1.50"),
    (pa.array([1.5]), b"1.5"),
    (pa.array([float("nan")]), b"null"),
    (pa.array([float("-inf")]), b"null"),
    (pa.array([None], pa.string()), b"null"),
    (pa.array(['Zürich "x"']), '"Zürich \\"x\\""'.encode()),
    (pa.array([True]), b"true"),
    (pa.array([[{"b": b"\x00\xff"}]]), b'[{"b":"AP8="}]'),
]


@pytest.mark.parametrize(("values", "text"), CASES, ids=lambda value: str(getattr(value, "type", "")))
def test_how_a_value_looks(values: pa.Array, text: bytes) -> None:
    [encoded] = encode_rows(["v"], rows_of(pa.table({"v": values})))
    assert encoded == b'{"v":' + text + b"}"
    orjson.loads(encoded)


def test_integers_beyond_64_bits_are_numbers_too() -> None:
    expected = [b'{"a":1,"b":"y"}', b'{"a":1180591620717411303424,"b":"x"}']
    rows = [(1, "y"), (2**70, "x")]
    assert encode_rows(["a", "b"], rows) == expected
    assert encode_rows(["a", "b"], (row for row in rows)) == expected, "rows that come once only"


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary(), pa.binary(4), pa.binary_view()])
def test_binary_columns_are_not_sent(kind: pa.DataType) -> None:
    assert is_binary(kind)
    assert not is_binary(pa.string())

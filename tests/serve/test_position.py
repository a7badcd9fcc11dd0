from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.errors import PositionError
from serve.position import Position

TABLE = "7538c0f5-cab9-44b3-aba7-6aa825adf763"
IDS = st.one_of(st.uuids().map(str), st.text(min_size=1, max_size=40).filter(lambda text: len(text.encode()) <= 100))


@given(IDS, st.integers(0, 2**63 - 1), st.integers(0, 2**32 - 1))
def test_a_token_stands_for_its_position(table_id: str, version: int, ordinal: int) -> None:
    position = Position(table_id, version, ordinal)
    assert Position.parse(position.token()) == position


def test_a_token_needs_no_escaping_in_an_address() -> None:
    assert Position(TABLE, 2**40, 7).token().replace("-", "a").replace("_", "a").isalnum()


@given(st.text(max_size=60))
def test_garbage_is_a_clear_error_or_a_position(text: str) -> None:
    try:
        position = Position.parse(text)
    except PositionError as error:
        assert "is not a position" in str(error)
    else:
        assert Position.parse(position.token()) == position


@pytest.mark.parametrize("token", ["", "AQ", "x" * 500, "AQAAAA=", "_" * 40, "1:2:3"])
def test_what_is_no_token(token: str) -> None:
    with pytest.raises(PositionError):
        Position.parse(token)


def test_positions_are_in_order_of_delivery() -> None:
    assert Position(TABLE, 4) < Position(TABLE, 4, 1) < Position(TABLE, 4, 2) < Position(TABLE, 5)

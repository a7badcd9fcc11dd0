from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lakehouse.contract.errors import EnvironmentProblem
from serve.core.position import KEY_FILE, Position, Seal, lake_seal
from serve.errors import RequestError

SEAL = Seal(b"of the test")
TABLE = "7538c0f5-cab9-44b3-aba7-6aa825adf763"
IDS = st.one_of(st.uuids().map(str), st.text(min_size=1, max_size=40).filter(lambda text: len(text.encode()) <= 100))


@given(IDS, st.integers(0, 2**63 - 1), st.integers(0, 2**32 - 1))
def test_a_token_stands_for_its_position(table_id: str, version: int, ordinal: int) -> None:
    position = Position(table_id, version, ordinal)
    assert SEAL.parse(SEAL.token(position)) == position


def test_a_token_needs_no_escaping_in_an_address() -> None:
    assert SEAL.token(Position(TABLE, 2**40, 7)).replace("-", "a").replace("_", "a").isalnum()


@given(st.text(max_size=60))
def test_garbage_is_a_clear_error_or_a_position(text: str) -> None:
    try:
        position = SEAL.parse(text)
    except RequestError as error:
        assert "is not a position" in str(error)
    else:
        assert SEAL.parse(SEAL.token(position)) == position


@pytest.mark.parametrize("token", ["", "AQ", "x" * 500, "AQAAAA=", "_" * 40, "1:2:3"])
def test_what_is_no_token(token: str) -> None:
    with pytest.raises(RequestError):
        SEAL.parse(token)


def test_positions_are_in_order_of_delivery() -> None:
    assert Position(TABLE, 4) < Position(TABLE, 4, 1) < Position(TABLE, 4, 2) < Position(TABLE, 5)


def test_a_position_is_of_its_lake_and_whole() -> None:
    token = SEAL.token(Position(TABLE, 4, 1, b"12345678"))
    assert SEAL.parse(token).view == b"12345678"
    with pytest.raises(RequestError, match="signature"):
        Seal(b"of another").parse(token)
    for at in range(0, len(token), 7):
        changed = token[:at] + ("A" if token[at] != "A" else "B") + token[at + 1 :]
        with pytest.raises(RequestError):
            SEAL.parse(changed)


def test_the_key_is_made_once_for_all_processes_and_readable_by_its_owner_only(tmp_path: Path) -> None:
    state = tmp_path / "lake" / "_millrace"
    with ThreadPoolExecutor(8) as pool:
        seals = list(pool.map(lambda _: lake_seal(state), range(16)))
    tokens = {seal.token(Position(TABLE, 1)) for seal in seals}
    assert len(tokens) == 1
    assert (state / KEY_FILE).stat().st_mode & 0o777 == 0o600
    assert [path.name for path in state.iterdir()] == [KEY_FILE]
    assert "key" not in repr(seals[0]).lower()


def test_a_key_that_is_too_short_is_a_clear_problem(tmp_path: Path) -> None:
    (tmp_path / KEY_FILE).write_bytes(b"short")
    (tmp_path / KEY_FILE).chmod(0o600)
    with pytest.raises(EnvironmentProblem, match="5 bytes"):
        lake_seal(tmp_path)

from __future__ import annotations

from typing import Any

import pytest

from serve.client import BadMessage, Change, Snapshot
from serve.client.subscription import Assembler


def snapshot(rows: list[Any], *, first: bool, last: bool) -> dict[str, Any]:
    content = {
        "type": "snapshot",
        "table": "t",
        "key": ["k"],
        "position": "p",
        "rows": rows,
        "first": first,
        "last": last,
    }
    return content | {"through": None, "committed_at": 1}


def change(position: str, upserts: list[Any], *, last: bool) -> dict[str, Any]:
    content = {"type": "change", "table": "t", "position": position, "upserts": upserts, "deletes": [], "last": last}
    return content | {"through": None, "committed_at": 1, "events": 0}


def test_parts_become_one_message() -> None:
    assembler = Assembler()
    assert assembler.received(snapshot([{"k": 1}], first=True, last=False)) is None
    whole = assembler.received(snapshot([{"k": 2}], first=False, last=True))
    assert isinstance(whole, Snapshot)
    assert (whole.rows, whole.key) == ([{"k": 1}, {"k": 2}], ("k",))
    assert assembler.received(change("q", [{"k": 3}], last=False)) is None
    commit = assembler.received(change("r", [{"k": 4}], last=True))
    assert isinstance(commit, Change)
    assert (commit.position, commit.upserts, commit.key) == ("r", [{"k": 3}, {"k": 4}], ("k",))


def test_a_new_snapshot_voids_half_a_one() -> None:
    assembler = Assembler()
    assembler.received(snapshot([{"k": 1}], first=True, last=False))
    whole = assembler.received(snapshot([{"k": 2}], first=True, last=True))
    assert whole is not None
    assert isinstance(whole, Snapshot)
    assert whole.rows == [{"k": 2}]


def test_unknown_messages_are_passed_over() -> None:
    assert Assembler().received({"type": "news", "x": 1}) is None


@pytest.mark.parametrize("content", [{}, {"type": "snapshot"}, {"type": "change", "upserts": []}, {"type": "resumed"}])
def test_what_is_no_message(content: dict[str, Any]) -> None:
    with pytest.raises(BadMessage):
        Assembler().received(content)

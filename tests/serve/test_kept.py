from __future__ import annotations

from serve.http.rows import ENTRY_BYTES, ByteCache


def test_the_least_used_go_when_there_are_too_many_bytes() -> None:
    kept: ByteCache[str] = ByteCache(4 * (100 + ENTRY_BYTES))
    for name in "abcd":
        kept.put(name, name.encode() * 100)
    assert kept.get("a") == b"a" * 100
    kept.put("e", b"e" * 100)
    assert [name for name in "abcde" if kept.get(name) is None] == ["b"]
    kept.put("f", b"f" * (100 + ENTRY_BYTES + 1))
    assert kept.get("f") is None, "one that would push out a quarter of the others"


def test_answers_without_a_body_count_too() -> None:
    kept: ByteCache[int] = ByteCache(10 * ENTRY_BYTES)
    for number in range(100):
        kept.put(number, b"")
    assert [number for number in range(100) if kept.get(number) is not None] == list(range(90, 100))

from __future__ import annotations

import os
from pathlib import Path

import pytest

from serve.client import ClientError, FileStore, MemoryStore, SqliteStore


async def test_a_file_holds_the_last_position(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "p")
    assert await store.load() is None
    await store.save("a")
    await store.save("b")
    assert await FileStore(tmp_path / "p").load() == "b"
    assert os.listdir(tmp_path) == ["p"], "no temporary file is left"


@pytest.mark.parametrize("content", ["", "[]", "{}", "x"])
async def test_another_file_is_not_taken_for_one(tmp_path: Path, content: str) -> None:
    (tmp_path / "p").write_text(content)
    with pytest.raises(ClientError, match="holds no position"):
        await FileStore(tmp_path / "p").load()


async def test_a_failed_save_leaves_the_old_position(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FileStore(tmp_path / "p")
    await store.save("a")

    def full(_: int) -> None:
        raise OSError(28, "no space left")

    monkeypatch.setattr("serve.client.stores.os.fsync", full)
    with pytest.raises(OSError, match="no space"):
        await store.save("b")
    assert await store.load() == "a"
    assert os.listdir(tmp_path) == ["p"]


async def test_memory() -> None:
    store = MemoryStore("a")
    assert await store.load() == "a"
    await store.save("b")
    assert await store.load() == "b"


async def test_a_database_holds_positions_by_name(tmp_path: Path) -> None:
    store, other = SqliteStore(tmp_path / "db", "a"), SqliteStore(tmp_path / "db", "b")
    assert await store.load() is None
    await store.save("1")
    await store.save("2")
    await other.save("9")
    store.close()
    assert await SqliteStore(tmp_path / "db", "a").load() == "2"
    other.close()
    assert (tmp_path / "db").stat().st_mode & 0o077 == 0, "nobody else may read it"
    with pytest.raises(ClientError, match="absent"):
        await SqliteStore(tmp_path / "absent" / "db").load()
    (tmp_path / "text").write_text("x" * 4096)
    with pytest.raises(ClientError, match="text: file is not a database"):
        await SqliteStore(tmp_path / "text").load()

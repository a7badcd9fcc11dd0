"""Secrets of webhooks as they are kept."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from lakehouse.contract.errors import ConfigError
from serve.webhooks.sealed import PlainSealer, SecretSealer, sealer_of
from serve.webhooks.store import Webhook, WebhookStore
from tests.serve.lakes import top_topics, topics, window
from tests.serve.webhooks.test_webhooks import added, hooked

SECRET = "whsec_" + "c2VjcmV0" * 4


def secrets_of(folder: Path, sealer: SecretSealer | None = None) -> list[str]:
    store = WebhookStore(folder, 10, sealer)
    try:
        return [hook.secret for hook in store.all().values()]
    finally:
        store.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A store that holds a secret as it is, from before there was a key."""
    store = WebhookStore(tmp_path / "webhooks", 10)
    assert store.add(Webhook("wh_1", "", "t", "https://x", SECRET), "", 10)
    store.close()
    return tmp_path / "webhooks"


def on_disk(folder: Path) -> bytes:
    return b"".join(file.read_bytes() for file in folder.iterdir())


def test_what_was_kept_as_it_is_is_encrypted_at_the_next_start(folder: Path, tmp_path: Path) -> None:
    assert SECRET.encode() in on_disk(folder)
    sealer = sealer_of(str(tmp_path / "key"))
    assert secrets_of(folder, sealer) == [SECRET]
    (kept,) = raw(folder)
    assert kept.startswith("fernet:")
    assert SECRET.encode() not in on_disk(folder)
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600
    assert secrets_of(folder, sealer_of(str(tmp_path / "key"))) == [SECRET]  # another process
    assert raw(folder) == [kept], "and it is encrypted once"
    assert "fernet" not in repr(sealer) and (tmp_path / "key").read_text().strip() not in repr(sealer)


def raw(folder: Path) -> list[str]:
    """What the database holds."""
    import sqlite3

    db = sqlite3.connect(folder / "webhooks.db")
    try:
        return [row[0] for row in db.execute("SELECT secret FROM webhooks")]
    finally:
        db.close()


async def test_a_server_signs_with_what_it_keeps_encrypted(root: Path, tmp_path: Path) -> None:
    top_topics(root).overwrite(topics(0, [5]), [window(0)])
    async with hooked(root, webhook_key=str(tmp_path / "key")) as (client, receiver):
        made = await added(client, receiver)
        await receiver.wait(1)  # it takes what is signed with the secret, and nothing else
    (kept,) = raw(root / "_millrace" / "webhooks")
    assert made["secret"] not in kept
    assert sealer_of(str(tmp_path / "key")).open(kept) == made["secret"]


def test_a_key_is_replaced(folder: Path, tmp_path: Path) -> None:
    old, new, both = tmp_path / "old", tmp_path / "new", tmp_path / "both"
    assert secrets_of(folder, sealer_of(str(old))) == [SECRET]
    sealer_of(str(new))
    both.touch(0o600)
    both.write_bytes(new.read_bytes() + old.read_bytes())
    with pytest.raises(ConfigError, match=r"another key.*Add that key"):
        WebhookStore(folder, 10, sealer_of(str(new)))
    assert secrets_of(folder, sealer_of(str(both))) == [SECRET]
    assert secrets_of(folder, sealer_of(str(new))) == [SECRET]  # the old one is not needed any more
    with pytest.raises(ConfigError, match=r"serve\.webhook_key"):
        secrets_of(folder, PlainSealer())


def test_a_file_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "open").write_bytes(b"x")
    (tmp_path / "open").chmod(0o644)
    (tmp_path / "bad").touch(0o600)
    (tmp_path / "bad").write_bytes(b"no key\n")
    (tmp_path / "empty").touch(0o600)
    for name, says in (("open", "chmod 600"), ("bad", "no Fernet keys"), ("empty", "no Fernet keys"), ("a/b", "used")):
        with pytest.raises(ConfigError, match=says):
            sealer_of(str(tmp_path / name))

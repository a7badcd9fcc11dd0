"""API keys: what the file holds, what a node makes of it, and that a revoked key ends."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from ingest.border.access import ApiKey, SenderKeys, new_key, read_keys, revoke_key
from lakehouse.contract.errors import ConfigError
from lakehouse.contract.keys import RELOAD_S

WANTED = ApiKey("0" * 64, name='The "roof"', tenant="acme", sources=("clicks",), rate=5, connections=2)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_key_is_known_by_its_hash_only(tmp_path: Path) -> None:
    path = tmp_path / "state" / "keys.toml"
    text = new_key(path, WANTED)
    assert text.split("_", 2)[2] not in path.read_text(), "the secret is nowhere"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    ring = SenderKeys(path)
    found = ring.find(text)
    assert found is not None
    assert (found.name, found.tenant, found.sources, found.rate, found.connections) == (
        'The "roof"', "acme", ("clicks",), 5, 2,
    )  # fmt: skip
    assert found.id == text.split("_")[1]
    assert found.hash not in repr(found)
    for wrong in ("", "x", text[:-1], text + "x", f"mr_{found.id}_wrong", "mr__", "_".join(["mr", "other", "x"])):
        assert ring.find(wrong) is None


def test_keys_are_added_and_revoked_while_a_node_runs(tmp_path: Path) -> None:
    path, clock = tmp_path / "keys.toml", Clock()
    ring = SenderKeys(path, clock)
    assert not ring.required and ring.find("mr_x_y") is None
    first = new_key(path, WANTED)
    assert ring.find(first) is None, "not looked at again so soon"
    clock.now += RELOAD_S
    assert ring.required and ring.find(first) is not None
    second = new_key(path, WANTED)
    revoked = revoke_key(path, first.split("_")[1])
    assert revoked.tenant == "acme"
    clock.now += RELOAD_S
    assert ring.find(first) is None
    assert ring.find(second) is not None
    revoke_key(path, second.split("_")[1])
    clock.now += RELOAD_S
    assert ring.required, "the last key revoked opens nothing"
    assert len(read_keys(path)) == 0


def test_a_file_that_is_broken_while_a_node_runs_changes_nothing(tmp_path: Path) -> None:
    path, clock = tmp_path / "keys.toml", Clock()
    text = new_key(path, WANTED)
    ring = SenderKeys(path, clock)
    path.write_text("[keys.a]\nhash = 5\n")
    clock.now += RELOAD_S
    assert ring.find(text) is not None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[keys.a]\nhash = 'short'\n", "SHA-256"),
        ("[keys.a]\n", "hash"),
        (f"[keys.a]\nhash = '{'0' * 64}'\nrates = 5\n", "rate"),
        (f"[keys.a]\nhash = '{'0' * 64}'\nrate = -5\n", "negative"),
        ("rubbish", "keys.toml"),
    ],
)
def test_a_file_that_is_wrong_is_named_at_start(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=says):
        SenderKeys(path)


def test_no_such_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no key 'nobody'"):
        revoke_key(tmp_path / "keys.toml", "nobody")

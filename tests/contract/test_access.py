from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from lakehouse.contract.access import RELOAD_S, Key, KeyFile, KeyRing, is_public


def test_a_file_that_cannot_be_read_for_a_moment_is_read_when_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, now = KeyFile(tmp_path / "keys.toml", Key), [0.0]
    text = file.new(Key("0" * 64, "somebody"))
    ring = KeyRing(file, lambda: now[0])
    file.revoke(text.split("_")[1])
    with monkeypatch.context() as broken:

        def no_more_files(*_: object, **__: object) -> str:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

        broken.setattr(Path, "read_text", no_more_files)
        now[0] += RELOAD_S
        assert ring.find(text) is not None, "what was read before counts"
    now[0] += RELOAD_S
    assert ring.find(text) is None
    assert ring.required


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0",
        "224.0.0.1", "240.0.0.1", "255.255.255.255", "192.0.2.1", "198.18.0.1", "::1", "::", "fe80::1", "fe80::1%eth0",
        "fc00::1", "fd12::1", "ff02::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "2002:7f00:1::", "64:ff9b::7f00:1",
        "64:ff9b::a9fe:a9fe", "2001:db8::1", "nonsense",
    ],
)  # fmt: skip
def test_addresses_that_only_we_reach(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", ["8.8.8.8", "1.1.1.1", "2606:4700:4700::1111", "64:ff9b::808:808"])
def test_addresses_of_the_internet(address: str) -> None:
    assert is_public(address)

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from lakehouse.contract.access import RELOAD_S, Key, KeyFile, KeyRing


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

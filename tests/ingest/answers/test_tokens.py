"""Tokens: they come back, bear the lake's signature, and its key is kept from others."""

from __future__ import annotations

import hashlib
import json
import stat
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingest.answers.acks import KEY_BYTES, Signer, Token
from ingest.errors import BadToken
from lakehouse.contract.envelope import Envelope
from lakehouse.contract.errors import EnvironmentProblem

SIGNER = Signer(b"k" * KEY_BYTES)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


def envelope(event_id: str = "e1", tenant: str = "default", at: int = 1) -> Envelope:
    return Envelope(event_id, "clicks", tenant, at, "n1", "")


@settings(max_examples=30)
@given(TEXT, TEXT, st.integers(0, 2**53))
def test_tokens_come_back(event_id: str, tenant: str, at: int) -> None:
    text = SIGNER.sign(envelope(event_id, tenant, at)).decode()
    assert text.replace("-", "").replace("_", "").isalnum()
    assert SIGNER.open(text) == Token("clicks", tenant, event_id, at)


@settings(max_examples=30)
@given(st.text(max_size=60) | st.binary(max_size=60).map(lambda b: b.hex()))
def test_rubbish_is_no_token(text: str) -> None:
    with pytest.raises(BadToken):
        SIGNER.open(text)


def test_a_changed_token_is_no_token() -> None:
    text = SIGNER.sign(envelope()).decode()
    for at in range(len(text) - 1):
        changed = text[:at] + ("A" if text[at] != "A" else "B") + text[at + 1 :]
        with pytest.raises(BadToken):
            SIGNER.open(changed)
    with pytest.raises(BadToken):
        SIGNER.open("A" * 100_000)


@given(st.lists(TEXT, max_size=6))
@settings(max_examples=30)
def test_tokens_of_many_events_are_those_of_each(ids: list[str]) -> None:
    envelopes = [envelope(event_id) for event_id in ids] or [envelope()]
    found = json.loads(SIGNER.sign_all(envelopes))
    assert found == [SIGNER.sign(one).decode() for one in envelopes]
    assert [SIGNER.open(text).event_id for text in found] == [one.event_id for one in envelopes]


def test_the_signature_is_keyed_blake2b_and_another_key_is_another_lake() -> None:
    mac = hashlib.blake2b(b"body", key=b"k" * KEY_BYTES, digest_size=16).digest()
    assert SIGNER._mac(b"body") == mac
    with pytest.raises(BadToken):
        Signer(b"x" * KEY_BYTES).open(SIGNER.sign(envelope()).decode())
    assert "k" * 8 not in repr(SIGNER)


def test_nodes_that_start_together_share_one_key(tmp_path: Path) -> None:
    texts: list[bytes] = []
    ready = threading.Barrier(8)

    def start() -> None:
        ready.wait()
        texts.append(Signer.of_lake(tmp_path / "state").sign(envelope()))

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(texts) == 8 and len(set(texts)) == 1
    (key,) = (tmp_path / "state").iterdir()
    assert stat.S_IMODE(key.stat().st_mode) == 0o600


def test_a_key_that_others_may_read_or_that_is_cut_off_is_refused(tmp_path: Path) -> None:
    Signer.of_lake(tmp_path)
    key = tmp_path / "ack.key"
    key.chmod(0o640)
    with pytest.raises(EnvironmentProblem, match="chmod 600"):
        Signer.of_lake(tmp_path)
    key.chmod(0o600)
    key.write_bytes(b"short")
    with pytest.raises(EnvironmentProblem, match="not a key"):
        Signer.of_lake(tmp_path)

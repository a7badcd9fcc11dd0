"""Acknowledgement tokens, and what became of their events, read from real Delta tables."""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
import stat
import threading
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pytest
from deltalake import CommitProperties, DeltaTable, write_deltalake
from hypothesis import given, settings
from hypothesis import strategies as st

from ingest.answers.acks import KEY_BYTES, AckState, RecentEvents, Signer, Token, ack_state
from ingest.answers.tables import Coordinates, LakeState
from ingest.errors import RequestRefused
from ingest.kafka import SendOutcome
from ingest.log.segments import LoggedEvent, LogSegment, SourceLane
from lakehouse.contract.envelope import Envelope
from lakehouse.contract.errors import EnvironmentProblem
from lakehouse.contract.lake import COMMIT_THROUGH, Lake, TableRef

AT = int(datetime(2026, 3, 1, 12, tzinfo=UTC).timestamp() * 1e6)

TOPIC = "clicks-raw"


def commit(table: TableRef, rows: list[dict[str, Any]], partition_by: list[str] | None = None, **metadata: str) -> None:
    """Append rows with custom metadata, as the lakehouse does."""
    properties = CommitProperties(custom_metadata=metadata or None)
    write_deltalake(
        str(table.path), pa.Table.from_pylist(rows), mode="append", partition_by=partition_by,
        commit_properties=properties,
    )  # fmt: skip


def bronze(lake: Lake, ids: list[str], offsets: dict[str, int], reject: str | None = None) -> None:
    schema = pa.schema([
        ("event_id", pa.string()), ("source", pa.string()), ("tenant", pa.string()), ("reject", pa.string()),
        ("topic", pa.string()), ("partition", pa.int32()), ("offset", pa.int64()), ("date", pa.date32()),
    ])  # fmt: skip
    first = max(offsets.values()) - len(ids)
    rows = [
        {"event_id": event_id, "source": "clicks", "tenant": "default", "reject": reject, "topic": TOPIC,
         "partition": 0, "offset": first + n, "date": date(2026, 3, 1)}
        for n, event_id in enumerate(ids)
    ]  # fmt: skip
    write_deltalake(
        str(lake.bronze("clicks").path), pa.Table.from_pylist(rows, schema), mode="append", partition_by=["date"],
        commit_properties=CommitProperties(
            custom_metadata={
                "userMetadata": orjson.dumps({"offsets": {f"{TOPIC}/{p}": n for p, n in offsets.items()}}).decode()
            }
        ),
    )  # fmt: skip


def token(event_id: str) -> Token:
    return Token("clicks", "default", event_id, AT)


def logged(event_id: str, reject: str | None = None) -> LoggedEvent:
    envelope = Envelope(event_id, "clicks", "default", AT, "n1", "", reject=reject)
    return LoggedEvent(1, SourceLane(0, "clicks/http/0", "clicks"), envelope, b"", b"", LogSegment(1, Path()), 0, None)


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake(tmp_path)


def test_an_event_goes_through_its_states(lake: Lake) -> None:
    recent, state = RecentEvents({"clicks": TOPIC}), LakeState(lake)

    def ask() -> AckState:
        return ack_state(token("e2"), recent, state, ["by_city", "top"])

    assert ask() == AckState("unknown")
    event = logged("e2")
    recent.logged(event.envelope)
    assert ask() == AckState("logged")
    at = Coordinates(TOPIC, 0, 2)
    recent.known(SendOutcome(event, 0, 2))
    assert ask() == AckState("queued", at)
    bronze(lake, ["e0", "e1"], {"0": 2, "1": 0})
    assert ask() == AckState("queued", at), "bronze is not that far"
    bronze(lake, ["e2"], {"0": 3, "1": 0})
    assert ask() == AckState("in_bronze", at)
    DeltaTable(str(lake.bronze("clicks").path)).optimize.compact()
    assert ask() == AckState("in_bronze", at), "maintenance says nothing of offsets"

    top = lake.table("gold", "top")
    commit(top, [{"n": 1}], **{COMMIT_THROUGH: orjson.dumps({f"{TOPIC}/0": 2}).decode()})
    assert ask() == AckState("in_bronze", at)
    commit(top, [{"n": 2}], **{COMMIT_THROUGH: orjson.dumps({f"{TOPIC}/0": 3}).decode()})
    assert ask() == AckState("in_product", at, {"top": 1})
    commit(lake.table("silver", "by_city"), [{"n": 2}], **{COMMIT_THROUGH: orjson.dumps({f"{TOPIC}/0": 9}).decode()})
    assert ask() == AckState("in_product", at, {"by_city": 0, "top": 1})

    shutil.rmtree(top.path)
    commit(top, [{"n": 1}], **{COMMIT_THROUGH: orjson.dumps({f"{TOPIC}/0": 1}).decode()})
    assert ask() == AckState("in_product", at, {"by_city": 0}), "a table that was made again starts again"


def test_after_a_restart_the_event_is_found_by_its_id(lake: Lake) -> None:
    bronze(lake, ["e0", "e1"], {"0": 2})
    recent, state = RecentEvents({"clicks": TOPIC}), LakeState(lake)
    assert ack_state(token("e1"), recent, state, []) == AckState("in_bronze", Coordinates(TOPIC, 0, 1))
    assert ack_state(token("e7"), recent, state, []) == AckState("unknown")
    bronze(lake, ["bad"], {"0": 3}, reject="not JSON")
    found = ack_state(token("bad"), recent, state, [])
    assert found == AckState("rejected", Coordinates(TOPIC, 0, 2), reason="not JSON")


def test_rejected_by_border_by_kafka_and_by_quarantine(lake: Lake) -> None:
    recent, state = RecentEvents({"clicks": TOPIC}), LakeState(lake)
    border, large, late = logged("a", "not JSON"), logged("b"), logged("c")
    for event in (border, large, late):
        recent.logged(event.envelope)
    recent.known(SendOutcome(large, -1, -1, "too large", final=True))
    recent.known(SendOutcome(late, 0, 7))
    assert ack_state(token("a"), recent, state, []) == AckState("rejected", reason="not JSON")
    assert ack_state(token("b"), recent, state, []) == AckState("rejected", reason="too large")
    assert ack_state(token("c"), recent, state, []).state == "queued"
    commit(lake.quarantine(), [{"event_id": "c", "source": "clicks", "tenant": "default", "reason": "guests < 0"}])
    found = ack_state(token("c"), recent, state, [])
    assert found == AckState("rejected", Coordinates(TOPIC, 0, 7), reason="guests < 0")
    assert ack_state(Token("other", "default", "c", AT), recent, state, []).state == "unknown"


def test_memory_is_bounded() -> None:
    recent = RecentEvents({"clicks": TOPIC}, size=10)
    for n in range(100):
        recent.logged(logged(f"e{n}").envelope)
    assert recent.get(token("e89")) is None
    assert recent.get(token("e90")) is not None


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
    with pytest.raises(RequestRefused):
        SIGNER.open(text)


def test_a_changed_token_is_no_token() -> None:
    text = SIGNER.sign(envelope()).decode()
    for at in range(len(text) - 1):
        changed = text[:at] + ("A" if text[at] != "A" else "B") + text[at + 1 :]
        with pytest.raises(RequestRefused):
            SIGNER.open(changed)
    with pytest.raises(RequestRefused):
        SIGNER.open("A" * 100_000)


@given(st.lists(TEXT, max_size=6))
@settings(max_examples=30)
def test_tokens_of_many_events_are_those_of_each(ids: list[str]) -> None:
    envelopes = [envelope(event_id) for event_id in ids] or [envelope()]
    found = json.loads(SIGNER.sign_all(envelopes))
    assert found == [SIGNER.sign(one).decode() for one in envelopes]
    assert [SIGNER.open(text).event_id for text in found] == [one.event_id for one in envelopes]


def test_the_signature_is_keyed_blake2b_and_another_key_is_another_lake() -> None:
    data = base64.urlsafe_b64decode(SIGNER.sign(envelope()))
    assert data[:16] == hashlib.blake2b(data[16:], key=b"k" * KEY_BYTES, digest_size=16).digest()
    with pytest.raises(RequestRefused):
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
    with pytest.raises(EnvironmentProblem, match="holds 5 bytes"):
        Signer.of_lake(tmp_path)

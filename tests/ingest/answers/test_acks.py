"""What becomes of an event, read from real Delta tables."""

from __future__ import annotations

import shutil
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pytest
from deltalake import CommitProperties, DeltaTable, write_deltalake

from ingest.answers.acks import AckState, RecentEvents, Token, ack_state
from ingest.answers.tables import Coordinates, LakeState
from ingest.kafka import SendOutcome
from ingest.log.events import LoggedEvent, LogSegment, SourceLane
from lakehouse.contract.envelope import Envelope
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

"""Log lines about single events: the event's id in each, and a bounded number of them."""

from __future__ import annotations

import logging

import pytest

from lakehouse.contract.envelope import LOG_FIELDS, EventLines


def test_a_line_bears_the_event(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    EventLines(logging.getLogger("x")).say(
        logging.INFO, "is refused", "not JSON: 50 %", event_id="~1", source="clicks", tenant="t"
    )
    (record,) = caplog.records
    assert [getattr(record, name) for name in LOG_FIELDS] == ["~1", "clicks", "t"]
    assert record.getMessage() == "event ~1 of clicks is refused: not JSON: 50 %"


def test_a_flood_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    now = [0.0]
    lines = EventLines(logging.getLogger("x"), 2, now=lambda: now[0])
    for number in range(9):
        now[0] = 100.0 + number // 8  # eight of them in one second
        lines.say(logging.INFO, "is refused", "why", event_id=str(number), source="clicks", tenant="t")
    assert [record.event_id for record in caplog.records] == ["0", "1", "8"]  # type: ignore[attr-defined]
    assert caplog.messages[-1] == "event 8 of clicks is refused: why (and 6 others before it)"

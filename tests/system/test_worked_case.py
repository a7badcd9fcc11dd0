"""The worked case as a person runs it: ``millrace demo`` on a file, checked against DuckDB over the same file."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import subprocess
from pathlib import Path

import pytest

from ingest.simulate.generator import generate
from tests.system.worked_case import MILLRACE, Demo, Expected, check_tables, processes_of, sql, wait_for

pytestmark = [pytest.mark.spark, pytest.mark.broker]

NAMELESS = [
    b'{"rsvp_id": 1, "mtime"',
    b"not json at all",
    b"[1, 2, 3]",
    b'{"rsvp_id": 5, "response": "yes"}',
    b"42",
]
# These have an event id, so that a copy of one is known for a copy.
NAMED = [
    b'{"mtime": "yesterday", "rsvp_id": "x", "response": "yes"}',
    '{"rsvp_id": 7, "mtime": 1489925470960, "response": "já"}'.encode(),
]
MALFORMED = NAMELESS + NAMED


def shuffled_input(path: Path, events: list[bytes], seed: int) -> Path:
    """RSVPs with malformed lines among them, some lines repeated, and no newline at the end."""
    rng = random.Random(seed)
    lines = events + [line for line in rng.sample(events, len(events) // 20) for _ in range(2)]
    lines += MALFORMED
    rng.shuffle(lines)
    path.write_bytes(b"\n".join(line.rstrip(b"\n") for line in lines))
    return path


def check_figures(result: dict[str, object], expected: Expected) -> None:
    """The demo's own figures: every event sent is held once, repeated, or in quarantine."""
    valid = len(expected.lines) - len(MALFORMED)
    assert result["arrived"], result
    assert result["events_sent"] == len(expected.lines)
    assert result["events_acknowledged"] == len(expected.lines)
    assert result["events_in_gold"] == expected.events
    assert result["duplicates"] == valid - expected.events
    assert result["quarantined"] == len(MALFORMED)
    assert (result["lost"], result["counted_twice"]) == (0, 0)


def verify(lake: Path) -> None:
    done = subprocess.run(
        [*MILLRACE, "replay", "--verify", "--lake", str(lake), "--json"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    tables = {row["table"]: row for row in json.loads(done.stdout)}
    assert tables.keys() == {"rsvps_by_city", "top_topics", "members", "quarantine"}
    assert all(row["equal"] and row["rows"][0] > 0 for row in tables.values())


def recorded() -> list[bytes]:
    """Real RSVPs where this machine has them, else made-up ones."""
    shared = Path(os.environ.get("MILLRACE_SHARED_DATA", Path(__file__).parents[3] / "shared" / "data"))
    recording = shared / "meetup" / "rsvps_2017-03-19.jsonl"
    if recording.is_file():
        return [line for line in recording.read_bytes().split(b"\n") if line]
    return list(itertools.islice(generate(3, 1_790_000_000_000), 1_500))


def test_a_file_then_the_same_again_on_the_same_lake(tmp_path: Path) -> None:
    file = shuffled_input(tmp_path / "rsvps.jsonl", recorded(), seed=3)
    expected = Expected(file)
    lake = tmp_path / "lake"

    first = Demo(lake, "--input", str(file), "--rate", "600").result()

    check_figures(first, expected)
    assert first["events_in_bronze"] == len(expected.lines)
    check_tables(lake, expected, MALFORMED)
    assert processes_of(lake) == []

    # The second start goes on where the first stopped: every valid event is a copy now.
    again = Demo(lake, "--input", str(file), "--rate", "1500").result()

    assert again["arrived"], again
    assert again["events_in_gold"] == expected.events
    assert again["duplicates"] == len(expected.lines) - len(NAMELESS)
    assert (again["lost"], again["counted_twice"]) == (0, 0)
    check_tables(lake, expected, MALFORMED + NAMELESS)
    verify(lake)


def test_kill_9_of_every_part_in_the_middle(tmp_path: Path) -> None:
    file = shuffled_input(
        tmp_path / "rsvps.jsonl", list(itertools.islice(generate(9, 1_790_000_000_000), 9_000)), seed=9
    )
    expected = Expected(file)
    lake = tmp_path / "lake"
    demo = Demo(lake, "--input", str(file), "--rate", "200")

    wait_for(lambda: demo.rows("members") > 0, "the first result")
    for part in ("collect", "serve", "lakehouse", "broker"):
        before = demo.rows("rsvps")
        demo.kill(part)
        wait_for(lambda before=before: demo.rows("rsvps") > before, f"events after the end of {part}")
    result = demo.result()

    restarts = result["restarts"]
    assert all(restarts[part] >= 1 for part in ("collect", "serve", "lakehouse", "broker")), restarts
    check_figures(result, expected)
    check_tables(lake, expected, MALFORMED)
    verify(lake)
    assert processes_of(lake) == []


def test_the_supervisor_killed_then_ctrl_c_lose_nothing_and_leave_no_process(tmp_path: Path) -> None:
    lake = tmp_path / "lake"
    demo = Demo(lake, "--rate", "300")
    wait_for(lambda: demo.rows("members") > 0, "the first result")

    os.kill(demo.process.pid, signal.SIGKILL)
    demo.process.communicate(timeout=60)

    wait_for(lambda: processes_of(lake) == [], "its parts to end", 60)
    held = sql(lake, "SELECT sum(rsvps) AS n FROM members")[0]["n"]

    again = Demo(lake, "--rate", "300")
    # What was still in Kafka and in the log reaches the tables before all parts are ready and the player starts.
    wait_for(lambda: again.part("player"), "the player", 180)
    wait_for(lambda: sql(lake, "SELECT sum(rsvps) AS n FROM members")[0]["n"] > held, "more")
    again.process.send_signal(signal.SIGINT)
    result = again.result(180)

    assert result["arrived"]
    assert result["events_sent"] > 0
    assert (result["lost"], result["counted_twice"]) == (0, 0)
    assert result["events_in_gold"] >= held
    assert processes_of(lake) == []

"""The worked case as a person runs it: ``millrace demo`` on a file, checked against DuckDB over the same file."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from jobs.local.stack import free_port
from tests.jobs.test_lineage import receiving
from tests.recordings import RECORDINGS, generate
from tests.serve.conftest import Spawned
from tests.system.browser import REMEDY
from tests.system.prometheus import Prometheus, panels, require_tool
from tests.system.seen import Seen, dashboard
from tests.system.worked_case import Demo, Expected, check_tables, processes_of, run, wait_for

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
FIRED = 'max by (alertname) (max_over_time(ALERTS{alertstate="firing"}[15m]))'


def shuffled(events: list[bytes], seed: int) -> list[bytes]:
    """RSVPs with malformed lines among them, and some lines repeated."""
    rng = random.Random(seed)
    lines = events + [line for line in rng.sample(events, len(events) // 20) for _ in range(2)]
    lines += MALFORMED
    rng.shuffle(lines)
    return lines


def written(path: Path, lines: list[bytes]) -> Path:
    """A file without a newline at its end."""
    path.write_bytes(b"\n".join(line.rstrip(b"\n") for line in lines))
    return path


def check_figures(result: dict[str, Any], expected: Expected) -> None:
    """The demo's own figures: every event sent is held once, repeated, or in quarantine."""
    valid = len(expected.lines) - len(MALFORMED)
    assert result["arrived"], result
    assert result["events_sent"] == len(expected.lines)
    assert result["events_acknowledged"] == len(expected.lines)
    assert result["events_in_gold"] == expected.events
    assert result["duplicates"] == valid - expected.events
    assert result["quarantined"] == len(MALFORMED)
    assert (result["lost"], result["counted_twice"]) == (0, 0)


def check_seen(seen: Seen, expected: Expected) -> None:
    """The dashboard shows what DuckDB counts."""
    assert seen.totals == expected.answers()
    exact = expected.topics()
    topics = exact[max(exact)]
    assert [count for _, count in seen.top] == [count for _, count in topics.most_common(10)]
    assert all(topics[item] == count for item, count in seen.top)
    full = seen.bars[0] / seen.top[0][1]
    assert seen.bars == pytest.approx([count * full for _, count in seen.top], abs=2), "as long as their counts"
    distinct = expected.members()
    assert seen.members == pytest.approx(distinct[max(distinct)][0], rel=0.05)
    assert seen.inked > 20, "the line of distinct members is drawn"
    assert seen.integrity == ("0", "0")


def verify(lake: Path) -> None:
    with receiving() as receiver:
        done = run(lake, "replay", "--set", f"lineage={receiver.url}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "incubator" not in done.stderr and "restricted mode" not in done.stderr
    assert receiver.states() == [("meetup.replay", "START"), ("meetup.replay", "COMPLETE")]
    read = {Path(one["name"]).relative_to(lake).as_posix() for one in receiver.events[0]["inputs"]}
    assert read == {"bronze/rsvps", "silver/rsvps_by_city", "gold/top_topics", "gold/members"}
    tables = {row["table"]: row for row in json.loads(done.stdout)}
    assert tables.keys() == {"rsvps_by_city", "top_topics", "members", "quarantine"}
    assert all(row["equal"] and row["rows"][0] > 0 for row in tables.values())


def made_up(seed: int, count: int) -> list[bytes]:
    return list(itertools.islice(generate(seed, 1_790_000_000_000), count))


def recorded() -> list[bytes]:
    """Real RSVPs where this machine has them, else made-up ones."""
    recording = RECORDINGS / "meetup" / "rsvps_2017-03-19.jsonl"
    if recording.is_file():
        return [line for line in recording.read_bytes().split(b"\n") if line]
    return made_up(3, 1_500)


@dataclass(frozen=True)
class Played:
    """A lake on which a file has been played, what it must hold, and what Prometheus and a browser saw meanwhile."""

    lake: Path
    file: Path
    expected: Expected
    empty_panels: list[str] | None
    fired: set[str]
    seen: Seen | None


def provoke(demo: Demo) -> None:
    """What a dashboard shows only once it has happened: a refused request, a statement, a webhook that fails."""
    serve, collect = demo.address("serve"), demo.address("collect")
    for url, kind, body in (
        (f"{collect}/v1/rsvps", "text/plain", b"not an event"),
        (f"{serve}/v1/sql", "application/json", b'{"sql": "SELECT count(*) FROM members"}'),
        (f"{serve}/v1/webhooks", "application/json", b'{"table": "members", "url": "http://127.0.0.1:9/"}'),
    ):
        request = urllib.request.Request(url, body, {"Content-Type": kind}, method="POST")
        try:
            urllib.request.urlopen(request, timeout=60).close()
        except urllib.error.HTTPError as error:
            assert error.code == 415, error.read()


def empty_panels(prometheus: Prometheus, demo: Demo) -> list[str]:
    """Panels without data, after a counter that begins has been seen twice."""
    left = panels()
    deadline = time.monotonic() + 60
    while left and time.monotonic() < deadline:
        provoke(demo)
        time.sleep(2)
        left = {name: expression for name, expression in left.items() if not prometheus.query(expression)}
    return list(left)


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Played:
    """A file is played, every part is killed in the middle of it, and then Ctrl-C ends it: what was sent is exact.

    However long the machine takes to start the parts again, there is more to play: the file is cut where the demo was.
    """
    folder = tmp_path_factory.mktemp("played")
    lake = folder / "lake"
    lines = shuffled(recorded(), 3) + made_up(9, 40_000)
    metrics = free_port()
    options = {"SPARK_REHEARSE": "false", "METRICS_PORT": str(metrics), "SERVE_WEBHOOK_PRIVATE": "true"}
    demo = Demo(lake, "--input", str(written(folder / "all.jsonl", lines)), "--rate", "80", **options)

    wait_for(lambda: demo.rows("members") > 0, "the first result")
    with contextlib.ExitStack() as stack:
        look = stack.enter_context(dashboard(demo))
        watch = None
        if shutil.which("prometheus"):
            targets = [demo.address(part).removeprefix("http://") for part in ("serve", "collect")]
            watch = stack.enter_context(Prometheus(folder / "prometheus", [*targets, f"127.0.0.1:{metrics}"]))
        for part in ("collect", "serve", "lakehouse", "broker"):
            before = demo.rows("rsvps")
            demo.kill(part)
            wait_for(lambda before=before: demo.rows("rsvps") > before, f"events after the end of {part}")
        wait_for(lambda: demo.rows("rsvps") > 2_000, "the whole of the mixed lines")
        wait_for(lambda: demo.rows("members") > 1, "a second window, so that a line can be drawn")
        empty = empty_panels(watch, demo) if watch else None
        fired = {series["metric"]["alertname"] for series in watch.query(FIRED)} if watch else set()
        port = demo.address("serve").rpartition(":")[2]
        demo.process.send_signal(signal.SIGINT)
        result = demo.result()

        assert processes_of(lake) == []
        restarts = result["restarts"]
        assert all(restarts[part] >= 1 for part in ("collect", "serve", "lakehouse", "broker")), restarts
        assert 2_000 < result["events_sent"] < len(lines), "Ctrl-C came in the middle"
        file = written(folder / "rsvps.jsonl", lines[: result["events_sent"]])
        expected = Expected(file)
        check_figures(result, expected)
        check_tables(lake, expected, MALFORMED)
        stack.callback(Spawned(lake, port=int(port)).close)  # what the demo ended too soon to show is shown now
        seen = look(lambda seen: check_seen(seen, expected))
    return Played(lake, file, expected, empty, fired, seen)


def test_the_dashboard_shows_what_duckdb_counts_in_the_file(played: Played) -> None:
    if played.seen is None:
        pytest.skip(REMEDY)
    check_seen(played.seen, played.expected)


def test_every_part_killed_then_ctrl_c_every_event_counts_once(played: Played) -> None:
    verify(played.lake)


def test_each_panel_of_the_dashboard_has_data(played: Played) -> None:
    require_tool("prometheus")
    assert len(panels()) > 20
    assert played.empty_panels == []


def test_an_alert_fires_for_a_part_that_is_down(played: Played) -> None:
    require_tool("prometheus")
    assert "MillracePartDown" in played.fired


@pytest.mark.soak
def test_the_supervisor_killed_leaves_no_process_and_the_same_file_again_changes_nothing(played: Played) -> None:
    lake, expected = played.lake, played.expected
    valid = written(played.file.with_name("valid.jsonl"), [line for line in expected.lines if line not in MALFORMED])
    demo = Demo(lake, "--input", str(valid), "--rate", "100", SPARK_REHEARSE="false")
    since = datetime.now(UTC).isoformat()
    newer = f"SELECT count(*) FROM rsvps WHERE received_at > TIMESTAMPTZ '{since}'"
    wait_for(lambda: demo.number(newer) > 0, "events of this run")

    os.kill(demo.process.pid, signal.SIGKILL)
    demo.process.communicate(timeout=120)

    wait_for(lambda: processes_of(lake) == [], "its parts to end")

    # What stood in the log and in Kafka comes first, then the file from its beginning: every valid event is a copy now.
    again = Demo(lake, "--input", str(played.file), "--rate", "1500").result()

    assert again["arrived"], again
    assert again["events_sent"] == len(expected.lines)
    assert again["events_in_gold"] == expected.events
    assert again["duplicates"] == len(expected.lines) - len(NAMELESS)
    assert (again["lost"], again["counted_twice"]) == (0, 0)
    assert processes_of(lake) == []
    check_tables(lake, expected, MALFORMED + NAMELESS)


@pytest.mark.soak  # the same without anything that is killed
def test_a_file_then_the_same_again_on_the_same_lake(tmp_path: Path) -> None:
    file = written(tmp_path / "rsvps.jsonl", shuffled(recorded(), 3))
    expected = Expected(file)
    lake = tmp_path / "lake"

    first = Demo(lake, "--input", str(file), "--rate", "600").result()

    check_figures(first, expected)
    assert first["events_in_bronze"] == len(expected.lines)
    check_tables(lake, expected, MALFORMED)
    assert processes_of(lake) == []

    again = Demo(lake, "--input", str(file), "--rate", "1500").result()

    assert again["arrived"], again
    assert again["events_in_gold"] == expected.events
    assert again["duplicates"] == len(expected.lines) - len(NAMELESS)
    assert (again["lost"], again["counted_twice"]) == (0, 0)
    check_tables(lake, expected, MALFORMED + NAMELESS)
    verify(lake)

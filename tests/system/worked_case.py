"""What the worked case must give, computed by DuckDB straight from the input file, and the demo run as a process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import duckdb
from deltalake.exceptions import DeltaError

from lakehouse.contract.errors import MillraceError
from lakehouse.contract.lake import Lake
from serve.sql.statement import run_sql
from tests.system.installed import millrace, user_environment

# Valid: a JSON object with all that the pipeline requires. The same (rsvp_id, mtime) twice counts once.
_EVENTS = """
CREATE TEMP TABLE events AS
WITH lines AS (
  SELECT row_number() OVER () AS n, line
  FROM read_csv(?, columns = {'line': 'VARCHAR'}, delim = '\x01', quote = '', escape = '', header = false)
), objects AS (
  SELECT n, line::JSON AS j FROM lines WHERE json_valid(line) AND json_type(line::JSON) = 'OBJECT'
), typed AS (
  SELECT n, TRY_CAST(j->>'rsvp_id' AS BIGINT) AS rsvp_id, TRY_CAST(j->>'mtime' AS BIGINT) AS mtime,
    j->>'response' AS response, coalesce(TRY_CAST(j->>'guests' AS BIGINT), 0) AS guests,
    TRY_CAST(j->'member'->>'member_id' AS BIGINT) AS member_id,
    j->'group'->>'group_city' AS city, j->'group'->>'group_country' AS country,
    from_json(j->'group'->'group_topics', '[{"topic_name":"VARCHAR"}]') AS topics
  FROM objects
)
SELECT * FROM typed
WHERE rsvp_id IS NOT NULL AND mtime IS NOT NULL AND response IS NOT NULL AND member_id IS NOT NULL
  AND city IS NOT NULL AND country IS NOT NULL
QUALIFY row_number() OVER (PARTITION BY rsvp_id, mtime ORDER BY n) = 1
"""


class Expected:
    """What the tables must hold after the file has been played."""

    def __init__(self, file: Path) -> None:
        self.db = duckdb.connect()
        self.db.execute("SET TimeZone = 'UTC'")
        self.db.execute(_EVENTS, [str(file)])
        self.lines = [line for line in file.read_bytes().split(b"\n") if line.strip()]

    @property
    def events(self) -> int:
        """Distinct valid events."""
        return int(self._rows("SELECT count(*) FROM events")[0][0])

    def answers(self) -> dict[str, int]:
        """Sums over all events."""
        [row] = self._rows(
            "SELECT count_if(response = 'yes'), count_if(response = 'no'), sum(guests)::BIGINT FROM events"
        )
        return dict(zip(("yes", "no", "guests"), row, strict=True))

    def by_city(self) -> Counter[tuple[Any, ...]]:
        """(window_start, window_end, city, country, yes, no, guests) of silver."""
        return Counter(
            self._rows("""
                SELECT strftime(to_timestamp(w / 1000), '%Y-%m-%dT%H:%M:%SZ'),
                  strftime(to_timestamp(w / 1000 + 30), '%Y-%m-%dT%H:%M:%SZ'), city, country,
                  count(*) FILTER (response = 'yes'), count(*) FILTER (response = 'no'), sum(guests)::BIGINT
                FROM (SELECT *, mtime - mtime % 30000 AS w FROM events) GROUP BY ALL""")
        )

    def by_arrival(self, received: Mapping[str, str]) -> None:
        """Give each event the minute of its arrival, as bronze recorded it."""
        self.db.execute("CREATE OR REPLACE TEMP TABLE arrivals (event_id VARCHAR, minute VARCHAR)")
        rows = [(event_id, f"{at[:16]}:00Z") for event_id, at in received.items()]
        self.db.executemany("INSERT INTO arrivals VALUES (?, ?)", rows)
        self.db.execute(
            "CREATE OR REPLACE TEMP VIEW arrived AS "
            "SELECT e.*, a.minute FROM events e JOIN arrivals a ON a.event_id = rsvp_id || ':' || mtime"
        )

    def topics(self) -> dict[str, Counter[str]]:
        """Exact topic counts by minute."""
        found: dict[str, Counter[str]] = {}
        for minute, topic, count in self._rows(
            "SELECT minute, t.topic_name, count(*) FROM (SELECT minute, unnest(topics) AS t FROM arrived) GROUP BY ALL"
        ):
            found.setdefault(minute, Counter())[topic] = count
        return found

    def members(self) -> dict[str, tuple[int, int]]:
        """Exact (distinct members, events) by minute."""
        rows = self._rows("SELECT minute, count(DISTINCT member_id), count(*) FROM arrived GROUP BY ALL")
        return {minute: (members, events) for minute, members, events in rows}

    def _rows(self, sql: str) -> list[tuple[Any, ...]]:
        return self.db.execute(sql).fetchall()


class Demo:
    """One ``millrace demo`` process of the installed wheel, started where there is no checkout.

    Args:
        lake: where it keeps everything.
        arguments: more of them.
        settings: by their environment variable, without the prefix.
    """

    def __init__(self, lake: Path, *arguments: str, **settings: str) -> None:
        self.lake = lake
        command = [
            str(millrace()),
            "demo",
            "--lake",
            str(lake),
            "--no-browser",
            "--json",
            "--set",
            "serve.port=0",
            *arguments,
        ]
        chosen = {"COLLECT_PORT": "0"} | settings
        environment = user_environment() | {f"MILLRACE_{name}": value for name, value in chosen.items()}
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, cwd=lake.parent
        )

    def result(self, timeout_s: float = 420.0) -> dict[str, Any]:
        """Wait for the end; the JSON object that is the last line."""
        try:
            out, err = self.process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGTERM)
            out, err = self.process.communicate(timeout=120)
            raise AssertionError(f"the demo did not end in time; it said: {err[-3000:]}") from None
        assert out.strip(), f"no result; it said: {err[-3000:]}"
        found: dict[str, Any] = json.loads(out.strip().splitlines()[-1])
        found["stderr"] = err
        return found

    def part(self, name: str) -> int | None:
        """Process id of a part that runs."""
        try:
            found = json.loads((self.lake / "_millrace" / "run" / "parts.json").read_text())
        except (FileNotFoundError, json.JSONDecodeError):
            return None
        pid = found.get(name)
        return int(pid) if pid else None

    def kill(self, name: str) -> int:
        """kill -9 of a part, and wait until the supervisor has started it again."""
        pid = self.part(name)
        assert pid is not None, f"{name} does not run"
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: self.part(name) not in (None, pid), f"{name} to be started again")
        return pid

    def address(self, name: str) -> str:
        """URL of a part that has HTTP."""
        found = json.loads((self.lake / "_millrace" / "run" / "addresses.json").read_text())
        return str(found[name])

    def number(self, query: str) -> int:
        """What a query gives by now, without a process of its own; 0 before its table exists."""
        try:
            return int(run_sql(Lake(self.lake), query).column(0)[0].as_py() or 0)
        except (MillraceError, DeltaError, OSError):
            return 0

    def rows(self, table: str) -> int:
        """Rows of a product or table by now; 0 before it exists."""
        return self.number(f"SELECT count(*) FROM {table}")


def wait_for(condition: Any, what: str, timeout_s: float = 240.0) -> None:
    """Poll until the condition holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s:.0f} s for {what}"
        time.sleep(0.3)  # a query by DuckDB costs some 30 ms of CPU


def run(lake: Path, *command: str, form: Sequence[str] = ("--json",)) -> subprocess.CompletedProcess[str]:
    """A command of the installed wheel that prints JSON."""
    return subprocess.run(
        [str(millrace()), *command, "--lake", str(lake), *form],
        capture_output=True,
        text=True,
        check=False,
        env=user_environment(),
        cwd=lake.parent,
    )


def sql(lake: Path, query: str) -> list[dict[str, Any]]:
    """Rows by ``millrace sql --format json``."""
    done = run(lake, "sql", query, form=("--format", "json"))
    assert done.returncode == 0, done.stderr
    rows: list[dict[str, Any]] = json.loads(done.stdout)
    return rows


def processes_of(lake: Path) -> list[str]:
    """Command lines of all processes that name the lake."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except (FileNotFoundError, ProcessLookupError):
                continue
            if str(lake) in command:
                found.append(command)
    return found


def check_tables(lake: Path, expected: Expected, malformed: list[bytes]) -> None:
    """The four tables against what DuckDB computes from the file."""
    by_city = sql(lake, "SELECT window_start, window_end, city, country, yes, no, guests FROM rsvps_by_city")
    assert Counter(tuple(row.values()) for row in by_city) == expected.by_city()

    received: dict[str, str] = {}
    for row in sql(lake, 'SELECT event_id, received_at FROM rsvps ORDER BY "partition", "offset"'):
        received.setdefault(row["event_id"], row["received_at"])
    expected.by_arrival(received)

    top: dict[str, list[dict[str, Any]]] = {}
    query = "SELECT window_start, window_end, rank, item, count, error FROM top_topics ORDER BY window_start, rank"
    for row in sql(lake, query):
        top.setdefault(row["window_start"], []).append(row)
    exact = expected.topics()
    assert top.keys() == exact.keys()
    for minute, rows in top.items():
        assert [row["rank"] for row in rows] == list(range(1, len(rows) + 1))
        assert len(rows) == min(10, len(exact[minute]))
        for row in rows:
            assert row["count"] - row["error"] <= exact[minute][row["item"]] <= row["count"]
        if all(row["error"] == 0 for row in rows):
            assert [row["count"] for row in rows] == [count for _, count in exact[minute].most_common(len(rows))]

    members = {row["window_start"]: row for row in sql(lake, "SELECT * EXCLUDE (sketch) FROM members")}
    distinct = expected.members()
    assert members.keys() == distinct.keys()
    for minute, (count, events) in distinct.items():
        assert members[minute]["rsvps"] == events
        assert members[minute]["lower"] <= count <= members[minute]["upper"]

    quarantine = sql(lake, "SELECT payload, reason FROM quarantine")
    assert Counter(row["payload"].encode() for row in quarantine) == Counter(malformed)
    assert all(row["reason"] for row in quarantine)

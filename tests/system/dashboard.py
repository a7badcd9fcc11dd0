"""A lake with a table of every kind that the dashboard draws, and commits that add up."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, write_deltalake

from lakehouse.contract import lake

MINUTE = timedelta(minutes=1)
TIME = pa.timestamp("us", "UTC")
CITIES = ("Berlin", "Utrecht", "São Paulo", "東京", "الرياض", "Lyon", "Oslo", "Quito", "Bonn", "Kyiv")
TOPICS = (
    "Outdoors",
    "Hiking",
    "Москва: прогулки",
    "ボードゲーム",
    "Live Music",
    "Chess",
    "Data",
    "Yoga",
    "Wine",
    "Running",
    "Go",
)
EVENTS = 200  # that a commit says it adds
LATE = 1_000  # in one row of a window of days ago
PIPELINE = '''
[sources.rsvps]
topic = "rsvps"
schema = "id BIGINT, city STRING, topic STRING, member BIGINT, response STRING"
event_time = "received_at"

[products.top_topics]
layer = "gold"
source = "rsvps"
sql = "SELECT received_at, topic FROM rsvps"
operator = "top_n"
item = "topic"
window = "1 minute"

[products.members]
layer = "gold"
source = "rsvps"
sql = "SELECT received_at, member FROM rsvps"
operator = "distinct"
item = "member"
window = "1 minute"

[products.by_city]
layer = "silver"
source = "rsvps"
sql = """
  SELECT window.start AS window_start, window.end AS window_end, city, count_if(response = 'yes') AS yes, count(*) AS n
  FROM rsvps GROUP BY window(received_at, '1 minute'), city
"""

[products.minutes]
layer = "gold"
source = "rsvps"
sql = """
  SELECT window.start AS window_start, count_if(response = 'yes') AS yes, count(*) AS n
  FROM rsvps GROUP BY window(received_at, '1 minute')
"""

[products.answers]
layer = "gold"
source = "rsvps"
sql = "SELECT response, count(*) AS n FROM rsvps GROUP BY response"

[products.visits]
layer = "gold"
source = "rsvps"
operator = "sessions"
by = ["member"]
aggregates = { rsvps = "count(*)" }
'''
KINDS = {"time": TIME, "text": pa.string(), "int": pa.int64(), "float": pa.float64(), "bool": pa.bool_()}


def columns(text: str) -> pa.Schema:
    """A schema from ``NAME KIND, NAME KIND``."""
    return pa.schema([(name, KINDS[kind]) for name, kind in (each.split() for each in text.split(","))])


WINDOW = "window_start time, window_end time"
SCHEMAS = {  # layer, key, columns
    "top_topics": ("gold", "window_start,rank", columns(f"{WINDOW}, rank int, item text, count int, error int")),
    "members": ("gold", "window_start", columns(f"{WINDOW}, members float, lower float, upper float, rsvps int")),
    "by_city": ("silver", "window_start,window_end,city", columns(f"{WINDOW}, city text, yes int, n int")),
    "minutes": ("gold", "window_start", columns("window_start time, yes int, n int")),
    "answers": ("gold", "response", columns("response text, n int")),
    "visits": ("gold", "member,session_start", columns("member int, session_start time, session_end time, rsvps int")),
    "quarantine": ("silver", "event_id", columns("event_id text, source text, reason text, payload text")),
    "alerts": (
        "gold",
        "alert,key",
        columns("alert text, key text, product text, state text, value float, raised_at time"),
    ),
    "quality": (
        "gold",
        "at,table,batch,expectation",
        columns(
            "at time, table text, batch text, expectation text, success bool, total int, unexpected int, observed text"
        ),
    ),
}


@dataclass
class Growing:
    """A lake whose every commit adds one window's events to every product.

    Attributes:
        root: of the lake; its pipeline is in ``pipeline`` beside it.
        by_city: events of each city and window, by (minute, city).
        answers: events of each answer.
    """

    root: Path
    commits: int = 0
    by_city: Counter[tuple[datetime, str]] = field(default_factory=Counter)
    answers: Counter[str] = field(default_factory=Counter)
    topics: Counter[str] = field(default_factory=Counter)
    window: datetime = field(default_factory=lambda: datetime.now(UTC).replace(second=0, microsecond=0))

    def __post_init__(self) -> None:
        self.pipeline.mkdir(parents=True)
        (self.pipeline / "pipeline.toml").write_text(PIPELINE, encoding="utf-8")
        for name, (_, key, schema) in SCHEMAS.items():
            self.path(name).mkdir(parents=True)
            configuration = {lake.PROPERTY_KEY: key}
            DeltaTable.create(self.path(name), schema, configuration=configuration, raise_if_key_not_exists=False)

    @property
    def pipeline(self) -> Path:
        return self.root.parent / "pipeline"

    @property
    def events(self) -> int:
        return self.by_city.total()

    def path(self, name: str) -> Path:
        return self.root / SCHEMAS[name][0] / name

    def fill(self, windows: int) -> None:
        """Windows that lie behind, in one commit, and something to tell of alerts, quality and quarantine."""
        for back in range(windows, 0, -1):
            self._count(self.window - back * MINUTE)
        self.topics.clear()
        self.commit()
        now = datetime.now(UTC)
        told = {"alert": "busy", "product": "minutes", "value": 31.0, "raised_at": now}
        self._append(
            "alerts", [told | {"key": '["Berlin"]', "state": "raised"}, told | {"key": '["Oslo"]', "state": "cleared"}]
        )
        found = {"at": now, "table": "top_topics", "batch": "", "total": 10, "observed": ""}
        self._append(
            "quality",
            [
                found | {"expectation": "counted", "success": True, "unexpected": 0},
                found | {"expectation": "ranks", "success": False, "unexpected": 2},
            ],
        )
        refused = [("rsvps", "not JSON")] * 3 + [("rsvps", "member is missing")]
        rows = [
            {"event_id": str(n), "source": source, "reason": reason, "payload": "{"}
            for n, (source, reason) in enumerate(refused)
        ]
        self._append("quarantine", rows)

    def commit(self) -> None:
        """One more commit to each product."""
        self._count(self.window)
        self.commits += 1
        minute = {"window_start": self.window, "window_end": self.window + MINUTE}
        windows = sorted({start for start, _ in self.by_city})
        every = windows if self.commits == 1 else [self.window]
        sums = {start: sum(n for (at, _), n in self.by_city.items() if at == start) for start in every}
        ranked = sorted(self.topics.items(), key=lambda pair: (-pair[1], pair[0]))[:10]
        tops = [
            minute | {"rank": rank, "item": item, "count": n, "error": rank % 3}
            for rank, (item, n) in enumerate(ranked, 1)
        ]
        self._write("top_topics", tops)
        self._write("members", [self._distinct(start, n) for start, n in sums.items()])
        cities = [(start, city, n) for (start, city), n in self.by_city.items() if start in sums]
        rows = [
            {"window_start": start, "window_end": start + MINUTE, "city": city, "yes": n // 2, "n": n}
            for start, city, n in cities
        ]
        self._write("by_city", [*rows, *self._late(rows[0])] if self.commits == 1 else rows)
        self._write("minutes", [{"window_start": start, "yes": n // 2, "n": n} for start, n in sums.items()])
        self._write("answers", [{"response": response, "n": n} for response, n in self.answers.items()], every=True)
        begun = [self.window - n * MINUTE for n in range(40)]
        visits = [
            {"member": n, "session_start": at, "session_end": at + MINUTE, "rsvps": n + self.commits}
            for n, at in enumerate(begun)
        ]
        self._write("visits", visits, every=True)

    def next_window(self) -> None:
        """The minute turns."""
        self.window += MINUTE
        self.topics.clear()

    def _count(self, start: datetime) -> None:
        turn = self.commits + int(start.timestamp()) // 60
        for place, city in enumerate(CITIES):
            n = (place * 7 + turn * 5) % 23 + (len(CITIES) - place) * 2
            self.by_city[start, city] += n
            self.answers["yes"] += n // 2
            self.answers["no"] += n - n // 2
        for place, topic in enumerate(TOPICS):
            self.topics[topic] += (place * 7 + turn * 5) % 37

    def _distinct(self, start: datetime, n: int) -> dict[str, Any]:
        about = n * 0.75
        return {
            "window_start": start,
            "window_end": start + MINUTE,
            "members": about,
            "lower": about * 0.9,
            "upper": about * 1.1,
            "rsvps": n,
        }

    def _late(self, row: dict[str, Any]) -> list[dict[str, Any]]:
        """A row of a window of days ago, which is not drawn beside those of now."""
        start = self.window - 4_000 * MINUTE
        late = {"window_start": start, "window_end": start + MINUTE, "city": "Bonn", "yes": LATE // 2, "n": LATE}
        return [row | late]

    def _write(self, name: str, rows: Sequence[dict[str, Any]], *, every: bool = False) -> None:
        now = int(time.time() * 1000)
        facts = {
            lake.COMMIT_THROUGH: json.dumps({"rsvps/0": self.events}),
            lake.COMMIT_EVENTS: str(EVENTS),
            lake.COMMIT_OLDEST: str(now - 900),
            lake.COMMIT_NEWEST: str(now - 300),
        }
        whole = every or self.commits == 1
        predicate = None if whole else f"window_start = '{self.window:%Y-%m-%dT%H:%M:%SZ}'"
        data = pa.Table.from_pylist(list(rows), schema=SCHEMAS[name][2])
        properties = CommitProperties(custom_metadata=facts)
        write_deltalake(self.path(name), data, mode="overwrite", predicate=predicate, commit_properties=properties)

    def _append(self, name: str, rows: Sequence[dict[str, Any]]) -> None:
        write_deltalake(self.path(name), pa.Table.from_pylist(list(rows), schema=SCHEMAS[name][2]), mode="append")


def turning(growing: Growing, pause_s: float, seconds: float) -> Iterator[int]:
    """Commit again and again; the window turns when its minute is over."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if datetime.now(UTC) >= growing.window + MINUTE:
            growing.next_window()
        growing.commit()
        yield growing.commits
        time.sleep(pause_s)

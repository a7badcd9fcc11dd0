"""A pipeline's folder made from a sample: a source, a window, a top-n and a distinct count, with a fixture for them.

The fixture's expected rows are counted here, in Python: running them through Spark is a test and not a repetition.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from jobs.local.guess import FIXTURE_ROWS, EventTime, Leaf, Sample, Shape, is_a_time
from lakehouse.contract.pipeline import Template
from lakehouse.contract.tomlfile import duration_ms

_SPANS = ((7_200, "1 minute"), (7 * 86_400, "1 hour"))  # of the sample in seconds, and the window for it
_TOP = 10
_FEW, _MANY = 2, 50  # distinct values of a column to group by
_SHORT = 40  # characters of a name; more are prose
_LONGEST = 63  # characters of a table's name
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)  # when a fixture's event arrives that has no time of its own

_TOML = """\
# Made by millrace init from a sample of {count} events. Change what is not as you mean it, then:
#   millrace check {name}              what is wrong, with file and line
#   millrace test {name}               the fixtures in tests/, through Spark
#   millrace up --pipeline {name}      everything, with a dashboard

[sources.{name}]
topic = "{name}"
# The payload's fields as Spark DDL. An event that does not fit goes to table quarantine, with its reason.
schema = \"\"\"
{schema}
\"\"\"
# An event that comes again with the same id counts once. Without an id, each event that arrives counts.
{event_id}
# Kafka keeps the order of events with the same key. Without a key, the event id is taken.
{key}
# When it happened, in Spark SQL over the fields. Windows stand on it.
event_time = {event_time}
# Events without one of these are refused.
required = [{required}]
# To leave out of the products what arrives late: lateness = "1 hour"

# The collector takes events by POST /v1/{name}. Kinds websocket, sse, lines and udp read elsewhere.
[[sources.{name}.collectors]]
kind = "http"

# What must hold for every event, e.g.
# [sources.{name}.expectations]
# not_negative = "price >= 0"

# A window: events by {by}. Its SQL keeps count, count_if, sum, min and max up to date.
[products.{windowed}]
layer = "gold"
source = "{name}"
sql = "{windowed}.sql"

# The {n} most frequent values of a window, with the error of each count. Another column: change the SQL.
[products.{top}]
layer = "gold"
source = "{name}"
operator = "top_n"
time = "event_time"
window = "{window}"
item = "item"
n = {n}
sql = {top_sql}

# How many different values a window has, within 2 %.
[products.{distinct}]
layer = "gold"
source = "{name}"
operator = "distinct"
time = "event_time"
window = "{window}"
item = "item"
sql = {distinct_sql}
"""


@dataclass(frozen=True, slots=True)
class Choices:
    """What the pipeline is made of: guesses, or what the user says instead.

    Attributes:
        event_id: template; empty: every event has an id of its own.
        key: template of the Kafka key; empty: the event id.
    """

    event_id: str
    event_time: str
    key: str


class Scaffold:
    """The files of a new pipeline.

    Args:
        name: of the pipeline and its source.
        time: where their time is, as guessed.
    """

    def __init__(self, name: str, sample: Sample, time: EventTime | None, choices: Choices) -> None:
        self.name = name
        self._sample = sample
        self._choices = choices
        self._time = time if time is not None and time.sql == choices.event_time else None
        self._is_timed = self._time is not None or choices.event_time == "received_at"
        self._named = {path for text in (choices.event_id, choices.key) for path in Template(text).fields}
        taken = [leaf for leaf in sample.leaves if leaf.filled >= 0.5 and not (time and leaf.path == time.leaf.path)]
        self._texts = [leaf for leaf in taken if leaf.told == "STRING"]
        self._group = self._group_by()
        self._item = self._counted_item(taken)
        self._subject = self._counted_subject(taken)
        self._measure = next(
            (leaf for leaf in taken if leaf.shape.kind in ("int", "float") and self._measures(leaf)), None
        )
        self.window = self._window()
        self.products = [
            f"{name}_by_{self._group.name if self._group else 'time'}"[:_LONGEST],
            f"top_{self._item.name}",
            f"distinct_{self._subject.name}",
        ]

    def write(self, folder: Path) -> list[Path]:
        """Write the folder, whole or not at all; returns its files."""
        fixture = self._fixture()
        files = {
            "pipeline.toml": self._toml(),
            f"{self.products[0]}.sql": self._window_sql(),
            "tests/sample/input.jsonl": _lines(fixture),
        }
        if self._is_timed:
            expected = zip(self.products, self._expected(fixture), strict=True)
            files |= {f"tests/sample/{product}.jsonl": _lines(rows) for product, rows in expected}
        folder.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=folder.parent, prefix=".init-") as drafts:
            draft = Path(drafts) / folder.name
            for name, text in files.items():
                (draft / name).parent.mkdir(parents=True, exist_ok=True)
                (draft / name).write_text(text, encoding="utf-8")
            draft.rename(folder)
        return [folder / name for name in files]

    def _group_by(self) -> Leaf | None:
        able = [leaf for leaf in self._texts if leaf.filled >= 0.95 and _FEW <= leaf.distinct <= _MANY]
        return min(able, key=lambda leaf: abs(leaf.distinct - 8), default=None)

    def _counted_item(self, taken: Sequence[Leaf]) -> Leaf:
        half = len(self._sample.rows) / 2
        texts = [leaf for leaf in self._texts if leaf is not self._group]
        able = [leaf for leaf in texts if _FEW <= leaf.distinct <= half and leaf.dotted not in self._named]
        short = [leaf for leaf in able if _length(leaf) <= _SHORT]
        for leaves in (short, able, texts):
            if leaves:
                return max(leaves, key=lambda leaf: leaf.distinct)
        return self._group or next((leaf for leaf in taken if leaf.shape.kind == "int"), None) or self._whole()

    def _counted_subject(self, taken: Sequence[Leaf]) -> Leaf:
        key = [leaf for leaf in taken if leaf.dotted in Template(self._choices.key).fields]
        half = len(self._sample.rows) / 2
        able = [leaf for leaf in self._texts if leaf is not self._item and leaf.distinct <= half]
        able = [leaf for leaf in able if _length(leaf) <= _SHORT] or able
        return next(iter(key), None) or max(able, key=lambda leaf: leaf.distinct, default=self._item)

    def _whole(self) -> Leaf:
        """The event itself, by its id."""
        template = Template(self._choices.event_id)
        ids = (template.render(row) or f"@fixture/{number}" for number, row in enumerate(self._sample.rows))
        return Leaf(("event_id",), Shape(), tuple(ids), column="event_id")

    def _measures(self, leaf: Leaf) -> bool:
        of_calendar = leaf.path[-1].lower() in ("year", "month", "day", "hour", "minute", "second")
        like_id = leaf.dotted in self._named or leaf.dotted.lower().endswith(("id", "key", "number", "code"))
        return leaf.filled >= 0.95 and leaf.distinct > _FEW and not of_calendar and not like_id and not is_a_time(leaf)

    def _window(self) -> str:
        if self._time is None:
            return "1 minute"
        times = [at for at in map(self._time.read, self._time.leaf.values) if at is not None]
        span = (max(times) - min(times)).total_seconds()
        return next((window for most, window in _SPANS if span <= most), "1 day")

    def _toml(self) -> str:
        choices, window = self._choices, self.products[0]
        required = list(Template(choices.event_id).fields)
        if self._time is not None and self._time.leaf in self._sample.leaves:
            required.append(self._time.leaf.dotted)
        items = {"top": self._item, "distinct": self._subject}
        return _TOML.format(
            count=f"{len(self._sample.rows):,}",
            name=self.name,
            schema=self._sample.schema.replace("\\", "\\\\"),
            event_id=f"event_id = {_text(choices.event_id)}" if choices.event_id else '# event_id = "{id}"',
            key=f"key = {_text(choices.key)}" if choices.key else '# key = "{user_id}"',
            event_time=_text(choices.event_time),
            required=", ".join(map(_text, dict.fromkeys(required))),
            by=self._group.dotted if self._group else "time",
            windowed=window,
            top=self.products[1],
            distinct=self.products[2],
            window=self.window,
            n=_TOP,
            **{f"{product}_sql": _text(_rows_sql(leaf, self.name)) for product, leaf in items.items()},
        )

    def _window_sql(self) -> str:
        group, measure = self._group, self._measure
        columns = ["window.start AS window_start", *([f"{group.sql} AS {_column(group)}"] if group else [])]
        columns += ["count(*) AS events", *([f"sum({measure.sql}) AS sum_{measure.name}"] if measure else [])]
        by = f"window(event_time, '{self.window}')" + (f", {group.sql}" if group else "")
        return f"SELECT\n  {(',' + chr(10) + '  ').join(columns)}\nFROM {self.name}\nGROUP BY {by}\n"

    def _fixture(self) -> list[dict[str, Any]]:
        """Events that are valid for certain; of no more items than a top-n shows."""
        found: list[dict[str, Any]] = []
        items: set[Any] = set()
        template = Template(self._choices.event_id)
        for number, row in enumerate(self._sample.rows):
            items.add(self._item.values[number])
            if self._time is not None and self._time.read(self._time.leaf.values[number]) is None:
                continue
            if len(items) > _TOP or len(found) == FIXTURE_ROWS:
                break
            if template.render(row) is not None and all(
                shape.fits(row.get(name)) for name, shape in self._sample.fields
            ):
                found.append(row)
        return found

    def _expected(self, fixture: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], ...]:
        """Rows of the three products."""
        step = duration_ms(self.window) / 1000
        number_of = {id(row): number for number, row in enumerate(self._sample.rows)}
        template = Template(self._choices.event_id)
        first = {(template.render(row) if self._choices.event_id else id(row)): row for row in reversed(fixture)}
        windows: dict[tuple[str, Any], list[int]] = defaultdict(list)
        items: dict[str, Counter[str]] = defaultdict(Counter)
        subjects: dict[str, list[Any]] = defaultdict(list)
        for row in fixture:
            if not any(row is one for one in first.values()):
                continue  # the same event once more
            number = number_of[id(row)]
            at = self._time.read(self._time.leaf.values[number]) if self._time is not None else None
            at = at or _EPOCH
            start = datetime.fromtimestamp(at.timestamp() // step * step, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            windows[start, self._group.values[number] if self._group else None].append(number)
            if (item := self._item.values[number]) is not None:
                items[start][str(item)] += 1
            subjects[start].append(self._subject.values[number])
        of_window = []
        for (start, group), numbers in windows.items():
            row = {
                "window_start": start,
                **({_column(self._group): group} if self._group else {}),
                "events": len(numbers),
            }
            if self._measure is not None:
                values = [value for n in numbers if (value := self._measure.values[n]) is not None]
                row[f"sum_{self._measure.name}"] = sum(values) if values else None
            of_window.append(row)
        counted = [(start, items.get(start) or {None: 0}) for start in subjects]
        top = [{"window_start": start, "item": i, "count": n} for start, counts in counted for i, n in counts.items()]
        distinct = [
            {"window_start": start, self.products[2]: len({v for v in values if v is not None}), self.name: len(values)}
            for start, values in subjects.items()
        ]
        return of_window, top, distinct


def _rows_sql(leaf: Leaf, source: str) -> str:
    return f"SELECT event_time, {leaf.sql} AS item FROM {source}"  # noqa: S608 - names are quoted


def _length(leaf: Leaf) -> float:
    texts = [value for value in leaf.values if isinstance(value, str)]
    return sum(map(len, texts)) / max(len(texts), 1)


def _column(leaf: Leaf) -> str:
    return f"{leaf.name}_value" if leaf.name in ("window_start", "events") else leaf.name


def _text(value: str) -> str:
    """A TOML string."""
    return json.dumps(value, ensure_ascii=False)


def _lines(rows: Sequence[dict[str, Any]]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)

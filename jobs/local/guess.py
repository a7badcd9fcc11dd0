"""What a sample of events says of their schema, id, time and key, and the pipeline that is written from it."""

from __future__ import annotations

import csv
import gzip
import itertools
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sqlglot.dialects.spark import Spark

from lakehouse.contract.errors import EnvironmentProblem
from lakehouse.contract.pipeline.source import column_of

MAX_ROWS = 10_000
FIXTURE_ROWS = 20

_SURE = 0.95  # a type that fewer values have is none: the field is text
_MAP_KEYS = 30
_LONGEST_NAME = 40
_TRIED = 12  # fields that are tried together as an event id
_ISO = re.compile(r"\d{4}-\d\d-\d\d([T ]\d\d:\d\d(:\d\d(\.\d+)?)?(Z|[+-]\d\d:?\d\d)?)?")
_WHOLE, _NUMBER = re.compile(r"0|-?[1-9][0-9]{0,17}"), re.compile(r"-?(0|[1-9][0-9]*)\.[0-9]+([eE][-+]?[0-9]+)?")
_EPOCHS = {"timestamp_seconds": 1, "timestamp_millis": 1_000, "timestamp_micros": 1_000_000}
_FIRST_S, _LAST_S = 946_684_800, 4_102_444_800  # the years 2000 to 2100
_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_LIKE_ID = re.compile(r"(^|.*_)(id|uuid|guid|key)$|.*[a-z](Id|ID|Uuid|UUID|Guid|GUID|Key)$")
_LIKE_TIME = re.compile(r"(.*_)?(time|timestamp|ts|at|date|datetime|when|created|sent)(_.*)?|.*(Time|At|Date)$", re.I)


@dataclass(slots=True)
class Shape:
    """What the values at one place of the sample were.

    Attributes:
        kinds: how many of them were ``bool``, ``int``, ``float``, ``text``, ``list``, ``struct`` or ``null``.
        fields: of structs.
        element: of lists.
    """

    kinds: Counter[str] = field(default_factory=Counter)
    fields: dict[str, Shape] = field(default_factory=dict)
    element: Shape | None = None

    def add(self, value: Any) -> None:
        kind = _kind(value)
        self.kinds[kind] += 1
        if kind == "struct":
            for name, inner in value.items():
                self.fields.setdefault(name, Shape()).add(inner)
        elif kind == "list":
            self.element = self.element or Shape()
            for inner in value:
                self.element.add(inner)

    @property
    def kind(self) -> str:
        """The kind that nearly all values have; ``text`` if there is none such."""
        counts = {kind: count for kind, count in self.kinds.items() if kind != "null"}
        if counts.keys() == {"int", "float"}:
            return "float"
        found = max(counts, key=lambda kind: counts[kind], default="text")
        return found if not counts or counts[found] >= _SURE * sum(counts.values()) else "text"

    @property
    def share(self) -> float:
        """The share of values, nulls apart, that have the guessed type; anything can be text."""
        count = sum(self.kinds.values()) - self.kinds["null"]
        taken = self.kinds[self.kind] + (self.kinds["int"] if self.kind == "float" else 0)
        return 1.0 if self.kind == "text" or not count else taken / count

    def fits(self, value: Any) -> bool:
        """Whether a value has the guessed types throughout."""
        kind = _kind(value)
        if kind == "null" or self.kind == "text":
            return True
        if self.kind == "float":
            return kind in ("int", "float")
        if kind == "list" and self.element is not None:
            return all(map(self.element.fits, value))
        if kind == "struct":
            return all(name not in value or shape.fits(value[name]) for name, shape in self.fields.items())
        return kind == self.kind

    @property
    def ddl(self) -> str:
        if self.kind == "list":
            return f"ARRAY<{self.element.ddl if self.element else 'STRING'}>"
        if self.kind == "struct":
            inner = Shape()
            if len(self.fields) > _MAP_KEYS:  # names that are data
                for shape in self.fields.values():
                    inner.kinds += shape.kinds
                return f"MAP<STRING, {inner.ddl}>" if inner.kind not in ("struct", "list") else "MAP<STRING, STRING>"
            return f"STRUCT<{', '.join(f'{_quoted(name)}: {shape.ddl}' for name, shape in _distinct(self.fields))}>"
        return {"bool": "BOOLEAN", "int": "BIGINT", "float": "DOUBLE"}.get(self.kind, "STRING")


def _kind(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return "int" if -(2**63) <= value < 2**63 else "text"
    kinds: dict[type, str] = {bool: "bool", float: "float", str: "text", list: "list", dict: "struct"}
    return kinds.get(type(value), "null")


def _distinct(fields: dict[str, Shape]) -> Iterator[tuple[str, Shape]]:
    """Fields that Spark takes: with a name, and none before that differs only in case; structs with fields."""
    seen: set[str] = set()
    for name, shape in fields.items():
        if name and name.lower() not in seen and not (shape.kind == "struct" and not shape.fields):
            seen.add(name.lower())
            yield name, shape


def _quoted(name: str) -> str:
    return name if _PLAIN.fullmatch(name) else f"`{name.replace('`', '``')}`"


@dataclass(frozen=True, slots=True, eq=False)
class Leaf:
    """A field with one value an event.

    Attributes:
        path: names from the outermost to its own.
        values: of each event of the sample; None where there is none.
        column: what SQL calls it; empty: as its path says.
    """

    path: tuple[str, ...]
    shape: Shape
    values: tuple[Any, ...]
    column: str = ""

    @property
    def dotted(self) -> str:
        """As templates name it."""
        return ".".join(self.path)

    @property
    def sql(self) -> str:
        """As SQL names it; a word of SQL's own is quoted."""
        if self.column:
            return self.column
        words = Spark.Tokenizer.KEYWORDS
        path = (column_of(self.path[0]), *self.path[1:])
        return ".".join(f"`{step}`" if step.upper() in words else _quoted(step) for step in path)

    @property
    def name(self) -> str:
        """For a column or a table: short, and without letters that a table's name cannot have."""
        plain = unicodedata.normalize("NFKD", self.path[-1]).encode("ascii", "ignore").decode()
        name = re.sub(r"\W", "_", plain).strip("_").lower()[:_LONGEST_NAME]
        return name if name[:1].isalpha() else f"value_{name}".rstrip("_")

    @property
    def told(self) -> str:
        """Its type, and what its texts are if they are more than texts."""
        if self.shape.kind != "text":
            return self.shape.ddl
        if is_a_time(self):
            return "STRING (times)"
        texts = [value for value in self.values if isinstance(value, str)]
        if texts and all(_WHOLE.fullmatch(text) or _NUMBER.fullmatch(text) for text in texts):
            return "STRING (numbers)"
        return self.shape.ddl

    @property
    def distinct(self) -> int:
        return len({value for value in self.values if value is not None})

    @property
    def filled(self) -> float:
        """The share of events that have it."""
        return sum(value is not None for value in self.values) / len(self.values)


@dataclass(frozen=True, slots=True)
class EventTime:
    """Where an event's time is.

    Attributes:
        sql: expression of the time.
        share: of the events whose value is such a time.
        read: the time of an event, or None.
    """

    leaf: Leaf
    sql: str
    share: float
    read: Callable[[Any], datetime | None]


@dataclass(frozen=True, slots=True)
class Sample:
    """Events of a file, and what is guessed from them.

    Attributes:
        fields: those that a schema can declare, outermost first.
        leaves: fields with one value an event.
    """

    rows: tuple[dict[str, Any], ...]
    fields: tuple[tuple[str, Shape], ...]
    leaves: tuple[Leaf, ...]

    @classmethod
    def of(cls, path: Path) -> Sample:
        """Read the first rows of a file. Raises EnvironmentProblem: it cannot be read, or holds no events."""
        rows = read_rows(path)
        whole = Shape()
        for row in rows:
            whole.add(row)
        fields = tuple(_distinct(whole.fields))
        return cls(rows, fields, tuple(_leaves(rows, fields, ())))

    @property
    def schema(self) -> str:
        """The DDL, a field a line."""
        return ",\n".join(f"  {_quoted(name)} {shape.ddl}" for name, shape in self.fields)

    def event_time(self) -> EventTime | None:
        """The likeliest time, if there is one: named as a time, or written as one."""
        found = [time for leaf in self.leaves for time in _times(leaf)]
        return min(found, key=_rank_of, default=None)

    def event_id(self, time: EventTime | None) -> tuple[tuple[Leaf, ...], float]:
        """Fields that together are different in different events, and the share of events for which they are."""
        places = {json.dumps(row, sort_keys=True): number for number, row in enumerate(self.rows)}
        places_of = list(places.values())  # an event that was sent twice stands here once
        able = [
            leaf for leaf in self.leaves if leaf.filled == 1 and leaf.shape.kind in ("int", "text") and _named(leaf)
        ]

        def share(leaves: Sequence[Leaf]) -> float:
            return len({tuple(leaf.values[n] for leaf in leaves) for n in places_of}) / len(places_of)

        like = sorted((leaf for leaf in able if _LIKE_ID.fullmatch(leaf.path[-1])), key=lambda leaf: len(leaf.path))
        best = max(like, key=lambda leaf: share([leaf]), default=None)
        if best is not None and share([best]) >= _SURE:
            return (best,), share([best])
        first = [time.leaf] if time is not None and time.leaf in able else []
        tried = list(dict.fromkeys([*first, *like, *sorted(able, key=lambda leaf: -leaf.distinct)]))[:_TRIED]
        for size in (2, 3, 4):
            for leaves in itertools.combinations(tried, size):
                if share(leaves) == 1:
                    return leaves, 1.0
        return (), 1.0

    def key(self, of_id: Sequence[Leaf]) -> Leaf | None:
        """A field that names whom or what events are about: it is like an id, and comes again."""
        able = [leaf for leaf in self.leaves if leaf.filled >= _SURE and [leaf] != list(of_id) and _named(leaf)]
        able = [leaf for leaf in able if leaf.shape.kind in ("int", "text") and _LIKE_ID.fullmatch(leaf.path[-1])]
        return max(
            (leaf for leaf in able if 1 < leaf.distinct < len(self.rows)), key=lambda x: x.distinct, default=None
        )


def read_rows(path: Path) -> tuple[dict[str, Any], ...]:
    """The first rows of a file of JSON lines, a JSON array, or CSV with a header; any of them with gzip.

    Raises EnvironmentProblem: it cannot be read, or holds no objects.
    """
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8-sig") as file:
            name = path.name.removesuffix(".gz")
            rows = _csv_rows(file) if name.endswith((".csv", ".tsv")) else _json_rows(file, path)
            found = tuple(itertools.islice(rows, MAX_ROWS))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise EnvironmentProblem(f"{path} cannot be read: {error}", "Name a file of JSON lines or CSV") from None
    if not found:
        raise EnvironmentProblem(f"{path} holds no events", "Name a file with one JSON object a line")
    return found


def _json_rows(lines: Iterable[str], path: Path) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(lines, 1):
        try:
            found = json.loads(line) if line.strip() else []
        except ValueError:
            if number > 1:  # a recording may end in the middle of a line
                remaining = next(iter(lines), None)
                if remaining is None:
                    return
            raise EnvironmentProblem(f"{path}:{number} is not JSON", "Write one JSON object a line") from None
        for row in found if isinstance(found, list) else [found]:
            if not isinstance(row, dict):
                raise EnvironmentProblem(f"{path}:{number} is not a JSON object", "Write one JSON object a line")
            yield row


def _csv_rows(file: Iterable[str]) -> Iterator[dict[str, Any]]:
    lines = iter(file)
    header = next(lines, "")
    delimiter = max(",;\t|", key=header.count)
    for row in csv.DictReader(itertools.chain([header], lines), delimiter=delimiter):
        yield {name: _cell(value) for name, value in row.items() if name is not None and isinstance(value, str)}


def _cell(text: str) -> Any:
    """A cell as the loader gives it: empty is null, and what is written as JSON writes a number is one."""
    if text in ("", "true", "false"):
        return {"true": True, "false": False}.get(text)
    return int(text) if _WHOLE.fullmatch(text) else float(text) if _NUMBER.fullmatch(text) else text


def _leaves(rows: Sequence[dict[str, Any]], fields: Iterable[tuple[str, Shape]], at: tuple[str, ...]) -> Iterator[Leaf]:
    for name, shape in fields:
        path = (*at, name)
        if shape.ddl.startswith("STRUCT"):
            yield from _leaves(rows, _distinct(shape.fields), path)
        elif shape.kind not in ("list", "struct"):
            yield Leaf(path, shape, tuple(_at(row, path) for row in rows))


def _at(row: Any, path: Sequence[str]) -> Any:
    for step in path:
        row = row.get(step) if isinstance(row, dict) else None
    return row if _kind(row) not in ("list", "struct") else json.dumps(row)


def _named(leaf: Leaf) -> bool:
    """Whether a template can name it."""
    return all(_PLAIN.fullmatch(step) for step in leaf.path)


def _times(leaf: Leaf) -> Iterator[EventTime]:
    """The ways in which the field may be a time: nearly all of its values are one."""
    texts = [value for value in leaf.values if isinstance(value, str)]
    if leaf.shape.kind == "text" and texts and all(map(_iso, texts[:20])):
        yield _time(leaf, f"to_timestamp({leaf.sql})", _iso)
    numbers = f"CAST({leaf.sql} AS BIGINT)" if leaf.shape.kind == "text" else leaf.sql
    if leaf.shape.kind in ("int", "float", "text"):
        for function, scale in _EPOCHS.items():
            time = _time(leaf, f"{function}({numbers})", lambda value, scale=scale: _epoch(value, scale))  # type: ignore[misc]
            if time.share >= _SURE and (scale > 1 or _LIKE_TIME.fullmatch(leaf.path[-1])):
                yield time


def is_a_time(leaf: Leaf) -> bool:
    """Whether the field's values are times."""
    return any(time.share >= _SURE * leaf.filled for time in _times(leaf))


def _time(leaf: Leaf, sql: str, read: Callable[[Any], datetime | None]) -> EventTime:
    return EventTime(leaf, sql, sum(read(value) is not None for value in leaf.values) / len(leaf.values), read)


def _iso(value: Any) -> datetime | None:
    if not isinstance(value, str) or not _ISO.fullmatch(value):
        return None
    try:
        found = datetime.fromisoformat(value)
    except ValueError:
        return None
    return found.replace(tzinfo=UTC) if found.tzinfo is None else found.astimezone(UTC)


def _epoch(value: Any, scale: int) -> datetime | None:
    if isinstance(value, str) and _WHOLE.fullmatch(value):
        value = int(value)
    if not isinstance(value, int | float) or isinstance(value, bool) or not _FIRST_S <= value / scale < _LAST_S:
        return None
    return datetime.fromtimestamp(value / scale, UTC)


def _rank_of(time: EventTime) -> tuple[Any, ...]:
    """The likeliest first: there in nearly every event, named as a time, with a time of day, near the top."""
    named = bool(_LIKE_TIME.fullmatch(time.leaf.path[-1]))
    of_day = time.leaf.shape.kind != "text" or any(len(str(value)) > 10 for value in time.leaf.values[:20])
    return time.share < _SURE, not of_day, not named, len(time.leaf.path)

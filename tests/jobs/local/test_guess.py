"""What ``millrace init`` guesses from a sample, and that the folder it writes passes ``millrace check``."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from jobs.cli import app
from jobs.local.check import pipeline_problems
from jobs.local.guess import Sample
from lakehouse.contract.errors import ConfigError, EnvironmentProblem
from lakehouse.contract.pipeline import load_pipeline

T0 = datetime(2024, 3, 1, 12, tzinfo=UTC)
runner = CliRunner()


def flights(count: int = 200) -> list[dict[str, Any]]:
    """Departures as nested JSON: no id, times with an offset, arrays, numbers as text, a field named as a column."""
    airports = ["EWR", "JFK", "LGA"]
    return [
        {
            "flight": {"carrier": "UABADLEV"[n % 4 * 2 :][:2], "number": n % 90, "tail_id": f"N{n % 37}"},
            "route": {"from": {"faa": airports[n % 3]}, "to": {"faa": f"D{n % 23}"}},
            "scheduled": (T0 + timedelta(minutes=n)).isoformat(),
            "air_time": None if n % 10 == 0 else 40 + n % 200,
            "delays": [{"kind": "weather", "minutes": n % 60}] * (n % 3),
            "seats": str(50 + n % 5),
            "origin": airports[n % 3],
        }
        for n in range(count)
    ]


def sample(folder: Path, rows: list[dict[str, Any]]) -> Path:
    path = folder / "sample.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_nested_fields_arrays_and_what_texts_are(tmp_path: Path) -> None:
    found = Sample.of(sample(tmp_path, flights()))
    assert {name: shape.ddl for name, shape in found.fields} == {
        "flight": "STRUCT<carrier: STRING, number: BIGINT, tail_id: STRING>",
        "route": "STRUCT<from: STRUCT<faa: STRING>, to: STRUCT<faa: STRING>>",
        "scheduled": "STRING",
        "air_time": "BIGINT",
        "delays": "ARRAY<STRUCT<kind: STRING, minutes: BIGINT>>",
        "seats": "STRING",
        "origin": "STRING",
    }
    told = {leaf.dotted: leaf.told for leaf in found.leaves}
    assert (told["scheduled"], told["seats"]) == ("STRING (times)", "STRING (numbers)")
    assert next(leaf for leaf in found.leaves if leaf.dotted == "air_time").filled == 0.9
    assert next(leaf for leaf in found.leaves if leaf.dotted == "origin").sql == "origin_", "the envelope has one too"
    time = found.event_time()
    assert time is not None
    assert (time.sql, time.share) == ("to_timestamp(scheduled)", 1)
    parts, share = found.event_id(time)
    assert (parts[0].dotted, share) == ("scheduled", 1)
    key = found.key(parts)
    assert key is not None
    assert key.dotted == "flight.tail_id"


@pytest.mark.parametrize("name", ["id", "order_id", "orderId", "scanUuid", "eventGUID", "dedupeKey"])
def test_what_is_named_as_an_id_is_one(tmp_path: Path, name: str) -> None:
    rows = [{"at": f"2026-01-01 00:00:{n:02}", "shelf": n, name: f"x{n}"} for n in range(30)]
    found = Sample.of(sample(tmp_path, rows))
    assert [leaf.dotted for leaf in found.event_id(found.event_time())[0]] == [name]


@pytest.mark.parametrize(
    ("name", "write", "sql"),
    [
        ("ts", lambda at: int(at.timestamp()), "timestamp_seconds(ts)"),
        ("when", lambda at: int(at.timestamp() * 1e3), "timestamp_millis(`when`)"),
        ("mtime", lambda at: str(int(at.timestamp() * 1e3)), "timestamp_millis(CAST(mtime AS BIGINT))"),
        ("x", lambda at: int(at.timestamp() * 1e6), "timestamp_micros(x)"),
        ("at", lambda at: at.strftime("%Y-%m-%d %H:%M:%S"), "to_timestamp(at)"),
        (
            "event_time",
            lambda at: at.isoformat(),
            "to_timestamp(event_time_)",
        ),
    ],
)
def test_forms_of_a_time(tmp_path: Path, name: str, write: Callable[[datetime], Any], sql: str) -> None:
    rows = [{"id": n, "count": 1_700_000_000 + n, name: write(T0 + timedelta(seconds=n))} for n in range(50)]
    found = Sample.of(sample(tmp_path, rows))
    time = found.event_time()
    assert time is not None
    assert time.sql == sql
    assert time.read(rows[3][name]) == T0 + timedelta(seconds=3)
    assert found.event_id(time)[0][0].dotted == "id"


def test_a_guess_says_how_many_events_agree(tmp_path: Path) -> None:
    rows = [{"id": n, "at": T0.isoformat(), "v": "bad" if n < 3 else n} for n in range(100)]
    rows += [rows[50]] * 5  # sent again as it was: the same event
    rows += [{**rows[60], "v": 1}]  # another with the same id
    found = Sample.of(sample(tmp_path, rows))
    assert dict(found.fields)["v"].ddl == "BIGINT"
    assert dict(found.fields)["v"].share == pytest.approx(103 / 106)
    assert found.event_id(found.event_time())[1] == pytest.approx(100 / 101)


def test_a_table_with_a_header_and_gzip(tmp_path: Path) -> None:
    path = tmp_path / "sample.csv.gz"
    lines = ["id;city;at;price;zip", *(f"{n};{'AB'[n % 2]};2024-03-01T12:00:0{n}Z;{n}.5;0{n}12" for n in range(10))]
    path.write_bytes(gzip.compress("\n".join(lines).encode()))
    found = Sample.of(path)
    assert [shape.ddl for _, shape in found.fields] == ["BIGINT", "STRING", "STRING", "DOUBLE", "STRING"]


ODD = [
    {"id": "a'b", "Weird name": 1, 'quote"d': "x", "back\\slash": True, "when": "2024-01-01T00:00:00Z", "ID": 2},
    {"id": "c", "Weird name": None, "nothing": None, "empty": {}, "list": [], "when": "2024-01-01T00:01:00Z"},
]


FOREIGN = [{"名前": "AB"[n % 2], "2nd Ünï": "CDE"[n % 3], "very" * 20: "FGHI"[n % 4]} for n in range(30)]


@pytest.mark.parametrize("rows", [flights(), ODD, FOREIGN, [{"a": 1}], [{"v": n / 2} for n in range(30)]])
def test_what_is_written_passes_the_check(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    made = runner.invoke(app, ["init", str(tmp_path / "rides"), "--from", str(sample(tmp_path, rows)), "--yes"])
    assert made.exit_code == 0, made.output
    pipeline = load_pipeline(tmp_path / "rides")
    assert pipeline_problems(pipeline) == []
    assert [product.operator for product in pipeline.products.values()] == ["", "top_n", "distinct"]
    again = runner.invoke(app, ["init", str(tmp_path / "rides"), "--from", str(tmp_path / "sample.jsonl"), "--yes"])
    assert isinstance(again.exception, ConfigError)
    assert "is there already" in str(again.exception)


@pytest.mark.parametrize(
    ("text", "says"),
    [("", "holds no events"), ("[1]", "not a JSON object"), ('{"a": 1}\nno\n{"a": 2}', "sample.jsonl:2 is not JSON")],
)
def test_what_is_no_sample(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "sample.jsonl").write_text(text)
    with pytest.raises(EnvironmentProblem, match=says):
        Sample.of(tmp_path / "sample.jsonl")


def test_nobody_to_ask(tmp_path: Path) -> None:
    asked = runner.invoke(app, ["init", "rides", "--from", str(sample(tmp_path, flights(5)))])
    assert isinstance(asked.exception, ConfigError)
    assert "Add --yes" in str(asked.exception)

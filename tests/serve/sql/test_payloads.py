"""Payloads as columns in DuckDB: typed, null where they do not fit, and behind a key's row filter."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from deltalake import write_deltalake

from lakehouse.contract.lake import Lake, UnknownTable
from lakehouse.contract.pipeline import Source
from serve.core.model import OPEN, Principal
from serve.errors import SqlError
from serve.sql.payloads import payload_schemas
from serve.sql.statement import Statement, run, run_sql
from tests.lakehouse.lakes import bronze_rows

SCHEMA = """
id BIGINT, who STRING, price DOUBLE, paid BOOLEAN, exact DECIMAL(10,2), at TIMESTAMP, tags ARRAY<STRING>,
place STRUCT<city: STRING, spots: ARRAY<STRUCT<n: INT>>>, extra MAP<STRING, STRING>, source STRING, `it's "odd"` INT
"""
SOURCES = {
    "clicks": Source("clicks", SCHEMA, "at", name="clicks"),
    "wrapped": Source("wrapped", "id BIGINT", "at", name="wrapped", unwrap="data.event"),
    "avro": Source("avro", "id BIGINT", "at", name="avro", format="avro"),
}
SCHEMAS = payload_schemas(SOURCES.values())
WHOLE = {
    "id": 7, "who": "Ōsaka", "price": 2, "paid": True, "exact": 1.25, "at": "2026-01-31T12:00:00+01:00", "tags": ["a"],
    "place": {"city": "Köln", "spots": [{"n": 1}], "more": 1}, "extra": {"k": "v"}, "source": "own", 'it\'s "odd"': 3,
}  # fmt: skip


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    lake = Lake(tmp_path_factory.mktemp("lake"))
    wrong = {
        "id": 1.5,
        "who": 8,
        "price": "2",
        "paid": 1,
        "exact": "x",
        "at": "noon",
        "tags": 3,
        "place": [],
        "extra": 1,
    }
    payloads = [json.dumps(WHOLE).encode(), json.dumps(wrong).encode(), b"\xff{", b"{", None, b'{"who":"nobody"}']
    write_deltalake(str(lake.bronze("clicks").path), bronze_rows(payloads))
    write_deltalake(str(lake.bronze("wrapped").path), bronze_rows([b'{"data":{"event":{"id":4}}}', b'{"data":5}']))
    write_deltalake(str(lake.bronze("avro").path), bronze_rows([b"\x00"]))
    return lake


def rows(lake: Lake, sql: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = run_sql(lake, sql, payloads=SCHEMAS).to_pylist()
    return found


def test_fields_are_typed_columns(lake: Lake) -> None:
    (row,) = rows(lake, "SELECT * EXCLUDE (received_at, bronze_at) FROM clicks__events WHERE event_id = 'e0'")
    assert json.loads(row.pop("payload")) == WHOLE
    assert row.pop("at").isoformat() == "2026-01-31T11:00:00+00:00"
    assert json.loads(row.pop("extra")) == {"k": "v"}
    assert row == {
        "event_id": "e0", "tenant": "default", "origin": "stream", "reason": None, "id": 7, "who": "Ōsaka",
        "price": 2.0, "paid": True, "exact": Decimal("1.25"), "tags": ["a"], "source_": "own", 'it\'s "odd"': 3,
        "place": {"city": "Köln", "spots": [{"n": 1}]},
    }  # fmt: skip
    assert rows(lake, "SELECT place.city, tags[1] AS tag FROM clicks__events WHERE id = 7") == [
        {"city": "Köln", "tag": "a"}
    ]


def test_a_value_that_does_not_fit_is_null_and_so_is_a_payload_that_is_no_json(lake: Lake) -> None:
    fields = 'id, price, paid, exact, "at", tags, place'
    found = rows(lake, f"SELECT event_id, who, {fields} FROM clicks__events WHERE event_id <> 'e0' ORDER BY 1")
    assert [(row.pop("event_id"), row.pop("who")) for row in found] == [
        ("e1", "8"), ("e2", None), ("e3", None), ("e4", None), ("e5", "nobody")
    ]  # fmt: skip
    assert {value for row in found for value in row.values()} == {None}
    texts = rows(lake, "SELECT count(payload) AS json, count(*) AS n FROM clicks__events")
    assert texts == [{"json": 3, "n": 6}]


def test_payloads_are_json_for_its_functions(lake: Lake) -> None:
    sql = "SELECT payload->>'$.place.more' AS m, json_extract_string(payload, '$.who') AS w FROM clicks__events"
    assert rows(lake, f"{sql} WHERE id = 7") == [{"m": "1", "w": "Ōsaka"}]
    of_bytes = (
        "json_extract_string(payload, '$.who')",
        "c.payload->>'$.who'",
        "payload->'$.who'",
        "json_keys(payload)",
    )
    for call in of_bytes:
        with pytest.raises(SqlError, match=r"payload has bytes.*Write FROM clicks__events, or decode\(payload\)"):
            rows(lake, f"SELECT {call} FROM clicks AS c")
    decoded = "SELECT json_extract_string(decode(payload), '$.who') AS w FROM clicks WHERE event_id = 'e0'"
    assert rows(lake, decoded) == [{"w": "Ōsaka"}]


def test_fields_inside_another_object(lake: Lake) -> None:
    assert rows(lake, "SELECT id FROM wrapped__events ORDER BY event_id") == [{"id": 4}, {"id": None}]


def test_an_earlier_version_and_a_row_filter(lake: Lake) -> None:
    assert rows(lake, "SELECT count(*) AS n FROM clicks__events FOR VERSION AS OF 0") == [{"n": 6}]

    def seen(sql: str, **limits: Any) -> Any:
        return json.loads(run(Statement(str(lake.root), sql, Principal(**limits), payloads=SCHEMAS)).body)

    own = {"rows": {"clicks": "who = 'nobody'"}}
    assert seen("SELECT event_id FROM clicks__events", **own) == [{"event_id": "e5"}]
    assert seen("SELECT count(*) AS n FROM clicks__events WHERE 1=1 OR who = 'x'", **own) == [{"n": 1}]
    for hidden in ("clicks__events__partials", "__source", "clicks__partials"):
        with pytest.raises((SqlError, UnknownTable)):
            seen(f"SELECT * FROM {hidden}", **own)
    with pytest.raises(UnknownTable):
        seen("SELECT * FROM clicks__events", tables=frozenset({"wrapped"}))


@pytest.mark.parametrize("name", ["avro__events", "nothing__events", "clicks__events__partials"])
def test_names_that_stand_for_nothing(lake: Lake, name: str) -> None:
    with pytest.raises((SqlError, UnknownTable)):
        run(Statement(str(lake.root), f"SELECT * FROM {name}", OPEN, payloads=SCHEMAS))


def test_a_source_without_a_readable_schema_has_its_payload(lake: Lake) -> None:
    schemas = payload_schemas([Source("clicks", "((", "at", name="clicks")])
    found: pa.Table = run_sql(lake, "SELECT * FROM clicks__events", payloads=schemas)
    assert found.num_rows == 6
    assert found.column_names[-2:] == ["reason", "payload"]

"""What is known of a schema without Spark."""

from __future__ import annotations

import pytest

from lakehouse.contract.sql.ddl import find_field, parse_ddl

NUMBER = frozenset({int, float})


def test_names_types_and_structs() -> None:
    fields = parse_ddl(
        "id BIGINT NOT NULL COMMENT 'a, b: c', price DECIMAL(10,2), ok boolean, `group` STRUCT<`group_id`: BIGINT, "
        "topics: ARRAY<STRUCT<key: STRING>>, lon: DOUBLE>, tags MAP<STRING, STRUCT<x: INT>>, at TIMESTAMP"
    )
    assert list(fields) == ["id", "price", "ok", "group", "tags", "at"]
    assert fields["id"].json == NUMBER
    assert fields["ok"].json == {bool}
    assert not fields["price"].json, "Spark takes a text for it too"
    assert fields["tags"].json == {dict}
    assert list(fields["group"].fields) == ["group_id", "topics", "lon"]
    inner = find_field(fields, ("group", "group_id"))
    assert inner is not None and inner.json == NUMBER
    assert find_field(fields, ("group", "no")) is None
    assert find_field(fields, ("id", "no")) is None
    assert find_field(fields, ("no", "no")) is None


@pytest.mark.parametrize("text", ["", "a", "a <", "a STRUCT<b", "a ARRAY<", "a,b", "a !", "STRUCT<a: INT>", "<>", ",,"])
def test_what_is_no_ddl_is_left_to_others(text: str) -> None:
    assert all(not field.fields for field in parse_ddl(text).values())

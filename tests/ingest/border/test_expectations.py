"""Expectations at the border: which are taken, and what they say of an event, compared with another engine's SQL."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import duckdb
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingest.border.admission import Border, FrontBorder, front_source
from ingest.border.expectations import compile_expectations
from ingest.relay import Refiner
from lakehouse.contract.errors import ConfigError
from lakehouse.contract.pipeline import Source, load_pipeline
from lakehouse.contract.pipeline.expectations import BORDER, HALT, Expectation

SCHEMA = (
    "id BIGINT, n INT, m SMALLINT, t TINYINT, d DOUBLE, f FLOAT, s STRING, r STRING, ok BOOLEAN, `two words` INT, "
    "p STRUCT<city: STRING, q: STRUCT<z: INT>>, at TIMESTAMP, tags MAP<STRING, INT>, a ARRAY<STRUCT<x: INT>>, "
    "ci STRING COLLATE UNICODE_CI, v VARCHAR(5)"
)


def source_of(*sqls: str, **options: Any) -> Source:
    found = {f"e{number}": Expectation(sql, at=BORDER) for number, sql in enumerate(sqls)}
    return Source(topic="t", schema=SCHEMA, event_time="received_at", expectations=found, name="clicks", **options)


def failed(sql: str, event: dict[str, Any]) -> bool:
    return compile_expectations(source_of(sql))(event) is not None


@pytest.mark.parametrize(
    ("sql", "passes", "fails"),
    [
        ("n > 0", {"n": 1}, {"n": 0}),
        ("0 < n", {"n": 1}, {"n": None}),
        ("-5 >= t", {"t": -5}, {"t": -4}),
        ("N BETWEEN 1 AND 5", {"n": 5}, {"n": 6}),
        ("id NOT IN (1, -2)", {"id": 2}, {"id": -2}),
        ("`two words` = 2", {"two words": 2}, {"two words": 3}),
        ("d > 1e3 OR d = -0.5", {"d": 1000.5}, {"d": 1000}),
        ("f = 0.5 OR f > 16777216", {"f": 0.5}, {"f": 16777210}),
        ("n <= id", {"n": 5, "id": 2**40}, {"n": 5, "id": 4}),
        ("s <> r", {"s": "a", "r": "a "}, {"s": "a", "r": None}),
        ("s < '\U0001f600'", {"s": "\uffff"}, {"s": "\U0001f601"}),
        ("p.CITY IN ('Ulm', '')", {"p": {"city": ""}}, {"p": None}),
        ("p.q.z IS NULL", {"p": {"q": {}}}, {"p": {"q": {"z": 1}}}),
        ("length(s) = 1", {"s": "\U0001f600"}, {"s": ""}),
        ("NOT ok OR n IS NOT NULL", {"ok": False}, {"ok": None}),
        ("ok IS NOT TRUE", {}, {"ok": True}),
        ("NOT (n > 1 AND (ok OR s = 'x'))", {"n": 1}, {"n": 2, "s": "x"}),
    ],
)
def test_what_is_judged(sql: str, passes: dict[str, Any], fails: dict[str, Any]) -> None:
    assert (failed(sql, passes), failed(sql, fails)) == (False, True)


@pytest.mark.parametrize(
    "sql",
    [
        *("n > '1'", "n > 1.5", "n > 9223372036854775808", "s > 1", "n > d", "ok > true", "f > 16777217", "d IN (1)"),
        *("at > 5", "ci = 'a'", "v = 'a'", "tags.x = 1", "a.x = 1", "a[0].x = 1", "upper(s).x = 'a'", "absent = 1"),
        *("tenant = 'a'", "n + 1 > 2", "1 = 1", "true", "n", "n = 1 = true", "n = 1 IS NULL", "n IN (1, null)"),
        *("n = null", "n <=> 1", "n = 5L", "s LIKE 'a%'", "coalesce(n, 0) > 1", "n IS TRUE", "length(n) > 1"),
        *(r"s = 'a\tb'", "s = 'it''s'", "s = '${x}'", "n > 1 -- x", "n > 0, n < 2", "SELECT 1", "*", "n >"),
        *("n BETWEEN SYMMETRIC 1 AND 2", "n IN (SELECT 1)", "now() > at", "! ok = s IS NULL"),
        *("(" * 200 + "n > 1" + ")" * 200, " OR ".join(["n = 1"] * 200)),
    ],
)  # fmt: skip
def test_what_is_not_taken(sql: str) -> None:
    with pytest.raises(ConfigError, match="cannot be judged at the border") as caught:
        compile_expectations(source_of("n > 0", sql))
    assert caught.value.key == "sources.clicks.expectations.e1"
    assert "leave out at" in caught.value.remedy


@pytest.mark.parametrize(
    "event",
    [
        {"n": "0"}, {"n": 0.0}, {"n": False}, {"n": 2**31}, {"n": [0]}, {"n": 0, "id": 2**63}, {"n": 0, "d": "NaN"},
        {"n": 0, "ok": "false"}, {"n": 0, "p": 5}, {"n": 0, "p": {"q": []}}, {"n": 0, "tags": []}, {"n": 0, "f": 1e39},
    ],
)  # fmt: skip
def test_an_event_that_may_not_fit_is_left_to_spark(event: dict[str, Any]) -> None:
    assert not failed("n > 0", event)
    assert failed("n > 0", {"n": 0, "s": 5, "at": "noon", "v": [], "more": {}}), "these fit, or are not known here"


@pytest.mark.parametrize("value", [1 + 2**-24, 1e-40, 1e39, -(2.0**-149)])
def test_a_float_that_may_be_rounded_in_two_ways_is_left_to_spark(value: float) -> None:
    assert not failed("f > 2000 AND f < 1000", {"f": value})
    assert failed("f > 2000 AND f < 1000", {"f": 0.1})


def test_an_error_names_file_and_line(tmp_path: Path) -> None:
    text = (
        '[sources.clicks]\ntopic = "t"\nschema = "n INT"\nevent_time = "received_at"\n\n[sources.clicks.expectations]\n'
    )
    file = tmp_path / "pipeline.toml"
    file.write_text(text + 'odd = { sql = "n % 2 = 1", at = "border" }\n', encoding="utf-8")
    with pytest.raises(ConfigError, match=r"pipeline.toml:7: sources.clicks.expectations.odd: cannot be judged"):
        Border(load_pipeline(tmp_path).sources["clicks"], tenant="t", collector="c", file=file)
    for declared, says in [('at = "boarder"', "Did you mean 'border'"), ('at = "border", action = "halt"', "to halt")]:
        file.write_text(text + 'odd = { sql = "n > 1", ' + declared + " }\n", encoding="utf-8")
        with pytest.raises(ConfigError, match=says) as caught:
            load_pipeline(tmp_path)
        assert (caught.value.key, caught.value.file) == ("sources.clicks.expectations.odd.at", file)


def test_the_second_of_two_steps_judges_and_the_first_does_not() -> None:
    source = source_of("n > 0")
    payload = b'{"n": 0}'
    front = FrontBorder(front_source(source), tenant="t", collector="front").admit(payload)
    assert front.refusal is None
    record = SimpleNamespace(topic="t.raw", partition=0, offset=5, value=payload, headers=front.envelope.to_headers())
    envelope, _, kept = Refiner(Border(source, tenant="t", collector="r1")).refine(record, suspect=False)
    assert (envelope.reject, envelope.event_id, kept) == ("expectation e0 failed", front.envelope.event_id, payload)


def test_only_what_says_so_is_judged_here() -> None:
    declared = {"a": Expectation("n > 0"), "b": Expectation("n > 1", action=HALT), "c": Expectation("now() > at")}
    assert compile_expectations(Source("t", SCHEMA, "received_at", expectations=declared))({"n": -1}) is None


NUMBERS, TEXTS = [-1, 0, 1, 2], ["", "a", "a ", "b", "é", "\U0001f600"]
KINDS: list[tuple[list[str], list[str], list[str]]] = [
    (["n", "id"], [str(number) for number in NUMBERS], ["=", "<>", "<", "<=", ">", ">="]),
    (["d"], ["0", "0.5", "-1.0", "1e0"], ["=", "<>", "<", "<=", ">", ">="]),
    (["s", "r"], [f"'{text}'" for text in TEXTS], ["=", "<>", "<", "<=", ">", ">="]),
    (["ok"], ["true", "false"], ["=", "<>"]),
]


@st.composite
def leaves(draw: st.DrawFn) -> str:
    fields, literals, operators = draw(st.sampled_from(KINDS))
    field, literal, second = (draw(st.sampled_from(names)) for names in (fields, literals, literals))
    forms = [f"{field} {draw(st.sampled_from(operators))} {draw(st.sampled_from([*literals, *fields]))}"]
    forms += [f"{literal} {draw(st.sampled_from(operators))} {field}", f"{field} IS NULL", f"{field} IS NOT NULL"]
    both = f"BETWEEN {literal} AND {second}"
    forms += [f"{field} {both}", f"{field} NOT {both}"] * (field != "ok")
    forms += [f"{field} IN ({literal}, {second})", f"{field} NOT IN ({literal})"] * (field not in ("ok", "d"))
    forms += ["ok", "ok IS TRUE", "ok IS NOT FALSE"] * (field == "ok") + [f"length({field}) < 2"] * (field == "s")
    return draw(st.sampled_from(forms))


EXPRESSIONS = st.recursive(
    leaves(),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from([" AND ", " OR "]), inner).map("".join), inner.map("NOT ({})".format),
        inner.map("({})".format),
    ),
    max_leaves=6,
)  # fmt: skip
ONE_EVENT = st.fixed_dictionaries(
    {},
    optional={
        "n": st.sampled_from([*NUMBERS, None]), "id": st.sampled_from([*NUMBERS, None]),
        "d": st.sampled_from([0, -0.0, 0.5, -1, 1, None]), "s": st.sampled_from([*TEXTS, None]),
        "r": st.sampled_from([*TEXTS, None]), "ok": st.sampled_from([True, False, None]),
    },
)  # fmt: skip


@given(sql=EXPRESSIONS, events=st.lists(ONE_EVENT, min_size=1, max_size=12))
@settings(max_examples=30, deadline=None)
def test_unknown_is_as_in_sql(sql: str, events: list[dict[str, Any]]) -> None:
    """DuckDB is asked the same."""
    values = "(VALUES (?::BIGINT, ?::INT, ?::DOUBLE, ?::VARCHAR, ?::VARCHAR, ?::BOOLEAN)) e(id, n, d, s, r, ok)"
    judge = compile_expectations(source_of(sql))
    assert judge is not None
    with duckdb.connect() as database:
        for event in events:
            row = [event.get(name) for name in ("id", "n", "d", "s", "r", "ok")]
            holds = database.execute(f"SELECT coalesce({sql}, false) FROM {values}", row).fetchone()
            assert holds == (judge(event) is None,), (sql, event)

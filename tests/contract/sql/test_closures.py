"""Conditions mean what they mean in SQL: compared with DuckDB on generated rows and conditions."""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal
from random import Random
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lakehouse.contract.rows import Row
from lakehouse.contract.sql.closures import Columns, compile_condition
from lakehouse.contract.sql.filters import MAX_LENGTH, parse_condition
from serve.core.messages import rows_of
from serve.core.model import TableInfo
from serve.errors import FilterError

SCHEMA = pa.schema(
    [
        ("k", pa.int64()),
        ("i", pa.int64()),
        ("f", pa.float64()),
        ("d", pa.decimal128(10, 2)),
        ("s", pa.string()),
        ("b", pa.bool_()),
        ("t", pa.timestamp("us", "UTC")),
        ("day", pa.date32()),
    ]
)
TABLE = TableInfo("x", "id", tuple(SCHEMA.names), ("k",), types=tuple(SCHEMA.types))
COLUMNS = Columns.of(TABLE)

TEXTS = ["", "a", "A", "ab", "abc", "b%", "x_y", "über", "a\nb"]
NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "k": st.integers(0, 5),
    "i": st.integers(-3, 3),
    "f": st.sampled_from([-1.5, -0.5, 0.0, 0.25, 2.5]),
    "d": st.sampled_from([Decimal("-1.50"), Decimal("0.00"), Decimal("0.25"), Decimal("2.00")]),
    "s": st.sampled_from(TEXTS),
    "b": st.booleans(),
    "t": st.sampled_from([NOON, NOON.replace(hour=0), NOON.replace(month=7, second=3)]),
    "day": st.sampled_from([date(2026, 1, 1), date(2026, 7, 4)]),
}
ROWS = st.lists(st.fixed_dictionaries({name: st.none() | each for name, each in VALUES.items()}), max_size=6)

COMPARE = ["=", "<>", "<", "<=", ">", ">=", "IS DISTINCT FROM", "IS NOT DISTINCT FROM"]


class Writer:
    """Writes conditions at random, of a bounded depth."""

    def __init__(self, random: Random) -> None:
        self.random = random

    def number(self, depth: int) -> str:
        if depth <= 0 or self.random.random() < 0.4:
            return self.random.choice(["i", "f", "d", "k", "1", "-2", "0.25", "2.5e0", "NULL", "year(day)", "i % 2"])
        one, other = self.number(depth - 1), self.number(depth - 1)
        forms = [
            f"({one} {self.random.choice('+-*')} {other})",
            f"abs({one})",
            f"coalesce({one}, {other})",
            f"nullif({one}, {other})",
            f"length({self.word(depth - 1)})",
            "extract(hour FROM t)",
        ]
        return self.random.choice(forms)

    def word(self, depth: int) -> str:
        if depth <= 0 or self.random.random() < 0.6:
            return self.random.choice(["s", "s", "'a'", "'ab'", "NULL", "'über'"])
        return f"{self.random.choice(['lower', 'upper', 'trim'])}({self.word(depth - 1)})"

    def pattern(self) -> str:
        return "".join(self.random.choices(["%", "_", "a", "b", "!%", "x"], k=self.random.randint(0, 4)))

    def condition(self, depth: int) -> str:
        pick, how = self.random.choice, self.random.choice(COMPARE)
        if depth > 0 and self.random.random() < 0.5:
            one, other = self.condition(depth - 1), self.condition(depth - 1)
            return pick([f"({one} AND {other})", f"({one} OR {other})", f"NOT ({one})", f"({one}) IS NOT TRUE"])
        one, other, third = (self.number(depth) for _ in range(3))
        negated = pick(["", "NOT "])
        forms = [
            f"{one} {how} {other}",
            f"{self.word(depth)} {how} {self.word(depth)}",
            f"{pick(['t', 'day'])} {how} {pick(['t', 'day'])}",
            f"t {how} TIMESTAMP '{pick(['2026-01-01 12:00:00', '2026-03-01'])}'",
            f"t {how} '2026-01-01 12:00:00'",
            f"day {how} DATE '2026-01-01'",
            f"s {negated}{pick(['', 'I'])}LIKE '{self.pattern()}' ESCAPE '!'",
            f"{one} {negated}IN ({other}, {third})",
            f"i {negated}IN (1, -2, {pick(['NULL', '0'])})",
            f"s {negated}IN ({self.word(1)}, 'abc')",
            f"{one} {negated}BETWEEN {other} AND {third}",
            f"{pick(list(VALUES))} IS {negated}NULL",
            f"b IS {negated}{pick(['TRUE', 'FALSE'])}",
            pick(["b", "TRUE", "NULL", "starts_with(s, 'a')", "contains(s, 'b')"]),
        ]
        return pick(forms)


def matches(sql: str, rows: list[Row]) -> list[Any]:
    tree = parse_condition(sql, COLUMNS)
    assert tree is not None
    again = parse_condition(tree.sql("duckdb"), COLUMNS)
    assert again is not None
    assert again.sql("duckdb") == tree.sql("duckdb"), "normalised once and for all"
    condition = compile_condition(again, COLUMNS)
    return [condition(row) for row in rows]


@settings(max_examples=12, suppress_health_check=list(HealthCheck))
@given(ROWS, st.integers(0, 2**32))
def test_a_condition_is_what_duckdb_says(rows: list[dict[str, Any]], seed: int) -> None:
    writer = Writer(Random(seed))  # one of hypothesis' own would note down every choice, which takes a minute
    table = pa.Table.from_pylist(rows, schema=SCHEMA)
    with duckdb.connect(config={"threads": "1"}) as database:
        database.execute("SET TimeZone = 'UTC'")
        database.register("x", table)
        for _ in range(25):
            condition = writer.condition(3)
            found = database.execute(f"SELECT ({condition})::BOOLEAN FROM x").fetchall()
            assert matches(condition, rows_of(table)) == [value for (value,) in found], condition


@pytest.mark.parametrize(
    ("sql", "problem"),
    [
        ("i = ", "not SQL"),
        ("@@", "not SQL"),
        ("i = 1; DROP TABLE x", "not taken"),
        ("1 = 1) OR (1 = 1", "not SQL"),
        ("i IN (SELECT 1)", "not taken"),
        ("EXISTS (SELECT 1)", "not taken"),
        ("i = (SELECT max(i) FROM x)", "not taken"),
        ("read_text('/etc/passwd') = 'x'", "read_text"),
        ("sum(i) > 1", "SUM"),
        ("row_number() OVER () = 1", "not taken"),
        ("random() < 0.5", "not taken"),
        ("t > now()", "now"),
        ("CASE WHEN b THEN TRUE END", "CASE"),
        ("s SIMILAR TO '(a|a)*b'", "not taken"),
        ("regexp_matches(s, 'a')", "not taken"),
        ("CAST(s AS INT) = 1", "Casts"),
        ("trim(BOTH 'x' FROM s) = ''", "not taken with"),
        ("x.i = 1", 'Write i, or with quotes "x.i"'),
        ("i >", "not SQL: GT lacks a value"),
        ("i = 1 AND", "not SQL: AND lacks a value"),
        ("nope = 1", "Columns: k, i"),
        ("i", "no condition"),
        ("i = 'a'", "do not compare"),
        ("s > 1", "do not compare"),
        ("t > 'yesterday'", "no time"),
        ("s + 1 = 2", "no number"),
        ("lower(i) = 'a'", "does not take"),
        ("s LIKE s", "pattern"),
        ("SELECT 1", "not taken"),
        ("i = $1", "not taken"),
        ("i = ?", "not taken"),
        ("(" * 900 + "b" + ")" * 900, "deeply"),
        ("NOT " * 40 + "b", "deeply"),
        ("i IN (" + "1," * 1_500 + "1)", "parts"),
        ("b OR s = '" + "x" * MAX_LENGTH + "'", "characters"),
        ("b\0", "NUL"),
    ],
)
def test_what_is_refused(sql: str, problem: str) -> None:
    with pytest.raises(FilterError) as refused:
        matches(sql, [])
    assert problem in str(refused.value)


def test_chains_are_not_deep_and_case_does_not_matter() -> None:
    assert matches(" OR ".join(["I = 1"] * 100), [(0, 1, *[None] * 6)]) == [True]
    assert matches("", []) == [] if parse_condition("  ", COLUMNS) else True


@pytest.mark.parametrize("sql", ["s LIKE '" + "%a" * 100 + "%b'", "(((i BETWEEN 0 AND 1) = b) = b) = b"])
def test_no_condition_explodes(sql: str) -> None:
    assert matches(sql, [(0, 1, 0.0, None, "a" * 5_000, True, None, None)]) in ([False], [True])


def test_nested_between_and_in_are_evaluated_once() -> None:
    calls = 0

    class Counted(tuple[Any, ...]):
        __slots__ = ()

        def __getitem__(self, index: Any) -> Any:
            nonlocal calls
            calls += index == 5
            return super().__getitem__(index)

    deep = "b"
    for _ in range(12):
        deep = f"({deep} BETWEEN FALSE AND TRUE)"
    for _ in range(12):
        deep = f"({deep} IN (TRUE, FALSE))"
    assert matches(deep, [Counted((0, 1, 0.0, None, "", True, None, None))]) == [True]
    assert calls == 1

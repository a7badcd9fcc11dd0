"""What is expected of events and of tables: declared once, judged in the stream and on batches and tables alike.

An :class:`Expectation` is a predicate over one event of a source. A :class:`Check` is about a whole table or batch: a
predicate over each of its rows, or an expectation of great-expectations by its type name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from lakehouse.contract.errors import ConfigError
from lakehouse.contract.tomlfile import duration_ms, one_of

QUARANTINE, WARN, HALT, FAIL = "quarantine", "warn", "halt", "fail"
BORDER = "border"
FRESH = "fresh"  # ours: the newest value of a time column is not older than `within`

# Expectations of great-expectations 1.x that a table in memory can be asked; a test compares them with the library.
GX_TYPES: tuple[str, ...] = (
    "expect_column_distinct_values_to_be_in_set",
    "expect_column_distinct_values_to_contain_set",
    "expect_column_distinct_values_to_equal_set",
    "expect_column_max_to_be_between",
    "expect_column_mean_to_be_between",
    "expect_column_median_to_be_between",
    "expect_column_min_to_be_between",
    "expect_column_most_common_value_to_be_in_set",
    "expect_column_pair_values_a_to_be_greater_than_b",
    "expect_column_pair_values_to_be_equal",
    "expect_column_pair_values_to_be_in_set",
    "expect_column_proportion_of_non_null_values_to_be_between",
    "expect_column_proportion_of_unique_values_to_be_between",
    "expect_column_quantile_values_to_be_between",
    "expect_column_stdev_to_be_between",
    "expect_column_sum_to_be_between",
    "expect_column_to_exist",
    "expect_column_unique_value_count_to_be_between",
    "expect_column_value_lengths_to_be_between",
    "expect_column_value_lengths_to_equal",
    "expect_column_value_z_scores_to_be_less_than",
    "expect_column_values_to_be_between",
    "expect_column_values_to_be_in_set",
    "expect_column_values_to_be_null",
    "expect_column_values_to_be_of_type",
    "expect_column_values_to_be_unique",
    "expect_column_values_to_match_regex",
    "expect_column_values_to_match_regex_list",
    "expect_column_values_to_not_be_in_set",
    "expect_column_values_to_not_be_null",
    "expect_column_values_to_not_match_regex",
    "expect_column_values_to_not_match_regex_list",
    "expect_compound_columns_to_be_unique",
    "expect_multicolumn_sum_to_equal",
    "expect_select_column_values_to_be_unique_within_record",
    "expect_table_column_count_to_be_between",
    "expect_table_column_count_to_equal",
    "expect_table_columns_to_match_ordered_list",
    "expect_table_columns_to_match_set",
    "expect_table_row_count_to_be_between",
    "expect_table_row_count_to_equal",
)


@dataclass(frozen=True, slots=True)
class Expectation:
    """A predicate over one event.

    Attributes:
        sql: Spark SQL over the payload's fields and the envelope; false and null both fail.
        action: what becomes of an event that fails: ``quarantine`` (refused, kept with the reason), ``warn`` (counts
            like any other, and is noted in table ``warnings``) or ``halt`` (the source's query stops before it counts).
        at: ``border``: a collector judges it too, and answers the sender; only of what quarantines. Empty: Spark alone
            does, behind the border.
    """

    SHORTHAND: ClassVar[str] = "sql"  # a plain text in the TOML file is this field
    sql: str
    action: str = QUARANTINE
    at: str = ""

    def __post_init__(self) -> None:
        one_of("action", self.action, (QUARANTINE, WARN, HALT))
        if self.at:
            one_of("at", self.at, (BORDER,))
        if self.at and self.action != QUARANTINE:
            raise ConfigError(
                f"what is to {self.action} is not judged at the border", key="at", remedy="Leave out at, or action"
            )
        if not self.sql.strip():
            raise ConfigError("an expectation needs a predicate", key="sql", remedy="Write e.g. 'price >= 0'")


@dataclass(frozen=True, slots=True)
class Check:
    """An expectation of a table or of a batch.

    Attributes:
        sql: predicate over each row; empty where ``expect`` says what is expected.
        expect: one of :data:`GX_TYPES` or :data:`FRESH`; empty where ``sql`` says it.
        arguments: of that expectation, by name; for a predicate only ``mostly``, the share of rows that must pass.
        action: ``fail`` (the table does not pass) or ``warn`` (said, and no more).
    """

    name: str
    sql: str = ""
    expect: str = ""
    arguments: tuple[tuple[str, Any], ...] = ()
    action: str = FAIL


def checks_of(declared: Mapping[str, Any], key: str) -> tuple[Check, ...]:
    """The checks of a TOML table: ``name = "SQL predicate"`` or ``name = {expect = "TYPE", …}``. Raises ConfigError."""
    return tuple(_check(name, value, f"{key}.{name}") for name, value in declared.items())


def _check(name: str, value: Any, key: str) -> Check:
    given = {"sql": value} if isinstance(value, str) else value
    if not isinstance(given, Mapping) or ("sql" in given) == ("expect" in given):
        raise ConfigError("not an expectation", key=key, remedy="Write a SQL predicate, or {expect = 'TYPE', …}")
    rest = {k: v for k, v in given.items() if k not in ("sql", "expect", "action")}
    action = given.get("action", FAIL)
    sql, expect = given.get("sql", ""), given.get("expect", "")
    if not all(isinstance(text, str) for text in (action, sql, expect)):
        raise ConfigError("sql, expect and action are texts", key=key)
    one_of(f"{key}.action", action, (FAIL, WARN))
    if expect == FRESH:
        _check_fresh(rest, key)
    elif expect:
        one_of(f"{key}.expect", expect, GX_TYPES)
    else:
        for argument in rest:
            one_of(f"{key}.{argument}", argument, ("mostly",))
        if not sql.strip():
            raise ConfigError("an expectation needs a predicate", key=key, remedy="Write e.g. 'n > 0'")
    return Check(name, sql, expect, tuple(rest.items()), action)


def _check_fresh(arguments: Mapping[str, Any], key: str) -> None:
    if set(arguments) != {"column", "within"}:
        raise ConfigError("fresh takes column and within", key=key, remedy="{expect = 'fresh', column = …, within = …}")
    try:
        duration_ms(str(arguments["within"]))
    except ValueError as error:
        raise ConfigError(str(error), key=f"{key}.within") from None

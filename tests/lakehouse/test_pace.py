"""Compiled or interpreted, by the size of a query's batches."""

from __future__ import annotations

import pytest
from pyspark.sql import SparkSession

from lakehouse.pace import LONG_BATCH, Pace

pytestmark = pytest.mark.spark


def test_pace_follows_the_size_and_leaves_given_settings_alone(spark: SparkSession) -> None:
    key = "spark.sql.codegen.factoryMode"
    session = spark.newSession()
    pace = Pace({})
    pace.suit(session, LONG_BATCH)
    assert session.conf.get(key) == "FALLBACK"
    for _ in range(20):
        pace.suit(session, 10)
    assert session.conf.get(key) == "NO_CODEGEN"
    given = Pace({key: "NO_CODEGEN"})
    given.suit(session, LONG_BATCH)
    assert session.conf.get(key) == "NO_CODEGEN"


def test_a_few_short_batches_among_long_ones_change_nothing(spark: SparkSession) -> None:
    key = "spark.sql.codegen.factoryMode"
    session = spark.newSession()
    pace = Pace({})
    for events in (LONG_BATCH, 0, 10, LONG_BATCH, 0, 0, 0):
        pace.suit(session, events)
        assert session.conf.get(key) == "FALLBACK"


def test_a_query_that_has_to_catch_up_begins_compiled(spark: SparkSession) -> None:
    key = "spark.sql.codegen.factoryMode"
    session = spark.newSession()
    before = session.conf.get(key)
    with Pace({}).begun(session, LONG_BATCH):
        assert session.conf.get(key) == "FALLBACK"
    assert session.conf.get(key) == before
    with Pace({}).begun(session, 10):
        assert session.conf.get(key) == before
    with Pace({key: "NO_CODEGEN"}).begun(session, LONG_BATCH):
        assert session.conf.get(key) == before

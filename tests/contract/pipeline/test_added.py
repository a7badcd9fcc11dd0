"""Queries and alerts as they are declared at run time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lakehouse.contract.errors import QueryRefused
from lakehouse.contract.lake import Lake
from lakehouse.contract.pipeline import Pipeline, load_pipeline
from lakehouse.contract.pipeline.added import (
    Declared,
    QuerySpec,
    State,
    added_products,
    checked_alert,
    checked_query,
)
from lakehouse.contract.pipeline.folder import Alert
from lakehouse.contract.settings import QuerySettings, conf_dir

MEETUP = load_pipeline(conf_dir() / "pipelines" / "meetup")
COUNTS = "SELECT response, count(*) AS n FROM rsvps GROUP BY response"


def checked(tmp_path: Path, name: str, sql: str, pipeline: Pipeline = MEETUP, **more: Any) -> QuerySpec:
    return checked_query(QuerySpec(name, sql, **more), pipeline, Lake(tmp_path), QuerySettings(max_queries=2))


def test_what_the_sql_says_is_filled_in(tmp_path: Path) -> None:
    spec = checked(tmp_path, "answers", COUNTS)
    assert (spec.relation, spec.key, spec.start) == ("rsvps", ("response",), "now")
    spec = checked(tmp_path, "tops", "SELECT item, sum(count) AS n FROM top_topics GROUP BY item", start="start")
    assert (spec.relation, spec.key, spec.view().base) == ("top_topics", ("item",), "top_topics")
    spec = checked(
        tmp_path, "top", "SELECT received_at, response FROM rsvps", options={"operator": "top_n", "item": "response"}
    )
    assert (spec.product().operator, spec.product().item, spec.product().name) == ("top_n", "response", "top")


@pytest.mark.parametrize(
    ("given_", "code"),
    [
        ({"name": "Answers"}, "name"),
        ({"name": "members"}, "taken"),
        ({"name": "alerts"}, "taken"),
        ({"start": "yesterday"}, "option"),
        ({"relation": "top_topics"}, "relation"),
        ({"key": ("n",)}, "key"),
        ({"options": {"operatr": "top_n"}}, "option"),
        ({"options": {"operator": "top_n", "item": "response"}, "key": ("n",)}, "key"),
        ({"options": {"operator": "join"}}, "option"),
        ({"sql": "SELECT count(*) AS n FROM rsvps"}, "sql"),
        ({"sql": "SELECT response FROM rsvps", "key": ("response",)}, "key"),
        ({"sql": "SELECT item, rank FROM top_topics"}, "key"),
        ({"sql": "SELECT item, rank FROM top_topics", "key": ("city",)}, "key"),
        ({"sql": "SELECT item, rank FROM top_topics", "key": ("item",), "options": {"n": 1}}, "option"),
        ({"sql": "SELECT resp, count(*) AS n FROM rsvps GROUP BY resp"}, "column"),
        ({"sql": "SELECT response, count(*) AS n, max(rand()) AS r FROM rsvps GROUP BY response"}, "function"),
    ],
)
def test_what_is_refused(tmp_path: Path, given_: dict[str, Any], code: str) -> None:
    with pytest.raises(QueryRefused) as caught:
        checked(tmp_path, **{"name": "answers", "sql": COUNTS, **given_})
    assert caught.value.code == code
    assert caught.value.remedy or code in ("sql", "function")


def test_names_and_quotas(tmp_path: Path) -> None:
    declared = Declared(Lake(tmp_path), QuerySpec)
    one = checked(tmp_path, "one", COUNTS)
    declared.add(one)
    with pytest.raises(QueryRefused, match="the name 'one' is taken"):
        checked(tmp_path, "one", COUNTS)
    with pytest.raises(QueryRefused, match="the name 'one' is taken"):
        declared.add(one)  # somebody was quicker
    assert checked(tmp_path, "over_one", "SELECT max(n) AS n, 1 AS k FROM one", key=("k",)).relation == "one"
    declared.add(checked(tmp_path, "two", COUNTS))
    with pytest.raises(QueryRefused, match="there are 2 queries already") as caught:
        checked(tmp_path, "three", COUNTS)
    assert caught.value.code == "quota"
    (tmp_path / "gold" / "four" / "_delta_log").mkdir(parents=True)
    declared.remove("two")
    with pytest.raises(QueryRefused, match="millrace query rm four --drop"):
        checked(tmp_path, "four", COUNTS)


def test_states_and_products(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    declared = Declared(lake, QuerySpec)
    assert declared.state("none") == State()
    declared.add(checked(tmp_path, "one", COUNTS))
    declared.tell("one", State("running", since=7, start_version=3))
    assert declared.state("one") == State("running", "", 7, 3)
    assert [(product.name, since) for product, since in added_products(lake, "rsvps")] == [("one", 7)]
    (declared.folder / "one.state.json").write_text("{")
    assert declared.state("one") == State()
    (declared.folder / "torn.toml").write_text("sql = ")
    assert list(declared.all()) == ["one"]
    declared.remove("one")
    assert not list(declared.folder.glob("one.*"))


@settings(max_examples=30)
@given(
    sql=st.text(st.characters(blacklist_categories=("Cs", "Cc")) | st.just("\n"), max_size=60),
    key=st.lists(st.text("abc_'\"\\é", min_size=1, max_size=5), max_size=3),
    options=st.dictionaries(
        st.sampled_from(["n", "item", "by"]), st.integers(0, 9) | st.text("a'\"\\", max_size=4) | st.booleans()
    ),
)
def test_what_is_written_is_read_again(
    tmp_path_factory: pytest.TempPathFactory, sql: str, key: list[str], options: dict[str, Any]
) -> None:
    declared = Declared(Lake(tmp_path_factory.mktemp("lake")), QuerySpec)
    spec = QuerySpec("q", sql, "rsvps", tuple(key), "start", options, "2026", drop=True)
    declared.add(spec)
    assert declared.all() == {"q": spec}


def test_alerts_at_run_time(tmp_path: Path) -> None:
    lake, quotas = Lake(tmp_path), QuerySettings()
    alert = Alert("top_topics", "count > 10", hold_raise=3, hold_clear="5 seconds", by=("item",), name="hot")
    columns = {"top_topics": ("item", "count")}
    Declared(lake, Alert).add(checked_alert(alert, MEETUP, lake, quotas, columns))
    assert Declared(lake, Alert).all() == {"hot": alert}
    for changed, says in [
        ({"name": "hot"}, "already"),
        ({"name": "Hot"}, "not a name"),
        ({"product": "none"}, "there is no product"),
        ({"when": "count(*) > 1"}, "looks at other rows"),
        ({"clear": "cnt > 1"}, "there is no column 'cnt'"),
    ]:
        given_ = {"product": "top_topics", "when": "count > 1", "name": "other", **changed}
        with pytest.raises(QueryRefused, match=says):
            checked_alert(Alert(**given_), MEETUP, lake, quotas, columns)


RIDES = """
[sources.rides]
topic = "rides"
schema = "ride_id BIGINT, at BIGINT, station STRING, amount DOUBLE"
event_id = "{ride_id}"
event_time = "timestamp_millis(at)"
[sources.rides.enrich.stations]
key = "{station}"
file = "stations.csv"
column = "id"
"""


def rides(folder: Path) -> Pipeline:
    (folder / "pipeline.toml").write_text(RIDES)
    return load_pipeline(folder)


def test_a_select_without_group_by_is_of_single_events(tmp_path: Path) -> None:
    spec = checked(tmp_path, "dear", "SELECT ride_id, amount FROM rides WHERE amount > 50", rides(tmp_path))
    assert (spec.product().operator, spec.key, spec.tenant_column) == ("events", (), "tenant")
    shared = checked(tmp_path, "d", "SELECT ride_id FROM rides", rides(tmp_path), options={"newest": 5, "tenant": "*"})
    assert (shared.product().newest, shared.tenant_column) == (5, "*")


@pytest.mark.parametrize(
    ("sql", "resolved"),
    [
        (
            "SELECT ride_id, s.name AS name FROM rides r JOIN stations s ON r.station = s.id WHERE r.amount > 5",
            "SELECT ride_id, stations.name AS name FROM rides AS r WHERE r.amount > 5 AND NOT stations IS NULL",
        ),
        (
            "SELECT ride_id, stations.name AS name FROM rides LEFT JOIN stations ON stations.id = station",
            "SELECT ride_id, stations.name AS name FROM rides",
        ),
        (
            "SELECT s.town AS town, count(*) AS n FROM rides JOIN stations s ON station = s.id GROUP BY s.town",
            "SELECT stations.town AS town, COUNT(*) AS n FROM rides WHERE NOT stations IS NULL GROUP BY stations.town",
        ),
    ],
)
def test_a_join_with_a_reference_is_resolved(tmp_path: Path, sql: str, resolved: str) -> None:
    assert checked(tmp_path, "q", sql, rides(tmp_path)).sql == resolved


@pytest.mark.parametrize(
    "join",
    [
        "JOIN stations s ON r.amount = s.id",
        "JOIN stations s ON r.station = s.name",
        "JOIN stations s ON r.station > s.id",
        "RIGHT JOIN stations s ON r.station = s.id",
        "CROSS JOIN stations s",
        "JOIN others s ON r.station = s.id",
        "LEFT SEMI JOIN stations s ON r.station = s.id",
    ],
)
def test_another_join_is_refused(tmp_path: Path, join: str) -> None:
    with pytest.raises(QueryRefused) as refused:
        checked(tmp_path, "q", f"SELECT ride_id FROM rides r {join}", rides(tmp_path))
    assert refused.value.code == "relation" and refused.value.remedy

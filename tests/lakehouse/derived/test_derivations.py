"""Views and alerts over real tables, turn by turn."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from lakehouse.contract import lake as names
from lakehouse.contract.lake import Lake
from lakehouse.contract.pipeline import View
from lakehouse.contract.pipeline.added import Declared, QuerySpec
from lakehouse.contract.pipeline.folder import Alert
from lakehouse.contract.storage import remove_tree
from lakehouse.derived.alerts import COMMIT_ALERTS
from lakehouse.derived.views import COMMIT_BASE, proofs
from tests.lakehouse.derived.tables import Driver, Product, a_pipeline, at, rows_of, versions

ROOT = Path(__file__).parents[3]
TOTALS = View(
    base="loads",
    name="totals",
    sql="SELECT city, count(*) AS readings, sum(n) AS n, max(at) AS newest FROM loads GROUP BY city",
)
BUSY = Alert(product="loads", name="busy", when="n > 10", clear="n < 5", by=("city",), value="kw")


def states(lake: Lake) -> list[tuple[Any, ...]]:
    rows = rows_of(lake, "alerts")
    return sorted(
        (r["alert"], r["key"], r["state"], r["raised_version"], r["cleared_version"], r["value"]) for r in rows
    )


def commits(lake: Lake, name: str = "alerts") -> int:
    """Commits that changed rows."""
    history = DeltaTable(str(lake.table("gold", name).path)).history()
    return sum(info["operation"] == "WRITE" and info["operationParameters"]["mode"] == "Overwrite" for info in history)


def test_a_view_follows_its_base(lake: Lake) -> None:
    loads = Product(lake)
    loads.put(("Ulm", at(0), 1, 0.5), ("Ulm", at(5), 2, None), ("Köln", at(0), 7, 1.5))
    driver = Driver(lake, a_pipeline([TOTALS]))
    driver.turn()
    assert rows_of(lake, "totals") == [
        {"city": "Köln", "readings": 1, "n": 7, "newest": at(0)},
        {"city": "Ulm", "readings": 2, "n": 3, "newest": at(5)},
    ]
    version = loads.put(("Ulm", at(0), 1, 0.5))
    driver.turn()
    assert rows_of(lake, "totals") == [{"city": "Ulm", "readings": 1, "n": 1, "newest": at(0)}]
    info = DeltaTable(str(lake.table("gold", "totals").path)).history(limit=1)[0]
    assert json.loads(info[COMMIT_BASE])[1] == version
    assert info[names.COMMIT_THROUGH] == '{"t/0": 2}'


def test_what_changes_nothing_is_not_written_again(lake: Lake) -> None:
    loads = Product(lake)
    loads.put(("Ulm", at(0), 1, 0.5))
    driver = Driver(lake, a_pipeline([TOTALS]))
    driver.turn()
    path = lake.table("gold", "totals").path
    before = versions(path)
    driver.turn()
    Driver(lake, a_pipeline([TOTALS])).turn()  # a new driver over the same version
    assert versions(path) == before
    loads.put(("Ulm", at(0), 1, 99.0))  # no column of the view's
    driver.turn()
    newest = DeltaTable(str(path)).history(limit=1)[0]
    assert newest["operationParameters"]["mode"] == "Append"  # how far it reaches, and no rows
    assert newest[names.COMMIT_THROUGH] == '{"t/0": 2}'
    assert commits(lake, "totals") == 1


def test_a_view_of_partials_sees_them_folded_also_after_a_fold(lake: Lake) -> None:
    loads = Product(lake, fold={"n": "sum", "kw": "max"})
    for n in range(5):
        loads.put(("Ulm", at(0), n, float(n)))
    driver = Driver(lake, a_pipeline([TOTALS]))
    driver.turn()
    assert rows_of(lake, "totals")[0] == {"city": "Ulm", "readings": 1, "n": 10, "newest": at(0)}
    loads.put(("Ulm", at(0), 5, 0.0), ("Bonn", at(0), 1, 0.0))
    driver.turn()
    DeltaTable(str(loads.path)).optimize.compact()
    loads.put(("Bonn", at(0), 1, 0.0))
    driver.turn()
    assert [(row["city"], row["readings"], row["n"]) for row in rows_of(lake, "totals")] == [
        ("Bonn", 1, 2),
        ("Ulm", 1, 15),
    ]


def test_a_view_of_latest_rows_never_mixes_two_of_them(lake: Lake) -> None:
    loads = Product(lake, fold={"n": "latest", "kw": "latest"}, properties={names.PROPERTY_ORDER: "n"})
    loads.put(("Ulm", at(0), 1, 10.0))
    newest = View(base="loads", name="newest", sql="SELECT city, n, kw FROM loads", key=("city",))
    driver = Driver(lake, a_pipeline([newest]))
    driver.turn()
    assert rows_of(lake, "newest") == [{"city": "Ulm", "n": 1, "kw": 10.0}]
    loads.put(("Ulm", at(0), 2, None))
    driver.turn()
    assert rows_of(lake, "newest") == [{"city": "Ulm", "n": 2, "kw": None}]


def test_views_over_views_in_any_order(lake: Lake) -> None:
    top = View(base="totals", name="top", key=("one",), sql="SELECT 1 AS one, max_by(city, n) AS city FROM totals")
    loads = Product(lake)
    loads.put(("Ulm", at(0), 1, 0.5), ("Bonn", at(0), 7, 1.5))
    driver = Driver(lake, a_pipeline([top, TOTALS]))
    driver.turn()
    driver.turn()
    assert rows_of(lake, "top") == [{"one": 1, "city": "Bonn"}]
    proven = {
        name: again.equals(live.cast(again.schema))
        for name, _, _, live, again in proofs(lake, a_pipeline([top, TOTALS]))
    }
    assert proven == {"top": True, "totals": True}


@pytest.mark.parametrize(
    ("view", "reason"),
    [
        (
            View(base="loads", name="v", sql="SELECT city, n FROM loads WHERE city = 'Ulm'", key=("city",)),
            "several rows have one city",
        ),
        (
            View(base="loads", name="v", sql="SELECT at, n FROM loads", key=("at", "n")),
            "it has 3 rows, and a view may have 2",
        ),
        (View(base="loads", name="v", sql="SELECT city, max(m) AS m FROM loads GROUP BY city"), "m"),
        (View(base="loads", name="v", sql="SELECT city, n FROM loads"), "which columns name one row"),
        (
            View(base="loads", name="v", sql="SELECT city, now() AS n FROM loads", key=("city",)),
            "the function now is not taken",
        ),
        (
            View(base="loads", name="v", sql="SELECT city, 1/0 AS n FROM other", key=("city",)),
            "there is no source or product",
        ),
    ],
)
def test_a_view_that_fails_says_why_and_fails_alone(lake: Lake, view: View, reason: str) -> None:
    loads = Product(lake)
    loads.put(("Ulm", at(0), 1, 0.5), ("Ulm", at(5), 2, 0.5), ("Bonn", at(9), 2, 0.5))
    driver = Driver(lake, a_pipeline([view, TOTALS]), max_view_rows=2)
    driver.turn()
    found = Declared(lake, QuerySpec)
    assert found.state("v").state == "failed"
    assert reason in found.state("v").reason
    assert found.state("totals").state == "running"
    assert len(rows_of(lake, "totals")) == 2
    assert not lake.table("gold", "v").exists()


def test_a_base_that_is_too_large_is_refused_with_a_remedy(lake: Lake) -> None:
    loads = Product(lake)
    loads.put(*[("Ulm", at(n), n, 0.0) for n in range(10)])
    Driver(lake, a_pipeline([TOTALS], [BUSY]), max_base_rows=5).turn()
    assert "raise queries.max_base_rows" in Declared(lake, QuerySpec).state("totals").reason
    assert "more than 5 rows" in Declared(lake, Alert).state("busy").reason


def test_a_view_that_is_declared_otherwise_is_made_anew(lake: Lake) -> None:
    loads = Product(lake)
    loads.put(("Ulm", at(0), 1, 0.5))
    Driver(lake, a_pipeline([TOTALS])).turn()
    other = View(base="loads", name="totals", sql="SELECT city, sum(kw) AS kwh FROM loads GROUP BY city")
    Driver(lake, a_pipeline([other])).turn()
    assert rows_of(lake, "totals") == [{"city": "Ulm", "kwh": 0.5}]


def test_a_base_that_is_built_again_is_followed_on(lake: Lake) -> None:
    loads = Product(lake)
    loads.put(("Ulm", at(0), 1, 0.5))
    driver = Driver(lake, a_pipeline([TOTALS], [BUSY]))
    driver.turn()
    remove_tree(loads.path)
    driver.turn()
    Product(lake).put(("Bonn", at(0), 50, 0.5))
    driver.turn()
    assert [row["city"] for row in rows_of(lake, "totals")] == ["Bonn"]
    assert [state[1:3] for state in states(lake)] == [('{"city": "Bonn"}', "raised")]


def test_an_alert_is_said_once_when_it_comes_about_and_once_when_it_ends(lake: Lake) -> None:
    loads = Product(lake)
    driver = Driver(lake, a_pipeline(alerts=[BUSY]))
    driver.turn()
    assert rows_of(lake, "alerts") == []
    for ulm, expected in [
        (1, []),
        (11, [("raised", 2, None)]),
        (12, [("raised", 2, None)]),
        (7, [("raised", 2, None)]),  # between the two conditions
        (4, [("cleared", 2, 5)]),
        (7, [("cleared", 2, 5)]),
        (20, [("raised", 7, None)]),
    ]:
        loads.put(("Ulm", at(0), ulm, ulm / 2), ("Bonn", at(0), 3, 1.0))
        driver.turn()
        assert [state[2:5] for state in states(lake)] == expected
    assert commits(lake) == 3
    raised = rows_of(lake, "alerts")[0]
    assert (raised["product"], raised["key"], raised["value"]) == ("loads", '{"city": "Ulm"}', 10.0)
    loads.put(("Bonn", at(0), 3, 1.0))  # gone is cleared
    driver.turn()
    assert [state[2] for state in states(lake)] == ["cleared"]


def test_conditions_that_hold_together_do_not_make_an_alert_flap(lake: Lake) -> None:
    loads = Product(lake)
    both = Alert(product="loads", name="both", when="n > 10", clear="n > 12 AND kw > 0", by=("city",), value="kw")
    driver = Driver(lake, a_pipeline(alerts=[both]))
    said = []
    for ulm in (13, 14, 15, 16, 7, 13):
        loads.put(("Ulm", at(0), ulm, 1.0))
        driver.turn()
        said.append(states(lake)[0][2:5])
    raised, cleared = ("raised", 1, None), ("cleared", 1, 2)
    assert said == [raised, cleared, cleared, cleared, cleared, ("raised", 6, None)]


def test_an_alert_belongs_to_the_tenant_of_its_key(lake: Lake) -> None:
    loads = Product(lake)
    loads.put(("acme", at(0), 11, 1.0), ("globex", at(0), 12, 1.0))
    mine = View(base="loads", name="mine", sql="SELECT city, n FROM loads", key=("city",), tenant="city")
    alerts = [
        Alert(product="mine", name="by_tenant", when="n > 10"),
        Alert(product="mine", name="by_number", when="n > 10", by=("n",)),
        Alert(product="loads", name="of_no_tenant", when="n > 10", by=("city",)),
    ]
    driver = Driver(lake, a_pipeline([mine], alerts))
    for _ in range(3):
        driver.turn()
    found = {(row["alert"], row["tenant"]) for row in rows_of(lake, "alerts")}
    assert found == {
        ("by_tenant", "acme"), ("by_tenant", "globex"), ("by_number", "default"), ("of_no_tenant", "default"),
    }  # fmt: skip


def test_each_version_is_looked_at_also_those_that_came_while_no_driver_ran(lake: Lake) -> None:
    alert = Alert(product="loads", name="a", when="n > 10", hold_raise=3, hold_clear=2, by=("city",))
    loads = Product(lake)
    loads.put(("Ulm", at(0), 0, 0.0))
    Driver(lake, a_pipeline(alerts=[alert])).turn()
    for n in (11, 12, 0, 11, 11, 11, 0, 11, 0, 0):
        loads.put(("Ulm", at(0), n, 0.0))
    Driver(lake, a_pipeline(alerts=[alert])).turn()
    assert [state[2:5] for state in states(lake)] == [("cleared", 7, 11)]
    assert commits(lake) == 2


def test_durations_go_by_the_products_own_clock(lake: Lake) -> None:
    by_arrival = Alert(product="loads", name="arrival", when="n > 10", hold_raise="10 minutes", by=("city",))
    by_column = Alert(product="loads", name="column", when="n > 10", hold_raise="10 minutes", by=("city",), time="at")
    loads = Product(lake)
    loads.put(("Ulm", at(0), 11, 0.0), newest=at(0))
    driver = Driver(lake, a_pipeline(alerts=[by_arrival, by_column]))
    driver.turn()
    loads.put(("Ulm", at(10), 11, 0.0), newest=at(1))
    driver.turn()
    assert [(state[0], state[2]) for state in states(lake)] == [("column", "raised")]
    loads.put(("Ulm", at(10), 11, 0.0), newest=at(10))
    driver.turn()
    assert [(state[0], state[2]) for state in states(lake)] == [("arrival", "raised"), ("column", "raised")]
    raised = rows_of(lake, "alerts")
    assert {(row["since"], row["raised_at"]) for row in raised} == {(at(0), at(10))}


def test_a_streak_survives_a_restart_and_silence_is_noted_now_and_then(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lakehouse.derived.alerts.SILENT_VERSIONS", 2)
    alert = Alert(product="loads", name="a", when="n > 10", hold_raise=5, by=("city",))
    loads = Product(lake)
    loads.put(("Ulm", at(0), 11, 0.0))
    for _ in range(3):
        driver = Driver(lake, a_pipeline(alerts=[alert]))
        driver.turn()
        loads.put(("Ulm", at(0), 11, 0.0))
    driver.turn()
    info = DeltaTable(str(lake.table("gold", "alerts").path)).history(limit=1)[0]
    assert json.loads(info[COMMIT_ALERTS])["a"]["streaks"] == {
        '{"city": "Ulm"}': {"versions": 3, "since": 1767268800000}
    }
    assert rows_of(lake, "alerts") == []
    loads.put(("Ulm", at(0), 11, 0.0))
    Driver(lake, a_pipeline(alerts=[alert])).turn()
    assert [state[3] for state in states(lake)] == [5]


def test_alerts_come_and_go_at_run_time_and_one_that_fails_fails_alone(lake: Lake) -> None:
    loads = Product(lake)
    loads.put(("Ulm", at(0), 11, 0.0))
    driver = Driver(lake, a_pipeline())
    declared = Declared(lake, Alert)
    declared.add(BUSY)
    declared.add(Alert(product="loads", name="broken", when="m > 1"))
    driver.turn()
    assert [state[:3] for state in states(lake)] == [("busy", '{"city": "Ulm"}', "raised")]
    assert declared.state("busy").state == "running"
    assert declared.state("broken").state == "failed"
    declared.remove("busy")
    driver.turn()
    assert rows_of(lake, "alerts") == []


SCRIPT = """
import sys
from lakehouse.contract.lake import Lake
from lakehouse.contract.storage import lake_path
from tests.lakehouse.derived.test_derivations import BUSY, TOTALS
from tests.lakehouse.derived.tables import Driver, a_pipeline
Driver(Lake(lake_path(sys.argv[1])), a_pipeline([TOTALS], [BUSY])).turn()
"""


def test_killed_between_the_products_commit_and_the_alerts(lake: Lake) -> None:
    """At each point: afterwards every alert has been said once."""
    loads = Product(lake)
    loads.put(("Ulm", at(0), 1, 0.0))

    def drive(crash_at: str = "") -> int:
        environ = {**os.environ, "PYTHONPATH": str(ROOT), "MILLRACE_CRASH_AT": crash_at}
        return subprocess.run(
            [sys.executable, "-c", SCRIPT, str(lake.root)], env=environ, cwd=ROOT, check=False
        ).returncode

    assert drive() == 0
    loads.put(("Ulm", at(0), 11, 0.0))
    assert drive("alerts.before_commit") == -signal.SIGKILL
    assert rows_of(lake, "alerts") == []
    loads.put(("Ulm", at(0), 1, 0.0))  # raised and ended while nobody looked
    assert drive("alerts.after_commit") == -signal.SIGKILL
    assert [state[2:5] for state in states(lake)] == [("raised", 2, None)]
    assert drive("view.before_commit") == -signal.SIGKILL
    assert drive() == 0
    assert [state[2:5] for state in states(lake)] == [("cleared", 2, 3)]
    assert drive() == 0
    assert commits(lake) == 2
    assert rows_of(lake, "totals")[0]["n"] == 1


@pytest.mark.parametrize("bucket", ["folder"], indirect=True)  # a store says itself when it wrote an object
def test_old_files_go_and_the_writers_go_on(lake: Lake) -> None:
    loads = Product(lake)
    driver = Driver(lake, a_pipeline([TOTALS], [BUSY]))
    for n in (11, 1, 12):
        loads.put(("Ulm", at(0), n, 0.0))
        driver.turn()
    tables = [lake.table("gold", name) for name in ("totals", "alerts")]
    for table in tables:
        for file in table.path.glob("*.parquet"):
            os.utime(file, (0, 0))
        log = table.path / "_delta_log"
        for commit in log.glob("*.json"):
            aged = [
                line.replace('"deletionTimestamp":1', '"deletionTimestamp":0')
                for line in commit.read_text().split("\n")
            ]
            commit.write_text("\n".join(aged))
    before = [len(list(table.path.glob("*.parquet"))) for table in tables]
    Driver(lake, a_pipeline([TOTALS], [BUSY])).turn()
    again = Driver(lake, a_pipeline([TOTALS], [BUSY]))
    again.turn()
    again.derivations._swept = float("-inf")
    again.turn()
    after = [len(list(table.path.glob("*.parquet"))) for table in tables]
    assert [now < then for now, then in zip(after, before, strict=True)] == [True, True]
    loads.put(("Ulm", at(0), 2, 0.0))
    again.turn()
    assert rows_of(lake, "totals")[0]["n"] == 2
    assert [state[2] for state in states(lake)] == ["cleared"]

"""Queries that are added while a driver runs: on a real broker, Spark and Delta."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from lakehouse.contract.envelope import fingerprint
from lakehouse.contract.pipeline.added import Declared, QuerySpec, checked_query
from lakehouse.gold.store import ProductStore
from lakehouse.replay import verify
from tests.lakehouse.lakes import Sent, Site, assert_exact, eventually, expected, is_valid, mixture
from tests.lakehouse.test_evolution import redeclared

pytestmark = [pytest.mark.spark, pytest.mark.broker]

CITIES = "SELECT place.city AS city, count(*) AS n, sum(price) AS total FROM clicks GROUP BY place.city"
EVENTS = "SELECT id, place.city AS city FROM clicks WHERE price <= 4"
TEAMS = "SELECT p.team AS team, count(*) AS n FROM clicks c JOIN people p ON c.who = p.name GROUP BY p.team"
REFERENCE = """
[sources.clicks.enrich.people]
file = "people.csv"
column = "name"
key = "{who}"

[products.per_city]"""
MOST = "SELECT 1 AS one, max(n) AS n, count(*) AS windows FROM totals"


def by_city(records: Sequence[Sent]) -> dict[str, tuple[int, int]]:
    """Events and sum of prices by city, in plain Python."""
    counts, totals = Counter[str](), Counter[str]()
    for _, city, n, total, _ in expected(records).per_city:
        counts[city] += n
        totals[city] += total or 0
    return {city: (n, totals[city]) for city, n in counts.items()}


def cheap(records: Sequence[Sent]) -> Counter[int]:
    """Ids of events that :data:`EVENTS` selects, in plain Python: the first valid copy of each."""
    events: dict[str, dict[str, Any]] = {}
    for record in filter(is_valid, records):
        event = json.loads(record.payload or b"")
        events.setdefault(record.event_id or str(event["id"]), event)
    return Counter(event["id"] for event in events.values() if event["price"] is not None and event["price"] <= 4)


class Enriched(Sent):
    """Some records carry a row of the reference, as a collector adds it to the headers."""

    @property
    def team(self) -> str:
        """Empty: the reference has no row."""
        return "" if self.event_id is None or self.partition else fingerprint(self.event_id.encode())[0]

    def headers(self) -> list[tuple[str, bytes]]:
        row = json.dumps({"name": "somebody", "team": self.team}).encode()
        return [*super().headers(), *([("people", row)] if self.team else [])]


def enriched(records: Sequence[Sent]) -> list[Sent]:
    return [Enriched(record.payload, record.event_id, record.reject) for record in records]


def by_team(records: Sequence[Sent]) -> Counter[str]:
    """What :data:`TEAMS` gives, in plain Python."""
    found = {record.event_id: record for record in filter(is_valid, records)}
    return Counter(record.team for record in found.values() if isinstance(record, Enriched) and record.team)


class Queries:
    """The declarations of a site, and what became of them."""

    def __init__(self, place: Site) -> None:
        self.place = place
        self.declared = Declared(place.lake, QuerySpec)

    def add(self, name: str, sql: str, **more: Any) -> None:
        spec = QuerySpec(name, sql, **more)
        settings = self.place.settings.queries
        self.declared.add(checked_query(spec, self.place.pipeline, self.place.lake, settings))

    def remove(self, name: str, *, drop: bool) -> None:
        spec = self.declared.all()[name]
        self.declared.replace(dataclasses.replace(spec, removed=True, drop=drop))

    def state(self, name: str) -> str:
        return self.declared.state(name).state

    def rows(self, name: str) -> list[dict[str, Any]]:
        return DeltaTable(str(self.place.lake.table("gold", name).path)).to_pyarrow_table().to_pylist()  # type: ignore[no-any-return]

    def ids(self, name: str) -> Counter[int]:
        if not self.place.lake.table("gold", name).exists():
            return Counter()
        return Counter(row["id"] for row in self.rows(name))

    def teams(self) -> Counter[str]:
        if not self.place.lake.table("gold", "teams").exists():
            return Counter()
        return Counter({row["team"]: row["n"] for row in self.rows("teams")})

    def cities(self, name: str) -> dict[str, tuple[int, int]]:
        if not self.place.lake.table("gold", name).exists():
            return {}
        return {row["city"]: (row["n"], row["total"] or 0) for row in self.rows(name)}


def mark(place: Site) -> Any:
    product = place.pipeline.products["totals"]
    found = ProductStore(product, place.lake.table("gold", "totals"), place.pipeline.name).mark()
    assert found is not None
    return found


def test_queries_come_and_go_beside_those_that_run(new_site: Callable[[], Site], spark: SparkSession) -> None:
    place = redeclared(new_site(), ("\n[products.per_city]", REFERENCE))
    queries = Queries(place)
    early = enriched(mixture(0, 80))
    place.send(early)
    with place.running(spark) as alive:
        eventually(place.arrived(), alive=alive)
        before = mark(place)
        queries.add("all_cities", CITIES, start="start")
        queries.add("new_cities", CITIES)
        queries.add("events", EVENTS, start="start")
        queries.add("new_events", EVENTS)
        queries.add("teams", TEAMS, start="start")
        queries.add("most", MOST, key=("one",))
        queries.add("broken", "SELECT place.nothing AS x, count(*) AS n FROM clicks GROUP BY place.nothing")
        started = {
            "events": "running",
            "new_events": "running",
            "teams": "running",
            "all_cities": "running",
            "new_cities": "running",
            "most": "running",
            "broken": "failed",
        }
        eventually(lambda: {name: queries.state(name) for name in started} == started, alive=alive)
        assert "nothing" in queries.declared.state("broken").reason
        eventually(lambda: queries.cities("all_cities") == by_city(early), alive=alive)

        place.send([*early[:20], *enriched(mixture(1_000, 60))])  # copies of earlier events are not new
        eventually(place.arrived(), alive=alive)
        late = {
            city: (n - by_city(early).get(city, (0, 0))[0], total - by_city(early).get(city, (0, 0))[1])
            for city, (n, total) in by_city(place.records).items()
        }
        eventually(lambda: queries.cities("all_cities") == by_city(place.records), alive=alive)
        eventually(lambda: queries.cities("new_cities") == late, alive=alive)
        totals = expected(place.records).totals
        most = {"one": 1, "n": max(n for _, n in totals), "windows": len(totals)}
        eventually(lambda: queries.rows("most") == [most], alive=alive)
        eventually(lambda: queries.teams() == by_team(place.records), alive=alive)
        eventually(lambda: queries.ids("events") == cheap(place.records), alive=alive)
        eventually(lambda: queries.ids("new_events") == cheap(place.records) - cheap(early), alive=alive)
        after = mark(place)
        assert after.application == before.application  # it went on, and began nowhere anew
        assert after.transaction > before.transaction
        assert_exact(place.lake, place.pipeline, place.records)

    place.send(mixture(2_000, 40))  # while no driver runs
    with place.running(spark) as alive:
        eventually(lambda: queries.cities("all_cities") == by_city(place.records), alive=alive)
        newest = Counter({city: n for city, (n, _) in by_city(place.records).items()})
        newest.subtract({city: n for city, (n, _) in by_city(early).items()})
        eventually(lambda: {c: n for c, (n, _) in queries.cities("new_cities").items()} == +newest, alive=alive)
        proven = {found.table: found.equal for found in verify(spark, place.settings, place.pipeline)}
        assert proven["all_cities"]
        assert proven["new_cities"]
        assert proven["events"]
        assert proven["new_events"]
        eventually(lambda: queries.ids("events") == cheap(place.records), alive=alive)
        assert proven["teams"]
        for name in ("events", "new_events", "teams"):
            queries.remove(name, drop=True)
        queries.remove("all_cities", drop=True)
        queries.remove("new_cities", drop=False)
        queries.remove("most", drop=True)
        queries.remove("broken", drop=True)
        eventually(lambda: not queries.declared.all(), alive=alive)
        queries.add("broken", CITIES, start="start")  # mended, under the same name, in the same driver
        eventually(lambda: queries.state("broken") == "running", alive=alive)
        eventually(lambda: queries.cities("broken") == by_city(place.records), alive=alive)
        queries.remove("broken", drop=True)
        eventually(lambda: not queries.declared.all(), alive=alive)
        tables = [table.name for table in place.lake.tables()]
        assert [name for name in ("all_cities", "new_cities", "most", "broken") if name in tables] == ["new_cities"]
        for folder in ("readers", "seen"):
            assert not list((place.lake.state / folder).glob("query-*"))
        place.send(mixture(3_000, 20))
        eventually(place.arrived(), alive=alive)
    assert_exact(place.lake, place.pipeline, place.records)
    assert Counter({c: n for c, (n, _) in queries.cities("new_cities").items()}) == +newest  # stopped, and kept

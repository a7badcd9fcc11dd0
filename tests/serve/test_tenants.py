"""The border between tenants on real sockets: every route and every transport, with every key that is the wrong one.

Each table has rows of two tenants and a row of the house; each row says whose it is in capitals. What a tenant is
answered must hold its own word and never another's. A route without a case fails the test.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pytest
from starlette.routing import Route

from lakehouse.contract import lake as names
from lakehouse.contract.access import KeyFile
from lakehouse.contract.lake import Lake
from lakehouse.contract.pipeline.added import Declared, QuerySpec
from serve.access import PUBLIC, ReaderKey
from serve.http.routes import ROUTES
from tests.serve.conftest import serving
from tests.serve.lakes import Product
from tests.serve.push.clients import TRANSPORTS

PIPELINE = """
[sources.rides]
topic = "rides"
schema = "ride_id BIGINT, at BIGINT, city STRING, note STRING"
event_id = "{ride_id}"
event_time = "timestamp_millis(at)"

[products.notes]
layer = "gold"
source = "rides"
sql = "SELECT tenant, city, max(note) AS note FROM rides GROUP BY tenant, city"
tenant = "tenant"

[products.shared]
layer = "gold"
source = "rides"
sql = "SELECT city, max(note) AS note FROM rides GROUP BY city"
tenant = "*"

[products.house]
layer = "gold"
source = "rides"
sql = "SELECT city, max(note) AS note FROM rides GROUP BY city"
"""
ROWS = pa.schema([("tenant", pa.string()), ("city", pa.string()), ("note", pa.string())])
BRONZE = pa.schema([("event_id", pa.string()), ("tenant", pa.string()), ("payload", pa.binary())])
WORDS = {"acme": "ACME-", "globex": "GLOBEX-", "default": "HOUSE-"}
TABLES = ("notes", "shared", "house", "rides", "quarantine", "alerts", "quality", "added", "unheard_of")


def note(tenant: str, city: str, number: int = 0) -> dict[str, str]:
    return {"tenant": tenant, "city": city, "note": f"{WORDS[tenant]}{number}"}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A lake with a table of each kind."""
    (tmp_path / "pipeline.toml").write_text(PIPELINE)
    root = tmp_path / "lake"
    every = [note("acme", "Bonn"), note("globex", "Bonn"), note("globex", "Kiel"), note("default", "Ulm")]
    keyed = {names.PROPERTY_KEY: "tenant,city"}
    for table in ("gold/notes", "silver/quarantine", "gold/alerts", "gold/added"):
        Product(root / table, ROWS, keyed).append(every)
    Product(root / "gold" / "shared", ROWS, keyed).append([{"tenant": "", "city": "Bonn", "note": "COMMON-0"}])
    for table in ("gold/house", "gold/quality"):
        Product(root / table, ROWS, keyed).append([note("default", "Ulm")])
    bronze = [
        {"event_id": f"e-{row['tenant']}", "tenant": row["tenant"], "payload": json.dumps(row).encode()}
        for row in every
    ]
    Product(root / "bronze" / "rides", BRONZE, {}).append(bronze)
    Lake(root).data_docs.mkdir(parents=True)
    (Lake(root).data_docs / "index.html").write_text("ACME-0 GLOBEX-0 HOUSE-0")
    Declared(Lake(root), QuerySpec).add(QuerySpec("added", "SELECT …", "rides", options={"tenant": "tenant"}))
    return root


def made(root: Path, **values: Any) -> str:
    return KeyFile(Lake(root).state / "readers.toml", ReaderKey).new(ReaderKey("0" * 64, **values))


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@asynccontextmanager
async def border(root: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with (
        serving(root, str(root.parent), webhook_private=True) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as client,
    ):
        yield client


def foreign(text: str, tenant: str) -> list[str]:
    """Words of others in an answer."""
    return [word for whose, word in WORDS.items() if whose != tenant and word in text]


Case = dict[str, Any]
SQL = ("POST", "/v1/sql")


def cases(theirs: dict[str, str]) -> dict[tuple[str, str], list[Case]]:
    """Requests by route.

    Args:
        theirs: positions, tags and ids that somebody else was given.
    """
    rows: list[Case] = [{"path": f"/v1/tables/{table}"} for table in TABLES]
    rows += [{"path": f"/v1/tables/{table}", "params": {"as_of": "1"}} for table in TABLES]
    asked: list[dict[str, str]] = [
        {"where": "tenant = 'globex' OR true"},
        {"where": "tenant = 'globex'"},
        {"columns": "note"},
        {"select": "SELECT tenant, max(note) AS note, count(*) AS n GROUP BY tenant"},
        {"select": "SELECT count(*) AS n, max(note) AS note"},
        {"where": "CAST(note AS INT) = 1"},
    ]
    rows += [{"path": "/v1/tables/notes", "params": each | more} for each in asked for more in ({}, {"as_of": "1"})]
    rows.append({"path": "/v1/tables/notes", "headers": {"If-None-Match": theirs["etag"]}})
    keys = ("globex", "globex,Bonn", "e-globex", "e-default", "default", "HOUSE")
    polls: list[Case] = [{"params": {"table": table, "wait": "0"}} for table in TABLES]
    polls += [{"params": {"table": "notes", "wait": "0", "from": theirs["position"]}}]
    statements = [f"SELECT * FROM {table}" for table in TABLES]
    statements += [
        "SHOW TABLES",
        "DESCRIBE notes",
        "SUMMARIZE notes",
        "SELECT CAST(note AS INTEGER) FROM notes",
        "SELECT error(note) FROM notes",
        "SELECT * FROM notes a JOIN notes b USING (city)",
        "SELECT * FROM notes FOR VERSION AS OF 1",
        "SELECT * FROM notes__partials",
        "SELECT list(note) FROM notes",
        "FROM duckdb_tables()",
        "SELECT CAST(payload AS VARCHAR) FROM rides",
    ]
    subscription = {"url": "http://127.0.0.1:1/x"}
    hook = f"/v1/webhooks/{theirs['webhook']}"
    return {
        ("GET", "/v1/tables"): [{}],
        ("GET", "/v1/quality/{path:path}"): [{"path": "/v1/quality/index.html"}],
        ("GET", "/v1/tables/{name}"): rows,
        ("GET", "/v1/tables/{name}/{key:path}"): [
            {"path": f"/v1/tables/{table}/{key}"} for table in TABLES for key in keys
        ],
        ("GET", "/v1/history/{name}"): [
            *({"path": f"/v1/history/{table}", "params": {"since": "0"}} for table in TABLES),
            {"path": "/v1/history/notes", "params": {"since": "0", "where": "tenant = 'globex' OR true"}},
            {"path": "/v1/history/notes", "params": {"from": theirs["position"]}},
        ],
        ("GET", "/v1/poll"): polls,
        ("GET", "/v1/subscribe"): [{"params": {"table": "house"}}],
        SQL: [{"json": {"sql": text}} for text in statements] + [{"json": {"sql": "FROM notes", "as_of": 1}}],
        ("GET", "/v1/webhooks"): [{}],
        ("POST", "/v1/webhooks"): [{"json": {"table": table} | subscription} for table in ("house", "unheard_of")],
        ("GET", "/v1/webhooks/{ident}"): [{"path": hook}],
        ("DELETE", "/v1/webhooks/{ident}"): [{"path": hook}],
        ("GET", "/v1/webhooks/{ident}/deliveries"): [{"path": f"{hook}/deliveries"}],
        ("GET", "/v1/webhooks/{ident}/dead"): [{"path": f"{hook}/dead"}],
        ("GET", "/v1/queries"): [{}],
        ("POST", "/v1/queries"): [{"json": {"name": "q", "sql": "SELECT tenant, count(*) AS n FROM rides GROUP BY 1"}}],
        ("GET", "/v1/queries/{name}"): [{"path": "/v1/queries/other"}],
        ("DELETE", "/v1/queries/{name}"): [{"path": "/v1/queries/other"}],
        ("POST", "/v1/tickets"): [{}],
        ("GET", "/v1/openapi.json"): [{}],
        ("GET", "/v1/asyncapi.json"): [{}],
        ("GET", "/healthz"): [{}],
        ("GET", "/readyz"): [{}],
        ("GET", "/metrics"): [{}],
    }


def routes() -> set[tuple[str, str]]:
    found = ((method, route) for route in ROUTES if isinstance(route, Route) for method in route.methods or {"GET"})
    return {(method, route.path) for method, route in found if method != "HEAD"}


async def given(client: httpx.AsyncClient, key: str) -> dict[str, str]:
    """What the server has given to somebody: others may have got hold of it."""
    read = await client.get("/v1/tables/notes", headers=bearer(key))
    hook = await client.post("/v1/webhooks", headers=bearer(key), json={"table": "notes", "url": "http://127.0.0.1:1/"})
    assert hook.status_code == 201, hook.text
    return {"etag": read.headers["etag"], "position": read.json()["position"], "webhook": hook.json()["id"]}


async def ask(client: httpx.AsyncClient, route: tuple[str, str], case: Case, key: str) -> httpx.Response:
    method, path = route
    headers = case.get("headers", {}) | (bearer(key) if key else {})
    options = {name: value for name, value in case.items() if name in ("params", "json")}
    return await client.request(method, case.get("path", path), headers=headers, **options)


async def test_no_route_gives_a_tenant_anything_of_another(root: Path) -> None:
    acme, globex = made(root, name="a", tenant="acme"), made(root, name="g", tenant="globex")
    nobody, home = made(root, name="n", tenant="nobody"), made(root, name="h", tenant="default")
    Declared(Lake(root), QuerySpec).add(QuerySpec("other", "SELECT 'HOUSE-'", "rides"))
    async with border(root) as client:
        theirs = await given(client, globex)
        asked = cases(theirs)
        assert asked.keys() == routes(), "each route needs a case here"
        own = 0
        for route, several in asked.items():
            others = [(nobody, "nobody"), (home, "default")]
            for number, case in enumerate(several):
                for key, tenant in [(acme, "acme"), *(others if number < len(TABLES) else [])]:
                    answer = await ask(client, route, case, key)
                    said = f"{answer.text} {answer.headers}"
                    assert foreign(said, tenant) == [], (route, case, tenant, said)
                    assert answer.status_code < 500, (route, case, said)
                    assert answer.status_code != 304, "another's tag is not one's own"
                    own += WORDS["acme"] in answer.text if tenant == "acme" else 0
                    if "webhook" in route[1] and "ident" in route[1]:
                        assert answer.status_code == 404
        assert own > 20, "the cases do find what is the tenant's own"
        assert (await client.get("/v1/tables/notes", headers=bearer(globex))).json()["rows"] != []
        seen = (await client.get("/v1/tables", headers=bearer(acme))).json()["tables"]
        assert {table["table"] for table in seen} == {"rides", "quarantine", "alerts", "notes", "shared", "added"}


async def test_a_tenant_sees_its_rows_and_what_is_shared(root: Path) -> None:
    keys = {tenant: made(root, name=tenant, tenant=tenant) for tenant in ("acme", "default")}
    keys["operator"] = made(root, name="operator")
    wanted: dict[str, dict[str, Any]] = {
        "acme": {"rides": ["ACME-0"], "notes": ["ACME-0"], "shared": ["COMMON-0"], "house": None, "added": ["ACME-0"]},
        "default": {"notes": ["HOUSE-0"], "shared": ["COMMON-0"], "house": ["HOUSE-0"], "added": ["HOUSE-0"]},
        "operator": {
            "rides": ["ACME-0", "GLOBEX-0", "HOUSE-0"],
            "notes": ["ACME-0", "GLOBEX-0", "GLOBEX-0", "HOUSE-0"],
            "house": ["HOUSE-0"],
        },
    }
    async with border(root) as client:
        for whose, tables in wanted.items():
            for table, notes in tables.items():
                answer = await client.get(f"/v1/tables/{table}", headers=bearer(keys[whose]))
                if notes is None:
                    missing = await client.get("/v1/tables/unheard_of", headers=bearer(keys[whose]))
                    assert (answer.status_code, answer.text) == (404, missing.text.replace("unheard_of", table))
                    continue
                assert sorted(row["note"] for row in answer.json()["rows"]) == notes, (whose, table)
                if table == "rides":
                    continue  # SQL has the payload, and no column of a note
                sql = await client.post(
                    "/v1/sql", headers=bearer(keys[whose]), json={"sql": f"SELECT note FROM {table} ORDER BY 1"}
                )
                assert [row["note"] for row in sql.json()["rows"]] == notes, (whose, table)
        assert (await client.get("/metrics", headers=bearer(keys["acme"]))).status_code == 403
        assert (await client.get("/metrics", headers=bearer(keys["operator"]))).status_code == 200


@pytest.mark.parametrize("name", TRANSPORTS)
async def test_no_transport_gives_a_tenant_anything_of_another(root: Path, name: str) -> None:
    acme, globex = made(root, name="a", tenant="acme"), made(root, name="g", tenant="globex")
    transport = TRANSPORTS[name]
    product = Product(root / "gold" / "notes", ROWS, {})
    async with border(root) as client:
        url = str(client.base_url)
        theirs = (await client.get("/v1/tables/notes", headers=bearer(globex))).json()["position"]
        for table in ("house", "quality", "unheard_of"):
            async with transport(url, {"table": table, "key": acme}) as refused:
                error = await refused.receive("error")
                assert error["code"] == "no_such_table" and foreign(json.dumps(error), "acme") == []
        async with transport(url, {"table": "notes", "key": acme, "where": "tenant <> 'acme' OR true"}) as mine:
            snapshot = await mine.receive("snapshot")
            assert [row["note"] for row in snapshot["rows"]] == ["ACME-0"] and snapshot["through"] is None
            product.append([note("globex", "Ulm", 1), note("acme", "Kiel", 1)])
            change = await mine.receive("change")
            assert [row["note"] for row in change["upserts"]] == ["ACME-1"], "the tail is behind the border too"
            assert change["events"] == 0 and change["through"] is None, "how much others send is not told"
            position = change["position"]
        product.append([note("globex", "Ulm", 2), note("acme", "Kiel", 2)])
        where = {"table": "notes", "key": acme, "where": "tenant <> 'acme' OR true"}
        async with transport(url, {**where, "from": position}) as again:
            await again.receive("resumed")
            assert [row["note"] for row in (await again.receive("change"))["upserts"]] == ["ACME-2"]
        async with transport(url, {**where, "from": theirs}) as stolen:
            assert (await stolen.expiry())["reason"] == "filter"
            assert {row["tenant"] for row in (await stolen.receive("snapshot"))["rows"]} == {"acme"}


@pytest.mark.parametrize("wrong", ["none", "made up", "revoked", "expired", "used ticket", "other tables"])
async def test_no_route_and_no_transport_takes_a_wrong_key(root: Path, wrong: str) -> None:
    globex = made(root, name="g", tenant="globex")
    file = KeyFile(Lake(root).state / "readers.toml", ReaderKey)
    keys = {"none": "", "made up": "mr_0123456789ab_x", "used ticket": ""}
    key = keys.get(wrong) or made(
        root,
        name="w",
        tenant="acme",
        tables=("shared",) if wrong == "other tables" else (),
        until=1.0 if wrong == "expired" else 0.0,
    )
    key = "" if wrong in ("none", "used ticket") else keys.get(wrong, key)
    async with border(root) as client:
        theirs = await given(client, globex)
        ticket = (await client.post("/v1/tickets", headers=bearer(globex))).json()["ticket"]
        if wrong == "revoked":
            file.revoke(key.split("_")[1])
            await asyncio.sleep(1.1)
        await client.get("/v1/tables", params={"ticket": ticket})  # a ticket is good for one use
        for route, several in cases(theirs).items():
            for case in several if wrong == "other tables" else several[:1]:
                if wrong == "used ticket":
                    case = case | {"params": case.get("params", {}) | {"ticket": ticket}}
                answer = await ask(client, route, case, key)
                assert foreign(answer.text, "") == [], (route, case)
                if wrong != "other tables" and route[1] not in PUBLIC:
                    assert (answer.status_code, answer.json()["code"]) == (401, "unauthorized"), (route, case)
        for transport in TRANSPORTS.values():
            more = {"ticket": ticket} if wrong == "used ticket" else {"key": key} if key else {}
            if transport.__name__.startswith("Rpc") and wrong != "other tables":
                continue  # refused before a call: test_access
            async with transport(str(client.base_url), {"table": "notes", **more}) as subscriber:
                code = (await subscriber.receive("error"))["code"]
                assert code == ("no_such_table" if wrong == "other tables" else "unauthorized")


async def test_a_key_without_the_right_changes_nothing(root: Path) -> None:
    acme, reader = made(root, name="a", tenant="acme"), made(root, name="r")
    query = {"name": "q", "sql": "SELECT city, count(*) AS n FROM rides GROUP BY city"}
    async with border(root) as client:
        for key in (acme, reader):
            assert (await client.post("/v1/queries", headers=bearer(key), json=query)).status_code == 403
            assert (await client.delete("/v1/queries/added", headers=bearer(key))).status_code == 403
        assert Declared(Lake(root), QuerySpec).all().keys() == {"added"}


async def test_a_query_that_goes_takes_its_place_in_the_border_with_it(root: Path) -> None:
    acme = made(root, name="a", tenant="acme")
    async with border(root) as client, asyncio.timeout(60):
        assert (await client.get("/v1/tables/added", headers=bearer(acme))).status_code == 200
        Declared(Lake(root), QuerySpec).remove("added")
        while (await client.get("/v1/tables/added", headers=bearer(acme))).status_code != 404:  # noqa: ASYNC110
            await asyncio.sleep(0.05)

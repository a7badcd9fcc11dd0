"""The REST of the control plane over both databases: resources, rights, limits, paging, ETags and the audit log."""

from __future__ import annotations

import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from lakehouse.contract.errors import ConfigError, EnvironmentProblem
from lakehouse.contract.settings import ControlSettings, Settings
from serve.control import operations
from serve.control.app import control_openapi
from serve.control.routes import OPERATIONS, PUBLIC, routes
from serve.control.store import OPERATOR, ControlBase, ControlStore
from tests.serve.control.conftest import Plane, controlling, good, new_tenant

SOURCE = {"topic": "clicks", "schema": "id STRING, at TIMESTAMP", "event_time": "at", "collectors": [{"kind": "http"}]}


def test_migrations_give_the_tables_of_the_models(tmp_path: Path, database: str) -> None:
    settings = Settings(lake=tmp_path, control=ControlSettings(database=database))
    ControlStore(settings).close()
    store = ControlStore(settings)
    with store.reading() as session:
        assert compare_metadata(MigrationContext.configure(session.connection()), ControlBase.metadata) == []
    store.close()


def test_database_refuses_to_change_the_audit_log(tmp_path: Path, database: str) -> None:
    store = ControlStore(Settings(lake=tmp_path, control=ControlSettings(database=database)))
    with store.changing(OPERATOR) as change:
        change.log("key.add", "x", "")
    for statement in ("UPDATE audit SET act = 'no'", "DELETE FROM audit"):
        with pytest.raises(DBAPIError, match="append-only"), store.changing(OPERATOR) as change:
            change.session.execute(text(statement))
    store.close()


def test_wrong_database_is_refused_with_a_remedy(tmp_path: Path) -> None:
    for url in ("mysql://x/y", "nonsense", "postgresql+asyncpg://x/y"):
        with pytest.raises(ConfigError, match=r"control\.database"):
            ControlStore(Settings(lake=tmp_path, control=ControlSettings(database=url)))
    with pytest.raises(EnvironmentProblem) as nobody:
        ControlStore(Settings(lake=tmp_path, control=ControlSettings(database="postgresql://u:secret@127.0.0.1:1/x")))
    assert "secret" not in str(nobody.value)


async def test_first_keys_are_files_of_their_owner_only_and_hashed_at_rest(
    plane: Plane, admin: httpx.AsyncClient
) -> None:
    for name in ("admin.key", "machine.key"):
        path = plane.folder / name
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        secret = path.read_text().strip().split("_", 2)[2]
        assert secret not in (await admin.get("/v1/keys")).text
        for file in plane.folder.glob("control.db*"):
            assert stat.S_IMODE(file.stat().st_mode) == 0o600
            assert secret.encode() not in file.read_bytes()


async def test_removed_key_file_gives_a_new_key_at_the_next_start(tmp_path: Path) -> None:
    async with controlling(tmp_path) as plane:
        file = plane.folder / "admin.key"
        lost = file.read_text().strip()
        async with plane.client() as admin:
            await good(admin, "DELETE", f"/v1/keys/{lost.split('_')[1]}", 204)
            assert (await admin.get("/v1/tenants")).status_code == 401
    file.unlink()
    async with controlling(tmp_path) as plane, plane.client() as admin:
        assert file.read_text().strip() != lost
        await good(admin, "GET", "/v1/tenants", 200)


async def test_nothing_comes_before_authentication(plane: Plane) -> None:
    paths = [(route.path.replace("{rest:path}", "x"), method) for route in routes() for method in route.methods]
    assert len(paths) > 30
    async with plane.client("") as nobody, plane.client("mr_x_y") as wrong, plane.machine() as machine:
        for path, method in paths:
            for client in (nobody, wrong):
                answer = await client.request(method, path)
                assert answer.status_code == (200 if path in PUBLIC else 401), (method, path, answer.text)
            if path not in PUBLIC and path != "/v1/state":
                assert (await machine.request(method, path)).status_code == 403, (method, path)


async def test_key_of_a_tenant_manages_this_tenant_only(plane: Plane, admin: httpx.AsyncClient) -> None:
    await new_tenant(admin)
    await new_tenant(admin, "other", "app")
    foreign = await good(admin, "POST", "/v1/keys", 201, actions=["read"], tenant="other")
    made = await good(admin, "POST", "/v1/keys", 201, actions=["manage"], tenant="acme")
    subscribed = await good(admin, "POST", "/v1/subscriptions", 201, tenant="other", app="app", table="t")
    async with plane.client(made["key"]) as own:
        assert [each["name"] for each in (await good(own, "GET", "/v1/tenants", 200))["items"]] == ["acme"]
        listed = (await good(own, "GET", "/v1/keys", 200))["items"]
        assert [each["id"] for each in listed] == [made["id"]]
        await good(own, "POST", "/v1/keys", 201, actions=["read", "send"], tenant="acme", app="shop")
        await good(own, "POST", "/v1/tenants/acme/apps", 201, name="second")
        assert {each["tenant"] for each in (await good(own, "GET", "/v1/audit", 200))["items"]} == {"acme"}
        for method, path, status, body in [
            ("GET", "/v1/tenants/other", 404, {}),
            ("GET", "/v1/tenants/other/apps", 404, {}),
            ("POST", "/v1/tenants/other/apps", 404, {"name": "x"}),
            ("PATCH", "/v1/tenants/other/apps/app", 404, {"ends": None}),
            ("DELETE", "/v1/tenants/other/apps/app", 404, {}),
            ("DELETE", "/v1/tenants/acme", 403, {}),
            ("POST", "/v1/tenants", 403, {"name": "new"}),
            ("GET", f"/v1/keys/{foreign['id']}", 404, {}),
            ("DELETE", f"/v1/keys/{foreign['id']}", 404, {}),
            ("POST", f"/v1/keys/{foreign['id']}/rotate", 404, {"grace_s": 0}),
            ("GET", "/v1/keys?tenant=other", 404, {}),
            ("POST", "/v1/keys", 403, {"actions": ["read"], "tenant": "other"}),
            ("POST", "/v1/keys", 403, {"actions": ["read"]}),
            ("POST", "/v1/keys", 403, {"actions": ["manage"]}),
            ("POST", "/v1/keys", 403, {"actions": ["state"], "tenant": "acme"}),
            ("POST", "/v1/keys", 403, {"actions": ["queries"], "tenant": "acme"}),
            ("POST", "/v1/keys/import", 403, {"keys": []}),
            ("POST", "/v1/subscriptions", 404, {"tenant": "other", "app": "app", "table": "t"}),
            ("GET", f"/v1/subscriptions/{subscribed['id']}", 404, {}),
            ("DELETE", f"/v1/subscriptions/{subscribed['id']}", 404, {}),
            ("GET", "/v1/subscriptions?tenant=other", 404, {}),
            ("GET", "/v1/audit?tenant=other", 404, {}),
            ("GET", "/v1/sources", 403, {}),
            ("PUT", "/v1/sources/clicks", 403, SOURCE),
            ("GET", "/v1/state", 403, {}),
        ]:
            refused = await good(own, method, path, status, **body)
            assert refused["status"] == status
        assert (await good(own, "GET", "/v1/subscriptions", 200))["items"] == []


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({"actions": ["state", "read"]}, "state"),
        ({"actions": ["state"], "tenant": "acme"}, "state"),
        ({"actions": ["manage"], "tenant": "acme", "app": "shop"}, "manages"),
        ({"actions": ["queries"], "tenant": "acme"}, "limited"),
        ({"actions": ["read"], "rows": {"t": "1 = ("}}, "rows"),
        ({"actions": ["read"], "rows": {"t": "(SELECT 1) = 1"}}, "rows"),
        ({"actions": ["read"], "until": "0001-01-01T00:00:00+14:00"}, "2000"),
    ],
)
async def test_key_that_cannot_be_is_refused(plane: Plane, admin: httpx.AsyncClient, body: Any, word: str) -> None:
    await new_tenant(admin)
    assert word in (await good(admin, "POST", "/v1/keys", 422, **body))["detail"]


async def test_bodies_are_checked_and_bounded(admin: httpx.AsyncClient) -> None:
    for body in (
        {"name": "A"},
        {"name": "a\n"},
        {"name": "a" * 64},
        {"name": ""},
        {"name": "a", "title": "x\0"},
        {"name": "a", "title": "x" * 201},
        {"name": "a", "more": 1},
        {},
    ):
        assert (await admin.post("/v1/tenants", json=body)).status_code == 400, body
    assert (await admin.post("/v1/tenants", content=b"{}", headers={"content-type": "text/plain"})).status_code == 415
    large = b'{"name": "a", "title": "' + b"x" * 300_000
    headers = {"content-type": "application/json"}
    assert (await admin.post("/v1/tenants", content=large, headers=headers)).status_code == 413
    deep = b'{"topic": ' + b"[" * 100_000
    assert (await admin.put("/v1/sources/x", content=deep, headers=headers)).status_code == 400
    assert (
        await admin.put("/v1/sources/x", content=b"a = " + b"[" * 100_000, headers={"content-type": "application/toml"})
    ).status_code == 400
    assert (await admin.get("/v1/tenants/%00")).status_code == 400
    assert (await admin.get("/v1/tenants?limit=0")).status_code == 400
    assert (await admin.get("/v1/tenants?limit=1001")).status_code == 400


async def test_counts_are_bounded(admin: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MAX_TENANTS", "MAX_APPS", "MAX_KEYS", "MAX_SOURCES"):
        monkeypatch.setattr(operations, name, 1)
    await new_tenant(admin)
    await good(admin, "POST", "/v1/keys", 201, actions=["read"], tenant="acme")
    await good(admin, "PUT", "/v1/sources/clicks", 200, **SOURCE)
    for method, path, body in [
        ("POST", "/v1/tenants", {"name": "b"}),
        ("POST", "/v1/tenants/acme/apps", {"name": "b"}),
        ("POST", "/v1/keys", {"actions": ["read"], "tenant": "acme"}),
        ("POST", "/v1/subscriptions", {"tenant": "acme", "app": "shop", "table": "t"}),
        ("PUT", "/v1/sources/views", SOURCE),
    ]:
        assert (await good(admin, method, path, 409, **body))["code"] == "full"
    await good(admin, "PUT", "/v1/sources/clicks", 200, **SOURCE | {"partitions": 3})


async def test_lists_are_paged(admin: httpx.AsyncClient) -> None:
    for number in range(5):
        await good(admin, "POST", "/v1/tenants", 201, name=f"t{number}")
    for path, key in (("/v1/tenants", "name"), ("/v1/keys", "id"), ("/v1/audit", "id")):
        whole = (await good(admin, "GET", path, 200))["items"]
        assert len(whole) > 1
        found, after = [], ""
        for _ in range(20):
            page = await good(admin, "GET", f"{path}?limit=2" + (f"&after={after}" if after else ""), 200)
            found += page["items"]
            if (after := page["next"]) is None:
                break
        assert [each[key] for each in found] == [each[key] for each in whole]


async def test_etags_guard_against_lost_changes(admin: httpx.AsyncClient) -> None:
    await new_tenant(admin)
    path = "/v1/tenants/acme/apps/shop"
    first = (await admin.get(path)).headers["etag"]
    assert (await admin.get(path, headers={"If-None-Match": first})).status_code == 304
    changed = await admin.patch(path, json={"ends": "2040-01-01T00:00:00Z"}, headers={"If-Match": first})
    assert changed.status_code == 200 and changed.headers["etag"] != first
    for method in ("PATCH", "DELETE"):
        answer = await admin.request(method, path, json={"ends": None}, headers={"If-Match": first})
        assert (answer.status_code, answer.json()["code"]) == (412, "changed")
    assert (await admin.delete(path, headers={"If-Match": changed.headers["etag"]})).status_code == 204


async def test_name_of_a_tenant_is_given_once(admin: httpx.AsyncClient) -> None:
    await new_tenant(admin)
    assert (await good(admin, "POST", "/v1/tenants", 409, name="acme"))["code"] == "taken"
    key = await good(admin, "POST", "/v1/keys", 201, actions=["read"], tenant="acme")
    await good(admin, "POST", "/v1/subscriptions", 201, tenant="acme", app="shop", table="t")
    await good(admin, "DELETE", "/v1/tenants/acme", 204)
    assert (await good(admin, "POST", "/v1/tenants", 409, name="acme"))["code"] == "taken"
    await good(admin, "GET", f"/v1/keys/{key['id']}", 404)
    assert (await good(admin, "GET", "/v1/subscriptions", 200))["items"] == []


async def test_app_that_is_gone_can_come_back_without_its_keys(admin: httpx.AsyncClient) -> None:
    await new_tenant(admin)
    key = await good(admin, "POST", "/v1/keys", 201, actions=["read"], tenant="acme", app="shop")
    await good(admin, "DELETE", "/v1/tenants/acme/apps/shop", 204)
    await good(admin, "POST", "/v1/tenants/acme/apps", 201, name="shop")
    await good(admin, "GET", f"/v1/keys/{key['id']}", 404)


async def test_source_is_checked_as_a_pipeline_file_is(plane: Plane, admin: httpx.AsyncClient) -> None:
    made = await good(admin, "PUT", "/v1/sources/clicks", 200, **SOURCE)
    toml = (
        b'topic = "clicks"\nschema = "id STRING"\nevent_time = "received_at"\n[enrich.c]\nkey = "{id}"\ntopic = "ref"\n'
    )
    answer = await admin.put("/v1/sources/clicks", content=toml, headers={"content-type": "application/toml"})
    assert answer.status_code == 200 and answer.json()["declaration"]["enrich"] == {
        "c": {"key": "{id}", "topic": "ref"}
    }
    assert answer.json()["created"] == made["created"]
    for wrong, word in [
        ({**SOURCE, "topics": "x"}, "Did you mean 'topic'"),
        ({"topic": "x"}, "missing"),
        ({**SOURCE, "retention": "soon"}, "duration"),
        ({**SOURCE, "partitions": None}, "partitions"),
        ({**SOURCE, "collectors": [{"kind": "telepathy"}]}, "collectors"),
        ({**SOURCE, "collectors": [{"kind": "os:system"}]}, "of one's own"),
        ({**SOURCE, "event_time": "reflect('java.lang.System', 'exit')"}, "reflect"),
        (
            {**SOURCE, "products": {"n": {"layer": "gold", "sql": "SELECT count(*) AS n FROM other GROUP BY id"}}},
            "other",
        ),
    ]:
        assert word in (await good(admin, "PUT", "/v1/sources/x", 422, **wrong))["detail"], wrong
    assert (await good(admin, "PUT", "/v1/sources/Clicks", 422, **SOURCE))["detail"]
    for text_ in (b"a = inf", b"a = 2020-01-01", b"topic = "):
        sent = await admin.put("/v1/sources/x", content=text_, headers={"content-type": "application/toml"})
        assert sent.status_code in (400, 422), sent.text


async def test_audit_log_says_who_did_what(plane: Plane, admin: httpx.AsyncClient) -> None:
    await new_tenant(admin)
    made = await good(admin, "POST", "/v1/keys", 201, actions=["manage"], tenant="acme", name="Ada")
    async with plane.client(made["key"]) as own:
        key = await good(own, "POST", "/v1/keys", 201, actions=["read"], tenant="acme", name="dashboard")
        await good(own, "DELETE", f"/v1/keys/{key['id']}", 204)
    revoked, added, *_ = (await good(admin, "GET", "/v1/audit", 200))["items"]
    assert (revoked["act"], revoked["who"], revoked["key"], revoked["subject"]) == (
        "key.revoke",
        "Ada",
        made["id"],
        key["id"],
    )
    assert (added["act"], added["detail"]["actions"], added["tenant"]) == ("key.add", ["read"], "acme")
    assert key["key"] not in (await admin.get("/v1/audit")).text
    refused = await admin.post("/v1/tenants", json={"name": "acme"})
    assert refused.status_code == 409
    assert (await good(admin, "GET", "/v1/audit", 200))["items"][0] == revoked, "what was refused did not happen"


async def test_rotation_is_one_act(plane: Plane, admin: httpx.AsyncClient) -> None:
    await new_tenant(admin)
    first = await good(admin, "POST", "/v1/keys", 201, actions=["manage"], tenant="acme")
    async with plane.client(first["key"]) as old:
        second = await good(old, "POST", f"/v1/keys/{first['id']}/rotate", 201, grace_s=60)
        assert second["id"] == f"{first['id']}-2" and second["until"] is None
        await good(old, "GET", "/v1/tenants", 200)
        async with plane.client(second["key"]) as new:
            await good(new, "GET", "/v1/tenants", 200)
            third = await good(new, "POST", f"/v1/keys/{second['id']}/rotate", 201, grace_s=0)
            assert third["id"] == f"{first['id']}-3"
            assert (await new.get("/v1/tenants")).status_code == 401
    shown = await good(admin, "GET", f"/v1/keys/{first['id']}", 200)
    assert datetime.fromisoformat(shown["until"]) < datetime.now(UTC) + timedelta(seconds=61)


async def test_end_of_life_of_an_app_ends_its_keys(plane: Plane, admin: httpx.AsyncClient) -> None:
    await new_tenant(admin)
    key = await good(admin, "POST", "/v1/keys", 201, actions=["read"], tenant="acme", app="shop")
    async with plane.machine() as machine:
        before = await machine.get("/v1/state")
        assert key["id"] in before.json()["keys"]
        ends = datetime.now(UTC) + timedelta(hours=1)
        await good(admin, "PATCH", "/v1/tenants/acme/apps/shop", 200, ends=ends.isoformat())
        after = (await machine.get("/v1/state", headers={"If-None-Match": before.headers["etag"]})).json()
        assert abs(after["keys"][key["id"]]["until"] - ends.timestamp()) < 1
        await good(admin, "PATCH", "/v1/tenants/acme/apps/shop", 200, ends="2020-01-01T00:00:00Z")
        last = (await machine.get("/v1/state", headers={"If-None-Match": before.headers["etag"]})).json()
        assert last["keys"] == {key["id"]: None} and list(last["apps"]) == ["acme/shop"]
        assert (await machine.get("/v1/state")).json()["keys"] == {}


async def test_state_is_what_has_changed(plane: Plane, admin: httpx.AsyncClient) -> None:
    await new_tenant(admin)
    async with plane.machine() as machine:
        first = await machine.get("/v1/state")
        assert first.json()["whole"] and first.json()["tenants"] == {"acme": {"title": ""}}
        tag = first.headers["etag"]
        same = await machine.get("/v1/state", headers={"If-None-Match": tag})
        assert (same.status_code, same.content, same.headers["etag"]) == (304, b"", tag)
        key = await good(admin, "POST", "/v1/keys", 201, actions=["send"], sources=["clicks"], rate=5)
        await good(admin, "PUT", "/v1/sources/clicks", 200, **SOURCE)
        second = await machine.get("/v1/state", headers={"If-None-Match": tag})
        changed = second.json()
        assert (changed["whole"], changed["tenants"], changed["sources"]) == (False, {}, {"clicks": SOURCE})
        entry = changed["keys"][key["id"]]
        assert (entry["sources"], entry["rate"], "key" in entry) == (["clicks"], 5, False)
        await good(admin, "DELETE", f"/v1/keys/{key['id']}", 204)
        await good(admin, "DELETE", "/v1/sources/clicks", 204)
        gone = (await machine.get("/v1/state", headers={"If-None-Match": second.headers["etag"]})).json()
        assert (gone["keys"], gone["sources"]) == ({key["id"]: None}, {"clicks": None})
        whole = await machine.get("/v1/state", headers={"If-None-Match": '"0123-4"'})
        assert whole.json()["whole"], "a tag of another process, or of a database that was restored"


async def test_subscription_has_channels_and_a_key(admin: httpx.AsyncClient) -> None:
    await new_tenant(admin)
    asked = {"tenant": "acme", "app": "shop", "table": "top_topics", "where": "count > 3", "columns": ["topic"]}
    made = await good(admin, "POST", "/v1/subscriptions", 201, **asked)
    assert made["channels"]["websocket"] == "ws://127.0.0.1:8400/v1/subscribe?table=top_topics&columns=topic"
    key = await good(admin, "GET", f"/v1/keys/{made['key_id']}", 200)
    assert (key["tables"], key["rows"]) == (["top_topics"], {"top_topics": "count > 3"})
    rotated = await good(admin, "POST", f"/v1/keys/{key['id']}/rotate", 201, grace_s=30)
    shown = await good(admin, "GET", f"/v1/subscriptions/{made['id']}", 200)
    assert shown["key_id"] == rotated["id"] and "key" not in shown
    await good(admin, "DELETE", f"/v1/subscriptions/{made['id']}", 204)
    for ident in (key["id"], rotated["id"]):
        await good(admin, "GET", f"/v1/keys/{ident}", 404)


async def test_keys_of_key_files_are_taken_over_once(admin: httpx.AsyncClient) -> None:
    keys = [{"id": f"{number:012x}", "hash": f"{number:064x}", "actions": ["read"]} for number in range(3)]
    assert await good(admin, "POST", "/v1/keys/import", 200, keys=keys) == {"added": 3, "known": 0}
    assert await good(admin, "POST", "/v1/keys/import", 200, keys=keys) == {"added": 0, "known": 3}
    bad = [
        {"id": "f" * 12, "hash": "0" * 64, "actions": ["read"]},
        {"id": "e" * 12, "hash": "0" * 64, "actions": ["read"], "tenant": "nobody"},
    ]
    await good(admin, "POST", "/v1/keys/import", 404, keys=bad)
    await good(admin, "GET", f"/v1/keys/{'f' * 12}", 404)


def test_document_names_every_operation() -> None:
    document = control_openapi()
    documented = {(method.upper(), path) for path, each in document["paths"].items() for method in each}
    assert {(one.method, one.path) for one in OPERATIONS} <= documented
    for path, each in document["paths"].items():
        for operation in each.values():
            assert operation["summary"], path

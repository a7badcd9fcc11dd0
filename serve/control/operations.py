"""What the control plane can be asked to do: one function an operation, run in a thread, in one transaction.

An operation returns a page, or the row that its answer shows; with a new key also the text of it, or nothing.
A key of a tenant sees and changes that tenant only. Whatever else there is does not exist for it.
"""

from __future__ import annotations

import secrets
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlencode

import msgspec
from sqlalchemy import func, select, update
from sqlalchemy.orm import Session

from lakehouse.contract.access import key_hash, new_key, new_key_id
from lakehouse.contract.errors import ConfigError
from lakehouse.contract.pipeline import Pipeline
from lakehouse.contract.pipeline.folder import added_source
from lakehouse.contract.tomlfile import toml_text
from serve.access import ReaderKey
from serve.control import types
from serve.control.store import (
    Actor,
    AppRow,
    AuditRow,
    ControlChange,
    GoneRow,
    KeyRow,
    RevisionRow,
    SourceRow,
    SubscriptionRow,
    TenantRow,
    now_ms,
)
from serve.errors import RequestError
from serve.push.request import invalid, whole_number

MAX_TENANTS = 10_000
MAX_APPS = 1_000  # of a tenant
MAX_KEYS = 20_000  # of a tenant, and as many of the operator
MAX_SOURCES = 1_000
_TENANT_ACTIONS = frozenset({"read", "send", "manage"})
_EARLIEST, _LATEST = (datetime(year, 1, 1, tzinfo=UTC) for year in (2000, 9000))
_ZERO = "0" * 64
_MOMENTS = frozenset({"at", "created", "ends", "until"})
_R = TypeVar("_R", TenantRow, AppRow, KeyRow, SourceRow, SubscriptionRow)
_E = TypeVar("_E", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True)
class ControlCall:
    """One request.

    Attributes:
        tag: revision that the caller wants to change (``If-Match``); empty: any.
        serve_url: where apps reach the servers.
        change: the transaction, if the operation changes something.
    """

    actor: Actor
    session: Session
    path: Mapping[str, str]
    query: Mapping[str, str]
    body: Any
    tag: str
    serve_url: str
    change: ControlChange | None = None

    @property
    def changing(self) -> ControlChange:
        assert self.change is not None
        return self.change

    def fence(self, tenant: str) -> None:
        """Another tenant than the caller's does not exist."""
        if self.actor.tenant not in ("", tenant):
            raise _missing("tenant", tenant)

    def operator(self) -> None:
        """Refuse everybody but the operator."""
        if self.actor.tenant:
            raise _forbidden("a key of a tenant may not do this")

    def matches(self, row: _R) -> _R:
        """The row, if it is the one that ``If-Match`` names."""
        if self.tag not in ("", "*", f'"{row.revision}"'):
            raise RequestError(4412, "changed", "it has changed since: get it again")
        return row


# --- tenants


def list_tenants(call: ControlCall) -> types.Page[types.TenantEntry]:
    """Tenants: ``?after=&limit=``"""
    own = call.actor.tenant
    return _page(call, TenantRow.name, types.TenantEntry, *([TenantRow.name == own] if own else []))


def add_tenant(call: ControlCall) -> TenantRow:
    """Add a tenant. The name of one that is gone is not given again, because its events are still in the tables"""
    call.operator()
    new: types.NewTenant = call.body
    change = call.changing
    if call.session.get(TenantRow, new.name) or call.session.get(GoneRow, ("tenants", new.name)):
        raise _taken("tenant", new.name)
    _bounded(call, TenantRow, MAX_TENANTS)
    row = TenantRow(name=new.name, title=new.title, created=change.now, revision=change.revision)
    call.session.add(row)
    change.log("tenant.add", new.name, new.name)
    return row


def show_tenant(call: ControlCall) -> TenantRow:
    """A tenant"""
    return _tenant_row(call, call.path["tenant"])


def remove_tenant(call: ControlCall) -> None:
    """Remove a tenant with its apps, keys and subscriptions; its events stay in the tables"""
    call.operator()
    row = call.matches(_tenant_row(call, call.path["tenant"]))
    change = call.changing
    for app in call.session.scalars(select(AppRow).where(AppRow.tenant == row.name)).all():
        _drop_app(call, app)
    change.drop_keys(call.session.scalars(select(KeyRow).where(KeyRow.tenant == row.name)).all())
    call.session.flush()
    call.session.delete(row)
    change.gone("tenants", row.name)
    change.log("tenant.remove", row.name, row.name)


def _tenant_row(call: ControlCall, name: str) -> TenantRow:
    call.fence(name)
    return _row(call, TenantRow, name)


# --- apps


def list_apps(call: ControlCall) -> types.Page[types.AppEntry]:
    """Apps of a tenant: ``?after=&limit=``"""
    tenant = _tenant_row(call, call.path["tenant"]).name
    return _page(call, AppRow.name, types.AppEntry, AppRow.tenant == tenant)


def add_app(call: ControlCall) -> AppRow:
    """Add an app to a tenant"""
    new: types.NewApp = call.body
    change, tenant = call.changing, _tenant_row(call, call.path["tenant"]).name
    if call.session.get(AppRow, (tenant, new.name)):
        raise _taken("app", new.name)
    _bounded(call, AppRow, MAX_APPS, AppRow.tenant == tenant)
    row = AppRow(
        tenant=tenant,
        name=new.name,
        title=new.title,
        ends=_ms(new.ends),
        created=change.now,
        revision=change.revision,
    )
    call.session.add(row)
    change.back("apps", f"{tenant}/{new.name}")
    change.log("app.add", new.name, tenant, ends=_text(row.ends))
    return row


def show_app(call: ControlCall) -> AppRow:
    """An app"""
    return _app_row(call, call.path["tenant"], call.path["app"])


def change_app(call: ControlCall) -> AppRow:
    """Set or clear the end of life of an app, after which none of its keys is good"""
    row = call.matches(_app_row(call, call.path["tenant"], call.path["app"]))
    change, ends = call.changing, call.body.ends
    row.ends, row.revision = _ms(ends), change.revision
    keys = update(KeyRow).where(KeyRow.tenant == row.tenant, KeyRow.app == row.name)
    call.session.execute(keys.values(revision=change.revision))
    change.log("app.change", row.name, row.tenant, ends=_text(row.ends))
    return row


def remove_app(call: ControlCall) -> None:
    """Remove an app with its keys and subscriptions"""
    row = call.matches(_app_row(call, call.path["tenant"], call.path["app"]))
    _drop_app(call, row)
    call.changing.log("app.remove", row.name, row.tenant)


def _drop_app(call: ControlCall, row: AppRow) -> None:
    keys = select(KeyRow).where(KeyRow.tenant == row.tenant, KeyRow.app == row.name)
    call.changing.drop_keys(call.session.scalars(keys).all())
    call.session.flush()
    call.session.delete(row)
    call.changing.gone("apps", f"{row.tenant}/{row.name}")


def _app_row(call: ControlCall, tenant: str, name: str) -> AppRow:
    _tenant_row(call, tenant)
    return _row(call, AppRow, name, (tenant, name))


# --- keys


def list_keys(call: ControlCall) -> types.Page[types.KeyEntry]:
    """Keys, of one tenant or app if asked: ``?tenant=&app=&after=&limit=``"""
    return _page(call, KeyRow.id, types.KeyEntry, *_owned(call, KeyRow))


def add_key(call: ControlCall) -> tuple[KeyRow, str]:
    """Make a key; it is shown in this answer only"""
    name = new_key_id()
    text = new_key(name)
    row = _new_key(call, call.body, name, key_hash(text))
    call.changing.log("key.add", row.id, row.tenant, name=row.name, app=row.app, actions=row.actions)
    return row, text


def import_keys(call: ControlCall) -> types.Imported:
    """Take over keys of key files by their hashes: whoever has one goes on using it"""
    call.operator()
    added = known = 0
    for new in call.body.keys:
        if call.session.get(KeyRow, new.id):
            known += 1
            continue
        _new_key(call, new, new.id, new.hash)
        call.session.flush()
        added += 1
    call.changing.log("key.import", f"{added} keys", "", ids=[new.id for new in call.body.keys])
    return types.Imported(added, known)


def show_key(call: ControlCall) -> KeyRow:
    """A key, without its secret"""
    return _row(call, KeyRow, call.path["id"])


def rotate_key(call: ControlCall) -> tuple[KeyRow, str]:
    """Replace a key by a new one with the same rights: the new one is good at once, the old one for the stated grace"""
    old, change = call.matches(_row(call, KeyRow, call.path["id"])), call.changing
    root = old.id.partition("-")[0]
    used = [*call.session.scalars(select(KeyRow.id).where(KeyRow.id.like(f"{root}-%")))]
    used += call.session.scalars(select(GoneRow.name).where(GoneRow.kind == "keys", GoneRow.name.like(f"{root}-%")))
    name = f"{root}-{max((int(one.partition('-')[2]) for one in used), default=1) + 1}"
    text = new_key(name)
    copied = {column.key: getattr(old, column.key) for column in KeyRow.__mapper__.columns}
    row = KeyRow(**copied | {"id": name, "hash": key_hash(text), "created": change.now, "revision": change.revision})
    call.session.add(row)
    call.session.execute(update(SubscriptionRow).where(SubscriptionRow.key == old.id).values(key=name))
    grace_s = call.body.grace_s
    if grace_s:
        ends = change.now + 1000 * grace_s
        old.until, old.revision = min(ends, old.until or ends), change.revision
    else:
        change.drop_keys([old])
    change.log("key.rotate", old.id, old.tenant, name=old.name, by=name, grace_s=grace_s)
    return row, text


def revoke_key(call: ControlCall) -> None:
    """Revoke a key, and remove the subscription that it was made for"""
    row = call.matches(_row(call, KeyRow, call.path["id"]))
    call.changing.drop_keys([row])
    call.changing.log("key.revoke", row.id, row.tenant, name=row.name)


def _new_key(call: ControlCall, new: types.NewKey, name: str, hashed: str) -> KeyRow:
    actions = _actions(new)
    if call.actor.tenant and (new.tenant != call.actor.tenant or not _TENANT_ACTIONS.issuperset(actions)):
        raise _forbidden("a key of a tenant makes keys of this tenant, which read, send or manage")
    if new.tenant:
        _tenant_row(call, new.tenant)
    if new.app:
        _app_row(call, new.tenant, new.app)
    if "state" in actions and (new.tenant or len(actions) > 1):
        raise _wrong("the state is of all tenants: a key that sees it has no tenant and no other action")
    if "manage" in actions and (new.app or new.tables or new.rows):
        raise _wrong("a key that manages is of a whole tenant: leave app, tables and rows out")
    if "read" in actions:
        try:
            ReaderKey(_ZERO, tenant=new.tenant, tables=new.tables, rows=new.rows, queries="queries" in actions)
        except ConfigError as error:
            raise _wrong(f"{error.key}: {error.problem}") from None
    _bounded(call, KeyRow, MAX_KEYS, KeyRow.tenant == new.tenant)
    row = key_row(new, name, hashed, call.changing)
    call.session.add(row)
    return row


def key_row(new: types.NewKey, name: str, hashed: str, change: ControlChange) -> KeyRow:
    """The row of a key that may be made."""
    values: dict[str, Any] = {each: getattr(new, each) for each in types.NewKey.__struct_fields__}
    values |= {"actions": _actions(new), "tables": list(new.tables), "sources": list(new.sources)}
    values |= {"until": _ms(new.until), "created": change.now, "revision": change.revision}
    return KeyRow(**values, id=name, hash=hashed)


def _actions(new: types.NewKey) -> list[str]:
    return sorted({*new.actions, *(("read",) if "queries" in new.actions else ())})


# --- sources


def list_sources(call: ControlCall) -> types.Page[types.SourceEntry]:
    """Sources of the run time: ``?after=&limit=``"""
    call.operator()
    return _page(call, SourceRow.name, types.SourceEntry)


def show_source(call: ControlCall) -> SourceRow:
    """A source of the run time"""
    return _source_row(call)


def put_source(call: ControlCall) -> SourceRow:
    """Declare a source, or change its declaration: what a pipeline.toml has below [sources.NAME], and its products"""
    call.operator()
    change, name = call.changing, call.path["name"]
    declaration = checked_source(name, call.body)
    row = call.session.get(SourceRow, name)
    if row is None:
        _bounded(call, SourceRow, MAX_SOURCES)
        row = SourceRow(name=name, declaration=declaration, created=change.now, revision=change.revision)
        call.session.add(row)
        change.back("sources", name)
    else:
        call.matches(row)
        row.declaration, row.revision = declaration, change.revision
    change.log("source.put", name, "", declaration=declaration)
    return row


def remove_source(call: ControlCall) -> None:
    """Stop a source; what it brought stays in the tables"""
    row = call.matches(_source_row(call))
    call.session.delete(row)
    call.changing.gone("sources", row.name)
    call.changing.log("source.remove", row.name, "")


def checked_source(name: str, declaration: dict[str, Any]) -> dict[str, Any]:
    """The declaration, if processes will take it: :mod:`lakehouse.contract.pipeline.folder`.

    Raises RequestError: it could not.
    """
    try:
        source, products = added_source(declaration, Path(f"{name}.toml"))
        Pipeline({name: source}, products)
    except ConfigError as error:
        raise _wrong(f"{error.key + ': ' if error.key else ''}{error.problem}. {error.remedy}".rstrip(". ")) from None
    try:
        same = tomllib.loads(toml_text(declaration)) == declaration
    except (tomllib.TOMLDecodeError, TypeError, ValueError, RecursionError):
        same = False
    if not same:
        raise _wrong("the declaration cannot be written as TOML")
    return declaration


def _source_row(call: ControlCall) -> SourceRow:
    call.operator()
    return _row(call, SourceRow, call.path["name"])


# --- subscriptions


def list_subscriptions(call: ControlCall) -> types.Page[types.SubscriptionEntry]:
    """Subscriptions, of one tenant or app if asked: ``?tenant=&app=&after=&limit=``"""
    return _page(call, SubscriptionRow.id, types.SubscriptionEntry, *_owned(call, SubscriptionRow))


def add_subscription(call: ControlCall) -> tuple[SubscriptionRow, str]:
    """Make a subscription: its channels, and a key for them that is good at once"""
    new: types.NewSubscription = call.body
    change = call.changing
    _app_row(call, new.tenant, new.app)
    made, name = new_key_id(), f"sub-{secrets.token_hex(8)}"
    text = new_key(made)
    wanted = types.NewKey(
        actions=("read",),
        name=f"subscription {name}",
        tenant=new.tenant,
        app=new.app,
        tables=(new.table,),
        rows={new.table: new.where} if new.where.strip() else {},
        rate=new.rate,
        connections=new.connections,
    )
    _new_key(call, wanted, made, key_hash(text))
    row = SubscriptionRow(
        id=name,
        tenant=new.tenant,
        app=new.app,
        table=new.table,
        where=new.where,
        columns=list(new.columns),
        key=made,
        created=change.now,
        revision=change.revision,
    )
    call.session.add(row)
    change.log("subscription.add", name, new.tenant, app=new.app, table=new.table, where=new.where, key=made)
    return row, text


def show_subscription(call: ControlCall) -> SubscriptionRow:
    """A subscription"""
    return _row(call, SubscriptionRow, call.path["id"])


def remove_subscription(call: ControlCall) -> None:
    """Remove a subscription and revoke its key"""
    row = call.matches(_row(call, SubscriptionRow, call.path["id"]))
    change = call.changing
    change.log("subscription.remove", row.id, row.tenant, app=row.app, key=row.key)
    root = row.key.partition("-")[0]
    keys = select(KeyRow).where((KeyRow.id == root) | KeyRow.id.like(f"{root}-%"))
    change.drop_keys(call.session.scalars(keys).all())


# --- audit and state


def list_audit(call: ControlCall) -> types.Page[types.AuditEntry]:
    """Who did what, newest first: ``?tenant=&after=&limit=``"""
    rows, limit = select(AuditRow).where(*_owned(call, AuditRow)).order_by(AuditRow.id.desc()), _limit(call)
    if "after" in call.query:
        rows = rows.where(AuditRow.id < whole_number(call.query["after"], "after", 0, 999_999_999))
    found = call.session.scalars(rows.limit(limit)).all()
    entries = [shown(call, types.AuditEntry, row) for row in found]
    return types.Page(entries, str(found[-1].id) if len(found) == limit else None)


def state_since(session: Session, since: int | None) -> tuple[int, types.SharedState | None]:
    """The newest revision, and what has changed since one; all there is if None; no state if nothing has changed."""
    revision = session.scalars(select(RevisionRow.revision)).one()  # before the rows: these may be newer, never older
    if revision == since:
        return revision, None
    after = -1 if since is None else since
    found: dict[str, dict[str, dict[str, Any] | None]] = {"tenants": {}, "apps": {}, "keys": {}, "sources": {}}
    if since is not None:
        for kind, name in session.execute(select(GoneRow.kind, GoneRow.name).where(GoneRow.revision > after)):
            found[kind][name] = None
    for name, title in session.execute(select(TenantRow.name, TenantRow.title).where(TenantRow.revision > after)):
        found["tenants"][name] = {"title": title}
    for app in session.execute(select(AppRow.__table__).where(AppRow.revision > after)).mappings():
        ends = None if app["ends"] is None else app["ends"] / 1000
        found["apps"][f"{app['tenant']}/{app['name']}"] = {"title": app["title"], "ends": ends}
    own = select(KeyRow.__table__, AppRow.ends).outerjoin(
        AppRow, (AppRow.tenant == KeyRow.tenant) & (AppRow.name == KeyRow.app)
    )
    now = now_ms()
    for key in session.execute(own.where(KeyRow.revision > after)).mappings():
        until = _sooner(key["until"], key["ends"])
        if {"read", "send"} & set(key["actions"]) and (until is None or until > now):
            found["keys"][key["id"]] = _shared_key(key, until)
        elif since is not None:
            found["keys"][key["id"]] = None
    for name, declaration in session.execute(
        select(SourceRow.name, SourceRow.declaration).where(SourceRow.revision > after)
    ):
        found["sources"][name] = declaration
    return revision, types.SharedState(since is None, **found)


def _shared_key(key: Mapping[Any, Any], until: int | None) -> dict[str, Any]:
    """An entry that :class:`lakehouse.contract.access.StateKeys` reads."""
    same = ("hash", "name", "tenant", "app", "actions", "tables", "rows", "sources")
    entry = {name: key[name] for name in (*same, "rate", "connections", "max_event_bytes") if key[name]}
    if "queries" in key["actions"]:
        entry["queries"] = True
    return entry | {"created": _text(key["created"])} | ({"until": until / 1000} if until else {})


# --- helpers


def _page(call: ControlCall, name: Any, kind: type[_E], *where: Any) -> types.Page[_E]:
    """Rows that fulfil the conditions, by ``name``, the column of their key."""
    limit = _limit(call)
    rows = select(name.class_).where(*where).order_by(name)
    if after := call.query.get("after"):
        if "\0" in after:
            raise invalid("bad_request", "after is what next said")
        rows = rows.where(name > after)
    found = call.session.scalars(rows.limit(limit)).all()
    following = getattr(found[-1], name.key) if len(found) == limit else None
    return types.Page([shown(call, kind, row) for row in found], following)


def _owned(call: ControlCall, kind: Any) -> list[Any]:
    """Conditions on rows of the tenant and app that are asked for, and of no tenant that the caller may not see."""
    found = []
    if tenant := call.query.get("tenant") or call.actor.tenant:
        call.fence(tenant)
        found.append(kind.tenant == tenant)
    if hasattr(kind, "app") and (app := call.query.get("app")):
        found.append(kind.app == app)
    return found


def _limit(call: ControlCall) -> int:
    return whole_number(call.query.get("limit", "100"), "limit", 1, types.MAX_PAGE)


def _bounded(call: ControlCall, kind: Any, most: int, *where: Any) -> None:
    if call.session.scalars(select(func.count()).select_from(kind).where(*where)).one() >= most:
        raise RequestError(4409, "full", f"there are {most} {kind.__tablename__}, which is the bound")


def _sooner(one: int | None, other: int | None) -> int | None:
    return min((each for each in (one, other) if each is not None), default=None)


def shown(call: ControlCall, kind: type[_E], row: Any, **more: Any) -> _E:
    """A row as answers of a kind show it, with what ``more`` says beside it or instead."""
    if isinstance(row, KeyRow):
        app = call.session.get(AppRow, (row.tenant, row.app)) if row.app else None
        more["until"] = _moment(_sooner(row.until, app.ends if app else None))
    elif isinstance(row, SubscriptionRow):
        asked = urlencode({"table": row.table} | ({"columns": ",".join(row.columns)} if row.columns else {}))
        more["key_id"] = row.key
        more["channels"] = types.Channels(
            websocket=f"ws{call.serve_url.removeprefix('http')}/v1/subscribe?{asked}",
            events=f"{call.serve_url}/v1/subscribe?{asked}",
            poll=f"{call.serve_url}/v1/poll?{asked}",
            rows=f"{call.serve_url}/v1/tables/{row.table}",
        )
    values = {name: getattr(row, name) for name in kind.__struct_fields__ if name not in more}
    return kind(**{name: _moment(value) if name in _MOMENTS else value for name, value in values.items()}, **more)


def _moment(ms: int | None) -> datetime | None:
    return None if ms is None else datetime.fromtimestamp(ms / 1000, UTC)


def _text(ms: int | None) -> str | None:
    return None if ms is None else datetime.fromtimestamp(ms / 1000, UTC).isoformat()


def _ms(moment: datetime | None) -> int | None:
    if moment is None:
        return None
    if not _EARLIEST <= moment < _LATEST:
        raise _wrong(f"{moment.isoformat()} is not between the years 2000 and 9000")
    return int(moment.timestamp() * 1000)


def _row(call: ControlCall, kind: type[_R], name: str, key: Any = None) -> _R:
    """The row of this name that the caller may see; ``key``: its primary key, if that is not the name."""
    row = call.session.get(kind, key or name)
    if row is None or call.actor.tenant not in ("", getattr(row, "tenant", call.actor.tenant)):
        raise _missing(kind.__tablename__.removesuffix("s"), name)
    return row


def _missing(kind: str, name: str) -> RequestError:
    return RequestError(RequestError.NOT_FOUND, f"no_such_{kind}", f"there is no {kind} {name!r}")


def _taken(kind: str, name: str) -> RequestError:
    return RequestError(4409, "taken", f"the name {name!r} is taken: the {kind} is here, or was")


def _forbidden(detail: str) -> RequestError:
    return RequestError(RequestError.FORBIDDEN, "forbidden", detail)


def _wrong(detail: str) -> RequestError:
    return RequestError(4422, "invalid", detail)

"""``control``, ``tenant`` and ``key``: the control plane, its clients, and key files where there is none."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from datetime import UTC, datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote, urlencode

import typer
from rich.markup import escape

from jobs.console import JsonOption, chosen_settings, err, out, print_json, print_table, run_async
from lakehouse.contract.access import ADMIN_KEY, address_file, key_text
from lakehouse.contract.errors import ConfigError, EnvironmentProblem, ProblemWithRemedy
from lakehouse.contract.settings import Settings

if TYPE_CHECKING:
    from ingest.border.access import ApiKey
    from lakehouse.contract.access import KeyFile
    from serve.access import ReaderKey

_AT_A_TIME = 1_000
OwnerArgument = Annotated[str, typer.Argument(metavar="TENANT[/APP]", help="Name of a tenant, or of an app of it.")]
AppArgument = Annotated[str, typer.Argument(metavar="TENANT/APP", help="Name of an app.")]
IdArgument = Annotated[str, typer.Argument(metavar="ID", help="Id of the key, as ls shows it.")]


class ControlAction(StrEnum):
    """What ``millrace control`` does."""

    RUN = "run"
    MIGRATE = "migrate"
    IMPORT = "import"


class Right(StrEnum):
    """What a key is for, as the control plane names it."""

    SEND = "send"
    READ = "read"
    QUERIES = "queries"
    MANAGE = "manage"
    STATE = "state"


def control(
    action: Annotated[
        ControlAction,
        typer.Argument(
            help="run it; migrate to bring the database up to date and end; "
            "import to take the keys of the key files over into the one that runs."
        ),
    ] = ControlAction.RUN,
) -> None:
    """Run the control plane: tenants, apps, keys, sources and subscriptions over REST."""
    settings = chosen_settings()
    if action is ControlAction.IMPORT:
        _import_keys(settings)
        return
    from serve.control.app import run_control
    from serve.control.store import ControlStore

    if action is ControlAction.MIGRATE:
        store = ControlStore(settings)
        store.close()
        err.print(f"{store.place} is up to date")
        return

    async def main(stop: asyncio.Event) -> None:
        await run_control(settings, ready=lambda url: err.print(f"control plane at {url}"), stop=stop)

    run_async(main)


class ControlRefused(ProblemWithRemedy):
    """The control plane refused a request."""


class ControlClient:
    """The control plane, as commands ask it. Raises ConfigError: its address or the key is not known."""

    def __init__(self, settings: Settings) -> None:
        self.url = control_url(settings)
        if not self.url:
            remedy = "Start one with `millrace control`, or set control.url"
            raise ConfigError("this lake has no control plane", key="control.url", remedy=remedy)
        self._headers = {"Authorization": f"Bearer {key_text(settings, ADMIN_KEY)}"}

    def ask(self, method: str, path: str, **body: Any) -> Any:
        """The JSON of the answer; None if it has none. Raises ControlRefused or EnvironmentProblem."""
        import httpx

        try:
            json = body if method in ("POST", "PATCH") else None
            answer = httpx.request(method, f"{self.url}{path}", json=json, headers=self._headers, timeout=30)
        except httpx.HTTPError as error:
            remedy = "Start it with `millrace control`, or set control.url"
            raise EnvironmentProblem(f"the control plane at {self.url} does not answer: {error}", remedy) from None
        if not answer.is_success:
            said = answer.json() if answer.headers.get("content-type", "").endswith("json") else {}
            raise ControlRefused(f"the control plane refuses it: {said.get('detail') or answer.status_code}")
        return answer.json() if answer.content else None

    def all(self, path: str, **query: str) -> list[dict[str, Any]]:
        """Every item of a list."""
        items: list[dict[str, Any]] = []
        asked = {name: value for name, value in query.items() if value} | {"limit": str(_AT_A_TIME)}
        while True:
            page = self.ask("GET", f"{path}?{urlencode(asked)}")
            items += page["items"]
            if page["next"] is None:
                return items
            asked["after"] = page["next"]


def control_url(settings: Settings) -> str:
    """Address of the control plane: ``control.url``, else where the lake's own was started last; empty: none."""
    if settings.control.url:
        return settings.control.url.rstrip("/")
    note = address_file(settings)
    return note.read_text(encoding="utf-8").strip() if note.is_file() else ""


# --- tenants and apps


def tenant_ls(
    tenant: Annotated[str, typer.Argument(help="List the apps of this tenant; default: list tenants.")] = "",
    as_json: JsonOption = False,
) -> None:
    """List tenants, or the apps of a tenant."""
    columns = ("name", "title", *(("ends",) if tenant else ()), "created")
    _print(ControlClient(chosen_settings()).all(_apps(tenant) if tenant else "/v1/tenants"), columns, as_json)


def tenant_add(
    name: OwnerArgument,
    title: Annotated[str, typer.Option(help="For people.")] = "",
    ends: Annotated[str, typer.Option(help="End of life of an app, e.g. 2030-12-31; UTC.", show_default="none")] = "",
    as_json: JsonOption = False,
) -> None:
    """Add a tenant, or an app to a tenant."""
    tenant, app = _owner(name)
    if ends and not app:
        raise ConfigError("only an app has an end of life", key="--ends", remedy="Name TENANT/APP")
    client = ControlClient(chosen_settings())
    if app:
        made = client.ask("POST", _apps(tenant), name=app, title=title, ends=_moment(ends))
    else:
        made = client.ask("POST", "/v1/tenants", name=tenant, title=title)
    _done(f"{name} is added", made, as_json)


def tenant_end(
    name: AppArgument,
    at: Annotated[str, typer.Option(help="When, e.g. 2030-12-31; UTC; or never.", show_default="now")] = "",
    as_json: JsonOption = False,
) -> None:
    """Set the end of life of an app, after which none of its keys is good."""
    tenant, app = _owner(name)
    if not app:
        raise ConfigError(f"{name!r} is not an app", key="NAME", remedy="Name TENANT/APP")
    ends = None if at == "never" else _moment(at) or datetime.now(UTC).isoformat()
    made = ControlClient(chosen_settings()).ask("PATCH", f"{_apps(tenant)}/{_quoted(app)}", ends=ends)
    _done(f"{name} ends {made['ends'] or 'never'}", made, as_json)


def tenant_rm(name: OwnerArgument, as_json: JsonOption = False) -> None:
    """Remove a tenant with its apps, or one app, with their keys and subscriptions; events stay in the tables."""
    tenant, app = _owner(name)
    path = f"{_apps(tenant)}/{_quoted(app)}" if app else f"/v1/tenants/{_quoted(tenant)}"
    ControlClient(chosen_settings()).ask("DELETE", path)
    _done(f"{name} is removed", {"name": name}, as_json)


def _owner(text: str) -> tuple[str, str]:
    """Tenant and app of ``TENANT`` (no app) or ``TENANT/APP``."""
    tenant, slash, app = text.partition("/")
    if slash and not (tenant and app):
        raise ConfigError(f"{text!r} is not a tenant or an app", key="TENANT/APP", remedy="Write e.g. acme/shop")
    return tenant, app


def _apps(tenant: str) -> str:
    return f"/v1/tenants/{_quoted(tenant)}/apps"


def _quoted(text: str) -> str:
    return quote(text, safe="")


def _moment(text: str) -> str | None:
    if not text:
        return None
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        remedy = "Write e.g. 2030-12-31, or 2030-12-31T12:00:00+02:00"
        raise ConfigError(f"{text!r} is no date", key="--ends", remedy=remedy) from None
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).isoformat()


# --- keys


def key_ls(
    tenant: Annotated[
        str, typer.Option(metavar="TENANT[/APP]", help="Only those of this tenant or app.", show_default="all")
    ] = "",
    as_json: JsonOption = False,
) -> None:
    """List keys, without their secrets."""
    settings = chosen_settings()
    owner, app = _owner(tenant)
    if control_url(settings):
        found = ControlClient(settings).all("/v1/keys", tenant=owner, app=app)
        _print(found, ("id", "name", "tenant", "app", "actions", "tables", "sources", "until", "created"), as_json)
        return
    _refuse({"--tenant": app}, True, "Start a control plane first")
    found = [
        {name: value for name, value in key.items() if name != "hash"}
        for key in _keys_of_files(settings)
        if not owner or key["tenant"] == owner
    ]
    _print(found, ("id", "name", "tenant", "actions", "tables", "sources", "rate", "connections", "created"), as_json)


def key_new(
    name: Annotated[str, typer.Argument(help="For people: whose it is.")],
    may: Annotated[
        Right,
        typer.Option(
            help="send events; read products; read and change queries; with a control plane also: "
            "manage the tenant (without one, all), or get the state for processes of another machine."
        ),
    ] = Right.SEND,
    source: Annotated[list[str] | None, typer.Option(help="Sender: only this source; may be repeated.")] = None,
    max_event_bytes: Annotated[int, typer.Option(help="Sender: largest event; 0: the source's limit.", min=0)] = 0,
    table: Annotated[list[str] | None, typer.Option(help="Reader: only this table; may be repeated.")] = None,
    rows: Annotated[
        list[str] | None,
        typer.Option(help="Reader: TABLE=CONDITION in SQL that limits the rows; TABLE * is every other table."),
    ] = None,
    tenant: Annotated[
        str,
        typer.Option(
            metavar="TENANT[/APP]",
            help="Tenant of the key; with a control plane its app too, whose end of life is the key's.",
            show_default="the node's",
        ),
    ] = "",
    rate: Annotated[int, typer.Option(help="Events or requests a second; 0: no limit of its own.", min=0)] = 0,
    connections: Annotated[int, typer.Option(help="Connections at a time; 0: no limit of its own.", min=0)] = 0,
    as_json: JsonOption = False,
) -> None:
    """Make a key. It is printed once; only its hash is kept. As soon as there is one key, every client needs one."""
    settings = chosen_settings()
    url = control_url(settings)
    owner, app = _owner(tenant)
    reads = may in (Right.READ, Right.QUERIES)
    _refuse({"--source": source, "--max-event-bytes": max_event_bytes}, reads, "Leave it out: readers have none")
    _refuse({"--table": table, "--rows": rows}, not reads, "Add --may read")
    _refuse({"--may": may not in (Right.SEND, Right.READ, Right.QUERIES)}, not url, "Start a control plane first")
    _refuse({"--tenant": app}, not url, "Start a control plane first")
    from serve.access import checked_rows

    limits: dict[str, Any] = {"name": name, "tenant": owner, "rate": rate, "connections": connections}
    conditions = checked_rows(rows or ())
    if url:
        reach = {"sources": source or [], "max_event_bytes": max_event_bytes, "tables": table or [], "rows": conditions}
        made = ControlClient(settings).ask("POST", "/v1/keys", actions=[may], app=app, **limits, **reach)
        _show_key(made, f"of {url}", as_json)
        return
    senders, readers = _files(settings)
    if reads:
        from serve.access import ReaderKey

        reader = ReaderKey("0" * 64, **limits, tables=tuple(table or ()), rows=conditions, queries=may is Right.QUERIES)
        path, text = readers.path, readers.new(reader)
    else:
        from ingest.border.access import ApiKey

        sender = ApiKey("0" * 64, **limits, sources=tuple(source or ()), max_event_bytes=max_event_bytes)
        path, text = senders.path, senders.new(sender)
    place = f"kept as a hash in {path}; running processes know it within a second"
    _show_key({"key": text, "id": text.split("_")[1]}, place, as_json)


def key_rotate(
    ident: IdArgument,
    grace: Annotated[int, typer.Option(help="Seconds that the old key stays good.", min=0)] = 0,
    as_json: JsonOption = False,
) -> None:
    """Replace a key of the control plane by a new one with the same rights, good at once."""
    made = ControlClient(chosen_settings()).ask("POST", f"/v1/keys/{_quoted(ident)}/rotate", grace_s=grace)
    _show_key(made, f"in place of {ident}, which stays good for {grace} s", as_json)


def key_revoke(ident: IdArgument, as_json: JsonOption = False) -> None:
    """Take a key away; running processes refuse it within two seconds."""
    settings = chosen_settings()
    if control_url(settings):
        ControlClient(settings).ask("DELETE", f"/v1/keys/{_quoted(ident)}")
    else:
        senders, readers = _files(settings)
        (readers if ident in readers.read() else senders).revoke(ident)
    _done(f"revoked {ident}", {"id": ident}, as_json)


def _import_keys(settings: Settings) -> None:
    """Take the keys of the key files over into the control plane; whoever has one goes on using it."""
    client = ControlClient(settings)
    found = []
    for key in _keys_of_files(settings):
        values = {name: value for name, value in key.items() if value}
        for unknown in ("created", "until", "queries"):
            values.pop(unknown, None)
        found.append(values)
    known = {each["name"] for each in client.all("/v1/tenants")}
    for tenant in sorted({key["tenant"] for key in found if "tenant" in key} - known):
        client.ask("POST", "/v1/tenants", name=tenant)
    added = 0
    for at in range(0, len(found), _AT_A_TIME):
        added += client.ask("POST", "/v1/keys/import", keys=found[at : at + _AT_A_TIME])["added"]
    there = len(found) - added
    err.print(f"{added} keys are taken over, {there} were there; now set control.url for every process")


def _keys_of_files(settings: Settings) -> list[dict[str, Any]]:
    """The keys of both files as the control plane describes keys: with ``actions``."""
    senders, readers = _files(settings)
    found = [dataclasses.asdict(key) | {"actions": [Right.SEND]} for key in senders.read().values()]
    for key in readers.read().values():
        found.append(dataclasses.asdict(key) | {"actions": [Right.QUERIES if key.queries else Right.READ]})
    return found


def _files(settings: Settings) -> tuple[KeyFile[ApiKey], KeyFile[ReaderKey]]:
    """The key files of collectors and of servers."""
    from ingest.border.access import ApiKey, keys_path
    from lakehouse.contract.access import KeyFile
    from serve.access import reader_keys

    return KeyFile(keys_path(settings), ApiKey), reader_keys(settings)


def _refuse(options: dict[str, Any], wrong: bool, remedy: str) -> None:
    given = [name for name, value in options.items() if value]
    if wrong and given:
        raise ConfigError("this key has no such property", key=given[0], remedy=remedy)


def _show_key(made: dict[str, Any], where: str, as_json: bool) -> None:
    if as_json:
        print_json(made)
        return
    out.print(made["key"], markup=False, highlight=False, soft_wrap=True)
    err.print(f"key {made['id']}, {where}", style="dim")


def _done(text: str, value: Any, as_json: bool) -> None:
    if as_json:
        print_json(value)
    else:
        err.print(text, markup=False)


def _print(found: list[dict[str, Any]], columns: Sequence[str], as_json: bool) -> None:
    if as_json:
        print_json(found)
        return
    print_table(columns, [[escape(_cell(each.get(column))) for column in columns] for each in found])


def _cell(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or "all"
    return str(value or "–")

"""``control``, ``tenant``, ``app`` and ``key``: the control plane, its clients, and key files where there is none."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from jobs.console import JsonOption, chosen_settings, err, out, print_json, print_table, run_async
from lakehouse.contract.access import ADMIN_KEY, address_file, key_text
from lakehouse.contract.errors import ConfigError, EnvironmentProblem, ProblemWithRemedy
from lakehouse.contract.settings import Settings

if TYPE_CHECKING:
    from lakehouse.contract.access import KeyFile

_AT_A_TIME = 1_000
TenantOption = Annotated[str, typer.Option(help="Tenant that it belongs to.")]
AnyTenantOption = Annotated[str, typer.Option(help="Only those of this tenant.", show_default="all")]
AnyAppOption = Annotated[str, typer.Option(help="Only those of this app.", show_default="all")]


def control(
    migrate: Annotated[bool, typer.Option("--migrate", help="Bring the database up to date, and end.")] = False,
) -> None:
    """Run the control plane: tenants, apps, keys, sources and subscriptions over REST."""
    from serve.control.app import run_control
    from serve.control.store import ControlStore

    settings = chosen_settings()
    if migrate:
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
            json = body if method in ("POST", "PATCH", "PUT") else None
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
        from urllib.parse import urlencode

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


def tenant_ls(as_json: JsonOption = False) -> None:
    """List tenants."""
    _print(ControlClient(chosen_settings()).all("/v1/tenants"), ("name", "title", "created"), as_json)


def tenant_add(
    name: Annotated[str, typer.Argument(help="Name of the tenant.")],
    title: Annotated[str, typer.Option(help="For people.")] = "",
    as_json: JsonOption = False,
) -> None:
    """Add a tenant."""
    made = ControlClient(chosen_settings()).ask("POST", "/v1/tenants", name=name, title=title)
    _done(f"tenant {name} is added", made, as_json)


def tenant_rm(name: Annotated[str, typer.Argument(help="Name of the tenant.")], as_json: JsonOption = False) -> None:
    """Remove a tenant with its apps, keys and subscriptions; its events stay in the tables."""
    ControlClient(chosen_settings()).ask("DELETE", f"/v1/tenants/{_quoted(name)}")
    _done(f"tenant {name} is removed", {"name": name}, as_json)


def app_ls(tenant: TenantOption, as_json: JsonOption = False) -> None:
    """List the apps of a tenant."""
    found = ControlClient(chosen_settings()).all(f"/v1/tenants/{_quoted(tenant)}/apps")
    _print(found, ("name", "title", "ends", "created"), as_json)


def app_add(
    name: Annotated[str, typer.Argument(help="Name of the app.")],
    tenant: TenantOption,
    title: Annotated[str, typer.Option(help="For people.")] = "",
    ends: Annotated[str, typer.Option(help="End of life, e.g. 2030-12-31; UTC.", show_default="none")] = "",
    as_json: JsonOption = False,
) -> None:
    """Add an app to a tenant."""
    path = f"/v1/tenants/{_quoted(tenant)}/apps"
    made = ControlClient(chosen_settings()).ask("POST", path, name=name, title=title, ends=_moment(ends))
    _done(f"app {name} of {tenant} is added", made, as_json)


def app_end(
    name: Annotated[str, typer.Argument(help="Name of the app.")],
    tenant: TenantOption,
    at: Annotated[str, typer.Option(help="When, e.g. 2030-12-31; UTC; or never.", show_default="now")] = "",
    as_json: JsonOption = False,
) -> None:
    """Set the end of life of an app, after which none of its keys is good."""
    ends = None if at == "never" else _moment(at) or datetime.now(UTC).isoformat()
    path = f"/v1/tenants/{_quoted(tenant)}/apps/{_quoted(name)}"
    made = ControlClient(chosen_settings()).ask("PATCH", path, ends=ends)
    _done(f"app {name} of {tenant} ends {made['ends'] or 'never'}", made, as_json)


def app_rm(
    name: Annotated[str, typer.Argument(help="Name of the app.")], tenant: TenantOption, as_json: JsonOption = False
) -> None:
    """Remove an app with its keys and subscriptions."""
    ControlClient(chosen_settings()).ask("DELETE", f"/v1/tenants/{_quoted(tenant)}/apps/{_quoted(name)}")
    _done(f"app {name} of {tenant} is removed", {"tenant": tenant, "name": name}, as_json)


# --- keys


def key_ls(
    reader: Annotated[bool, typer.Option("--reader", help="Without a control plane: keys of the server.")] = False,
    tenant: AnyTenantOption = "",
    app: AnyAppOption = "",
    as_json: JsonOption = False,
) -> None:
    """List keys, without their secrets."""
    settings = chosen_settings()
    if control_url(settings):
        found = ControlClient(settings).all("/v1/keys", tenant=tenant, app=app)
        _print(found, ("id", "name", "tenant", "app", "actions", "tables", "sources", "until", "created"), as_json)
        return
    keys = [dataclasses.asdict(key) for key in _file(settings, reader).read().values()]
    shown = [{name: value for name, value in key.items() if name != "hash"} for key in keys]
    reach = "tables" if reader else "sources"
    _print(shown, ("id", "name", "tenant", reach, "rate", "connections", "created"), as_json)


def key_new(
    name: Annotated[str, typer.Argument(help="For people: whose it is.")],
    reader: Annotated[
        bool, typer.Option("--reader", help="It may read products. Default: it may send events.")
    ] = False,
    source: Annotated[list[str] | None, typer.Option(help="Sender: only this source; may be repeated.")] = None,
    max_event_bytes: Annotated[int, typer.Option(help="Sender: largest event; 0: the source's limit.", min=0)] = 0,
    table: Annotated[list[str] | None, typer.Option(help="Reader: only this table; may be repeated.")] = None,
    rows: Annotated[
        list[str] | None,
        typer.Option(help="Reader: TABLE=CONDITION in SQL that limits the rows; TABLE * is every other table."),
    ] = None,
    queries: Annotated[bool, typer.Option("--queries", help="Reader: may add and remove continuous queries.")] = False,
    manage: Annotated[
        bool, typer.Option("--manage", help="Control plane: it may manage the tenant; without a tenant, all.")
    ] = False,
    machine: Annotated[
        bool, typer.Option("--machine", help="Control plane: for collectors and servers of another machine.")
    ] = False,
    tenant: Annotated[str, typer.Option(help="Tenant of the key.", show_default="the node's")] = "",
    app: Annotated[str, typer.Option(help="Control plane: app of the tenant, whose end of life is the key's.")] = "",
    rate: Annotated[int, typer.Option(help="Events or requests a second; 0: no limit of its own.", min=0)] = 0,
    connections: Annotated[int, typer.Option(help="Connections at a time; 0: no limit of its own.", min=0)] = 0,
    as_json: JsonOption = False,
) -> None:
    """Make a key. It is printed once; only its hash is kept. As soon as there is one key, every client needs one."""
    settings = chosen_settings()
    url = control_url(settings)
    _refuse({"--source": source, "--max-event-bytes": max_event_bytes}, reader, "Leave it out: readers have none")
    _refuse({"--table": table, "--rows": rows, "--queries": queries}, not reader, "Add --reader")
    _refuse({"--manage": manage, "--machine": machine, "--app": app}, not url, "Start a control plane first")
    limits = {"name": name, "tenant": tenant, "rate": rate, "connections": connections}
    conditions = _conditions(rows or [])
    if url:
        own = [text for text, given in (("manage", manage), ("state", machine), ("queries", queries)) if given]
        reach = {"sources": source or [], "max_event_bytes": max_event_bytes, "tables": table or [], "rows": conditions}
        actions = own or ["read" if reader else "send"]
        made = ControlClient(settings).ask("POST", "/v1/keys", actions=actions, app=app, **limits, **reach)
        _show_key(made, f"of {url}", as_json)
        return
    hashed: dict[str, Any] = {"hash": "0" * 64, **limits}
    if reader:
        from serve.access import ReaderKey

        key: Any = ReaderKey(**hashed, tables=tuple(table or ()), rows=conditions, queries=queries)
    else:
        from ingest.border.access import ApiKey

        key = ApiKey(**hashed, sources=tuple(source or ()), max_event_bytes=max_event_bytes)
    file = _file(settings, reader)
    text = file.new(key)
    place = f"kept as a hash in {file.path}; running processes know it within a second"
    _show_key({"key": text, "id": text.split("_")[1]}, place, as_json)


def key_rotate(
    ident: Annotated[str, typer.Argument(metavar="ID", help="Id of the key, as ls shows it.")],
    grace: Annotated[int, typer.Option(help="Seconds that the old key stays good.", min=0)] = 0,
    as_json: JsonOption = False,
) -> None:
    """Replace a key by a new one with the same rights, good at once."""
    made = ControlClient(chosen_settings()).ask("POST", f"/v1/keys/{_quoted(ident)}/rotate", grace_s=grace)
    _show_key(made, f"in place of {ident}, which stays good for {grace} s", as_json)


def key_revoke(
    ident: Annotated[str, typer.Argument(metavar="ID", help="Id of the key, as ls shows it.")],
    reader: Annotated[bool, typer.Option("--reader", help="Without a control plane: a key of the server.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Take a key away; running processes refuse it within two seconds."""
    settings = chosen_settings()
    if control_url(settings):
        ControlClient(settings).ask("DELETE", f"/v1/keys/{_quoted(ident)}")
    else:
        _file(settings, reader).revoke(ident)
    _done(f"revoked {ident}", {"id": ident}, as_json)


def key_import(as_json: JsonOption = False) -> None:
    """Take the keys of the key files over into the control plane; whoever has one goes on using it."""
    settings = chosen_settings()
    client = ControlClient(settings)
    found = []
    for reader, action in ((False, "send"), (True, "read")):
        for key in _file(settings, reader).read().values():
            values = {name: value for name, value in dataclasses.asdict(key).items() if value}
            actions = ["queries"] if values.pop("queries", False) else [action]
            values.pop("created", None)
            values.pop("until", None)
            found.append(values | {"actions": actions})
    known = {each["name"] for each in client.all("/v1/tenants")}
    for tenant in sorted({key["tenant"] for key in found if "tenant" in key} - known):
        client.ask("POST", "/v1/tenants", name=tenant)
    added = 0
    for at in range(0, len(found), _AT_A_TIME):
        added += client.ask("POST", "/v1/keys/import", keys=found[at : at + _AT_A_TIME])["added"]
    done = {"added": added, "known": len(found) - added}
    _done(
        f"{added} keys are taken over, {done['known']} were there; now set control.url for every process", done, as_json
    )


def _file(settings: Settings, reader: bool) -> KeyFile[Any]:
    if reader:
        from serve.access import reader_keys

        return reader_keys(settings)
    from ingest.border.access import ApiKey, keys_path
    from lakehouse.contract.access import KeyFile

    return KeyFile(keys_path(settings), ApiKey)


def _conditions(texts: Sequence[str]) -> dict[str, str]:
    from serve.access import checked_rows

    return checked_rows(texts) if texts else {}


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


def _moment(text: str) -> str | None:
    if not text:
        return None
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        remedy = "Write e.g. 2030-12-31, or 2030-12-31T12:00:00+02:00"
        raise ConfigError(f"{text!r} is no date", key="--ends", remedy=remedy) from None
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).isoformat()


def _quoted(text: str) -> str:
    from urllib.parse import quote

    return quote(text, safe="")


GROUPS: dict[str, tuple[str, dict[str, Callable[..., None]]]] = {
    "tenant": (
        "Add, list and remove tenants of the control plane.",
        {"ls": tenant_ls, "add": tenant_add, "rm": tenant_rm},
    ),
    "app": (
        "Add, list, end and remove apps of a tenant.",
        {"ls": app_ls, "add": app_add, "end": app_end, "rm": app_rm},
    ),
    "key": (
        "Make, list, rotate and revoke keys: of the control plane, or of key files where there is none.",
        {"ls": key_ls, "new": key_new, "rotate": key_rotate, "revoke": key_revoke, "import": key_import},
    ),
}
"""Commands of each group, by name."""

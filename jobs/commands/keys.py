"""``millrace keys``: API keys of collectors (who may send) and of the server (who may read)."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from jobs.console import JsonOption, LakeOption, err, out, print_json
from lakehouse.contract.errors import ConfigError
from lakehouse.contract.keys import KeyFile
from lakehouse.contract.settings import Settings, load_settings

app = typer.Typer(help="API keys: who may send, and with --reader who may read.", no_args_is_help=True)

ReaderOption = Annotated[bool, typer.Option("--reader", help="Of the server: who may read. Else of collectors.")]


@app.command("new")
def keys_new(
    name: Annotated[str, typer.Argument(help="Whose key it is.")],
    lake: LakeOption = None,
    reader: ReaderOption = False,
    source: Annotated[list[str] | None, typer.Option(help="May send to this source only; may be repeated.")] = None,
    table: Annotated[list[str] | None, typer.Option(help="Reader: may read this table only; may be repeated.")] = None,
    rows: Annotated[
        list[str] | None,
        typer.Option(help="Reader: TABLE=CONDITION, SQL that its rows fulfil; TABLE * is every other one."),
    ] = None,
    queries: Annotated[bool, typer.Option("--queries", help="Reader: may add and remove continuous queries.")] = False,
    tenant: Annotated[str, typer.Option(help="Tenant that it belongs to.", show_default="the node's")] = "",
    rate: Annotated[int, typer.Option(help="Events or requests a second; 0: no limit of its own.", min=0)] = 0,
    connections: Annotated[int, typer.Option(help="Connections at a time; 0: no limit of its own.", min=0)] = 0,
    max_event_bytes: Annotated[int, typer.Option(help="Of an event; 0: the source's limit.", min=0)] = 0,
    as_json: JsonOption = False,
) -> None:
    """Make a key and print it, this once: only its hash is kept. From the first key on, everybody has to show one."""
    settings = load_settings(lake=lake)
    file = _file(settings, reader)
    _refuse_foreign(reader, {"--source": source, "--max-event-bytes": max_event_bytes}, "readers")
    _refuse_foreign(not reader, {"--table": table, "--rows": rows, "--queries": queries}, "senders")
    if reader:
        from serve.access import ReaderKey, checked_rows

        conditions = checked_rows(rows or [])
        limits = (rate, connections)
        made: Any = ReaderKey("0" * 64, name, tenant, *limits, "", "", tuple(table or ()), conditions, queries)
    else:
        from ingest.border.access import ApiKey

        made = ApiKey("0" * 64, name, tenant, rate, connections, "", "", tuple(source or ()), max_event_bytes)
    text = file.new(made)
    if as_json:
        print_json({"key": text, "id": text.split("_")[1]})
    else:
        out.print(text, markup=False, highlight=False, soft_wrap=True)
        err.print(f"kept as a hash in {file.path}; running processes know it within a second", style="dim")


@app.command("ls")
def keys_ls(lake: LakeOption = None, reader: ReaderOption = False, as_json: JsonOption = False) -> None:
    """List the keys: ids, names and limits, no secrets."""
    found = _file(load_settings(lake=lake), reader).read()
    if as_json:
        print_json([{n: v for n, v in dataclasses.asdict(key).items() if n != "hash"} for key in found.values()])
        return
    table = Table("id", "name", "tenant", "tables" if reader else "sources", "rate/s", "connections", "made")
    for key in found.values():
        limits = (str(key.rate or "–"), str(key.connections or "–"))
        reach = ", ".join(key.tables if reader else key.sources) or "all"
        table.add_row(*map(escape, (key.id, key.name, key.tenant or "–", reach, *limits, key.created)))
    out.print(table)


@app.command("revoke")
def keys_revoke(
    key_id: Annotated[str, typer.Argument(help="Id of the key, as `millrace keys ls` shows it.")],
    lake: LakeOption = None,
    reader: ReaderOption = False,
) -> None:
    """Take a key away; running processes refuse it within a second or two, and close what it holds open."""
    gone = _file(load_settings(lake=lake), reader).revoke(key_id)
    out.print(f"revoked {key_id} ({escape(gone.name)})")


def _file(settings: Settings, reader: bool) -> KeyFile[Any]:
    if reader:
        from serve.access import reader_keys

        return reader_keys(settings)
    from ingest.border.access import ApiKey, keys_path

    return KeyFile(keys_path(settings), ApiKey)


def _refuse_foreign(other: bool, options: dict[str, Any], whose: str) -> None:
    given = [name for name, value in options.items() if value]
    if other and given:
        remedy = "Leave it out" if whose == "readers" else "Add --reader"
        raise ConfigError(f"keys of {whose} have no such property", key=given[0], remedy=remedy)

"""What the site says of commands, settings, operators, routes and metrics, taken from the code when the site is built.

A page with the line ``<!-- generated: NAME -->`` gets there what the function of this name in :data:`PARTS` returns.
"""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import re
import tempfile
import typing
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import typer
from prometheus_client.core import Metric

from ingest.node import CollectorNode, NodeOptions
from jobs.cli import app
from jobs.metrics import DriverCollector, relay_counts
from lakehouse.contract.lake import Lake
from lakehouse.contract.pipeline import OPERATORS, Product, load_pipeline
from lakehouse.contract.pipeline.product import TAKEN_BY
from lakehouse.contract.settings import PREFIX, Settings, load_settings
from lakehouse.counts import EVENTS, TOO_LATE
from lakehouse.maintain.report import RETENTION_SHARE
from serve.app import make_app
from serve.control.app import control_openapi
from serve.http import routes
from serve.http.schema import openapi

ROOT = Path(__file__).parents[2]


def commands() -> str:
    """Each command, with its arguments and options."""
    group: Any = typer.main.get_command(app)
    shared = _parameters(group, ("help", "install_completion", "show_completion"))
    found = [f"## All commands\n\n{inspect.cleandoc(group.help)}\n\n{shared}"]
    for name, command in _commands(group):
        found.append(f"## millrace {name}\n\n{inspect.cleandoc(command.help)}\n\n{_parameters(command)}")
    return "\n\n".join(found)


def settings() -> str:
    """Each setting, with default, environment variable and meaning."""
    rows = []
    for key, default, meaning in _settings(Settings):
        text = str(default).lower() if isinstance(default, bool) else str(default)
        shown = f"`{text}`" if text and not isinstance(default, dict) else "empty"
        variable = "" if isinstance(default, dict) else f"`{PREFIX}{key.replace('.', '_').upper()}`"
        rows.append((f"`{key}`", shown, variable, meaning))
    return _table(("setting", "default", "environment", "meaning"), rows)


def operators() -> str:
    """The keys that each operator takes."""
    meanings, defaults = attributes(Product), {one.name: one for one in dataclasses.fields(Product)}
    found = []
    for operator in OPERATORS:
        keys = [key for key, takers in TAKEN_BY.items() if operator in takers]
        rows = [(f"`{key}`", _default(defaults[key]), meanings[key]) for key in keys]
        found.append(f"## {operator}\n\n{_table(('key', 'default', 'meaning'), rows)}")
    every = [name for name in defaults if name not in TAKEN_BY and defaults[name].init and name in meanings]
    rows = [(f"`{key}`", _default(defaults[key]), meanings[key]) for key in every if key != "name"]
    return "\n\n".join([f"## Keys of every product\n\n{_table(('key', 'default', 'meaning'), rows)}", *found])


def server_routes() -> str:
    """Each route of the server, from its OpenAPI document."""
    return _routes(openapi(routes.ROUTES))


def control_routes() -> str:
    """Each route of the control plane, from its OpenAPI document."""
    return _routes(control_openapi())


def _routes(document: dict[str, Any]) -> str:
    rows = []
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            asked = ", ".join(f"`{one['name']}`" for one in operation["parameters"] if one["in"] == "query")
            answers = ", ".join(code for code in operation["responses"] if code != "4XX")
            rows.append((f"`{method.upper()} {path}`", operation["summary"], asked, answers))
    return _table(("route", "what it does", "parameters", "answers"), sorted(rows, key=lambda row: row[0].split()[1]))


def metrics() -> str:
    """The metrics of each process, as its collectors give them when nothing has happened yet."""
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(_families(folder))
    parts = []
    for process, families in found.items():
        rows = [
            (f"`{one.name}{'_total' if one.type == 'counter' else ''}`", one.type, _labels(one), f"{one.documentation}")
            for one in families
        ]
        parts.append(f"## {process}\n\n{_table(('metric', 'type', 'labels', 'meaning'), rows)}")
    return "\n\n".join(parts)


def changes() -> str:
    """The changelog."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").partition("\n")[2]
    return re.sub(r"\]\(docs/", "](", text)


def decisions() -> str:
    """The titles of the decisions."""
    pages = sorted((ROOT / "docs" / "decisions").glob("0*.md"))
    titles = [page.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ") for page in pages]
    return "\n".join(f"- [{title}]({page.name})" for page, title in zip(pages, titles, strict=True))


PARTS = {
    "changes": changes,
    "commands": commands,
    "control_routes": control_routes,
    "decisions": decisions,
    "metrics": metrics,
    "operators": operators,
    "routes": server_routes,
    "settings": settings,
}


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Fill in what is generated; called by MkDocs for each page."""
    return re.sub(r"^<!-- generated: (\w+) -->$", lambda found: PARTS[found[1]](), markdown, flags=re.MULTILINE)


def attributes(described: type) -> dict[str, str]:
    """Text of each entry below ``Attributes:`` in a class's docstring, as Markdown."""
    part = (described.__doc__ or "").partition("Attributes:\n")[2].partition("\n\n")[0]
    found = {}
    for names, text in re.findall(r"^(\w[\w, ]*): (.*(?:\n +.*)*)", inspect.cleandoc("\n" + part), re.MULTILINE):
        words = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", " ".join(text.split()).replace("``", "`"))
        found |= dict.fromkeys(names.split(", "), words.rstrip("."))
    return found


def _commands(group: Any, above: str = "") -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _commands(command, f"{above}{name} ")
        else:
            yield f"{above}{name}", command


def _parameters(command: Any, left_out: Sequence[str] = ("help",)) -> str:
    rows = []
    for one in command.params:
        if one.name not in left_out:
            names = ", ".join([*one.opts, *one.secondary_opts]) if one.param_type_name == "option" else one.name.upper()
            default = "" if one.default in (None, False, ()) or callable(one.default) else f"`{one.default}`"
            rows.append((f"`{names}`", default, one.help))
    return _table(("argument or option", "default", "meaning"), rows) if rows else "It takes no options of its own."


def _settings(described: type, at: str = "") -> Iterator[tuple[str, Any, str]]:
    meanings, types = attributes(described), typing.get_type_hints(described)
    for one in dataclasses.fields(described):
        if dataclasses.is_dataclass(types[one.name]):
            yield from _settings(types[one.name], f"{at}{one.name}.")
        else:
            default = one.default if one.default is not dataclasses.MISSING else {}
            yield f"{at}{one.name}", default, meanings[one.name]


def _default(one: dataclasses.Field[Any]) -> str:
    empty = one.default in (dataclasses.MISSING, "", ()) or not isinstance(one.default, str | int | float | tuple)
    return "" if empty else f"`{one.default}`"


async def _families(folder: str) -> dict[str, list[Metric]]:
    options = load_settings({}, lake=Path(folder), kafka__bootstrap="127.0.0.1:9", serve__port=0)
    pipeline = load_pipeline(options.pipeline_folder())
    server = make_app(options)
    async with server.router.lifespan_context(server) as state:
        of_server = list(state["metrics"].registry.collect())
    node = CollectorNode(options, pipeline, NodeOptions())
    driver = DriverCollector(lambda: (), Lake(Path(folder)))
    kinds = (("millrace_refine", ("read", "refined", "rejected", "sent_again")), ("millrace_latest", ("copied",)))
    relays = [relay_counts(prefix, {}, *names) for prefix, names in kinds]
    return {
        "Collector": _ours(node._stats.registry.collect()),
        "Spark driver": _ours([*driver.collect(), *map(_family, (EVENTS, RETENTION_SHARE, TOO_LATE))]),
        "Server": _ours(of_server),
        "refine and latest": _ours(family for counts in relays for one in counts for family in one.collect()),
    }


def _family(declared: Any) -> Metric:
    (family,) = declared.collect()
    family._labelnames = declared._labelnames
    return family


def _ours(families: Iterable[Metric]) -> list[Metric]:
    return sorted((one for one in families if one.name.startswith("millrace_")), key=lambda one: one.name)


def _labels(family: Metric) -> str:
    return ", ".join(f"`{name}`" for name in getattr(family, "_labelnames", ()))


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)

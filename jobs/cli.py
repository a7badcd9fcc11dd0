"""The ``millrace`` command. Each part imports what it needs when it is called: serving and collecting need no Java."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from jobs.commands import care, control, load, parts, project, query, tables
from jobs.console import choose, print_problems
from jobs.local.supervise import exit_status, follow_parent
from lakehouse.contract.errors import EnvironmentProblem, MillraceError
from lakehouse.contract.storage import is_away

_SHARED = ("--lake", "--pipeline", "--set")
_EPILOG = "Every command also takes --lake, --pipeline and --set: see millrace --help."


class SharedOptions(TyperGroup):
    """Takes the options that all commands share before the command's name and after it."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Move the shared options to the front, where the group itself reads them."""
        shared: list[str] = []
        rest: list[str] = []
        words = iter(args)
        for word in words:
            name, equals, _ = word.partition("=")
            if word == "--":
                rest += [word, *words]
            elif name not in _SHARED:
                rest.append(word)
            elif equals:
                shared.append(word)
            else:
                value = list(itertools.islice(words, 1))
                if not value:
                    ctx.fail(f"Option '{name}' requires an argument.")
                shared += [word, *value]
        return super().parse_args(ctx, [*shared, *rest])


app = typer.Typer(
    name="millrace",
    cls=SharedOptions,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def shared(
    lake: Annotated[str | None, typer.Option(help="Root folder of the tables.", show_default="lake")] = None,
    pipeline: Annotated[
        str | None, typer.Option(help="Folder below conf/pipelines, or a path.", show_default="meetup")
    ] = None,
    assignments: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="A setting, e.g. serve.port=9000; may be repeated."),
    ] = None,
) -> None:
    """An event-sourced Delta Lake lakehouse that pushes its results.

    Every command takes the options below, before or after its name.
    """
    choose(lake, pipeline, assignments or ())


COMMANDS = (
    project.init,
    project.test,
    project.check,
    project.prepare,
    project.kafka,
    parts.up,
    parts.demo,
    parts.collect,
    parts.run,
    parts.serve,
    control.control,
    parts.simulate,
    parts.status,
    tables.sql,
    tables.subscribe,
    tables.tables,
    tables.state,
    load.load,
    load.staging,
    care.log,
    care.audit,
    care.quality,
    care.maintain,
    care.replay,
)
GROUPS: dict[str, tuple[str, dict[str, Callable[..., None]]]] = {
    "query": (
        "Add, list and remove continuous queries and alerts.",
        {"add": query.add, "alert": query.alert, "ls": query.ls, "rm": query.rm},
    ),
    "tenant": (
        "Add, list, end and remove tenants of the control plane and their apps.",
        {"ls": control.tenant_ls, "add": control.tenant_add, "end": control.tenant_end, "rm": control.tenant_rm},
    ),
    "key": (
        "Make, list, rotate and revoke keys: of the control plane, or of key files where there is none.",
        {"ls": control.key_ls, "new": control.key_new, "rotate": control.key_rotate, "revoke": control.key_revoke},
    ),
}
for _command in COMMANDS:
    app.command(epilog=_EPILOG)(_command)
for _name, (_help, _members) in GROUPS.items():
    _group = typer.Typer(help=_help, no_args_is_help=True)
    for _member, _run in _members.items():
        _group.command(_member, epilog=_EPILOG)(_run)
    app.add_typer(_group, name=_name)


def main() -> None:
    """Console script: an error of ours, or of a file, is one line and not a traceback."""
    follow_parent()
    try:
        app()
    except MillraceError as error:
        print_problems([error])
        sys.exit(exit_status(error))
    except Exception as error:
        if is_away(error):
            problem = EnvironmentProblem(str(error).strip().splitlines()[0], "Start it again when the store answers")
            status = exit_status(problem)
        elif isinstance(error, OSError) and error.filename is not None:
            remedy = "Name another path, such as --lake, or correct its rights"
            problem, status = EnvironmentProblem(f"{error.filename}: {error.strerror}", remedy), 1
        else:
            raise
        print_problems([problem])
        sys.exit(status)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()

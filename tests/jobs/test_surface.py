"""What a user meets: how much there is of it, that each part is explained, and that the docs name only what exists."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from jobs.cli import app
from lakehouse.contract.settings import Settings, leaves

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])


def commands(command: Any, above: str = "") -> Iterator[tuple[str, Any]]:
    """Each command that does something, by its name."""
    inner = getattr(command, "commands", None)
    if inner is None:
        yield above, command
    for name, one in (inner or {}).items():
        yield from commands(one, f"{above} {name}".strip())


ROOT_COMMAND: Any = typer.main.get_command(app)
COMMANDS = dict(commands(ROOT_COMMAND))


def parameters(command: Any) -> list[Any]:
    return [one for one in command.params if one.name not in ("help", "install_completion", "show_completion")]


def test_there_is_no_more_of_it_than_somebody_can_learn() -> None:
    assert len(COMMANDS) <= 36
    assert sum(len(parameters(command)) for command in (ROOT_COMMAND, *COMMANDS.values())) <= 154
    assert len(list(leaves(Settings()))) <= 65


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_and_option_is_one_sentence(name: str) -> None:
    command = COMMANDS[name]
    assert command.help.splitlines()[0].endswith((".", "…}.")), command.help
    for one in parameters(command):
        assert one.help and one.help.endswith("."), one.name


def named() -> Iterator[tuple[str, str]]:
    """Page and call of each ``millrace …`` in the documentation's code."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        code = re.findall(r"```.*?\n(.*?)```", text, re.DOTALL) + re.findall(r"^    (.*)$", text, re.MULTILINE)
        code += re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
        for piece in code:
            for call in re.findall(r"(?:^|\s)millrace ([^\n]*(?:\\\n[^\n]*)*)", piece):
                yield page.name, call


@pytest.mark.parametrize(("page", "call"), sorted(set(named())))
def test_the_docs_name_commands_and_options_that_exist(page: str, call: str) -> None:
    words = re.split(r"\s+", re.sub(r"\"[^\"]*\"|'[^']*'", "VALUE", call.split("  ")[0].split(" # ")[0]))
    name = " ".join(words[:2]) if " ".join(words[:2]) in COMMANDS else words[0]
    for one in name.split("|"):
        assert one in COMMANDS or one == "query", f"{page}: millrace {call}"
        if one in COMMANDS:
            known = {option for found in (COMMANDS[one], ROOT_COMMAND) for p in found.params for option in p.opts}
            known |= {option for p in COMMANDS[one].params for option in p.secondary_opts}
            given = {
                re.match(r"--?[a-z-]+", word.strip("[("))[0] for word in words if re.match(r"[\[(]?--?[a-z]", word)
            }  # type: ignore[index]
            assert given <= known, f"{page}: millrace {call}"

"""``millrace query``, without a driver."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from jobs.cli import app
from lakehouse.contract.errors import QueryRefused
from lakehouse.contract.lake import Lake
from lakehouse.contract.pipeline.added import OWNER, Declared, QuerySpec, State
from lakehouse.contract.pipeline.folder import Alert
from lakehouse.lock import WriterLocks
from tests.lakehouse.derived.tables import Product

COUNTS = "SELECT response, count(*) AS n FROM rsvps GROUP BY response"


def call(lake: Path, *arguments: str) -> Any:
    """What the command prints as JSON; its own error is raised."""
    done = CliRunner().invoke(app, [*arguments, "--lake", str(lake)])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout) if "--json" in arguments else done.output


def test_a_query_is_added_listed_and_removed(tmp_path: Path) -> None:
    made = call(tmp_path, "query", "add", "--name", "answers", "--sql", COUNTS, "--from", "start", "--json")
    assert (made["relation"], made["key"], made["start"], made["state"]) == ("rsvps", ["response"], "start", "waiting")
    (tmp_path / "q.sql").write_text("SELECT item, max(count) AS n FROM top_topics GROUP BY item")
    call(tmp_path, "query", "add", "--name", "most", "--sql", f"@{tmp_path / 'q.sql'}")
    Declared(Lake(tmp_path), QuerySpec).tell("most", State("failed", "no [table]"))
    listed = {
        row["name"]: (row["relation"], row["state"], row["reason"])
        for row in call(tmp_path, "query", "ls", "--json")["queries"]
    }
    assert listed == {"answers": ("rsvps", "waiting", ""), "most": ("top_topics", "failed", "no [table]")}
    assert "no [table]" in call(tmp_path, "query", "ls")
    assert call(tmp_path, "query", "rm", "answers", "--json") == {"name": "answers", "removed": True, "dropped": False}
    with WriterLocks(Lake(tmp_path), ["most"]):  # a driver runs it
        assert not call(tmp_path, "query", "rm", "most", "--json")["removed"]
    assert [row["state"] for row in call(tmp_path, "query", "ls", "--json")["queries"]] == ["removing"]
    with pytest.raises(QueryRefused, match="there is no query or alert 'answers'"):
        call(tmp_path, "query", "rm", "answers")


def test_a_table_that_stayed_is_dropped_later_and_no_other_is(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    theirs, ours = Product(lake, "theirs"), Product(lake, "ours", properties={"millrace.pipeline": OWNER})
    with pytest.raises(QueryRefused, match="there is no query or alert 'theirs'"):
        call(tmp_path, "query", "rm", "theirs", "--drop")
    call(tmp_path, "query", "rm", "ours", "--drop")
    assert (theirs.ref.exists(), ours.ref.exists()) == (True, False)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--sql", "SELECT response, avg(guests) AS a FROM rsvps GROUP BY response"], "cannot be merged"),
        (["--sql", "SELECT now() AS n FROM rsvps"], "the function now is not taken"),
        (["--sql", COUNTS, "--from", "later"], "from 'later' is not known"),
        (["--sql", COUNTS, "--option", "operator="], "not TOML"),
        (["--sql", COUNTS, "--option", "window='soon'"], "window"),
    ],
)
def test_what_is_refused(tmp_path: Path, arguments: list[str], says: str) -> None:
    with pytest.raises(Exception, match=says):
        call(tmp_path, "query", "add", "--name", "q", *arguments)
    assert not Declared(Lake(tmp_path), QuerySpec).all()


def test_an_alert_is_added_listed_and_removed(tmp_path: Path) -> None:
    options = ["--when", "count > 10", "--for", "30 seconds", "--hold", "2", "--by", "item", "--value", "count"]
    made = call(tmp_path, "query", "alert", "--name", "hot", "--product", "top_topics", *options, "--json")
    assert (made["for"], made["hold"], made["by"]) == ("30 seconds", 2, ["item"])
    (row,) = call(tmp_path, "query", "ls", "--json")["alerts"]
    assert (row["name"], row["state"], row["raised"]) == ("hot", "waiting", [])
    assert "count > 10" in call(tmp_path, "query", "ls")
    call(tmp_path, "query", "rm", "hot")
    assert Declared(Lake(tmp_path), Alert).all() == {}
    with pytest.raises(QueryRefused, match="no query or alert 'hot' that was added"):
        call(tmp_path, "query", "rm", "hot")
    with pytest.raises(QueryRefused, match="there is no product 'nothing'"):
        call(tmp_path, "query", "alert", "--name", "hot", "--product", "nothing", "--when", "a > 1")

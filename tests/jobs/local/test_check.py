"""``millrace check``: each planted mistake is found with its line and the way out, and a right pipeline has none."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from jobs.local.machine import before_start
from lakehouse.contract.errors import ConfigError
from lakehouse.contract.settings import conf_dir, load_settings
from lakehouse.contract.sql.ddl import parse_ddl
from lakehouse.contract.sql.spark import check_spark_query

ROOT = Path(__file__).parents[3]
PIPELINE = '''
[sources.rides]
topic = "rides"
schema = """
  id BIGINT, at BIGINT, city STRING,
  rider STRUCT<name: STRING, age: INT>, stops ARRAY<STRUCT<place: STRING>>
"""
event_id = "{id}"
event_time = "timestamp_millis(at)"
required = ["id", "rider.name"]

[sources.rides.expectations]
adult = "rider.age >= 18"

[products.by_city]
layer = "gold"
source = "rides"
sql = "by_city.sql"

[products.top]
layer = "gold"
source = "rides"
operator = "top_n"
sql = "SELECT received_at, city FROM rides"
item = "city"

[products.busy]
from = "by_city"
key = ["city"]
sql = "SELECT city, sum(n) AS n FROM by_city GROUP BY city"

[products.by_city.channel]
where = "n > 1"
columns = ["n"]

[products.by_city.expectations]
counted = "n > 0"
fresh = { expect = "fresh", column = "window_start", within = "1 hour" }

[products.visits]
layer = "gold"
source = "rides"
operator = "sessions"
by = ["city"]
time = "event_time"
aggregates = { rides = "count(*)" }

[products.newest]
layer = "silver"
source = "rides"
operator = "latest"
sql = "SELECT id, at, city FROM rides"
by = ["id"]
version = "at"

[alerts.crowd]
product = "by_city"
when = "n > 100"
by = ["city"]

[alerts.popular]
product = "top"
when = "count > 1000"

[staging.copy]
product = "newest"
columns = ["city"]
'''
SQL = """SELECT
  window.start AS window_start,
  city,
  count_if(rider.age > 30) AS n
FROM rides
GROUP BY window(event_time, '1 minute'), city
"""

# What is written instead of what, the line on which that is, and what the message must say.
MISTAKES = [
    ("toml", 'topic = "rides"', "topic = rides", None, "not valid TOML"),
    ("toml", 'topic = "rides"', 'topik = "rides"', 3, "Did you mean 'topic'"),
    ("toml", "at BIGINT", "at BIGINTT", 5, "Did you mean BIGINT"),
    ("toml", "age: INT>", "age: INTT>", 6, "INTT is not a type of Spark"),
    ("toml", "place: STRING", "place: STRIG", 6, "Did you mean STRING"),
    ("toml", "timestamp_millis(at)", "timestamp_milis(at)", 9, "Did you mean 'timestamp_millis'"),
    ("toml", "timestamp_millis(at)", "timestamp_millis(att)", 9, "there is no column 'att'"),
    ("toml", "timestamp_millis(at)", "", 9, "Write received_at"),
    ("toml", "{id}", "{idd}", 8, "no field 'idd'"),
    ("toml", '"rider.name"', '"rider.nam"', 10, "no field 'rider.nam'"),
    ("toml", "rider.age >= 18", "rider.agee >= 18", 13, "Did you mean 'age'"),
    ("toml", 'source = "rides"\nsql', 'source = "ride"\nsql', 17, "there is no source 'ride'"),
    ("toml", 'sql = "by_city.sql"', 'sql = "by_town.sql"', 18, "by_town.sql cannot be read"),
    ("toml", '"top_n"', '"topn"', 23, "'topn' is not known"),
    ("toml", "received_at, city FROM rides", "received_at, town FROM rides", 24, "there is no column 'town'"),
    ("toml", 'item = "city"', 'item = "town"', 25, "there is no column 'town'"),
    ("toml", "FROM by_city GROUP", "FROM by_town GROUP", 30, "no source or product 'by_town'"),
    ("toml", "sum(n) AS n", "sum(m) AS n", 30, "there is no column 'm'"),
    ("toml", "sum(n) AS n", "count_min_sketch(n) AS n", 30, "count_min_sketch is not taken here"),
    ("toml", "n > 100", "n >> > 100", 58, "not SQL"),
    ("toml", "n > 100", "m > 100", 58, "there is no column 'm'"),
    ("toml", 'product = "by_city"', 'product = "by_town"', 57, "there is no product 'by_town'"),
    ("toml", "[alerts.crowd]", "[alerts.Crowd]", 56, "not a name"),
    ("toml", 'event_id = "{id}"', 'event_id = "{id}"\nkey = "{citi}"', 9, "no field 'citi'"),
    ("toml", 'topic = "rides"', 'topic = "rides"\npartitions = 0', 4, "at least 1"),
    ("toml", 'topic = "rides"', 'topic = "rides"\nretention = "7 dayz"', 4, "not a duration"),
    (
        "toml",
        'layer = "gold"\nsource = "rides"\nsql',
        'layer = "golden"\nsource = "rides"\nsql',
        16,
        "Did you mean 'gold'",
    ),
    ("toml", 'item = "city"', 'item = "city"\nn = "ten"', 26, "not of type int"),
    ("toml", 'item = "city"', 'item = "city"\nfpp = 0.1', 26, "says nothing to top_n"),
    ("toml", 'key = ["city"]', 'key = ["town"]', 29, "there is no column 'town'"),
    ("toml", 'where = "n > 1"', 'where = "m > 1"', 33, "there is no column 'm'"),
    ("toml", 'columns = ["n"]', 'columns = ["m"]', 34, "there is no column 'm'"),
    ("toml", 'counted = "n > 0"', 'counted = "m > 0"', 37, "there is no column 'm'"),
    ("toml", 'column = "window_start"', 'column = "windows_tart"', 38, "Did you mean 'window_start'"),
    ("toml", '"fresh", column', '"freshh", column', 38, "'freshh' is not known"),
    ("toml", 'rides = "count(*)"', 'rides = "avg(id)"', 46, "cannot be put together from parts"),
    ("toml", 'by = ["city"]\ntime', 'by = ["town"]\ntime', 44, "there is no column 'town'"),
    ("toml", 'version = "at"', 'version = "att"', 54, "Did you mean 'at'"),
    ("toml", 'by = ["city"]\n\n[alerts.popular]', 'by = ["town"]\n\n[alerts.popular]', 59, "no column 'town'"),
    ("toml", 'by = ["city"]\n\n[alerts.popular]', 'time = "at"\n\n[alerts.popular]', 59, "no column 'at'"),
    ("toml", "count > 1000", "counts > 1000", 63, "Did you mean 'count'"),
    ("toml", 'columns = ["city"]', 'columns = ["town"]', 67, "there is no column 'town'"),
    ("sql", "count_if(", "countif(", 4, "Did you mean 'count_if'"),
    ("sql", "GROUP BY", "GROUPE BY", 6, "Did you mean GROUP"),
    ("sql", "FROM rides", "FORM rides", 5, "Did you mean FROM"),
    ("sql", "FROM rides", "FROM ridess", 5, "there is no table 'ridess'"),
    ("sql", "  city,", "  citty,", 3, "Did you mean 'city'"),
    ("sql", "rider.age", "rider.agee", 4, "Did you mean 'age'"),
    ("sql", "count_if(rider.age > 30)", "count_if(rider.age > 30", 4, "not SQL"),
    ("sql", "SELECT\n", "SELEC\n", None, "not SQL"),
    ("sql", "count_if(rider.age > 30) AS n", "avg(rider.age) AS n", 4, "cannot be merged from partial results"),
    ("sql", "count_if(rider.age > 30) AS n", "count(DISTINCT id) AS n", 4, "operator = 'distinct'"),
    ("sql", ", city\n", ", city\nHAVING count(id) > 1\n", 7, "HAVING"),
    ("sql", ", city\n", "\n", 3, "neither grouped by nor an aggregate"),
    ("sql", "  city,\n", "  upper(city),\n", 3, "has no name"),
    ("sql", "window.start AS window_start,\n", "", 5, "it groups by what is not a column"),
    ("sql", "FROM rides", "FROM rides JOIN rides AS r", 5, "several events at once"),
]


def write(folder: Path, toml: str = PIPELINE, sql: str = SQL) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "pipeline.toml").write_text(toml)
    (folder / "by_city.sql").write_text(sql)
    return folder


def problems(folder: Path, lake: Path) -> list[str]:
    return [str(one) for one in before_start(load_settings({}, lake=lake, pipeline=str(folder)), ports=False)]


@pytest.mark.parametrize(("where", "right", "wrong", "line", "says"), MISTAKES, ids=[m[2][:30] for m in MISTAKES])
def test_a_planted_mistake_is_found(
    tmp_path: Path, where: str, right: str, wrong: str, line: int | None, says: str
) -> None:
    texts = {"toml": PIPELINE, "sql": SQL}
    assert right in texts[where]
    texts[where] = texts[where].replace(right, wrong, 1)
    folder = write(tmp_path / "rides", **texts)
    found = before_start(load_settings({}, lake=tmp_path / "lake", pipeline=str(folder)), ports=False)
    assert len(found) == 1, found
    (problem,) = found
    assert isinstance(problem, ConfigError)
    assert says in str(problem)
    assert problem.file == folder / ("pipeline.toml" if where == "toml" else "by_city.sql")
    if line is not None:
        assert problem.line == line, problem


def test_right_pipelines_have_no_problem(tmp_path: Path) -> None:
    folders = [write(tmp_path / "rides"), *(path.parent for path in conf_dir().glob("pipelines/*/pipeline.toml"))]
    for folder in folders:
        assert problems(folder, tmp_path / "lake") == [], folder.name
    assert not (tmp_path / "lake").exists()


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT timestampdiff(HOUR, a, b) AS h, date_add(a, 1) AS d, extract(YEAR FROM a) AS y FROM t",
        "SELECT transform(list, x -> x + 1) AS l, aggregate(list, 0, (sum, x) -> sum + x) AS s FROM t",
        "WITH u (k, v) AS (SELECT a, b FROM t) SELECT k, v FROM u",
        "SELECT s.place FROM t LATERAL VIEW explode(stops) e AS s",
        "SELECT made.place FROM (SELECT explode(stops) AS made FROM t)",
        "SELECT place FROM (SELECT inline(stops) FROM t)",
        "SELECT A AS x, T.a, `b`, stops[0].place, CAST(a AS DECIMAL(10, 2)), try_cast(a AS INT) FROM t",
        "SELECT IF(a > b, 1, 2) AS i FROM t",
        "SELECT a, row_number() OVER (PARTITION BY b ORDER BY a) AS n FROM t WHERE a IN (1, 2) AND NOT (b = 1)",
        "SELECT window.start, count(*) FILTER (WHERE a > 1) AS n FROM t GROUP BY window(a, '1 minute', '5 seconds')",
        "SELECT a AS c, c + 1 AS d, current_date() AS e, current_timestamp, date '2024-01-01', a :: int FROM t",
        "SELECT to_json(named_struct('a', a)) AS j, get_json_object(b, '$.x') AS x, b RLIKE 'a(b)' AS r FROM t",
    ],
)
def test_what_spark_takes_is_not_refused(sql: str) -> None:
    columns = parse_ddl("a INT, b STRING, list ARRAY<INT>, stops ARRAY<STRUCT<place: STRING>>")
    check_spark_query(sql, "t", columns)


def millrace(*arguments: str, module: str = "jobs.cli", **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "HOME": str(Path.home()), "COLUMNS": "200", **environ},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def not_a_folder(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "lake").write_text("")
    return {"MILLRACE_LAKE": str(tmp_path / "lake")}


def no_java(tmp_path: Path) -> dict[str, str]:
    return {"JAVA_HOME": str(tmp_path)}


def in_proc(_: Path) -> dict[str, str]:
    return {"MILLRACE_LAKE": "/proc/lake"}


def no_kafka(_: Path) -> dict[str, str]:
    return {"MILLRACE_KAFKA": "127.0.0.1:9"}


@pytest.mark.parametrize(
    ("command", "machine", "says"),
    [
        ("check", not_a_folder, "lake is not a folder"),
        ("check", no_kafka, "Kafka does not answer at 127.0.0.1:9"),
        ("up", no_java, "JAVA_HOME"),
        ("run", not_a_folder, "lake is not a folder"),
        ("demo", in_proc, "/proc/lake cannot be written"),
    ],
)
def test_a_machine_that_does_not_fit_starts_nothing(
    tmp_path: Path, command: str, machine: Callable[[Path], dict[str, str]], says: str
) -> None:
    folder = write(tmp_path / "rides")
    given = {"MILLRACE_LAKE": str(tmp_path / "lake"), **machine(tmp_path)}
    done = millrace(command, "--pipeline", str(folder), "--set", "serve.port=0", "--set", "collect.port=0", **given)
    assert done.returncode == 1, done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, done.stderr
    assert says in errors[0]
    assert "Traceback" not in done.stderr
    assert "ready" not in done.stderr
    assert not (tmp_path / "lake").is_dir(), "nothing was started"


def test_a_spark_job_begins_with_the_check(tmp_path: Path) -> None:
    folder = write(tmp_path / "rides", sql=SQL.replace("GROUP BY", "GROUPE BY"))
    arguments = ("--only", "gold", "--lake", str(tmp_path / "lake"), "--pipeline", str(folder))
    done = millrace(*arguments, module="jobs.run_pipeline", MILLRACE_KAFKA="127.0.0.1:9")
    assert done.returncode == 1
    (error,) = done.stderr.splitlines()  # nothing of Kafka, which gold does not read
    assert error.startswith(f"error: {folder}/by_city.sql:6: products.by_city.sql: it is not SQL at 'GROUPE'")


@pytest.mark.spark
@pytest.mark.broker
def test_what_only_spark_finds_stops_up_with_the_error_itself(tmp_path: Path) -> None:
    folder = write(tmp_path / "rides", sql=SQL.replace("count_if(rider.age > 30)", "sum(rider)"))
    ports = ("--set", "serve.port=0", "--set", "collect.port=0", "--lake", str(tmp_path / "lake"))
    done = millrace("up", "--pipeline", str(folder), *ports)
    assert done.returncode == 1, done.stderr
    assert "DATATYPE_MISMATCH" in next(line for line in done.stderr.splitlines() if line.startswith("error: "))
    assert "Traceback" not in done.stderr
    assert ".log" not in done.stderr


def test_a_port_in_use_starts_nothing(tmp_path: Path) -> None:
    folder = write(tmp_path / "rides")
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        port = held.getsockname()[1]
        shared = ["--pipeline", str(folder), "--lake", str(tmp_path / "lake"), "--set", "collect.port=0"]
        done = millrace("up", *shared, "--set", f"serve.port={port}")
    assert done.returncode == 1
    assert f"error: the port for serving, 127.0.0.1:{port} is taken" in done.stderr
    assert not (tmp_path / "lake").exists()


def test_all_problems_at_once_as_json(tmp_path: Path) -> None:
    folder = write(tmp_path / "rides", sql=SQL.replace("GROUP BY", "GROUPE BY"))
    began = os.times().children_user
    ports = ("--set", "serve.port=0", "--set", "collect.port=0", "--lake", "/proc/lake")
    done = millrace("check", str(folder), "--json", *ports)
    assert done.returncode == 1
    sql, lake = json.loads(done.stdout)
    assert sql == {
        "file": str(folder / "by_city.sql"),
        "line": 6,
        "key": "products.by_city.sql",
        "problem": "it is not SQL at 'GROUPE'",
        "remedy": "Did you mean GROUP?",
    }
    assert lake["file"] is None
    assert lake["problem"].startswith("the lake /proc/lake cannot be written")
    assert os.times().children_user - began < 5, "no JVM is started"
    assert millrace("check", str(folder), "--set", "lake_=1").returncode == 1

"""The HTTP side, on a real socket."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lakehouse.contract.errors import EnvironmentProblem
from lakehouse.contract.settings import ServeSettings, Settings
from serve.app import _run_forever, run_server
from tests.serve.conftest import serving
from tests.serve.lakes import TOPICS, Product, top_topics, topics, window


async def get(url: str) -> tuple[int, dict[str, str], bytes]:
    def fetch() -> tuple[int, dict[str, str], bytes]:
        try:
            with urllib.request.urlopen(url, timeout=60) as response:
                return response.status, {k.lower(): v for k, v in response.headers.items()}, response.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, {k.lower(): v for k, v in error.headers.items()}, error.read()

    return await asyncio.to_thread(fetch)


async def get_json(url: str) -> Any:
    return json.loads((await get(url))[2])


async def test_tables_and_their_rows(root: Path) -> None:
    top_topics(root).overwrite(topics(0, [5, 4, 3]), [window(0)])
    Product(root / "silver" / "plain", TOPICS, {})
    Product(root / "bronze" / "rsvps", TOPICS, {})
    async with serving(root) as url:
        rows = await get_json(f"{url}/v1/tables/top_topics?limit=2")
        assert [row["count"] for row in rows["rows"]] == [5, 4]
        assert (rows["table"], rows["key"], rows["through"]) == (
            "top_topics",
            ["window_start", "rank"],
            {"rsvps/0": 10},
        )
        listed = {table["table"]: table for table in (await get_json(f"{url}/v1/tables"))["tables"]}
        assert list(listed) == ["rsvps", "plain", "top_topics"]
        assert [listed[name]["served"] for name in listed] == [False, False, True]
        assert listed["top_topics"] | {"version": 1, "rows": 3, "position": rows["position"]} == listed["top_topics"]
        assert "millrace.key" in listed["plain"]["detail"]
        declared = {"kind": "top_n", "from": ["rsvps"], "window": "1 minute", "item": "topic"}
        assert listed["top_topics"]["declared"] == declared
        assert "declared" not in listed["plain"]


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/v1/tables/nope", 404),
        ("/v1/tables/top_topics?limit=0", 400),
        ("/v1/tables/top_topics?limit=x", 400),
        ("/v1/tables/others", 409),
        ("/v1/nope", 404),
        ("/../app.py", 404),
    ],
)
async def test_errors_are_problems(root: Path, path: str, status: int) -> None:
    top_topics(root)
    Product(root / "bronze" / "others", TOPICS, {})
    async with serving(root) as url:
        got, headers, body = await get(url + path)
        assert (got, headers["content-type"]) == (status, "application/problem+json")
        problem = json.loads(body)
        assert problem["status"] == status
        assert problem["detail"]


async def test_health_and_metrics(root: Path) -> None:
    top_topics(root)
    async with serving(root) as url:
        assert (await get(f"{url}/healthz"))[0] == 200
        for _ in range(3_000):
            if (await get(f"{url}/readyz"))[0] == 200:
                break
            await asyncio.sleep(0.02)
        else:
            raise AssertionError("it never became ready")
        text = (await get(f"{url}/metrics"))[2].decode()
        assert 'millrace_serve_table_version{table="top_topics"} 0.0' in text
        for name in ("subscribers", "messages_total", "slow_total", "cut_total", 'expired_total{reason="lagged"}'):
            assert f"millrace_serve_{name}" in text


async def test_what_all_depend_on_goes_on_after_an_error(caplog: pytest.LogCaptureFixture) -> None:
    left, through = [OSError("no"), ValueError("not this time")], asyncio.Event()

    async def clock() -> None:
        if left:
            raise left.pop()
        through.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(_run_forever(partial(clock)))
    async with asyncio.timeout(60):
        await through.wait()
    task.cancel()
    assert caplog.text.count("clock failed, and goes on") == 2


async def test_the_dashboard_may_load_nothing_from_elsewhere(root: Path) -> None:
    top_topics(root)
    async with serving(root) as url:
        status, headers, body = await get(f"{url}/")
        assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
        assert "default-src 'self'" in headers["content-security-policy"]
        assert (headers["cache-control"], headers["x-content-type-options"]) == ("no-cache", "nosniff")
        for name in re.findall(r'(?:src|href)="([^"#]+)"', body.decode()):
            assert (await get(f"{url}/{name}"))[0] == 200


async def test_a_taken_port_is_a_clear_problem(root: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        with pytest.raises(EnvironmentProblem, match=f"cannot listen on 127.0.0.1:{port}.*MILLRACE_SERVE_PORT"):
            await run_server(Settings(lake=root, serve=ServeSettings(port=port)))


SCRIPT = """
import logging, resource, sys
from serve.app import allow_files
logging.basicConfig(format="%(message)s", stream=sys.stdout)
resource.setrlimit(resource.RLIMIT_NOFILE, (200, 400))
print(allow_files(int(sys.argv[1])), resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize(("subscribers", "warned"), [(144, False), (145, True)])
def test_the_soft_limit_becomes_the_hard_one_and_too_few_are_told(subscribers: int, warned: bool) -> None:
    run = [sys.executable, "-c", SCRIPT, str(subscribers)]
    told = subprocess.run(run, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2]).stdout
    assert "400 (400, 400)" in told
    assert ("serve.max_subscribers asks for 401" in told) == warned

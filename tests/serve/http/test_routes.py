"""The report on quality, and the files of the dashboard."""

from __future__ import annotations

import hashlib
from pathlib import Path

import httpx

from lakehouse.contract.access import KeyFile
from lakehouse.contract.lake import Lake
from serve.access import ReaderKey
from serve.http.routes import WEB
from tests.serve.conftest import serving


async def test_the_report_on_quality_runs_no_script_and_is_for_keys_that_see_all(root: Path) -> None:
    report = Lake(root).data_docs
    async with serving(root) as url, httpx.AsyncClient(base_url=url, timeout=30) as http:
        missing = await http.get("/v1/quality/index.html")
        assert (missing.status_code, missing.json()["code"]) == (404, "no_such_page")
        (report / "static").mkdir(parents=True)
        (report / "index.html").write_text("<h1>Data Docs</h1>", encoding="utf-8")
        assert (await http.get("/v1/tables")).json()["report"] == "v1/quality/index.html"
        page = await http.get("/v1/quality/index.html")
        assert (page.status_code, page.text) == (200, "<h1>Data Docs</h1>")
        policy = page.headers["content-security-policy"].split("; ")
        assert {"default-src 'none'", "sandbox"} <= set(policy)
        assert "script-src" not in page.headers["content-security-policy"]
        for path in ("", "static", "../position.key", "%2e%2e/position.key", "..%2fposition.key"):
            assert (await http.get(f"/v1/quality/{path}")).status_code == 404, path
    keys = KeyFile(Lake(root).state / "readers.toml", ReaderKey)
    some = keys.new(ReaderKey("0" * 64, "some", tables=("top_topics",)))
    every = keys.new(ReaderKey("0" * 64, "every"))
    async with serving(root) as url, httpx.AsyncClient(base_url=url, timeout=30) as http:
        address = "/v1/quality/index.html"
        statuses = [
            (await http.get(address, headers={"Authorization": f"Bearer {key}"})).status_code for key in (some, every)
        ]
        assert [(await http.get(address)).status_code, *statuses] == [401, 403, 200]


def test_files_of_the_chart_library_are_as_npm_has_them() -> None:
    folder = WEB / "vendor" / "uplot"
    _, *told = (folder / "VERSION").read_text(encoding="utf-8").splitlines()
    for line in told:
        _, digest, name = line.split()
        assert hashlib.sha256((folder / Path(name).name).read_bytes()).hexdigest() == digest
    assert len(told) == 2

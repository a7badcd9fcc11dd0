"""Readers and gates of one's own: the package of the documentation, installed as any other is."""

from __future__ import annotations

import gzip
import importlib
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lakehouse.contract.errors import ConfigError
from lakehouse.contract.pipeline.source import FeedSpec
from lakehouse.load import files
from lakehouse.load.worker import check_extensions
from tests.lakehouse.load.offers import bronze, job, run

ROOT = Path(__file__).parents[3]
GUIDE = (ROOT / "docs/guide/loading.md").read_text(encoding="utf-8")


def block(title: str) -> str:
    found = re.search(rf"```\w+ {{.extension title={re.escape(title)}}}\n(.*?)```", GUIDE, re.DOTALL)
    assert found is not None
    return found[1]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder that the package is installed in: its module, and its metadata as pip writes it."""
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "our_feeds.py").write_text(block("our_feeds.py"), encoding="utf-8")
    project = tomllib.loads(block("pyproject.toml"))["project"]
    install(folder, project["name"], project["entry-points"])
    monkeypatch.syspath_prepend(folder)
    forget()
    yield folder
    sys.modules.pop("our_feeds", None)
    monkeypatch.undo()
    forget()


def install(folder: Path, name: str, points: dict[str, dict[str, str]]) -> None:
    info = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n", encoding="utf-8")
    lines = [
        line
        for group, named in points.items()
        for line in (f"[{group}]", *(f"{key} = {value}" for key, value in named.items()))
    ]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def forget() -> None:
    importlib.invalidate_caches()
    files.own_readers.cache_clear()
    files.imported.cache_clear()


def lines(count: int, merchant: int = 1, cents: int = 150) -> bytes:
    return b"".join(b"m%03do%05d%08d\n" % (merchant, number, cents) for number in range(count))


def test_the_package_of_the_guide(site: Path, tmp_path: Path) -> None:
    feeds = tmp_path / "feeds"
    feeds.mkdir()
    (feeds / "a.fixed").write_bytes(lines(300))
    (feeds / "b.fixed.gz").write_bytes(gzip.compress(lines(200, merchant=2)))
    (feeds / "cut.fixed").write_bytes(lines(3, merchant=3)[:-1])
    (feeds / "free.fixed").write_bytes(lines(50, merchant=4, cents=0))
    (feeds / "wrong.fixed").write_bytes(b"no number of cents\n")
    command = [sys.executable, "-m", "jobs.cli", "load", str(feeds), "--gate", "--workers", "2", "--json"]
    done = subprocess.run(
        [*command, "--pipeline", "offers", "--lake", str(tmp_path / "lake")],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(site)])},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 1, done.stderr
    reports = {Path(report["name"]).name: report for report in json.loads(done.stdout)["files"]}
    assert {name: (report["state"], report["rows"]) for name, report in reports.items()} == {
        "a.fixed": ("loaded", 300),
        "b.fixed.gz": ("loaded", 200),
        "cut.fixed": ("failed", 2),
        "free.fixed": ("refused", 0),
        "wrong.fixed": ("failed", 0),
    }
    assert reports["cut.fixed"]["reason"] == "the last line is cut off"
    assert reports["free.fixed"]["reason"] == "gate 'prices': more than half of the offers cost nothing"
    assert reports["wrong.fixed"]["reason"].startswith("reader 'fixed' (our_feeds:read) failed: ValueError(")
    held = [json.loads(payload) for payload in bronze(job(tmp_path), ["payload"])["payload"].to_pylist()]
    assert len(held) == 502
    assert {"merchant": "m002", "offer": "o00199", "version": 1, "price": 1.5} in held


def test_a_load_goes_on_at_the_offset_of_the_reader(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: Any = importlib.import_module("our_feeds")
    begun: list[int] = []
    read = made.read

    def noted(opened: Any, source: Any, offset: int) -> Any:
        begun.append(offset)
        segments = list(read(opened, source, offset))
        if not offset:
            yield segments[0]
            raise OSError("the network is gone")
        yield from segments

    monkeypatch.setattr(made, "read", noted)
    (tmp_path / "a.fixed").write_bytes(lines(100_000))  # read in two segments
    first = run(job(tmp_path), tmp_path / "a.fixed")["a.fixed"]
    assert (first.state, 0 < first.rows < 100_000) == ("failed", True)
    again = run(job(tmp_path), tmp_path / "a.fixed")["a.fixed"]
    assert (again.state, again.rows, again.from_row) == ("loaded", 100_000, first.rows)
    assert begun == [0, first.rows * 19]
    assert len(set(bronze(job(tmp_path), ["event_id"])["event_id"].to_pylist())) == 100_000


def test_what_cannot_be_used_is_told_before_the_first_file(site: Path, tmp_path: Path) -> None:
    install(site, "broken-feeds", {"millrace.readers": {"odd": "no_such_module:read"}})
    forget()
    with pytest.raises(ConfigError, match="no_such_module:read of package broken-feeds cannot be imported"):
        check_extensions(gates=False)


def test_a_reader_without_a_last_segment(site: Path, tmp_path: Path) -> None:
    made: Any = importlib.import_module("our_feeds")
    made.read = lambda opened, source, offset: iter(())
    (tmp_path / "a.fixed").write_bytes(lines(3))
    report = run(job(tmp_path), tmp_path / "a.fixed")["a.fixed"]
    assert (report.state, "gave no last segment" in report.reason) == ("failed", True)
    assert bronze(job(tmp_path)).num_rows == 0


def test_a_feed_may_name_an_installed_format(site: Path) -> None:
    assert FeedSpec("https://host.invalid/x", format="fixed").format == "fixed"
    with pytest.raises(ConfigError, match="fixed"):
        FeedSpec("https://host.invalid/x", format="fixd")

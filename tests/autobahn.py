"""The Autobahn Testsuite's fuzzing client against a WebSocket endpoint that echoes.

It needs Python 2.7, so it is not among our packages: ``pip install autobahntestsuite==25.10.1`` into an environment of
Python 2.7, and name its ``wstest`` in WSTEST or put it on PATH. Without it the tests that use it are skipped.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections import Counter
from pathlib import Path

import pytest

LARGEST = 67_108_864  # bytes; its largest message has 16 MiB
_PATIENCE_S = 1_500.0


COMPRESSION = ("12.*", "13.*")  # RFC 7692; two thirds of the time


async def fuzzed(url: str, folder: Path, cases: tuple[str, ...], exclude: tuple[str, ...] = ()) -> Counter[str]:
    """Run these cases (``"12.*"``) but the excluded ones; how often each behaviour came, the close included.

    The cases themselves, with what went over the wire, stand in ``folder`` as HTML.
    """
    wstest = os.environ.get("WSTEST") or shutil.which("wstest")
    if wstest is None:
        pytest.skip("the Autobahn Testsuite is not here; tests/autobahn.py says how to get it")
    spec = folder / "spec.json"
    server = {"agent": "millrace", "url": url, "options": {"version": 18}}
    spec.write_text(
        json.dumps(
            {
                "outdir": str(folder / "report"),
                "servers": [server],
                "cases": list(cases),
                "exclude-cases": list(exclude),
                "exclude-agent-cases": {},
            }
        )
    )
    with (folder / "wstest.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            wstest, "-m", "fuzzingclient", "-s", str(spec), stdout=log, stderr=log
        )
        try:
            code = await asyncio.wait_for(process.wait(), _PATIENCE_S)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    assert code == 0, (folder / "wstest.log").read_text()[-3000:]
    found = json.loads((folder / "report" / "index.json").read_text())["millrace"]
    behaviours = {case: f"{result['behavior']}, {result['behaviorClose']}" for case, result in found.items()}
    failed = {case: behaviour for case, behaviour in behaviours.items() if "FAILED" in behaviour}
    assert not failed, failed
    return Counter(behaviours.values())

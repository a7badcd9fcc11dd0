"""Azurite, Microsoft's emulator of blob storage, for tests: from npm, in memory, on a free port of the loopback."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

CONTAINER = "lake"
_PACKAGE = "azurite@3.37.0"
# The account that every emulator has.
_ACCOUNT = "devstoreaccount1"
_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
_PATIENCE_S = 300.0  # npm may have to fetch it


@contextlib.contextmanager
def azurite(folder: Path) -> Iterator[str]:
    """URL of an empty container; its variables are set for this process."""
    if shutil.which("npm") is None:
        pytest.skip("there is no npm, which fetches Azurite")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = int(probe.getsockname()[1])
    url = f"http://127.0.0.1:{port}"
    command = ["npm", "exec", "--yes", f"--package={_PACKAGE}", "--", "azurite-blob", "--inMemoryPersistence"]
    command += ["--skipApiVersionCheck", "--disableTelemetry", "--blobHost", "127.0.0.1", "--blobPort", str(port)]
    with (folder / "azurite.log").open("ab") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, start_new_session=True)
    try:
        until = time.monotonic() + _PATIENCE_S
        while not _listens(port):
            assert process.poll() is None and time.monotonic() < until, (folder / "azurite.log").read_text()
            time.sleep(0.1)
        _make_container(url)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("AZURE_STORAGE_USE_EMULATOR", "true")
            patch.setenv("AZURE_STORAGE_ACCOUNT_NAME", _ACCOUNT)
            patch.setenv("AZURE_STORAGE_ACCOUNT_KEY", _KEY)
            patch.setenv("AZURITE_BLOB_STORAGE_URL", url)
            yield f"abfss://{CONTAINER}"
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # npm and its child
        process.wait()


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


def _make_container(url: str) -> None:
    """By Azure's Shared Key: a client of tables makes no containers."""
    now, version = f"{datetime.now(UTC):%a, %d %b %Y %H:%M:%S GMT}", "2021-08-06"
    headers = f"x-ms-date:{now}\nx-ms-version:{version}"
    text = "\n".join(["PUT", *[""] * 11, headers, f"/{_ACCOUNT}/{_ACCOUNT}/{CONTAINER}", "restype:container"])
    signature = base64.b64encode(hmac.new(base64.b64decode(_KEY), text.encode(), hashlib.sha256).digest()).decode()
    request = urllib.request.Request(
        f"{url}/{_ACCOUNT}/{CONTAINER}?restype=container",
        method="PUT",
        headers={
            "x-ms-date": now,
            "x-ms-version": version,
            "Authorization": f"SharedKey {_ACCOUNT}:{signature}",
            "Content-Length": "0",
        },
    )
    urllib.request.urlopen(request, timeout=30).close()

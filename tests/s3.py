"""A real S3-compatible server for tests: S3Proxy on a folder of this machine, on a free port of the loopback."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from lakehouse.contract.jars import jar_paths
from lakehouse.contract.java import find_java
from lakehouse.contract.storage import StorePath

BUCKET = "lake"
_PATIENCE_S = 60.0


class S3Server:
    """The server, and the variables by which clients reach it.

    Args:
        folder: of its objects.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])

    @property
    def variables(self) -> dict[str, str]:
        """What a client's environment must hold."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_ACCESS_KEY_ID": "local",
            "AWS_SECRET_ACCESS_KEY": "local-secret",
            "AWS_REGION": "us-east-1",
            "AWS_ALLOW_HTTP": "true",
        }

    def file(self, path: StorePath) -> Path:
        """Where the server keeps an object."""
        return self._folder / "objects" / path.url.partition("://")[2]

    @contextlib.contextmanager
    def in_environment(self) -> Iterator[None]:
        """This process and those that it starts meanwhile are clients."""
        with pytest.MonkeyPatch.context() as patch:
            for name, value in self.variables.items():
                patch.setenv(name, value)
            yield

    def start(self) -> None:
        """Start it, and wait until it answers."""
        (self._folder / "objects" / BUCKET).mkdir(parents=True, exist_ok=True)
        settings = {
            "s3proxy.authorization": "aws-v2-or-v4",
            "s3proxy.identity": "local",
            "s3proxy.credential": "local-secret",
            "s3proxy.endpoint": self.variables["AWS_ENDPOINT_URL"],
            "jclouds.provider": "filesystem-nio2",
            "jclouds.filesystem.basedir": str(self._folder / "objects"),
        }
        (self._folder / "s3proxy.conf").write_text("".join(f"{key}={value}\n" for key, value in settings.items()))
        # Logback logs everything unless it is told otherwise.
        (self._folder / "logback.xml").write_text('<configuration><root level="warn"/></configuration>')
        jars = os.pathsep.join(map(str, jar_paths("s3server")))
        command = [str(find_java().path), "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Xmx128m"]
        command += [f"-Dlogback.configurationFile={self._folder}/logback.xml", "-cp", jars]
        command += ["org.gaul.s3proxy.Main", "--properties", str(self._folder / "s3proxy.conf")]
        with (self._folder / "s3proxy.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        until = time.monotonic() + _PATIENCE_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > until:
                raise RuntimeError((self._folder / "s3proxy.log").read_text()[-2_000:])
            time.sleep(0.05)

    def stop(self) -> None:
        """End it; what it holds stays."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _answers(self) -> bool:
        try:
            urllib.request.urlopen(self.variables["AWS_ENDPOINT_URL"], timeout=1).close()
        except urllib.error.HTTPError:
            return True  # it wants a signature
        except OSError:
            return False
        return True

"""A PostgreSQL that the tests start themselves, from the binaries of the system."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from jobs.local.stack import free_port

URL = "postgresql://{user}@127.0.0.1:{port}/{name}"


def _binary(name: str) -> str | None:
    found = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))
    return str(found[-1]) if found else shutil.which(name)


class Postgres:
    """A PostgreSQL of its own; as root it runs as a system user, because it refuses root."""

    def __init__(self, folder: Path) -> None:
        server, initdb = _binary("postgres"), _binary("initdb")
        if server is None or initdb is None:
            pytest.skip("PostgreSQL is not installed (Debian: apt-get install postgresql)")
        self._folder = folder
        self.user = "postgres"
        self.port = free_port()
        identity: dict[str, Any] = {}
        if os.getuid() == 0:
            known = {entry.pw_name: entry for entry in pwd.getpwall()}
            entry = known.get("postgres") or known["nobody"]
            os.chown(folder, entry.pw_uid, entry.pw_gid)
            identity = {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}
        data = str(folder / "data")
        made = subprocess.run(
            [initdb, "-D", data, "-U", self.user, "-A", "trust", "--no-sync", "-E", "UTF8", "--locale=C"],
            capture_output=True,
            text=True,
            cwd=folder,
            **identity,
        )
        assert made.returncode == 0, made.stderr
        options = {"listen_addresses": "127.0.0.1", "port": self.port, "unix_socket_directories": "", "fsync": "off"}
        arguments = [text for name, value in options.items() for text in ("-c", f"{name}={value}")]
        with (folder / "log").open("wb") as log:
            self._process = subprocess.Popen([server, "-D", data, *arguments], stderr=log, cwd=folder, **identity)

    def new_database(self) -> str:
        """URL of a new, empty database."""
        import psycopg

        name = f"t{time.monotonic_ns()}"
        until = time.monotonic() + 30
        while True:
            try:
                with psycopg.connect(URL.format(user=self.user, port=self.port, name="postgres")) as connection:
                    connection.autocommit = True
                    connection.execute(f"CREATE DATABASE {name}")
                    return URL.format(user=self.user, port=self.port, name=name)
            except psycopg.OperationalError:
                assert time.monotonic() < until, (self._folder / "log").read_text()
                time.sleep(0.05)

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(30)

"""A real S3-compatible server for tests: S3Proxy on a folder of this machine, on a free port of the loopback."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from lakehouse.contract.jvm import find_java, jar_paths
from lakehouse.contract.storage import StorePath

BUCKET = "lake"
_PATIENCE_S = 60.0
_LENGTH = re.compile(rb"(?i)\r\ncontent-length: *(\d+)")
_BUSY = b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"


class S3Server:
    """The server, and the variables by which clients reach it.

    Args:
        folder: of its objects.
        bucket: a process keeps its connection to a bucket, so a second server needs another name.
    """

    def __init__(self, folder: Path, bucket: str = BUCKET) -> None:
        self._folder = folder
        self._bucket = bucket
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
        (self._folder / "objects" / self._bucket).mkdir(parents=True, exist_ok=True)
        settings = {
            "s3proxy.authorization": "aws-v2-or-v4",
            "s3proxy.identity": "local",
            "s3proxy.credential": "local-secret",
            "s3proxy.endpoint": self.variables["AWS_ENDPOINT_URL"],
            "s3proxy.ignore-unknown-headers": "true",  # ClickHouse sends one that S3Proxy does not know
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


class CountingProxy:
    """Stands before the server, counts what is asked of it, and answers 503 when it is told to.

    Attributes:
        seen: method and path of each request so far; a listing's method is LIST.
        busy: answer each request with 503 Slow Down.
        variables: what a client's environment must hold.
        behind: the same for the server itself, whose requests are not counted.
    """

    def __init__(self, server: S3Server) -> None:
        self.seen: list[tuple[str, str]] = []
        self.busy = False
        self._target = server.port
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        starting = asyncio.run_coroutine_threadsafe(asyncio.start_server(self._accept, "127.0.0.1", 0), self._loop)
        self._listener = starting.result(60)
        self.port = int(self._listener.sockets[0].getsockname()[1])
        self.behind = server.variables
        self.variables = self.behind | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}"}

    def close(self) -> None:
        """Close all connections."""
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(60)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _close(self) -> None:
        self._listener.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @contextlib.contextmanager
    def counted(self) -> Iterator[Counter[str]]:
        """Requests by method during the block, without signs of life; a listing counts as LIST."""
        found, began = Counter[str](), len(self.seen)
        yield found
        found.update(method for method, path in self.seen[began:] if "/sessions/" not in path)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        onward, answers = None, None
        try:
            onward = await asyncio.open_connection("127.0.0.1", self._target)
            answers = asyncio.create_task(_carry(onward[0], writer))
            await self._carry_requests(reader, onward[1], writer)
        except (OSError, EOFError, asyncio.CancelledError):
            writer.transport.abort()
        finally:
            for end in (writer, *(onward[1:] if onward else ())):
                end.close()
            if answers is not None:
                await asyncio.gather(answers, return_exceptions=True)

    async def _carry_requests(
        self, reader: asyncio.StreamReader, onward: asyncio.StreamWriter, back: asyncio.StreamWriter
    ) -> None:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            method, path, _ = head.split(b"\r\n", 1)[0].decode().split(" ")
            listing = method == "GET" and ("list-type=" in path or "prefix=" in path)
            self.seen.append(("LIST" if listing else method, path))
            length = _LENGTH.search(head)
            left = int(length[1]) if length else 0
            if self.busy:
                back.write(b"HTTP/1.1 503 Slow Down\r\nContent-Type: application/xml\r\nConnection: close\r\n")
                back.write(b"Content-Length: %d\r\n\r\n%s" % (len(_BUSY), b"" if method == "HEAD" else _BUSY))
                await back.drain()
                onward.transport.abort()
                return
            onward.write(head)
            while left:
                piece = await reader.read(min(left, 65_536))
                if not piece:
                    raise EOFError
                left -= len(piece)
                onward.write(piece)
                await onward.drain()


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while piece := await reader.read(65_536):
            writer.write(piece)
            await writer.drain()
    writer.close()

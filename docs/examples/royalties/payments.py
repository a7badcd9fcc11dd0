"""A payment service that is not idempotent, and not reliable: it pays whatever it is asked to pay, each time.

    python payments.py paid.db 8500 --unanswered 0.2

``POST /payments`` pays: ``{"royalty", "owner", "cents"}``. It leaves a share of the requests unanswered after it has
paid (``--unanswered``), and another without paying (``--lost``). ``GET /payments?royalty=ID`` says what was paid.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import sqlite3
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit


class PaymentService(ThreadingHTTPServer):
    """The service.

    Args:
        path: SQLite file of the payments.
        port: on the loopback address; 0: any.
        unanswered: share of the payments that are made and not answered.
        lost: share of the requests that are neither paid nor answered.
        seed: of the choice between them.
    """

    daemon_threads = True

    def __init__(self, path: str, port: int, unanswered: float = 0.0, lost: float = 0.0, seed: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _PaymentRequest)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self._unanswered, self._lost = unanswered, lost
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._database = sqlite3.connect(path, check_same_thread=False)
        self._database.execute("CREATE TABLE IF NOT EXISTS payments (royalty TEXT, owner TEXT, cents INTEGER)")

    def pay(self, royalty: str, owner: str, cents: int) -> bool:
        """Pay, once more if it is asked once more; whether it answers."""
        with self._lock, self._database:
            fate = self._random.random()
            if fate < self._lost:
                return False
            self._database.execute("INSERT INTO payments VALUES (?, ?, ?)", (royalty, owner, cents))
            return fate >= self._lost + self._unanswered

    def paid(self, royalty: str) -> list[dict[str, Any]]:
        with self._lock:
            rows = self._database.execute("SELECT owner, cents FROM payments WHERE royalty = ?", [royalty]).fetchall()
        return [{"owner": owner, "cents": cents} for owner, cents in rows]

    def payments(self) -> list[tuple[str, str, int]]:
        """All of them."""
        with self._lock:
            return self._database.execute("SELECT royalty, owner, cents FROM payments ORDER BY rowid").fetchall()


class _PaymentRequest(BaseHTTPRequestHandler):
    server: PaymentService

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.server.pay(asked["royalty"], asked["owner"], asked["cents"]):
            self._answer({"paid": asked["cents"]})
        else:
            self.close_connection = True  # as a proxy does when its patience ends

    def do_GET(self) -> None:
        royalty = parse_qs(urlsplit(self.path).query)["royalty"][0]
        self._answer({"payments": self.server.paid(royalty)})

    def _answer(self, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        with contextlib.suppress(ConnectionError):  # whoever asked was killed
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing of single requests."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("path")
    parser.add_argument("port", type=int)
    parser.add_argument("--unanswered", type=float, default=0.2)
    parser.add_argument("--lost", type=float, default=0.05)
    given = parser.parse_args()
    with PaymentService(given.path, given.port, given.unanswered, given.lost) as service:
        print(f"payments at {service.url}", flush=True)
        service.serve_forever()


if __name__ == "__main__":
    main()

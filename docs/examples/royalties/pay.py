"""Pays every royalty of a Millrace table once, by a payment service that is not idempotent.

python pay.py http://127.0.0.1:8400 http://127.0.0.1:8500 pay.db
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Iterable, Mapping
from decimal import Decimal
from typing import Any

import httpx

from serve.client import Change, ClientOptions, ExactlyOnce, Message, SqliteStore, subscribe

SHARE = Decimal("0.004")  # dollars that an owner gets for a play


class Payments:
    """The payment service, as Millrace's ``ExactlyOnce`` sees it."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http

    def items(self, message: Message) -> Iterable[tuple[str, Mapping[str, Any]]]:
        rows = message.upserts if isinstance(message, Change) else message.rows
        return ((row["statement"], row) for row in rows)

    def process(self, item: Mapping[str, Any]) -> Mapping[str, Any]:
        cents = int(item["plays"] * SHARE * 100)
        return {"royalty": item["statement"], "owner": item["owner"], "cents": cents}

    async def request(self, item_id: str, request: Mapping[str, Any]) -> Any:
        answer = await self._http.post("/payments", json=request)
        answer.raise_for_status()
        return answer.json()

    async def lookup(self, item_id: str, request: Mapping[str, Any]) -> Any:
        answer = await self._http.get("/payments", params={"royalty": item_id})
        answer.raise_for_status()
        return answer.json()["payments"] or None


async def pay(server: str, service: str, path: str, settle_s: float) -> None:
    """Pay what there is and what comes, until something ends us; then begin again with the same file."""
    options = ClientOptions(wait_for_table=True)  # a new lake has none before the first statement
    async with (
        httpx.AsyncClient(base_url=service, timeout=5) as http,
        ExactlyOnce(Payments(http), path, settle_s=settle_s) as once,
        subscribe(server, "royalties", SqliteStore(path), options=options) as messages,
    ):
        await once.run(messages)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("server")
    parser.add_argument("service")
    parser.add_argument("path")
    parser.add_argument("--settle-s", type=float, default=10, help="in which the service pays, or never will")
    given = parser.parse_args()
    asyncio.run(pay(given.server, given.service, given.path, given.settle_s))


if __name__ == "__main__":
    main()

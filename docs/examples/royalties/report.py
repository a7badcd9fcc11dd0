"""Reports plays, a statement for each work, to a Millrace collector; none is lost and none counts twice.

python report.py http://127.0.0.1:8401 report.db --statements 1000
"""

from __future__ import annotations

import argparse
import asyncio
import random

from serve.client import Publisher


async def report(collector: str, path: str, statements: int) -> None:
    """Return when the collector has every statement, also those that an earlier run left in its log."""
    async with Publisher(collector, "statements", path, "statement") as publisher:
        for work in range(statements):
            plays = random.randint(100, 100_000)
            await publisher.publish({"owner": f"owner-{work % 50}", "work": f"work-{work}", "plays": plays})
        await publisher.settled()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("collector")
    parser.add_argument("path")
    parser.add_argument("--statements", type=int, default=1000)
    given = parser.parse_args()
    asyncio.run(report(given.collector, given.path, given.statements))


if __name__ == "__main__":
    main()

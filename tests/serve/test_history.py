from __future__ import annotations

import shutil
from pathlib import Path

import httpx

from .conftest import serving
from .lakes import top_topics, topics, window


async def test_a_version_of_a_table_that_was_there_before_is_not_shown(root: Path) -> None:
    async with serving(root) as url, httpx.AsyncClient(base_url=url, timeout=60) as client:
        for count in (3, 7):
            top_topics(root).overwrite(topics(0, [count]), [window(0)])
            for _ in range(2):  # the second comes out of memory
                answer = await client.get("/v1/tables/top_topics?as_of=1")
                assert [row["count"] for row in answer.json()["rows"]] == [count]
            shutil.rmtree(root / "gold" / "top_topics")
        assert (await client.get("/v1/tables/top_topics?as_of=1")).status_code == 404

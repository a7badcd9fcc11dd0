"""Rows straight into bronze, from a program that has them: no file, no queue, the same commit as a loader's."""

from __future__ import annotations

import time
from collections.abc import Iterable
from hashlib import blake2b

from lakehouse.contract.feed import LOADER
from lakehouse.contract.lake import Lake
from lakehouse.contract.pipeline import Source
from lakehouse.feeds.commit import Committer, at_table
from lakehouse.feeds.errors import FileTaken
from lakehouse.feeds.rows import Sealer, Segment


def write_rows(
    lake: Lake, source: Source, batch: str, rows: Iterable[bytes], *, tenant: str = "default", node: str = LOADER
) -> int:
    """Append a batch of events in one commit, once. One at a time in a process; several processes may.

    Args:
        batch: its name, unique in the source: one that is in is passed over, whatever its rows are now.
        rows: JSON objects; one that is refused is in bronze with the reason, as a collector's is.
        tenant: whose events they are.
        node: id of the program, the rows' ``collector``.

    Returns:
        The bronze version that holds them; -1: they were in.

    Raises:
        CommitFailed: bronze does not take them. Written again they are in once, whether they were in or not.
    """
    sealer = Sealer(source, tenant=tenant, node=node)
    with at_table(source.name):
        committer = Committer(lake, source.name, sealer)
        try:
            before = committer.look(blake2b(batch.encode(), digest_size=16).hexdigest())
            if before.ended or before.rows:
                return -1
            part = sealer.seal(batch, before, Segment(list(rows), ended=True), time.time_ns() // 1000)
            return committer.commit([part])
        except FileTaken:
            return -1
        finally:
            committer.close()

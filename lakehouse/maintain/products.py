"""Care of a product's table by its one writer, between two batches.

Every commit made here carries the mark of the newest batch, so that the table still says how far it is.
"""

from __future__ import annotations

import dataclasses
import logging
import time

from deltalake import CommitProperties, write_deltalake

from lakehouse.contract.faults import crash_point
from lakehouse.gold.store import ProductStore

log = logging.getLogger(__name__)

MANY_FILES = 200
SMALL = 8 << 20  # bytes: larger files are left alone
FOLD_ROWS = 2_000_000  # a table of partials with more rows is folded only when its pipeline does not run
_WORTH = 0.7  # a fold that leaves more of the rows than this is not worth its commit


def tidy(store: ProductStore, *, many: int = MANY_FILES, fold_rows: int = FOLD_ROWS) -> str:
    """Fold partials or put small files together where there are many files; says what was done, empty for nothing.

    No result row changes: subscribers see an empty change, and positions stay good for as long as was promised.
    """
    if not store.table.exists():
        return ""
    began = time.monotonic()
    files = len(store.delta().file_uris())
    if files < many:
        return ""
    done = "folded"
    crash_point("care.before_commit")
    if not (store.folded and fold(store, fold_rows)):
        store.delta().optimize.compact(target_size=SMALL, commit_properties=_marked(store))
        done = "compacted"
    crash_point("care.after_commit")
    after = len(store.delta().file_uris())
    log.info("%s %s: %d files into %d in %.2f s", store.table.name, done, files, after, time.monotonic() - began)
    return done


def fold(store: ProductStore, most: int = FOLD_ROWS) -> bool:
    """Put one row in place of each key's partial rows; False where that is too much or not worth while."""
    delta = store.delta()
    if delta.to_pyarrow_dataset().count_rows() > most:
        return False
    rows = delta.to_pyarrow_table()
    if not rows.num_rows:
        return False
    folded = store.operator.merge(None, rows)
    if folded.num_rows > rows.num_rows * _WORTH:
        return False
    write_deltalake(delta, folded, mode="overwrite", commit_properties=_marked(store))
    return True


def sweep(store: ProductStore) -> int:
    """Delete files that no promised version needs; returns how many. Makes no commit where there are none."""
    if not store.table.exists() or not store.delta().vacuum(dry_run=True):
        return 0
    return len(store.delta().vacuum(dry_run=False, commit_properties=_marked(store)))


def _marked(store: ProductStore) -> CommitProperties:
    """What a commit that adds no events says: how far the table is, as before."""
    mark = store.mark()
    said = dataclasses.replace(mark, events=0, oldest=None, newest=None).to_metadata() if mark else {}
    return CommitProperties(custom_metadata=said, max_commit_retries=0)

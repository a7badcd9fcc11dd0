"""Which copy of an event counts: the first in bronze, by an index that is a pure function of bronze.

The index maps a dedupe key (16 bytes) to the coordinates of the first row that carries it. A row counts if and only if
the index holds that row's own coordinates, so judging a batch again (after a crash, or when Spark repeats it) gives
the same answer, and there is no horizon: an event is once for ever. Lost or damaged, it is rebuilt from bronze.

Rejected: Spark's own ``dropDuplicates`` state (it forgets behind a watermark, is lost with the checkpoint, and takes
whichever copy comes first off a shuffle, so that a replay could choose another one); a B+tree (LMDB), which writes a
page of 4 KB for each new key once it is large. docs/decisions/0005.

    base      what an index promises
    entries   keys and coordinates as columns
    run       entries in a file, sorted, never changed
    index     the index of those, and the journal of what came since the last run
"""

from lakehouse.bronze.seen.base import JUDGED, SeenIndex, Verdict
from lakehouse.bronze.seen.index import RunIndex

__all__ = ["JUDGED", "RunIndex", "SeenIndex", "Verdict"]

"""The garbage collector of a collecting process."""

from __future__ import annotations

import gc

_YOUNG = 50_000  # by default 700: a batch of events is more, and all of them live until Kafka has them
_OLDER = 50


def calm_garbage_collector() -> None:
    """Look for cycles less often, and never among what the modules have made: it took a quarter of a core.

    What a collector makes for an event is freed by counting references; there are no cycles among it.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG, _OLDER, _OLDER)

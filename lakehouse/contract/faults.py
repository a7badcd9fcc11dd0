"""Named crash points, so that a test can kill a process between two steps of a write.

``MILLRACE_CRASH_AT=NAME[:COUNT]`` kills the process with SIGKILL when it comes to the point for the COUNT-th time
(the first, by default). Unset, as always outside tests, a point is one look at a module variable.
"""

from __future__ import annotations

import os
import signal
from collections import Counter

_armed, _, _count = os.environ.get("MILLRACE_CRASH_AT", "").partition(":")
_passed: Counter[str] = Counter()


def crash_point(name: str) -> None:
    """Die here if the environment says so."""
    if _armed != name:
        return
    _passed[name] += 1
    if _passed[name] >= int(_count or 1):
        os.kill(os.getpid(), signal.SIGKILL)

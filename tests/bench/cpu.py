"""CPU time of a process with its descendants, from ``/proc``."""

from __future__ import annotations

import os
from pathlib import Path


def cpu_s(pid: int) -> float:
    """Seconds of CPU until now of a process and its descendants, those included that ended and were waited for.

    A process that has ended counts as 0.
    """
    ticks, pids = 0, [pid]
    for one in pids:
        try:
            fields = Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()
            ticks += sum(map(int, fields[11:15]))  # utime, stime, and both of the children that were waited for
            for task in Path(f"/proc/{one}/task").iterdir():
                pids += [int(child) for child in (task / "children").read_text().split()]
        except OSError:
            continue
    return ticks / os.sysconf("SC_CLK_TCK")

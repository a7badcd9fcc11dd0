"""What the operating system has to allow a server: a file descriptor a subscriber."""

from __future__ import annotations

import contextlib
import logging
import resource

log = logging.getLogger(__name__)

OTHER_FILES = 256  # tables, logs, workers, requests


def allow_files(subscribers: int) -> int:
    """Raise this process' limit of open files as far as it may; says so where that is too few.

    Args:
        subscribers: how many connections are to be taken.

    Returns:
        The limit by now.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = subscribers + OTHER_FILES
    with contextlib.suppress(ValueError, OSError):  # a hard limit beyond what the kernel knows
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    if soft != resource.RLIM_INFINITY and soft < wanted:
        log.warning(
            "%d files may be open, and serve.max_subscribers asks for %d: raise the hard limit (ulimit -Hn, "
            "LimitNOFILE= of a unit), or lower serve.max_subscribers",
            soft,
            wanted,
        )
    return soft

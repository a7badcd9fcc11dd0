"""Who is at which file: a lock on the byte that its fingerprint names, freed by the system with its process."""

from __future__ import annotations

import fcntl
import os

from lakehouse.feeds.model import Job


class Claims:
    """What one process has claimed of a job's files.

    Args:
        job: whose files they are; a trial claims nothing.
    """

    def __init__(self, job: Job) -> None:
        self._file: int | None = None
        if not job.trial:
            path = job.lake.state / "loads" / job.source.name / "claims"
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def take(self, file: str, *, wait: bool) -> bool:
        """Claim a file; False where another process has it, and there is no waiting."""
        if self._file is None:
            return True
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB), 1, _byte(file))
        except BlockingIOError:
            return False
        return True

    def release(self, file: str) -> None:
        """Give a claim back."""
        if self._file is not None:
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, _byte(file))

    def release_all(self) -> None:
        """Give all back."""
        if self._file is not None:
            fcntl.lockf(self._file, fcntl.LOCK_UN)

    def close(self) -> None:
        """Give all back, and close the file."""
        if self._file is not None:
            os.close(self._file)


def _byte(file: str) -> int:
    return int(file[:15], 16)

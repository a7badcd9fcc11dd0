"""A watched folder: finished files are loaded, then moved to ``done`` or ``failed`` below it.

A file is finished when its name does not say otherwise (``.part``, ``.tmp``, a leading dot) and neither its size nor
its time of change has moved between two looks that are ``settle_s`` apart. So both ways of handing over are safe: write
under another name and rename, or just write. A crash between a load and the move repeats nothing: the file is met
again, found to be in bronze, and moved. A file that took the name of another while that one was loaded stays.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from lakehouse.feeds.files import FeedFile, Mark, is_finished, mark_of
from lakehouse.feeds.model import FileReport

log = logging.getLogger(__name__)

DONE, FAILED = "done", "failed"


class Inbox:
    """One watched folder.

    Args:
        folder: where files arrive, in it or in folders below it.
        settle_s: how long a file must have been still.
        now: monotonic seconds.
    """

    def __init__(self, folder: Path, settle_s: float = 2.0, now: Callable[[], float] = time.monotonic) -> None:
        self.folder = folder
        self._settle_s = settle_s
        self._now = now
        self._seen: dict[Path, tuple[Mark, float]] = {}

    def look(self) -> list[FeedFile]:
        """Files that are finished by now, oldest first."""
        ready: list[tuple[int, FeedFile]] = []
        seen: dict[Path, tuple[Mark, float]] = {}
        now = self._now()
        for path in self.paths():
            try:
                found = path.stat()
            except FileNotFoundError:
                continue
            mark = mark_of(found)
            before, since = self._seen.get(path, (None, now))
            since = since if before == mark else now
            seen[path] = (mark, since)
            if before == mark and now - since >= self._settle_s:
                ready.append((found.st_mtime_ns, FeedFile(path, found.st_size)))
        self._seen = seen
        return [file for _, file in sorted(ready, key=lambda item: (item[0], item[1].path))]

    def put_away(self, reports: Sequence[FileReport]) -> set[Path]:
        """Move the reported files; beside a failed one stands ``NAME.reason.txt``.

        Returns:
            Files that stay: they are not what was read under their name, and are yet to be loaded.
        """
        unread = set()
        for report in reports:
            path = Path(report.name)
            target = self._place_for(report)
            self._seen.pop(path, None)
            try:
                path.rename(target)
                mark = mark_of(target.lstat())
            except FileNotFoundError:
                log.warning("%s was taken away while it was loaded", path)
                continue
            if report.mark is not None and mark != report.mark and not target.is_symlink():
                unread.add(_given_back(target, path))
            elif not report.ok:
                target.with_name(f"{target.name}.reason.txt").write_text(f"{report.reason}\n", encoding="utf-8")
        return unread

    def paths(self) -> set[Path]:
        """Files that are there and not put away, finished or not by their time."""
        away = {self.folder / DONE, self.folder / FAILED}
        return {
            path
            for path in self.folder.rglob("*")
            if path.is_file() and is_finished(path) and not away.intersection(path.parents)
        }

    def _place_for(self, report: FileReport) -> Path:
        folder = self.folder / (DONE if report.ok else FAILED)
        folder.mkdir(exist_ok=True)
        path = Path(report.name)
        target = folder / path.name
        return folder / f"{path.stem}-{report.file[:12]}-{time.time_ns()}{path.suffix}" if target.exists() else target


def _given_back(file: Path, path: Path) -> Path:
    """Move a file back to its name, or beside it where a third one has that by now; returns where it is."""
    try:
        path.hardlink_to(file)  # unlike a rename it replaces nothing
        file.unlink()
    except OSError:  # the name is taken, or the file system has no links
        path = file.rename(path.with_name(f"{path.stem}-{time.time_ns()}{path.suffix}"))
    log.info("%s has replaced a file that was being loaded; it is next", path)
    return path

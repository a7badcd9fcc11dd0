"""Class-data archives (JEP 350): what a JVM has parsed and verified of its classes, mapped by every later one.

Spark and Kafka load thousands of classes before they do anything, which takes most of their start. ``millrace prepare``
(:mod:`jobs.local.machine`) makes an archive once, from a run that does what ours do. An archive fits one JVM and one
class path: its name contains a digest of both, and its size. A JVM without a fitting archive starts as usual, only
slower. ``kind`` is ``spark`` or ``kafka`` everywhere.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from lakehouse.contract.errors import EnvironmentProblem
from lakehouse.contract.jars import jars_dir
from lakehouse.contract.java import find_java
from lakehouse.contract.storage import locked

_KEPT = 3  # archives of a kind: other installations, other Javas
_QUIET = ["-Xlog:cds=off", "-Xlog:cds+dynamic=off"]


def archive(kind: str, class_path: Iterable[Path]) -> Path | None:
    """The whole archive for the Java that is found and these jars; None: there is none.

    Raises:
        EnvironmentProblem: there is no Java.
    """
    place = _place(kind, class_path)
    for path in place.parent.glob(f"{place.name}-*.jsa"):
        if path.stem.rpartition("-")[2] == str(path.stat().st_size):  # a JVM dies of one that is cut off
            return path
    return None


def sharing(kind: str, class_path: Iterable[Path]) -> list[str]:
    """The JVM's flags for its archive, as far as there is one."""
    try:
        path = archive(kind, class_path)
    except (EnvironmentProblem, OSError):
        return []
    if path is None or any(letter.isspace() for letter in str(path)):
        return []
    return [f"-XX:SharedArchiveFile={path}", "-Xshare:auto", *_QUIET]


def recording(path: Path) -> list[str]:
    """The JVM's flags to write an archive when it ends."""
    return [f"-XX:ArchiveClassesAtExit={path}", *_QUIET]


@contextmanager
def making(kind: str, class_path: Iterable[Path]) -> Iterator[Path | None]:
    """A block that makes the archive where this says; None: there is one. One process at a time makes them; the oldest
    of other class paths go."""
    place = _place(kind, class_path)
    place.parent.mkdir(parents=True, exist_ok=True)
    with locked(place.parent / ".lock"):
        if archive(kind, class_path) is not None:
            yield None
            return
        for left in place.parent.glob("*.part"):  # by one that was killed
            left.unlink(missing_ok=True)
        part = place.with_suffix(".part")
        try:
            yield part
            with part.open("rb") as file:
                os.fsync(file.fileno())
            part.rename(place.with_name(f"{place.name}-{part.stat().st_size}.jsa"))
        finally:
            part.unlink(missing_ok=True)
        made = sorted(place.parent.glob(f"{kind}-*.jsa"), key=lambda path: path.stat().st_mtime, reverse=True)
        for old in made[_KEPT:]:
            old.unlink(missing_ok=True)


def _place(kind: str, class_path: Iterable[Path]) -> Path:
    """The archive's name, less its size."""
    digest = hashlib.blake2b(find_java().version.encode(), digest_size=8)
    for jar in class_path:
        found = jar.stat()
        digest.update(f"{jar} {found.st_size} {found.st_mtime_ns}\n".encode())
    return jars_dir() / "classes" / f"{kind}-{digest.hexdigest()}"

"""Readers and gates of one's own: functions that other packages name in the metadata of their distribution.

Group ``millrace.readers``: ``NAME = "module:function"`` reads files of format NAME, which is also their suffix. Group
``millrace.gates``: each function is asked before rows are committed where the load checks expectations.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import pyarrow as pa

from lakehouse.contract.errors import ConfigError
from lakehouse.contract.pipeline import Source
from lakehouse.errors import BadFile
from lakehouse.load.files import OpenFile, own_readers
from lakehouse.load.rows import Segment

log = logging.getLogger(__name__)

GATES = "millrace.gates"

Reader = Callable[[OpenFile, Source, int], Iterator[Segment]]
"""Gives a file's segments from a place on: 0, or the ``offset`` of a segment that it gave. The last one has ``ended``
set. It raises :class:`~lakehouse.errors.BadFile` for a file that it cannot read to its end."""

Gate = Callable[[Source, pa.Table], str]
"""Judges a batch of a file's rows, in bronze's columns: why the file is refused, or an empty text."""


def check_extensions(*, gates: bool) -> None:
    """Import them before the first file.

    Raises:
        ConfigError: one cannot be imported.
    """
    for point in (*own_readers().values(), *(entry_points(group=GATES) if gates else ())):
        _imported(point)


def read_with(point: EntryPoint, opened: OpenFile, source: Source, offset: int) -> Iterator[Segment]:
    """A file's segments from a place on, by a reader of one's own.

    Raises:
        ConfigError: the reader cannot be imported.
        BadFile: it cannot read the file, or it fails.
    """
    reader: Reader = _imported(point)
    ended = False
    try:
        for segment in reader(opened, source, offset):
            ended = segment.ended
            yield segment
    except BadFile:
        raise
    except Exception as error:  # other files can be read
        log.warning("reader %s of %s failed", point.name, opened.name, exc_info=True)
        raise BadFile(opened.name, f"reader {point.name!r} ({point.value}) failed: {error!r}") from error
    if not ended:
        raise BadFile(opened.name, f"reader {point.name!r} ({point.value}) gave no last segment, one with ended=True")


def failed_gate(source: Source, rows: pa.Table) -> str:
    """Why a gate of one's own refuses the rows; empty if none does. A gate that fails refuses them.

    Raises:
        ConfigError: a gate cannot be imported.
    """
    for point in sorted(entry_points(group=GATES)):
        gate: Gate = _imported(point)
        try:
            why = gate(source, rows)
        except Exception as error:  # what cannot be judged is not let in
            log.warning("gate %s failed", point.name, exc_info=True)
            why = repr(error)
        if why:
            return f"gate {point.name!r}: {why}"
    return ""


@functools.cache
def _imported(point: EntryPoint) -> Callable[..., Any]:
    try:
        found: Callable[..., Any] = point.load()
    except Exception as error:  # whatever its module raises
        whose = point.dist.name if point.dist else "?"
        raise ConfigError(
            f"{point.value} of package {whose} cannot be imported: {error!r}",
            key=f"{point.group} {point.name}",
            remedy="Mend the package, or uninstall it",
        ) from error
    return found

"""Demand: what the subscribers of a lake want, told upstream.

A process with subscribers keeps a note, ``LAKE/_millrace/demand/NAME.json``: whose subscribers want events of which
source and, where a filter pins a column, of which values. Collectors read the notes and tell devices.

A note is a lease: it is renewed while the process runs, and counts for :data:`LEASE_S` seconds after the last renewal.
So a process that starts again within that time changes nothing, and what a dead one wanted comes to an end.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

import orjson

from lakehouse.contract.lake import ALERTS, Lake
from lakehouse.contract.pipeline import Pipeline
from lakehouse.contract.storage import LakePath, StorePath, files_in, folder_stamp, stamp_of, write_whole

log = logging.getLogger(__name__)

LEASE_S = 10.0
LOOK_S = 0.25
"""Seconds between two looks at what subscribers want, and between two looks at the notes of a lake of this machine."""
MOST_VALUES = 10_000
"""Values of a tenant and source in a note; of more than that, all events are wanted."""
_RENEW_S = 3.0
_HOLD_S = 1.0  # a demand ends when nobody has had it for so long: between two polls it does not
_OLD_S = 3600.0  # notes of dead processes are removed after that


class Want(NamedTuple):
    """Events that somebody wants.

    Attributes:
        tenant: of the subscriber; empty: the operator.
        source: of the events.
        column: of the table that is subscribed to; empty: all events.
        value: of the column, as text.
    """

    tenant: str
    source: str
    column: str = ""
    value: str = ""


def sources_of(
    table: str, pipeline: Pipeline, reads: Mapping[str, Collection[str]] = {}, seen: frozenset[str] = frozenset()
) -> set[str]:
    """Sources whose events a table shows; none for tables about all events, such as ``quarantine``.

    Args:
        reads: tables that queries of the run time read, and those of its alerts.
        seen: tables that are being looked up.
    """
    if table in pipeline.sources:
        return {table}
    if (product := pipeline.products.get(table)) is not None:
        return {product.source, product.right} - {""}
    bases = set(reads.get(table, ()))
    if table == ALERTS:
        bases |= {alert.product for alert in pipeline.alerts.values()}
    elif (view := pipeline.views.get(table)) is not None:
        bases.add(view.base)
    elif (copy := pipeline.staging.get(table)) is not None:
        bases.add(copy.product)
    inner = seen | {table}
    return {source for base in bases - inner for source in sources_of(base, pipeline, reads, inner)}


class DemandNote:
    """What the subscribers of this process want, for collectors to read.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, lake: Lake, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder = lake.shared / "demand"
        self._file = self._folder / f"{secrets.token_hex(8)}.json"
        self._clock = clock
        self._wants: frozenset[Want] = frozenset()
        self._ended: dict[Want, float] = {}
        self._written: frozenset[Want] = frozenset()
        self._renewals = 0
        self._renewed_at = 0.0

    def tell(self, wants: frozenset[Want]) -> None:
        """Say what is wanted now. Call it every :data:`LOOK_S` seconds; it writes a change, and renewals. It blocks."""
        now = self._clock()
        ended = dict.fromkeys(self._wants - wants, now) | self._ended
        self._ended = {want: at for want, at in ended.items() if want not in wants and now - at < _HOLD_S}
        self._wants = wants
        held = wants | self._ended.keys()
        if held == self._written and (not held or now - self._renewed_at < _RENEW_S):
            return
        if held:
            if not self._renewals:
                self._remove_old()
            self._renewals += 1
            # The number makes each renewal another file for the readers, who compare contents and not clocks.
            write_whole(
                self._file, orjson.dumps({"renewal": self._renewals, "wants": sorted(map(list, _bounded(held)))})
            )
        else:
            self._file.unlink(missing_ok=True)
        self._written, self._renewed_at = held, now

    def _remove_old(self) -> None:
        for file in files_in(self._folder, "*.json"):
            stamp = stamp_of(file)
            if stamp is not None and time.time() - stamp.at / 1e9 > _OLD_S:
                file.unlink(missing_ok=True)


def _bounded(wants: frozenset[Want]) -> set[Want]:
    sizes = Counter((want.tenant, want.source) for want in wants)
    return {Want(want.tenant, want.source) if sizes[want.tenant, want.source] > MOST_VALUES else want for want in wants}


class DemandBoard:
    """What the subscribers of all processes want.

    Args:
        clock: seconds, monotonic. It measures the age of notes, whatever the clock of their machine says.
    """

    def __init__(self, lake: Lake, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder = lake.shared / "demand"
        self._clock = clock
        self._stamp = 0
        self._notes: dict[str, tuple[bytes, float, frozenset[Want]]] = {}  # contents, and when they were first seen

    def read(self) -> frozenset[Want]:
        """What is wanted now. It blocks.

        Raises Exception: the notes cannot be read; what is wanted is not known then.
        """
        now = self._clock()
        # In a folder of a file system, two changes within a tick of the clock have one stamp.
        stamp = folder_stamp(self._folder) if isinstance(self._folder, StorePath) else -1
        if stamp != self._stamp or stamp == -1:
            self._notes = {file.name: self._note(file, now) for file in files_in(self._folder, "*.json")}
            self._stamp = stamp
        fresh = [wants for _, seen_at, wants in self._notes.values() if now - seen_at < LEASE_S]
        return frozenset().union(*fresh)

    def _note(self, file: LakePath, now: float) -> tuple[bytes, float, frozenset[Want]]:
        known = self._notes.get(file.name)
        try:
            content = file.read_bytes()
        except FileNotFoundError:  # it has just gone
            return b"", now, frozenset()
        if known is not None and known[0] == content:
            return known
        try:
            return content, now, frozenset(Want(*map(str, fields)) for fields in orjson.loads(content)["wants"])
        except (ValueError, TypeError, KeyError):  # of another version of Millrace
            log.warning("%s is not a note of what subscribers want", file)
            return content, now, frozenset()

"""An endless stream of RSVPs in the shape of Meetup's, from a seed.

Shapes are fitted to real recordings: topics by Zipf's law, a few countries with most groups, late and backward
``mtime``, RSVPs that are changed or come again. Names are invented.

The stream is made in blocks of :data:`BLOCK` that do not depend on each other, so that any place of it can be had
again at once: a player resumes a client from event 10,000,000 without keeping or making the ten million before.
"""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass

from ingest.simulate import vocabulary as words
from ingest.simulate.world import Event, World

BLOCK = 1_024
_EVENTS_CHANGE_EVERY = 64  # blocks
_FIRST_RSVP_ID = 2_000_000_000
_MEMBERS = 4_000_000
_HOUR_MS = 3_600_000

_EXACT_REPEAT = 0.005
_REPEAT = 0.155  # of an RSVP among those of a short while ago
_FLIP = 0.14  # of those: yes becomes no, or no yes
_BACKWARD = 0.4  # of those: mtime is earlier than it was
_SAME_MEMBER = 0.2  # answers for another event a moment later
_YES = 0.73
_WARM_UP = 30  # RSVPs of a block before any can come again, or the first would come again most


@dataclass(slots=True)
class _Rsvp:
    """What a repeat needs to know of an RSVP."""

    rsvp_id: int
    member: bytes
    event: Event
    yes: bool
    guests: int
    mtime: int
    line: bytes = b""


class RsvpGenerator:
    """The stream of one seed.

    Args:
        seed: equal arguments make equal streams.
        start_ms: when the first event arrives, ms since the epoch; None: now.
        rate: events a second that the stream is meant to be played at; ``mtime`` follows it.
    """

    def __init__(self, seed: int, start_ms: int | None = None, rate: float = 1_000.0) -> None:
        self._seed = seed
        self._start_ms = time.time_ns() // 1_000_000 if start_ms is None else start_ms
        self._rate = rate
        self._world = World(seed)
        self._event = functools.lru_cache(maxsize=16_384)(self._make_event)

    def block(self, number: int) -> list[bytes]:
        """Events ``number * BLOCK`` to ``(number + 1) * BLOCK - 1``, as JSON without line ends."""
        rng = random.Random(f"block {self._seed} {number}")
        chance = rng.random
        recent: list[_Rsvp] = []
        lines: list[bytes] = []
        rsvp_id = _FIRST_RSVP_ID + number * 4 * BLOCK
        for index in range(number * BLOCK, (number + 1) * BLOCK):
            now = self._arrival_ms(index)
            kind = chance()
            if len(recent) >= _WARM_UP and kind < _EXACT_REPEAT + _REPEAT:
                old = recent[-1 - min(len(recent) - 1, int(rng.expovariate(1 / 30)))]
                rsvp = old if kind < _EXACT_REPEAT else _changed(old, now, rng)
            else:
                rsvp_id += 1 + int(3 * chance())
                rsvp = self._new(rsvp_id, number, now, recent, rng)
            if not rsvp.line:
                rsvp.line = _render(rsvp)
                recent.append(rsvp)
            lines.append(rsvp.line)
        return lines

    def _arrival_ms(self, index: int) -> int:
        return self._start_ms + int(index * 1_000 / self._rate)

    def _new(self, rsvp_id: int, block: int, now: int, recent: list[_Rsvp], rng: random.Random) -> _Rsvp:
        chance = rng.random
        group = self._world.group(chance())
        epoch = self._world.epoch(group, block, _EVENTS_CHANGE_EVERY)
        event = self._event(group, epoch, chance() < 0.7)
        if len(recent) >= _WARM_UP and chance() < _SAME_MEMBER:
            member = recent[-1 - int(len(recent) * chance() * 0.2)].member
        else:
            member = _member(int(_MEMBERS * chance()))
        return _Rsvp(rsvp_id, member, event, chance() < _YES, _guests(chance()), now - _lateness_ms(rng))

    def _make_event(self, group: int, epoch: int, main: bool) -> Event:
        now = self._arrival_ms(max(0, epoch) * BLOCK)
        return self._world.event(group, epoch, 0.0 if main else 0.99, now)


def generate(seed: int, start_ms: int | None = None, rate: float = 1_000.0) -> Iterator[bytes]:
    """The stream of :class:`RsvpGenerator` from its beginning: JSON objects without line ends. It never ends."""
    generator = RsvpGenerator(seed, start_ms, rate)
    number = 0
    while True:
        yield from generator.block(number)
        number += 1


def _changed(old: _Rsvp, now: int, rng: random.Random) -> _Rsvp:
    """The same RSVP again, with another ``mtime`` and perhaps another answer."""
    chance = rng.random
    yes = old.yes != (chance() < _FLIP)
    guests = old.guests if chance() < 0.9 else _guests(chance())
    if chance() < _BACKWARD:
        mtime = old.mtime - 1 - int(1_000 * chance() ** 2)
    else:
        mtime = min(now, old.mtime + 1 + int(rng.expovariate(1 / 700)))
        mtime = mtime if mtime != old.mtime else mtime - 1
    return _Rsvp(old.rsvp_id, old.member, old.event, yes, guests, mtime)


def _lateness_ms(rng: random.Random) -> int:
    """How long before its arrival an RSVP was last changed: mostly a moment, now and then hours, rarely a month."""
    kind = rng.random()
    if kind < 0.90:
        return int(rng.expovariate(1 / 400))
    if kind < 0.975:
        return int(rng.expovariate(1 / 9_000))
    if kind < 0.988:
        return int(rng.uniform(20_000, 120_000))
    if kind < 0.9985:
        return int(rng.uniform(1, 72) ** 1.2 * _HOUR_MS)
    return int(rng.gauss(33, 2) * 24 * _HOUR_MS)


def _guests(at: float) -> int:
    if at < 0.936:
        return 0
    if at < 0.986:
        return 1
    return 2 if at < 0.996 else 3 + int((at - 0.996) * 2_000)


@functools.lru_cache(maxsize=4_096)
def _member(number: int) -> bytes:
    # Numbers are spread by a multiplication, so that neighbours have nothing in common.
    member_id = number * 2_654_435_761 % 900_000_007
    first = words.FIRST_NAMES[member_id % len(words.FIRST_NAMES)]
    last = words.LAST_NAMES[member_id // 64 % len(words.LAST_NAMES)]
    photo = b',"photo":"https://photos.invalid/member/%x/thumb_%d.jpeg"' % (member_id % 4_096, member_id)
    value = f'"member":{{"member_id":{member_id},"member_name":"{first} {last}"'.encode()
    return value + (photo if member_id % 19 else b"") + b"}"


def _render(rsvp: _Rsvp) -> bytes:
    return b'{%b"visibility":"public","response":"%b","guests":%d,%b,"rsvp_id":%d,"mtime":%d%b' % (
        rsvp.event.venue,
        b"yes" if rsvp.yes else b"no",
        rsvp.guests,
        rsvp.member,
        rsvp.rsvp_id,
        rsvp.mtime,
        rsvp.event.tail,
    )

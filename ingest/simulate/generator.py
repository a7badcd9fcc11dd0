"""An endless stream of RSVPs in the shape of Meetup's, from a seed.

The shapes are fitted to real recordings: topics by Zipf's law, most groups in a few countries, late and backward
``mtime``, RSVPs that are changed or repeated. Names are invented (``words.toml``).

The stream is made in independent blocks of :data:`BLOCK` events, so any place of it can be produced at once: a player
resumes a client at event 10,000,000 without making or storing the ten million before it.
"""

from __future__ import annotations

import functools
import random
import re
import time
import tomllib
from bisect import bisect
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import orjson

BLOCK = 1_024
GROUPS = 2_000

_EVENTS_CHANGE_EVERY = 64  # blocks
_FIRST_RSVP_ID = 2_000_000_000
_MEMBERS = 4_000_000
_HOUR_MS = 3_600_000

# Shares of RSVPs.
_EXACT_REPEAT = 0.005
_REPEAT = 0.155  # of a recent RSVP
_FLIP = 0.14  # of repeats: yes becomes no, or no yes
_BACKWARD = 0.4  # of repeats: mtime is earlier than before
_SAME_MEMBER = 0.2  # answers for another event a moment later
_YES = 0.73
_WARM_UP = 30  # RSVPs of a block before any is repeated, or the first would be repeated most

# Number of topics of a group, and the share of groups with that number, per mille.
_TOPIC_NUMBERS = (1, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16)
_TOPIC_NUMBER_WEIGHTS = (10, 20, 27, 26, 37, 55, 53, 73, 50, 88, 90, 83, 120, 240, 28)
_WITHOUT_VENUE = 0.15
_WITHOUT_TIME = 0.005
_VENUE_UNPLACED = 0.06


WORDS: dict[str, Any] = tomllib.loads(Path(__file__).with_name("words.toml").read_text(encoding="utf-8"))


@dataclass(frozen=True, slots=True)
class Country:
    """A country of groups; ``weight`` is its share among groups, ``words`` are names of local groups."""

    code: str
    weight: float
    latitude: float
    longitude: float
    cities: tuple[str, ...]
    words: tuple[str, ...] = ()


_COUNTRIES = [Country(**fields) for fields in WORDS["countries"]]


@dataclass(slots=True)
class _Rsvp:
    rsvp_id: int
    member: bytes
    event: MeetupEvent
    yes: bool
    guests: int
    mtime: int
    line: bytes = b""


class RsvpGenerator:
    """The stream of one seed.

    Args:
        seed: equal arguments give equal streams.
        start_ms: arrival of the first event, ms since the epoch; None: now.
        rate: events a second at which the stream will be played; ``mtime`` follows it.
    """

    total: None = None  # endless

    def __init__(self, seed: int, start_ms: int | None = None, rate: float = 1_000.0) -> None:
        self._seed = seed
        self._start_ms = time.time_ns() // 1_000_000 if start_ms is None else start_ms
        self._rate = rate
        self._groups = _groups(random.Random(f"world {seed}"))
        self._event = functools.lru_cache(maxsize=16_384)(self._make_event)

    def block(self, number: int) -> list[bytes]:
        """Events ``number * BLOCK`` to ``(number + 1) * BLOCK - 1`` as JSON without line ends."""
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
        group = int(GROUPS * chance() ** 1.45)  # by popularity; a tenth of the groups gets a quarter of all RSVPs
        phase = self._groups[group].phase % _EVENTS_CHANGE_EVERY
        announced = (block + phase) // _EVENTS_CHANGE_EVERY * _EVENTS_CHANGE_EVERY - phase
        event = self._event(group, announced, 0 if chance() < 0.7 else 1)
        if len(recent) >= _WARM_UP and chance() < _SAME_MEMBER:
            member = recent[-1 - int(len(recent) * chance() * 0.2)].member
        else:
            member = _member(int(_MEMBERS * chance()))
        return _Rsvp(rsvp_id, member, event, chance() < _YES, _guests(chance()), now - _lateness_ms(rng))

    def _make_event(self, number: int, announced: int, slot: int) -> MeetupEvent:
        """One of a group's events that are announced in the block ``announced``; each group has two, the slots."""
        group = self._groups[number]
        rng = random.Random(f"{self._seed} {number} {announced} {slot}")
        event_id = _event_id(rng)
        form = rng.choice(WORDS["event_forms"])
        event = {
            "event_name": form.format(topic=group.topic, day=rng.choice(WORDS["days"]), number=rng.randrange(1, 13)),
            "event_id": event_id,
        }
        tail = orjson.dumps(event)[:-1]
        if rng.random() >= _WITHOUT_TIME:
            now_ms = self._arrival_ms(max(0, announced) * BLOCK)
            hours = 24 * min(rng.lognormvariate(1.25, 1.1), 300.0)
            tail += b',"time":%d' % ((now_ms // 900_000) * 900_000 + int(hours * 4) * 900_000)
        tail += b',"event_url":"https://meetup.invalid/%b/events/%b/"}' % (group.urlname.encode(), event_id.encode())
        return MeetupEvent(_venue(group, rng), b',"event":' + tail + b',"group":' + group.fragment + b"}")


def _changed(old: _Rsvp, now: int, rng: random.Random) -> _Rsvp:
    """The same RSVP with another ``mtime`` and perhaps another answer."""
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
    """Time from an RSVP's last change to its arrival: mostly a moment, sometimes hours, rarely a month."""
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
    # The multiplication spreads consecutive numbers.
    member_id = number * 2_654_435_761 % 900_000_007
    first = WORDS["first_names"][member_id % len(WORDS["first_names"])]
    last = WORDS["last_names"][member_id // 64 % len(WORDS["last_names"])]
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


@dataclass(frozen=True, slots=True)
class MeetupGroup:
    """A group, with ``fragment``, its JSON for RSVPs. ``phase`` shifts when its events change."""

    urlname: str
    topic: str
    latitude: float
    longitude: float
    phase: int
    fragment: bytes


@dataclass(frozen=True, slots=True)
class MeetupEvent:
    """An event of a group as two parts of an RSVP: ``"venue":{…},`` or nothing, and ``,"event":`` to the end."""

    venue: bytes
    tail: bytes


def _groups(rng: random.Random) -> list[MeetupGroup]:
    topics = _topics(rng)
    # Zipf-Mandelbrot, fitted to the share of RSVPs whose group has the topic at rank 1, 10, 100 and 1,000.
    weights = list(accumulate((rank + 4) ** -0.87 for rank in range(len(topics))))
    countries = list(accumulate(country.weight for country in _COUNTRIES))
    cities = {country.code: _cities(country, rng) for country in _COUNTRIES}
    groups: list[MeetupGroup] = []
    for number in range(GROUPS):
        country = _COUNTRIES[bisect(countries, rng.random() * countries[-1])]
        groups.append(_group(number, country, cities[country.code], topics, weights, rng))
    return groups


def _topics(rng: random.Random) -> list[str]:
    made = [f"{kind} {thing}" for kind in WORDS["topic_kinds"] for thing in WORDS["topic_things"]]
    rng.shuffle(made)
    return [*WORDS["plain_topics"], *WORDS["topic_things"], *made]


def _cities(country: Country, rng: random.Random) -> list[tuple[str, float, float]]:
    names = list(country.cities)
    if country.code in WORDS["town_countries"]:
        towns = [a + b for a in WORDS["town_begins"] for b in WORDS["town_ends"]]
        names += rng.sample(towns, min(len(towns), 3 * len(country.cities)))
    spread = {"us": 9.0, "ca": 9.0, "au": 5.0}.get(country.code, 0.8)
    return [
        (name, country.latitude + rng.uniform(-spread, spread), country.longitude + rng.uniform(-spread, spread))
        for name in names
    ]


def _group(
    number: int,
    country: Country,
    cities: list[tuple[str, float, float]],
    topics: list[str],
    weights: list[float],
    rng: random.Random,
) -> MeetupGroup:
    city, latitude, longitude = cities[int(len(cities) * rng.random() ** (1.6 if country.code == "us" else 4.0))]
    count = rng.choices(_TOPIC_NUMBERS, _TOPIC_NUMBER_WEIGHTS)[0]
    chosen: dict[str, None] = {}
    while len(chosen) < count:
        chosen[topics[bisect(weights, rng.random() * weights[-1])]] = None
    main = next(iter(chosen))
    name = rng.choice(WORDS["group_forms"]).format(city=city, topic=main)
    if country.words and rng.random() < 0.5:
        name = f"{rng.choice(country.words)} {city}"
    urlname = re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-") or f"group-{number}"
    value = {
        "group_topics": [{"urlkey": re.sub(r"[^a-z0-9]+", "-", t.lower()), "topic_name": t} for t in chosen],
        "group_city": city,
        "group_country": country.code,
        "group_id": 1_000_000 + number * 9_973,
        "group_name": name,
        "group_lon": round(longitude, 2),
        "group_urlname": urlname,
    }
    if country.code in WORDS["states"]:
        value["group_state"] = rng.choice(WORDS["states"][country.code])
    value["group_lat"] = round(latitude, 2)
    return MeetupGroup(urlname, main, latitude, longitude, rng.randrange(1_000), orjson.dumps(value))


def _event_id(rng: random.Random) -> str:
    if rng.random() < 0.6:
        return str(rng.randrange(230_000_000, 290_000_000))
    return "".join(rng.choices("bcdfghjklmnpqrstvwxyz", k=12))  # recurring events have letters


def _venue(group: MeetupGroup, rng: random.Random) -> bytes:
    if rng.random() < _WITHOUT_VENUE:
        return b""
    placed = rng.random() >= _VENUE_UNPLACED
    venue = {
        "venue_name": rng.choice(WORDS["venue_forms"]).format(word=rng.choice(WORDS["venue_words"])),
        "lon": round(group.longitude + rng.uniform(-0.1, 0.1), 6) if placed else 0,
        "lat": round(group.latitude + rng.uniform(-0.1, 0.1), 6) if placed else 0,
        "venue_id": rng.randrange(1_000_000, 26_000_000),
    }
    return b'"venue":' + orjson.dumps(venue) + b","

"""The world that generated RSVPs come from, made from a seed: cities, topics, and groups with their events."""

from __future__ import annotations

import random
import re
from bisect import bisect
from dataclasses import dataclass
from itertools import accumulate

import orjson

from ingest.simulate import vocabulary as words

GROUPS = 2_000
# How many topics a group has, and the share of groups that have so many, per mille.
_TOPIC_NUMBERS = (1, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16)
_TOPIC_NUMBER_WEIGHTS = (10, 20, 27, 26, 37, 55, 53, 73, 50, 88, 90, 83, 120, 240, 28)
_EVENTS_AT_ONCE = 2
_WITHOUT_VENUE = 0.15
_WITHOUT_TIME = 0.005
_VENUE_UNPLACED = 0.06


@dataclass(frozen=True, slots=True)
class Group:
    """A group, and its JSON ready to be joined into RSVPs.

    Attributes:
        name: as shown.
        urlname: as in its address.
        topic: its main topic.
        latitude: degrees.
        longitude: degrees.
        phase: shifts when its events change, so that not all groups change at once.
        fragment: value of an RSVP's ``group`` member.
    """

    name: str
    urlname: str
    topic: str
    latitude: float
    longitude: float
    phase: int
    fragment: bytes


@dataclass(frozen=True, slots=True)
class Event:
    """An event of a group, as two pieces of an RSVP.

    Attributes:
        venue: ``"venue":{…},`` or nothing.
        tail: from ``,"event":`` to the end of the line.
    """

    venue: bytes
    tail: bytes


class World:
    """All groups of one seed.

    Args:
        seed: equal seeds make equal worlds.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        rng = random.Random(f"world {seed}")
        topics = _topics(rng)
        # Zipf-Mandelbrot, fitted to the share of RSVPs whose group has the topic at rank 1, 10, 100 and 1,000.
        weights = list(accumulate((rank + 4) ** -0.87 for rank in range(len(topics))))
        countries = list(accumulate(country.weight for country in words.COUNTRIES))
        cities = {country.code: _cities(country, rng) for country in words.COUNTRIES}
        self._groups: list[Group] = []
        for number in range(GROUPS):
            country = words.COUNTRIES[bisect(countries, rng.random() * countries[-1])]
            self._groups.append(_group(number, country, cities[country.code], topics, weights, rng))

    def group(self, at: float) -> int:
        """Number of the group at ``at`` (0 to 1) in order of popularity: a tenth of them has a quarter of all RSVPs."""
        return int(GROUPS * at**1.45)

    def event(self, group_number: int, block: int, at: float, now_ms: int) -> Event:
        """One of the group's events that are announced while ``block`` is generated.

        Args:
            group_number: as of :meth:`group`.
            block: number of the block of RSVPs.
            at: chooses among the group's events, 0 to 1.
            now_ms: start of the events' time of announcement, ms since the epoch.
        """
        group = self._groups[group_number]
        slot = int(at * _EVENTS_AT_ONCE)
        rng = random.Random(f"{self._seed} {group_number} {block} {slot}")
        event_id = _event_id(rng)
        form = rng.choice(words.EVENT_FORMS)
        event = {
            "event_name": form.format(topic=group.topic, day=rng.choice(words.DAYS), number=rng.randrange(1, 13)),
            "event_id": event_id,
        }
        tail = orjson.dumps(event)[:-1]
        if rng.random() >= _WITHOUT_TIME:
            hours = 24 * min(rng.lognormvariate(1.25, 1.1), 300.0)
            tail += b',"time":%d' % ((now_ms // 900_000) * 900_000 + int(hours * 4) * 900_000)
        tail += b',"event_url":"https://meetup.invalid/%b/events/%b/"}' % (group.urlname.encode(), event_id.encode())
        return Event(_venue(group, rng), b',"event":' + tail + b',"group":' + group.fragment + b"}")

    def epoch(self, group_number: int, block: int, blocks: int) -> int:
        """The block whose events the group still has in ``block``, where they change every ``blocks`` blocks."""
        phase = self._groups[group_number].phase % blocks
        return (block + phase) // blocks * blocks - phase


def _topics(rng: random.Random) -> list[str]:
    made = [f"{kind} {thing}" for kind in words.TOPIC_KINDS for thing in words.TOPIC_THINGS]
    rng.shuffle(made)
    return [*words.PLAIN_TOPICS, *words.TOPIC_THINGS, *made]


def _cities(country: words.Country, rng: random.Random) -> list[tuple[str, float, float]]:
    names = list(country.cities)
    if country.code in words.TOWN_COUNTRIES:
        towns = [a + b for a in words.TOWN_BEGINS for b in words.TOWN_ENDS]
        names += rng.sample(towns, min(len(towns), 3 * len(country.cities)))
    spread = {"us": 9.0, "ca": 9.0, "au": 5.0}.get(country.code, 0.8)
    return [
        (name, country.latitude + rng.uniform(-spread, spread), country.longitude + rng.uniform(-spread, spread))
        for name in names
    ]


def _group(
    number: int,
    country: words.Country,
    cities: list[tuple[str, float, float]],
    topics: list[str],
    weights: list[float],
    rng: random.Random,
) -> Group:
    city, latitude, longitude = cities[int(len(cities) * rng.random() ** (1.6 if country.code == "us" else 4.0))]
    count = rng.choices(_TOPIC_NUMBERS, _TOPIC_NUMBER_WEIGHTS)[0]
    chosen: dict[str, None] = {}
    while len(chosen) < count:
        chosen[topics[bisect(weights, rng.random() * weights[-1])]] = None
    main = next(iter(chosen))
    name = rng.choice(words.GROUP_FORMS).format(city=city, topic=main)
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
    if country.code in words.STATES:
        value["group_state"] = rng.choice(words.STATES[country.code])
    value["group_lat"] = round(latitude, 2)
    return Group(name, urlname, main, latitude, longitude, rng.randrange(1_000), orjson.dumps(value))


def _event_id(rng: random.Random) -> str:
    if rng.random() < 0.6:
        return str(rng.randrange(230_000_000, 290_000_000))
    return "".join(rng.choices("bcdfghjklmnpqrstvwxyz", k=12))  # recurring events have letters


def _venue(group: Group, rng: random.Random) -> bytes:
    if rng.random() < _WITHOUT_VENUE:
        return b""
    placed = rng.random() >= _VENUE_UNPLACED
    venue = {
        "venue_name": rng.choice(words.VENUE_FORMS).format(word=rng.choice(words.VENUE_WORDS)),
        "lon": round(group.longitude + rng.uniform(-0.1, 0.1), 6) if placed else 0,
        "lat": round(group.latitude + rng.uniform(-0.1, 0.1), 6) if placed else 0,
        "venue_id": rng.randrange(1_000_000, 26_000_000),
    }
    return b'"venue":' + orjson.dumps(venue) + b","

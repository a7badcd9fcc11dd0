"""What bench_lakehouse sends: the worked case's RSVPs (1.4 KB each), or page views (about 250 bytes)."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from lakehouse.contract.settings import conf_dir
from tests.recordings import generate

Lines = Callable[[int, int, float], Iterator[bytes]]
_BLOCK = 50_000
_NUMBERS = re.compile(rb'(.*"rsvp_id":)([0-9]+)(,"mtime":)([0-9]+)(,.*)')
_COUNTRIES = ("de", "fr", "us", "gb", "nl", "pl", "jp", "in", "br", "es")
_SITES = ("https://search.invalid/?q=shoes", "https://news.invalid/today", "https://shop.invalid/", "")
_AGENTS = ("Mozilla/5.0 (X11; Linux x86_64) Gecko/20100101", "Mozilla/5.0 (iPhone; CPU iPhone OS 17_5) Mobile/15E148")


@dataclass(frozen=True, slots=True)
class Case:
    """A stream to measure with.

    Attributes:
        source: its name in the pipeline.
        pipeline: folder of the pipeline.
        counts: the gold product that counts each event once, and the column it does so in.
        lines: endless payloads of a seed, from a time on (ms since the epoch), at a rate (events a second).
    """

    source: str
    pipeline: Path
    counts: tuple[str, str]
    lines: Lines


def rsvps(seed: int, start_ms: int, rate: float) -> Iterator[bytes]:
    """RSVPs as the simulator makes them, :data:`_BLOCK` of them over and over, each time with later ids and times.

    So they are made in a tenth of the time. What came twice among the first comes twice each time.
    """
    made = [_NUMBERS.fullmatch(line) for line in itertools.islice(generate(seed, start_ms, rate), _BLOCK)]
    parts = [(m[1], int(m[2]), m[3], int(m[4]), m[5]) for m in made if m is not None]
    assert len(parts) == _BLOCK, "an RSVP is of another shape"
    for again in itertools.count():
        ids, times = again * _BLOCK, int(again * _BLOCK * 1000 / rate)
        for before, rsvp_id, between, mtime, behind in parts:
            yield b"%b%d%b%d%b" % (before, rsvp_id + ids, between, mtime + times, behind)


def views(seed: int, start_ms: int, rate: float) -> Iterator[bytes]:
    """Page views: visitors and pages by a power law, one in two hundred sent twice."""
    chance = random.Random(seed)
    number = seed << 40
    while True:
        number += 1
        view = {
            "view_id": number,
            "at": start_ms + int((number & 0xFFFF_FFFF) * 1000 / rate),
            "visitor": f"v{int(chance.paretovariate(0.6)) % 4_000_000:07}",
            "page": f"/p/{chance.choice(_COUNTRIES)}/{int(chance.paretovariate(0.9)) % 50_000:05}",
            "referrer": chance.choice(_SITES),
            "country": chance.choice(_COUNTRIES),
            "agent": chance.choice(_AGENTS),
            "load_ms": int(chance.expovariate(0.01)),
        }
        line = json.dumps(view, separators=(",", ":")).encode()
        yield line
        if number % 200 == 0:
            yield line


CASES = {
    "meetup": Case("rsvps", conf_dir() / "pipelines" / "meetup", ("members", "rsvps"), rsvps),
    "clicks": Case("views", Path(__file__).parent / "clicks", ("visitors", "views"), views),
}

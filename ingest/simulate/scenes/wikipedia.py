"""Edits of wikis in the shape of Wikimedia's ``recentchange``: by people, by bots, and some that are no edits."""

from __future__ import annotations

import random
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime

from ingest.simulate.scenes.arrival import Happening, arriving

_WIKIS = (
    ("enwiki", "en.wikipedia.org", 30), ("wikidatawiki", "www.wikidata.org", 26),
    ("commonswiki", "commons.wikimedia.org", 18), ("frwiki", "fr.wikipedia.org", 6), ("dewiki", "de.wikipedia.org", 6),
    ("eswiki", "es.wikipedia.org", 4), ("ruwiki", "ru.wikipedia.org", 4), ("jawiki", "ja.wikipedia.org", 2),
    ("viwiki", "vi.wikipedia.org", 2), ("enwiktionary", "en.wiktionary.org", 2),
)  # fmt: skip
_BOT_SHARE = {"wikidatawiki": 0.6, "commonswiki": 0.5, "viwiki": 0.5}
_PACE_S = 30.0  # events a second, about what Wikimedia has
_PAGES, _PEOPLE, _BOTS = 20_000, 3_000, 40


def events(seed: int, start_ms: int) -> Iterator[tuple[str, dict[str, object]]]:
    """``edits``: the fields of ``recentchange`` that the pipeline reads, and some that it does not."""
    rng = random.Random(f"wikipedia {seed}")
    for _, source, payload in arriving(_happenings(rng, start_ms), random.Random(f"network {seed}")):
        yield source, payload


def _happenings(rng: random.Random, start_ms: int) -> Iterator[Happening]:
    weights = [weight for _, _, weight in _WIKIS]
    now, number = float(start_ms), 0
    while True:
        wiki, server, _ = rng.choices(_WIKIS, weights)[0]
        yield int(now), "edits", _change(rng, wiki, server, int(now), number)
        number += 1
        now += rng.expovariate(_PACE_S) * 1000


def _change(rng: random.Random, wiki: str, server: str, now_ms: int, number: int) -> dict[str, object]:
    bot = rng.random() < _BOT_SHARE.get(wiki, 0.12)
    kind = rng.choices(("edit", "new", "log", "categorize"), (70, 6, 6, 18))[0]
    canary = rng.random() < 0.002
    page = int(_PAGES * rng.random() ** 4)
    user = f"Robo{rng.randrange(_BOTS)}Bot" if bot else f"Editor {int(_PEOPLE * rng.random() ** 2)}"
    old = int(rng.lognormvariate(8.5, 1.2)) if kind == "edit" else 0
    change: dict[str, object] = {
        "$schema": "/mediawiki/recentchange/1.0.0",
        "meta": {
            "id": str(uuid.UUID(int=rng.getrandbits(128), version=4)),
            "dt": datetime.fromtimestamp(now_ms / 1000, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
            "domain": "canary" if canary else server,
            "stream": "mediawiki.recentchange",
            "uri": f"https://{server}/wiki/Page_{page}",
        },
        "id": None if kind == "log" else 1_900_000_000 + number,
        "type": kind,
        "namespace": rng.choices((0, 1, 2, 3, 14), (75, 6, 6, 8, 5))[0],
        "title": f"Page {page}",
        "comment": rng.choice(("", "typo", "+ref", "revert", "/* History */ expanded", "объём", "リンク")),
        "timestamp": now_ms // 1000,
        "user": user,
        "bot": bot,
        "wiki": wiki,
        "server_name": server,
    }
    if kind in ("edit", "new"):
        change |= {"minor": rng.random() < 0.2, "length": {"old": old or None, "new": max(0, old + _delta(rng))}}
    return change


def _delta(rng: random.Random) -> int:
    return int(rng.choice((-1, 1, 1)) * rng.lognormvariate(3.5, 1.5))

"""Scenes: endless invented events of the example pipelines, from a seed; and feed files of offers.

A scene is a function of ``(seed, start_ms)`` that yields ``(source, payload)``: the name of a source of the pipeline of
the same name, and the payload as a JSON-ready dictionary. The first event happens at ``start_ms`` (ms since the epoch).
Events come in the order of arrival, so event times go back now and then. Equal arguments give equal streams.
"""

from __future__ import annotations

import csv
import functools
import gzip
import heapq
import io
import json
import random
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

Payload = dict[str, object]
Scene = Callable[[int, int], Iterator[tuple[str, Payload]]]
Happening = tuple[int, str, Payload]
"""Time in ms, source, payload."""

_LATE = 0.02  # share of events
_LATEST_MS = 120_000  # longest delay, which bounds the heap


def _delivered(happen: Callable[[random.Random, int], Iterator[Happening]]) -> Scene:
    """The scene of happenings (their times never decrease), in the order in which a network delivers them.

    An event takes some tens of milliseconds, and a few take up to two minutes.
    """

    @functools.wraps(happen)
    def scene(seed: int, start_ms: int) -> Iterator[tuple[str, Payload]]:
        network = random.Random(f"network {seed}")
        waiting: list[tuple[int, int, Happening]] = []
        for number, event in enumerate(happen(random.Random(f"{happen.__name__} {seed}"), start_ms)):
            now = event[0]
            delay = network.randrange(_LATEST_MS) if network.random() < _LATE else int(network.expovariate(1 / 40))
            heapq.heappush(waiting, (now + delay, number, event))
            while waiting and waiting[0][0] <= now:
                _, source, payload = heapq.heappop(waiting)[2]
                yield source, payload

    return scene


# --- Advertising: impressions on pages, and the clicks that follow some of them

CAMPAIGNS = tuple(
    f"{kind}-{thing}" for kind in ("spring", "sale", "new") for thing in ("shoes", "bikes", "tea", "maps")
)
_SITE_PAGES = ("front", "news", "sport", "weather", "forum")
_IMPRESSION_MS = 20.0  # between two impressions, on average
_SLOW_CLICK = 0.04  # of clicks: comes after the ten minutes that the pipeline counts
_TWICE = 0.03  # of clicks: the visitor clicks again


def click_rate(campaign: str) -> float:
    """Share of the campaign's impressions that are clicked at least once."""
    return 0.01 + 0.012 * CAMPAIGNS.index(campaign)


@_delivered
def ads(rng: random.Random, start_ms: int) -> Iterator[Happening]:
    """``impressions``: impression_id, at (ms), campaign, page, visitor; ``clicks``: click_id, at, impression_id."""
    clicks: list[tuple[int, str, str]] = []  # to come: time, click, impression
    now, number = float(start_ms), 0
    while True:
        at, impression = int(now), f"i{number}"
        while clicks and clicks[0][0] <= at:
            when, click, clicked = heapq.heappop(clicks)
            yield when, "clicks", {"click_id": click, "at": when, "impression_id": clicked}
        campaign = CAMPAIGNS[min(int(rng.expovariate(0.35)), len(CAMPAIGNS) - 1)]
        yield (
            at,
            "impressions",
            {
                "impression_id": impression,
                "at": at,
                "campaign": campaign,
                "page": rng.choice(_SITE_PAGES),
                "visitor": f"v{rng.randrange(50_000)}",
            },
        )
        if rng.random() < click_rate(campaign):
            for times in range(1 + (rng.random() < _TWICE)):
                heapq.heappush(clicks, (at + _click_delay_ms(rng), f"c{number}.{times}", impression))
        number += 1
        now += rng.expovariate(1 / _IMPRESSION_MS)


def _click_delay_ms(rng: random.Random) -> int:
    if rng.random() < _SLOW_CLICK:
        return int(rng.uniform(600_001, 900_000))
    return min(600_000, int(rng.lognormvariate(9.2, 1.0)))  # ten seconds at the median


# --- A shop: visitors view pages, fill and empty carts, buy, and return later

VISITORS = 400
_SHOP_PAGES = ("home", "search", "product", "product", "product", "reviews", "help")
_THINK_MS = 25_000.0
_AWAY_MS = 2_700_000.0  # on top of the half hour that ends a session


@_delivered
def clickstream(rng: random.Random, start_ms: int) -> Iterator[Happening]:
    """``actions``: action_id, at (ms), visitor, kind (view, add, remove, buy), page, sku (null for a plain page)."""
    # Time, visitor and cart, ordered by the time of the next action.
    due: list[tuple[int, str, list[str]]] = [(start_ms, "u0", [])]
    due += [(start_ms + int(rng.expovariate(1 / _AWAY_MS)), f"u{n}", []) for n in range(1, VISITORS)]
    heapq.heapify(due)
    number = 0
    while True:
        now, visitor, cart = heapq.heappop(due)
        kind, page, sku = _act(rng, cart)
        yield (
            now,
            "actions",
            {"action_id": number, "at": now, "visitor": visitor, "kind": kind, "page": page, "sku": sku},
        )
        number += 1
        pause = rng.expovariate(1 / _THINK_MS)
        if kind == "buy" or rng.random() < 0.09:  # leaves
            pause = 1_800_001 + rng.expovariate(1 / _AWAY_MS)
            cart = []
        heapq.heappush(due, (now + 1 + int(pause), visitor, cart))


def _act(rng: random.Random, cart: list[str]) -> tuple[str, str, str | None]:
    """The visitor's next action: kind, page, article. Changes the cart."""
    chance = rng.random()
    if cart and chance < 0.08:
        return "remove", "cart", cart.pop(rng.randrange(len(cart)))
    if cart and chance < 0.14:
        cart.clear()
        return "buy", "checkout", None
    sku = f"s{int(300 * rng.random() ** 2)}"
    if chance < 0.30:
        cart.append(sku)
        return "add", "product", sku
    page = rng.choice(_SHOP_PAGES)
    return "view", page, sku if page in ("product", "reviews") else None


# --- Electricity meters: one reading per customer every five minutes

CUSTOMERS = 40
EVERY_MS = 300_000
# Mean power in kW by hour of the day.
_PROFILE: tuple[float, ...] = (1.15, 1.0, 0.8, 0.75, 0.65, 0.8, 1.5, 2.0, 1.9, 1.55, 1.3, 1.25)
_PROFILE += (1.3, 1.15, 1.25, 1.2, 0.95, 0.95, 1.8, 2.45, 2.4, 2.3, 1.8, 1.45)
_LEAST_KW, _MOST_KW = 0.2, 9.4
_HOUR_MS = 3_600_000


@_delivered
def meters(rng: random.Random, start_ms: int) -> Iterator[Happening]:
    """``readings``: customer, seq (its how manieth reading), at (end of the five minutes, ms), wh, voltage."""
    size = [rng.uniform(0.5, 1.6) for _ in range(CUSTOMERS)]  # of the household, against the mean
    mood = [1.0] * CUSTOMERS
    seq, now = 0, start_ms
    while True:
        hour = _PROFILE[now // _HOUR_MS % 24]
        for number in range(CUSTOMERS):
            mood[number] = max(0.3, min(3.0, mood[number] + rng.gauss(0, 0.15) + 0.05 * (1 - mood[number])))
            kw = max(_LEAST_KW, min(_MOST_KW, hour * size[number] * mood[number] * rng.lognormvariate(0, 0.25)))
            reading: Payload = {
                "customer": f"c{number:03}",
                "seq": seq,
                "at": now,
                "wh": round(kw * 1000 / 12),
                "voltage": round(rng.gauss(240.5 - kw * 0.6, 1.2), 2),
            }
            yield now, "readings", reading
        seq += 1
        now += EVERY_MS


# --- Rides on hired bikes: one event at the end of each ride

CITIES = ("Utrecht", "Gent", "Aarhus", "Graz", "Leeds", "Nantes")
_RIDE_MS = 50.0  # between two rides, on average


@_delivered
def trips(rng: random.Random, start_ms: int) -> Iterator[Happening]:
    """Source ``trips``: trip_id, at (end of the ride, ms), city, rider, age (years), metres, seconds."""
    now, number = float(start_ms), 0
    while True:
        rider = int(30_000 * rng.random() ** 1.5)
        age = 16 + rider * 7_919 % 62
        speed = max(1.5, rng.gauss(5.2 - 0.03 * abs(age - 32), 0.8))  # metres a second
        seconds = int(rng.lognormvariate(6.3, 0.6)) + 60
        city = CITIES[min(int(rng.expovariate(0.6)), len(CITIES) - 1)]
        payload: Payload = {
            "trip_id": number,
            "at": int(now),
            "city": city,
            "rider": rider,
            "age": age,
            "metres": int(speed * seconds),
            "seconds": seconds,
        }
        yield int(now), "trips", payload
        number += 1
        now += rng.expovariate(1 / _RIDE_MS)


# --- Edits of wikis in the shape of Wikimedia's ``recentchange``

_WIKIS = (
    ("enwiki", "en.wikipedia.org", 30), ("wikidatawiki", "www.wikidata.org", 26),
    ("commonswiki", "commons.wikimedia.org", 18), ("frwiki", "fr.wikipedia.org", 6), ("dewiki", "de.wikipedia.org", 6),
    ("eswiki", "es.wikipedia.org", 4), ("ruwiki", "ru.wikipedia.org", 4), ("jawiki", "ja.wikipedia.org", 2),
    ("viwiki", "vi.wikipedia.org", 2), ("enwiktionary", "en.wiktionary.org", 2),
)  # fmt: skip
_BOT_SHARE = {"wikidatawiki": 0.6, "commonswiki": 0.5, "viwiki": 0.5}
_EDITS_PER_S = 30.0  # events a second, about what Wikimedia has
_WIKI_PAGES, _PEOPLE, _BOTS = 20_000, 3_000, 40


@_delivered
def wikipedia(rng: random.Random, start_ms: int) -> Iterator[Happening]:
    """``edits``: the fields of ``recentchange`` that the pipeline reads, and some that it does not."""
    weights = [weight for _, _, weight in _WIKIS]
    now, number = float(start_ms), 0
    while True:
        wiki, server, _ = rng.choices(_WIKIS, weights)[0]
        yield int(now), "edits", _change(rng, wiki, server, int(now), number)
        number += 1
        now += rng.expovariate(_EDITS_PER_S) * 1000


def _change(rng: random.Random, wiki: str, server: str, now_ms: int, number: int) -> Payload:
    bot = rng.random() < _BOT_SHARE.get(wiki, 0.12)
    kind = rng.choices(("edit", "new", "log", "categorize"), (70, 6, 6, 18))[0]
    canary = rng.random() < 0.002
    page = int(_WIKI_PAGES * rng.random() ** 4)
    user = f"Robo{rng.randrange(_BOTS)}Bot" if bot else f"Editor {int(_PEOPLE * rng.random() ** 2)}"
    old = int(rng.lognormvariate(8.5, 1.2)) if kind == "edit" else 0
    change: Payload = {
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


# --- Offers of many merchants: single updates as they come, or whole feed files

MERCHANTS = 14_000
_FEED_FORMATS = ("csv", "jsonl", "parquet", "csv.gz", "jsonl.gz")
_THINGS = ("Kettle", "Lamp", "Raincoat", "Bicycle bell", "Notebook", "Desk", "Teapot", "Backpack", "Blanket", "Torch")
_KINDS = ("oak", "steel", "wool", "recycled", "folding", "small", "large", "blue", "grey", "waterproof")
_REPEATED, _MALFORMED = 0.03, 0.005


def offers(seed: int, start_ms: int) -> Iterator[tuple[str, Payload]]:
    """Source ``offers``: updates of offers of all merchants, one every 10 ms, now and then an older version."""
    rng = random.Random(f"offers {seed}")
    versions: dict[tuple[int, int], int] = {}
    now = start_ms
    while True:
        merchant, number = int(MERCHANTS * rng.random() ** 2), int(100 * rng.random() ** 2)
        version = versions.get((merchant, number), 0) + 1
        if len(versions) < 1_000_000 or version > 1:
            versions[merchant, number] = version
        old = rng.random() < 0.1
        yield "offers", offer(seed, merchant, number, max(1, version - 1) if old else version, now)
        now += 10


def offer(seed: int, merchant: int, number: int, version: int, start_ms: int) -> Payload:
    """One version of an offer: equal arguments give equal offers."""
    rng = random.Random(f"{seed} {merchant} {number} {version}")
    name = f"m{merchant:05}"
    return {
        "merchant": name,
        "offer": f"o{number:07}",
        "version": version,
        "title": f'{rng.choice(_THINGS)}, {rng.choice(_KINDS)} and "{rng.choice(_KINDS)}", no. {number}',
        "price": round(rng.lognormvariate(3.2, 1.0), 2),
        "currency": "EUR" if merchant % 5 else "SEK",
        "category": f"home/{rng.choice(_THINGS).lower().replace(' ', '-')}",
        "available": rng.random() < 0.9,
        "deleted": rng.random() < 0.02,
        "url": f"https://{name}.invalid/p/{number}?v={version}",
        "updated_at": start_ms + version * _HOUR_MS + number % 1_000,
    }


def feed_rows(seed: int, merchant: int, offers: int, rounds: int, start_ms: int) -> Iterator[list[Payload | None]]:
    """The rows of each of a merchant's files: versions in any order, some repeated, None for a malformed row.

    Round ``r`` has most offers in version ``r + 1``, and some in a version of another round.
    """
    rng = random.Random(f"feed {seed} {merchant}")
    for turn in range(rounds):
        rows: list[Payload | None] = []
        for number in range(offers):
            version = turn + 1 if rng.random() < 0.8 else 1 + int(rounds * rng.random())
            rows.append(offer(seed, merchant, number, version, start_ms))
            if rng.random() < _REPEATED:
                rows.append(rows[-1])
            if rng.random() < _MALFORMED:
                rows.append(None)
        rng.shuffle(rows)
        yield rows


@dataclass(frozen=True, slots=True)
class Written:
    """Numbers of written files, of their rows, and of malformed rows among these."""

    files: int
    rows: int
    malformed: int


def write_feeds(
    folder: Path,
    seed: int,
    merchants: int = MERCHANTS,
    offers: int = 10,
    rounds: int = 1,
    start_ms: int = 1_790_000_000_000,
) -> Written:
    """Write feed files below ``folder``: one a merchant and round, in a subfolder a merchant, the formats in turn.

    Args:
        seed: equal seeds give equal files.
        offers: offers of each merchant.
        start_ms: time of the first version, ms since the epoch.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    files = count = malformed = 0
    for merchant in range(merchants):
        place = folder / f"m{merchant:05}"
        place.mkdir(parents=True, exist_ok=True)
        for turn, rows in enumerate(feed_rows(seed, merchant, offers, rounds, start_ms)):
            kind = _FEED_FORMATS[(merchant + turn) % len(_FEED_FORMATS)]
            if kind == "parquet":  # cannot hold a malformed row
                rows = [row for row in rows if row is not None]
                pq.write_table(pa.Table.from_pylist(rows), place / f"offers-{turn}.parquet")
            else:
                text = (_csv if kind.startswith("csv") else _jsonl)(rows)
                packed = gzip.compress(text, 1, mtime=0) if kind.endswith(".gz") else text
                (place / f"offers-{turn}.{kind}").write_bytes(packed)
            files += 1
            count += len(rows)
            malformed += sum(row is None for row in rows)
    return Written(files, count, malformed)


def _csv(rows: Sequence[Payload | None]) -> bytes:
    text = io.StringIO()
    writer = csv.DictWriter(text, tuple(offer(0, 0, 0, 1, 0)), lineterminator="\n")
    writer.writeheader()
    for row in rows:
        if row is None:
            text.write("this row,is not one\n")
        else:
            writer.writerow({name: str(v).lower() if isinstance(v, bool) else v for name, v in row.items()})
    return text.getvalue().encode()


def _jsonl(rows: Sequence[Payload | None]) -> bytes:
    return "".join(("{broken" if row is None else json.dumps(row)) + "\n" for row in rows).encode()


SCENES: dict[str, Scene] = {
    "ads": ads,
    "clickstream": clickstream,
    "meters": meters,
    "offers": offers,
    "trips": trips,
    "wikipedia": wikipedia,
}
"""Scene by pipeline."""

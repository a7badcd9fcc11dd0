"""Offers of many merchants: single updates as they come, or whole feed files."""

from __future__ import annotations

import csv
import gzip
import io
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

MERCHANTS = 14_000
FORMATS = ("csv", "jsonl", "parquet", "csv.gz", "jsonl.gz")
COLUMNS = (
    "merchant",
    "offer",
    "version",
    "title",
    "price",
    "currency",
    "category",
    "available",
    "deleted",
    "url",
    "updated_at",
)
_THINGS = ("Kettle", "Lamp", "Raincoat", "Bicycle bell", "Notebook", "Desk", "Teapot", "Backpack", "Blanket", "Torch")
_KINDS = ("oak", "steel", "wool", "recycled", "folding", "small", "large", "blue", "grey", "waterproof")
_HOUR_MS = 3_600_000
_REPEATED, _MALFORMED = 0.03, 0.005
Offer = dict[str, object]


@dataclass(frozen=True, slots=True)
class Written:
    """What :func:`write_feeds` wrote: files, rows, and how many of the rows are malformed."""

    files: int
    rows: int
    malformed: int


def offers(seed: int, start_ms: int) -> Iterator[tuple[str, Offer]]:
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


def offer(seed: int, merchant: int, number: int, version: int, start_ms: int) -> Offer:
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


def feed_rows(seed: int, merchant: int, offers: int, rounds: int, start_ms: int) -> Iterator[list[Offer | None]]:
    """The rows of each of a merchant's feeds: versions in any order, some repeated, None for a malformed row.

    Round ``r`` has most offers in version ``r + 1``, and some in a version of another round.
    """
    rng = random.Random(f"feed {seed} {merchant}")
    for turn in range(rounds):
        rows: list[Offer | None] = []
        for number in range(offers):
            version = turn + 1 if rng.random() < 0.8 else 1 + int(rounds * rng.random())
            rows.append(offer(seed, merchant, number, version, start_ms))
            if rng.random() < _REPEATED:
                rows.append(rows[-1])
            if rng.random() < _MALFORMED:
                rows.append(None)
        rng.shuffle(rows)
        yield rows


def write_feeds(
    folder: Path,
    *,
    seed: int,
    merchants: int = MERCHANTS,
    offers: int = 10,
    rounds: int = 1,
    start_ms: int = 1_790_000_000_000,
    formats: Sequence[str] = FORMATS,
) -> Written:
    """Write ``merchants * rounds`` feed files below ``folder``, each of one merchant.

    Args:
        folder: one subfolder a merchant.
        offers: per merchant.
        formats: from :data:`FORMATS`, in turn.
    """
    files = count = malformed = 0
    for merchant in range(merchants):
        place = folder / f"m{merchant:05}"
        place.mkdir(parents=True, exist_ok=True)
        for turn, rows in enumerate(feed_rows(seed, merchant, offers, rounds, start_ms)):
            kind = formats[(merchant + turn) % len(formats)]
            if kind == "parquet":  # which cannot hold a malformed row
                rows = [row for row in rows if row is not None]
                _write_parquet(place / f"offers-{turn}.parquet", rows)
            else:
                text = (_csv if kind.startswith("csv") else _jsonl)(rows)
                packed = gzip.compress(text, 1, mtime=0) if kind.endswith(".gz") else text
                (place / f"offers-{turn}.{kind}").write_bytes(packed)
            files += 1
            count += len(rows)
            malformed += sum(row is None for row in rows)
    return Written(files, count, malformed)


def _csv(rows: Sequence[Offer | None]) -> bytes:
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        if row is None:
            text.write("this row,is not one\n")
        else:
            writer.writerow({name: str(v).lower() if isinstance(v, bool) else v for name, v in row.items()})
    return text.getvalue().encode()


def _jsonl(rows: Sequence[Offer | None]) -> bytes:
    return "".join(("{broken" if row is None else json.dumps(row)) + "\n" for row in rows).encode()


def _write_parquet(path: Path, rows: Sequence[Offer | None]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(list(rows)), path)

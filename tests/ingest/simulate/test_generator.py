"""The generator's shape, against real recordings where there are any."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any

import orjson
import pytest

from ingest.simulate.generator import BLOCK, RsvpGenerator
from tests.recordings import RECORDINGS, generate

START_MS = 1_700_000_000_000
RECORDING = "meetup/rsvps_2017-03-19.jsonl"


@dataclass(frozen=True)
class Shape:
    """What is compared."""

    bytes_a_line: float
    topics: int
    topics_a_group: float
    topic_shares: tuple[float, ...]
    groups: int
    top_groups_share: float
    countries: int
    top_country_share: float
    members: int
    without_venue: float
    without_photo: float
    without_time: float
    yes: float
    alone: float
    repeated: float
    flipped: int
    backward: int
    exact: int
    older_than_a_minute: float
    older_than_an_hour: float


def share(rows: list[dict[str, Any]], test: Any) -> float:
    return sum(1 for row in rows if test(row)) / len(rows)


def shape_of(lines: list[bytes]) -> Shape:
    rows = [orjson.loads(line) for line in lines]
    topics = Counter(topic["topic_name"] for row in rows for topic in row["group"]["group_topics"])
    groups = Counter(row["group"]["group_id"] for row in rows)
    countries = Counter(row["group"]["group_country"] for row in rows)
    by_id: dict[int, list[dict[str, Any]]] = defaultdict(list)
    newest, late = 0, []
    for row in rows:
        by_id[row["rsvp_id"]].append(row)
        newest = max(newest, row["mtime"])
        late.append((newest - row["mtime"]) / 1_000)
    again = [same for same in by_id.values() if len(same) > 1]
    return Shape(
        bytes_a_line=sum(map(len, lines)) / len(lines),
        topics=len(topics),
        topics_a_group=topics.total() / len(rows),
        topic_shares=tuple(topics.most_common(rank)[-1][1] / len(rows) for rank in (1, 10, 30, 100, 300)),
        groups=len(groups),
        top_groups_share=sum(n for _, n in groups.most_common(len(groups) // 10)) / len(rows),
        countries=len(countries),
        top_country_share=countries.most_common(1)[0][1] / len(rows),
        members=len({row["member"]["member_id"] for row in rows}),
        without_venue=share(rows, lambda row: "venue" not in row),
        without_photo=share(rows, lambda row: "photo" not in row["member"]),
        without_time=share(rows, lambda row: "time" not in row["event"]),
        yes=share(rows, lambda row: row["response"] == "yes"),
        alone=share(rows, lambda row: row["guests"] == 0),
        repeated=len(again) / len(by_id),
        flipped=sum(len({row["response"] for row in same}) > 1 for same in again),
        backward=sum(any(b["mtime"] < a["mtime"] for a, b in pairwise(same)) for same in again),
        exact=len(lines) - len(set(lines)),
        older_than_a_minute=sum(seconds > 60 for seconds in late) / len(late),
        older_than_an_hour=sum(seconds > 3_600 for seconds in late) / len(late),
    )


@pytest.fixture(scope="module")
def recording() -> list[bytes]:
    if not (RECORDINGS / RECORDING).is_file():
        pytest.skip(f"no recording {RECORDING} in {RECORDINGS} (set MILLRACE_SHARED_DATA)")
    return [line for line in (RECORDINGS / RECORDING).read_bytes().split(b"\n") if line]


def test_has_the_shape_of_the_recording(recording: list[bytes]) -> None:
    real = shape_of(recording)
    made = shape_of(list(islice(generate(1, START_MS, rate=1.4), len(recording))))

    def near(name: str, factor: float) -> None:
        a, b = getattr(real, name), getattr(made, name)
        assert a / factor <= b <= a * factor, f"{name}: recorded {a}, generated {b}"

    near("bytes_a_line", 1.05)
    near("topics", 1.2)
    near("topics_a_group", 1.1)
    for rank, (a, b) in enumerate(zip(real.topic_shares, made.topic_shares, strict=True)):
        assert a / 1.7 <= b <= a * 1.7, f"topic share {rank}: recorded {a}, generated {b}"
    near("groups", 1.25)
    near("top_groups_share", 1.3)
    near("countries", 1.3)
    near("top_country_share", 1.25)
    near("members", 1.25)
    near("yes", 1.1)
    near("alone", 1.05)
    near("repeated", 1.7)
    for name in ("flipped", "backward", "exact", "without_time", "older_than_a_minute", "older_than_an_hour"):
        near(name, 3.0)
    near("without_photo", 2.0)


def test_has_every_quirk_of_the_stream() -> None:
    lines = list(islice(generate(2, START_MS), 20_000))
    made = shape_of(lines)
    assert 0.07 <= made.without_venue <= 0.20
    assert 0.003 <= made.exact / len(lines) <= 0.009
    assert made.flipped > 100
    assert made.backward > 500
    assert made.without_time > 0
    rows = [orjson.loads(line) for line in lines]
    ages = [START_MS + index - row["mtime"] for index, row in enumerate(rows)]
    assert sum(age < 60_000 for age in ages) > 0.95 * len(ages)
    assert any(30 <= age / 86_400_000 <= 40 for age in ages), "none is a month late"
    assert min(ages) >= 0, "changed after it arrived"
    scripts = {"latin é": "é", "cyrillic": "О", "hebrew": "ד", "chinese": "小", "devanagari": "र", "korean": "지"}
    text = b"".join(lines).decode()
    assert [name for name, letter in scripts.items() if letter not in text] == []


def test_groups_do_not_change() -> None:
    seen: dict[int, Any] = {}
    for line in islice(generate(3, START_MS), 30_000):
        group = orjson.loads(line)["group"]
        assert seen.setdefault(group["group_id"], group) == group


def test_same_seed_same_stream() -> None:
    first = list(islice(generate(7, START_MS), 3_000))
    assert list(islice(generate(7, START_MS), 3_000)) == first
    assert list(islice(generate(8, START_MS), 3_000)) != first


def test_any_block_can_be_had_by_itself() -> None:
    whole = list(islice(generate(5, START_MS), 4 * BLOCK))
    assert RsvpGenerator(5, START_MS).block(3) == whole[3 * BLOCK :]


def test_new_rsvps_have_new_ids_across_blocks() -> None:
    generator = RsvpGenerator(5, START_MS)
    ids = [{orjson.loads(line)["rsvp_id"] for line in generator.block(number)} for number in (0, 1, 2)]
    assert not ids[0] & ids[1]
    assert max(ids[1]) < min(ids[2])


def test_starts_now_unless_told() -> None:
    mtimes = sorted(orjson.loads(line)["mtime"] for line in islice(generate(1), 1_000))
    assert abs(mtimes[500] / 1_000 - time.time()) < 30


def test_is_no_bottleneck() -> None:
    generator = RsvpGenerator(1, START_MS)
    generator.block(0)
    start = time.process_time()
    for number in range(1, 21):
        generator.block(number)
    assert 20 * BLOCK / (time.process_time() - start) > 2_000, "ten times as fast on a plain machine"

"""Load shedding: by itself, and in a node whose broker does not answer."""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import Iterable
from pathlib import Path

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingest.border.admission import Shedder, Waiting
from ingest.broker import EmbeddedBroker
from lakehouse.contract.envelope import WEIGHT, Envelope
from lakehouse.contract.pipeline.source import ShedSpec
from tests.ingest.conftest import consume, event, get, pipeline_of, request, running_node, settings_of


class Site:
    """A shedder with everything around it in the test's hand."""

    def __init__(self, spec: ShedSpec) -> None:
        self.waiting = Waiting(0, 0, 0)
        self.now = 1_000.0
        self.shedder = Shedder("s", spec, lambda: self.waiting, now=lambda: self.now, clock=lambda: int(self.now * 1e9))

    def after(self, seconds: float, **waiting: int) -> bool:
        """Whether it sheds so much later."""
        self.now += seconds
        self.waiting = Waiting(**({"events": 0, "bytes": 0, "oldest_at": 0} | waiting))
        return self.shedder.share > 0


def test_it_switches_itself_on_and_off_again_with_hysteresis() -> None:
    site = Site(ShedSpec(on_events=100, off=0.5, hold="2 seconds"))
    assert not site.after(1, events=99)
    assert site.after(1, events=100)
    assert site.after(1, events=60)  # not below half yet
    assert site.after(5, events=60)
    assert site.after(1, events=40)
    assert site.after(1, events=40)
    assert site.after(0.5, events=60)  # up again: the two seconds begin anew
    assert site.after(1, events=40)
    assert site.after(1.9, events=40)
    assert not site.after(0.2, events=40)
    assert not site.after(1, events=60)


def test_each_limit_switches_it_on() -> None:
    site = Site(ShedSpec(on_bytes=1_000, on_age="3 seconds", hold="1 second"))
    assert not site.after(1, events=10**9)
    assert site.after(1, bytes=1_000)
    assert not [site.after(1) for _ in range(3)][-1]
    assert not site.after(1, oldest_at=int((site.now - 1.0) * 1e6))
    assert site.after(1, oldest_at=int((site.now - 3.0) * 1e6))


@settings(max_examples=20)
@given(st.lists(st.text(min_size=1), unique=True, min_size=1, max_size=50), st.floats(0.05, 0.95))
def test_an_events_fate_hangs_on_its_id_alone(ids: list[str], share: float) -> None:
    fates = []
    for order in (ids, ids[::-1]):
        site = Site(ShedSpec(on_events=1, share=share))
        site.after(1, events=1)
        fates.append({event_id: site.shedder.judge(event_id, {}) for event_id in order})
    assert fates[0] == fates[1]


def estimate(fates: Iterable[tuple[tuple[str, str], ...] | None]) -> float:
    return sum(float(dict(extra).get(WEIGHT, 1)) for extra in fates if extra is not None)


@pytest.mark.parametrize("share", [0.5, 0.9, 0.99])
def test_weights_scale_back_to_what_there_was(share: float) -> None:
    site = Site(ShedSpec(on_events=1, share=share))
    site.after(1, events=1)
    fates = [site.shedder.judge(f"event {number}", {}) for number in range(100_000)]
    kept = 100_000 - site.shedder.count
    deviation = (share * (1 - share) * 100_000) ** 0.5  # of a binomial count
    assert abs(kept - (1 - share) * 100_000) < 4 * deviation
    assert abs(estimate(fates) - 100_000) < 4 * deviation / (1 - share)


def test_what_is_named_is_always_kept_and_weighs_one() -> None:
    site = Site(ShedSpec(mode="semantic", keep=('kind in ["buy"]', "amount > 5"), share=0.99, on_events=1))
    assert site.shedder.judge("a", {"kind": "look"}) == ()  # nothing waits
    site.after(1, events=1)
    for number in range(500):
        assert site.shedder.judge(str(number), {"kind": "buy"}) == ()
        assert site.shedder.judge(str(number), {"kind": "look", "amount": 6}) == ()
    fates = [site.shedder.judge(str(number), {"kind": "look", "amount": 5}) for number in range(500)]
    assert None in fates
    assert () not in fates


def lines(numbers: Iterable[int]) -> bytes:
    return b"\n".join(map(event, numbers))


@pytest.mark.broker
async def test_a_node_sheds_while_its_broker_stalls_and_stops_by_itself(tmp_path: Path, broker: EmbeddedBroker) -> None:
    topic = f"shed-{uuid.uuid4().hex[:8]}"
    spec = ShedSpec(mode="semantic", keep=("who = 'k3'",), share=0.8, on_events=50, hold="100 ms")
    pipeline = pipeline_of(topic, "http", shed=spec)
    ndjson = {"content_type": "application/x-ndjson"}
    taken: set[str] = set()
    left_out = 0

    async with running_node(settings_of(tmp_path), pipeline, broker.bootstrap) as url:

        async def post(numbers: range) -> list[int]:
            nonlocal left_out
            status, _, answer = await request(url, "POST", "/v1/clicks", lines(numbers), **ndjson)
            assert (status, answer["rejected"]) == (202, [])
            shed: list[int] = answer.get("shed", [])
            assert [place for place, token in enumerate(answer["tokens"]) if token is None] == shed
            taken.update(str(number) for place, number in enumerate(numbers) if place not in set(shed))
            left_out += len(shed)
            return shed

        assert await post(range(10)) == []
        assert broker.pid is not None
        os.kill(broker.pid, signal.SIGSTOP)
        try:
            first = 1_000
            while not await post(range(first, first + 20)):
                first += 20
                assert first < 100_000, "it never began to shed"
            shed = await post(range(200_000, 201_000))
            assert await post(range(200_000, 201_000)) == shed  # sent again: the same fate
            assert not [place for place in shed if (200_000 + place) % 7 == 3]
            assert abs(len(shed) - 0.8 * 1_000 * 6 / 7) < 4 * (0.8 * 0.2 * 857) ** 0.5
            status, _, answer = await request(
                url, "POST", "/v1/clicks", event(200_000 + shed[0]), content_type="application/json"
            )
            left_out += 1
            assert (status, answer) == (202, {"shed": True, "event_id": str(200_000 + shed[0])})
            _, _, stats = await get(url, "/v1/stats")
            assert (stats["sources"]["clicks"]["shed"], stats["sources"]["clicks"]["shed_share"]) == (left_out, 0.8)
            assert f'millrace_collector_shed_share{{source="clicks"}} {0.8}' in (await get(url, "/metrics"))[2]
        finally:
            os.kill(broker.pid, signal.SIGCONT)

        calm = False
        while not calm:  # by itself, within the test's own time limit
            _, _, stats = await get(url, "/v1/stats")
            calm = stats["sources"]["clicks"]["shed_share"] == 0.0
        assert await post(range(300_000, 300_010)) == []

    async with running_node(settings_of(tmp_path), pipeline, broker.bootstrap) as url:
        _, _, stats = await get(url, "/v1/stats")
        assert stats["sources"]["clicks"]["shed"] == left_out  # counted over restarts

    records = {}
    for record in consume(broker.bootstrap, topic, len(taken), timeout_s=60):
        records[Envelope.from_headers(record.headers).event_id] = record
    assert records.keys() == taken  # what was acknowledged is there, what was shed is not
    of_batch = [record for name, record in records.items() if 200_000 <= int(name) < 201_000]
    weights = [float(dict(record.headers).get(WEIGHT, b"1")) for record in of_batch]
    assert {weight for weight in weights if weight != 1} == {5.0}
    assert sum(weight == 1 for weight in weights) == sum(number % 7 == 3 for number in range(200_000, 201_000))
    assert abs(sum(weights) - 1_000) < 4 * (0.8 * 0.2 * 857) ** 0.5 * 5
    assert WEIGHT not in dict(records["300000"].headers)
    assert orjson.loads(records["300000"].value)["id"] == 300_000

"""Scenes: endless, equal for equal seeds, and events of the pipelines that they are for."""

from __future__ import annotations

import json
from itertools import islice
from typing import Any

import pytest

from ingest.simulate.scenes import SCENES
from lakehouse.contract.pipeline import load_pipeline
from lakehouse.contract.settings import conf_dir

START_MS = 1_767_268_800_000


def events(name: str, seed: int = 1, count: int = 3_000) -> list[tuple[str, Any]]:
    return list(islice(SCENES[name](seed, START_MS), count))


@pytest.mark.parametrize("name", ["ads", "clickstream", "trips"])
def test_events_fit_their_pipeline(name: str) -> None:
    pipeline = load_pipeline(conf_dir() / "pipelines" / name)
    found = events(name)
    assert {source for source, _ in found} == set(pipeline.sources)
    ids = []
    for source, payload in found:
        declared = pipeline.sources[source]
        assert declared.event_id_template is not None
        ids.append((source, declared.event_id_template.render(payload)))
        assert all(payload[path] is not None for path in declared.required)
        assert json.loads(json.dumps(payload)) == payload
    assert len(set(ids)) == len(ids)
    times = [payload["at"] for _, payload in found]
    assert min(times) >= START_MS
    assert times != sorted(times)  # they come in the order of arrival
    late = max(max(times[: n + 1]) - at for n, at in enumerate(times))
    assert 1_000 < late <= 120_000 + 300_000


@pytest.mark.parametrize("name", sorted(SCENES))
def test_equal_seeds_make_equal_events(name: str) -> None:
    assert events(name, 3, 300) == events(name, 3, 300)
    assert events(name, 3, 300) != events(name, 4, 300)

"""Scenes: endless invented events of the example pipelines, from a seed.

A scene is a function ``events(seed, start_ms)`` that yields ``(source, payload)``: the source's name in the pipeline of
the same name, and an event's payload as a JSON-ready dictionary. Its first event happens at ``start_ms`` (ms since the
epoch); events come in order of arrival, so their own times go back now and then. Equal arguments make equal streams.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ingest.simulate.scenes import ads, clickstream, meters, offers, trips, wikipedia

Payload = dict[str, object]
Scene = Callable[[int, int], Iterator[tuple[str, Payload]]]

SCENES: dict[str, Scene] = {
    "ads": ads.events,
    "clickstream": clickstream.events,
    "meters": meters.events,
    "offers": offers.events,
    "trips": trips.events,
    "wikipedia": wikipedia.events,
}
"""Scene by pipeline."""

__all__ = ["SCENES", "Payload", "Scene"]

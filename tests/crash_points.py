"""The crash points of the code (:mod:`lakehouse.contract.errors`), by what passes them."""

from __future__ import annotations

CRASH_POINTS = (
    "bronze.before_append",
    "bronze.after_append",
    "live.after_judge",
    "live.before_commit",
    "live.after_first_commit",
    "live.after_commits",
)
LOAD_CRASH_POINTS = ("load.before_commit", "load.after_commit")
JOIN_CRASH_POINTS = ("join.after_judge", "join.after_index", "join.before_commit", "join.after_commit")
JOIN_BUILD_CRASH_POINTS = ("join.after_clear", "join.after_replace")
"""Points of building a join from bronze: passed where its product is new, lost or declared otherwise."""

REFINE_CRASH_POINTS = ("refine.before_commit",)

SEEN_CRASH_POINTS = ("seen.after_run", "seen.after_note")
"""Points of the index of seen events, passed each time its journal becomes a run."""

REBUILD_CRASH_POINTS = ("rebuild.after_forget", "rebuild.after_first_replace", "rebuild.before_note")
"""Points of building products from bronze: passed where products are new, lost or declared otherwise."""

DERIVED_CRASH_POINTS = (
    "view.before_commit",
    "alerts.before_commit",
    "alerts.after_commit",
)
"""Points of what follows products: passed only where a pipeline has views or alerts."""

ADDED_CRASH_POINTS = ("added.after_copy", "added.after_note")
"""Points of the beginning of a query that is added and counts from now on."""

FORGET_CRASH_POINTS = ("forget.after_reader", "forget.after_index", "forget.after_table", "forget.after_state")
"""Points of clearing away what a removed query leaves."""

SOURCE_CRASH_POINTS = ("source.after_stop", "source.after_products")
"""Points of a source that changes while its driver runs: stopped; its products started, and its query not yet."""

CARE_CRASH_POINTS = ("care.before_commit", "care.after_commit")
"""Points of care by a product's writer: compaction and folding."""

ONCE_CRASH_POINTS = (
    "once.receive",
    "once.log_message",
    "once.store_received",
    "once.process",
    "once.log_request",
    "once.store_sending",
    "once.request",
    "once.acknowledge",
    "once.remove_request",
    "once.remove_message",
    "once.acknowledge_upstream",
)
"""Points of a client that calls a third party exactly once: each is passed after the step of its name."""


def points_of(*parts: str) -> list[str]:
    """The points of the write path that these parts pass."""
    return [point for point in CRASH_POINTS if point.startswith(parts)]

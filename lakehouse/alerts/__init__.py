"""Alerts: a condition over a product, said once when it comes about and once when it ends.

Each version of the product is looked at, in order. What an alert knows stands in table ``alerts``: a row for each key
that was ever raised, and in each commit's metadata the product version it reaches and the streaks that have not come to
anything yet. So one commit holds both what is said and how far was looked: after a crash the versions behind it are
looked at again and give the same, no alert is repeated and none forgotten.
"""

from __future__ import annotations

from lakehouse.alerts.book import AlertBook
from lakehouse.alerts.watcher import Watcher

__all__ = ["AlertBook", "Watcher"]

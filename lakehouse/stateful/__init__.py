"""Products that remember: sessions, windows by count, drift, and joins of two sources.

They hold to what all products hold to: the table is the state, a commit names its batch, and everything follows from
bronze, so that a replay gives the same rows. Where order matters it is bronze's own (:data:`ORDER`); where time
matters it is the newest event time so far and never a wall clock.
"""

from lakehouse.stateful.base import ORDER, Keeps, stateful_operator

__all__ = ["ORDER", "Keeps", "stateful_operator"]

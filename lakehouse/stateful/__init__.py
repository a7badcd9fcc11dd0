"""Products that remember: sessions, windows by count, drift, and joins of two sources.

They hold to what all products hold to: the table is the state, a commit names its position in bronze, and everything
follows from bronze, so that a replay gives the same rows. Where order matters it is bronze's own
(:data:`lakehouse.operators.base.ORDER`). Where time matters it is the newest event time so far and never a wall clock.

windows     sessions, and windows of so many events
drift       concept drift
join_index  what a join remembers
live_join   keeps a join at a version of both bronze tables, and builds it from all of them
report      what products remember, without Spark
"""

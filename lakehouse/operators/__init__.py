"""Operators: how a product is aggregated in Spark, and how partial results are merged.

base       the contract, and what operators share
registry   the operator of a product
aggregate  SQL aggregates, over events and over the pairs of a join
sketched   heavy hitters, distinct counts, frequencies, membership, quantiles, and the skew of event times
rows       the latest row of each key, a uniform sample, single events
sql        what the SQL of a product may be
"""

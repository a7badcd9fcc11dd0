"""Operators: how a product is aggregated in Spark, and how partial results are merged.

base       the contract, and what operators share
registry   the operator of a product
windows    windows and panes, for all operators
aggregate  SQL aggregates
sketched   heavy hitters, distinct counts, frequencies, membership
quantiles  quantiles, and the skew of event times
rows       the latest row of each key, a uniform sample
sql        what the SQL of a product may be
"""

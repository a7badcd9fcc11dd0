"""Kafka to gold: bronze, silver and gold Delta tables kept up to date by Spark.

``lakehouse.contract`` is pure Python and is all that ``ingest`` and ``serve`` may import from here.
"""

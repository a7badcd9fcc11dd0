"""Moved to :mod:`lakehouse.contract.rows`; this name goes when lakehouse.operators.latest imports from there."""

from lakehouse.contract.rows import LATEST

__all__ = ["LATEST"]

"""Fixtures of the chaos tests: the Spark session, for bronze."""

from __future__ import annotations

from tests.lakehouse.conftest import spark

__all__ = ["spark"]

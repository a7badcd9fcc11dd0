"""Where recordings of real streams are; they are never part of a clone."""

from __future__ import annotations

import os
from pathlib import Path

RECORDINGS = Path(os.environ.get("MILLRACE_SHARED_DATA") or Path(__file__).parents[2] / "shared" / "data")
"""A folder beside the checkout, or that which MILLRACE_SHARED_DATA names; it may be missing."""

"""One Spark session for all tests of a run, and lakes on the embedded broker."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from ingest.broker import EmbeddedBroker
from lakehouse.contract.lake import Lake
from lakehouse.contract.settings import load_settings
from lakehouse.contract.storage import lake_path
from lakehouse.session import build_session
from tests.lakehouse.lakes import Site, site


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """The session, as every driver makes it."""
    session = build_session(load_settings({}, spark__driver_memory="1g"), "tests")
    yield session
    session.stop()


@pytest.fixture(params=["folder", pytest.param("s3", marks=[pytest.mark.s3, pytest.mark.soak])])
def bucket(request: pytest.FixtureRequest) -> str:
    """Where lakes are: empty for folders of this machine, or URL of an object store."""
    return "" if request.param == "folder" else str(request.getfixturevalue("s3"))


@pytest.fixture
def lake(bucket: str, tmp_path: Path) -> Lake:
    """An empty lake."""
    if not bucket:
        return Lake(tmp_path / "lake")
    return Lake(lake_path(f"{bucket}/{uuid.uuid4().hex}"), tmp_path / "work")


@pytest.fixture
def new_site(tmp_path: Path, broker: EmbeddedBroker) -> Callable[[], Site]:
    """Makes a lake with a topic of its own."""
    return lambda: site(tmp_path, broker.bootstrap, f"clicks-{uuid.uuid4().hex[:8]}")

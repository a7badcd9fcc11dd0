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
from lakehouse.silver.avro import FOLDER
from tests.lakehouse.lakes import Site, site
from tests.s3 import BUCKET, S3Server


@pytest.fixture(scope="session")
def spark(s3_server: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """The session, as every driver makes it. It reads the S3-compatible server too, as soon as that is started."""
    work = tmp_path_factory.mktemp("work")
    settings = load_settings(
        {},
        lake=f"s3://{BUCKET}",
        work=str(work),
        spark__driver_memory="1g",
        spark__conf={FOLDER: str(work / "schemas")},
    )
    with s3_server.in_environment():
        session = build_session(settings, "tests")
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
def new_site(tmp_path: Path, broker: EmbeddedBroker) -> Callable[..., Site]:
    """Makes a lake with a topic of its own, below ``tmp_path`` or in a bucket."""

    def made(bucket: str = "") -> Site:
        name = f"clicks-{uuid.uuid4().hex[:8]}"
        return site(tmp_path, broker.bootstrap, name, lake=f"{bucket}/{name}" if bucket else "")

    return made

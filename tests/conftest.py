"""Fixtures of several packages."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from functools import cache
from importlib.machinery import ModuleSpec
from pathlib import Path

import hypothesis
import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from ingest.broker import EmbeddedBroker
from tests.azure import azurite
from tests.s3 import BUCKET, S3Server

# A busy machine is no failure, and what a run says of a commit the next one says too. Other examples than those of a
# test's own seed are looked for with HYPOTHESIS_EXPLORE=1.
hypothesis.settings.register_profile(
    "millrace",
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
    derandomize=not os.environ.get("HYPOTHESIS_EXPLORE"),
)
hypothesis.settings.load_profile("millrace")

# Most of what a JVM runs in a test it runs a few times: C2 would take a fifth of its CPU, and never pay.
os.environ.setdefault("SPARK_SUBMIT_OPTS", "-XX:TieredStopAtLevel=1")


# A process of pytest-xdist has a main module without a name, which PySpark takes for a doctest, and ends it.
if sys.modules["__main__"].__spec__ is None:
    sys.modules["__main__"].__spec__ = ModuleSpec("__main__", None)


class Modules(LoadScopeScheduling):
    """Gives each process a module at a time; those that share the Spark session, all to one process."""

    def _split_scope(self, nodeid: str) -> str:
        module = nodeid.partition("::")[0]
        return "spark" if shares_session(self.config.rootpath / module) else module


@cache
def shares_session(module: Path) -> bool:
    """Whether tests of the module take the fixture ``spark``."""
    return "spark: SparkSession" in module.read_text(encoding="utf-8")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Modules:
    """Of ``make test``."""
    return Modules(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where processes share the work, what takes longest comes first: the session's tests, then those with a JVM."""
    if hasattr(config, "workerinput"):
        items.sort(
            key=lambda item: [
                not shares_session(item.path),
                not item.get_closest_marker("spark"),
                not item.get_closest_marker("broker"),
            ]
        )


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedBroker]:
    """A started embedded broker, one for the whole session: use topic and group names of your own."""
    embedded = EmbeddedBroker(tmp_path_factory.mktemp("broker"), heap_mb=256, die_with_parent=True)
    embedded.start()
    yield embedded
    embedded.stop()


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A real S3-compatible server that nobody has started yet; its address is known."""
    server = S3Server(tmp_path_factory.mktemp("s3"))
    yield server
    server.stop()


@pytest.fixture(scope="session")
def s3(s3_server: S3Server) -> Iterator[str]:
    """URL of an empty bucket on a started S3-compatible server, whose variables are set for this process."""
    s3_server.start()
    with s3_server.in_environment():
        yield f"s3://{BUCKET}"


@pytest.fixture(scope="session")
def azure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of an empty container of Azure's emulator, whose variables are set for this process."""
    with azurite(tmp_path_factory.mktemp("azure")) as url:
        yield url

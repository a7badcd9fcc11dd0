"""What is made once on a machine, before the first run: jars fetched, class-data archives written.

An archive comes out of a run that does what the real one does: for Spark a driver that rehearses the shipped pipeline,
for Kafka a broker that comes up. Each JVM writes its own when it ends, which takes it some seconds.
"""

from __future__ import annotations

import logging
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from ingest import broker
from lakehouse.contract.classdata import archive, making
from lakehouse.contract.errors import EnvironmentProblem
from lakehouse.contract.jars import JAR_SETS, jar_paths

logger = logging.getLogger(__name__)

_PATIENCE_S = 300.0


def prepare(tell: Callable[[str], None]) -> None:
    """Do what is not done yet.

    Args:
        tell: is told, in a few words, what takes a while.

    Raises:
        EnvironmentProblem: no Java, or jars that cannot be fetched. Archives that cannot be made are only logged.
    """
    jars_of = {set_name: jar_paths(set_name) for set_name in JAR_SETS}
    from lakehouse.session import class_path as spark_class_path

    for kind, jars, record in (
        ("kafka", jars_of["kafka"], _record_kafka),
        ("spark", spark_class_path(jars_of["spark"]), _record_spark),
    ):
        if archive(kind, jars) is not None:
            continue
        tell(f"Preparing Java's classes of {kind.capitalize()} (once, up to a minute) …")
        try:
            with making(kind, jars) as path, tempfile.TemporaryDirectory(prefix="millrace-prepare-") as folder:
                if path is not None:  # another process may just have made it
                    record(path, Path(folder))
        except (OSError, subprocess.SubprocessError, EnvironmentProblem) as error:
            logger.warning("the classes of %s could not be prepared, so it starts slower: %s", kind, error)


def _record_kafka(path: Path, folder: Path) -> None:
    embedded = broker.EmbeddedBroker(folder / "broker", die_with_parent=True, record_classes=path)
    embedded.start()
    embedded.stop(_PATIENCE_S)


def _record_spark(path: Path, folder: Path) -> None:
    """In a process of its own: a Spark session is one for its process's life."""
    command = [sys.executable, "-m", "lakehouse.recording", str(path), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_S, check=False)
    if done.returncode != 0:
        raise OSError(done.stderr.strip().rpartition("\n")[2] or f"it ended with code {done.returncode}")

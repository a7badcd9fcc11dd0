"""Finding Java: for Spark, for the embedded broker, and for fetching jars."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from lakehouse.contract.errors import EnvironmentProblem
from lakehouse.contract.settings import conf_dir

MINIMUM_JAVA = 17
LOG_VARIABLE = "MILLRACE_LOG"
"""``text`` or ``json``: how every process of ours writes its log."""

_VERSION = re.compile(r'version "(?:1\.)?(\d+)')
_REMEDY = f"Install a Java {MINIMUM_JAVA} runtime (such as openjdk-17-jre-headless) and put it on PATH or in JAVA_HOME"


@dataclass(frozen=True, slots=True)
class Java:
    """A Java runtime."""

    path: Path
    major: int
    version: str


def find_java() -> Java:
    """Java of ``JAVA_HOME``, else of ``PATH``.

    Raises:
        EnvironmentProblem: there is none, or it is older than :data:`MINIMUM_JAVA`.
    """
    home = os.environ.get("JAVA_HOME")
    found = str(Path(home) / "bin" / "java") if home else shutil.which("java")
    if found is None:
        raise EnvironmentProblem("Java is not installed", _REMEDY)
    java = Java(Path(found), *_version(found))
    if java.major < MINIMUM_JAVA:
        raise EnvironmentProblem(f"Java {java.major} ({found}) is too old", _REMEDY)
    return java


@functools.cache
def _version(command: str) -> tuple[int, str]:
    """Major version, and what ``java -version`` says."""
    try:
        done = subprocess.run([command, "-version"], capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise EnvironmentProblem(f"{command} does not run: {error}", _REMEDY) from None
    said = done.stderr + done.stdout
    match = _VERSION.search(said)
    if match is None:
        raise EnvironmentProblem(f"{command} does not say its version", _REMEDY)
    return int(match[1]), said


def jvm_proxy_flags(proxies: dict[str, str]) -> list[str]:
    """System properties for the proxies of the environment, which a JVM does not read by itself.

    Args:
        proxies: scheme to URL, as :func:`urllib.request.getproxies` gives them; credentials in them are not passed on.
    """
    flags: list[str] = []
    for scheme in ("http", "https"):
        match = re.fullmatch(r"(?:\w+://)?(?:[^@/]*@)?([^:/]+)(?::(\d+))?/?", proxies.get(scheme, ""))
        if match:
            flags += [f"-D{scheme}.proxyHost={match[1]}", f"-D{scheme}.proxyPort={match[2] or 80}"]
    exempt = [host.strip() for host in proxies.get("no", "").split(",") if host.strip()]
    if flags and exempt:
        flags.append("-Dhttp.nonProxyHosts=" + "|".join(f"*{host}" if host[0] == "." else host for host in exempt))
    return flags


def log_flags() -> list[str]:
    """The flags with which a JVM's log is as the process's that starts it: warnings and errors, as text or as JSON."""
    name = "log4j2-json.properties" if os.environ.get(LOG_VARIABLE) == "json" else "log4j2.properties"
    file = conf_dir() / name
    return [f"-Dlog4j2.configurationFile={file.as_uri()}"] if file.is_file() else []

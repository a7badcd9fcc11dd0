"""What our JVMs (Spark, the embedded broker) need: a Java, jars by coordinates and checksum, class-data archives.

``conf/jars.lock`` names the jars. Downloading is left to Apache Ivy, whose jar is part of pyspark: it knows Maven
Central by itself, so no host stands in this repository, and it is what Spark would use. ``MILLRACE_MAVEN_URL`` names a
mirror. All 57 jars (65 MB) take 7 s on a fast line, so parallel downloads of our own would save little.

Ivy downloads into a staging folder below the cache; a jar is moved into place, in one rename, once its SHA-256 is that
of the lock. A file lock lets one process fetch at a time. ``spark.jars.packages`` would not do: it resolves anew on
each start, checks no lock, and fails where a mirror lacks one of the transitive dependencies.

A class-data archive (JEP 350) is what a JVM has parsed and verified of its classes, mapped by every later one
(docs/decisions/0016-class-data-archives.md). ``millrace prepare`` (:mod:`jobs.local.machine`) makes it once. It fits
one JVM and one class path: its name contains a digest of both, and its size. A JVM without a fitting archive starts as
usual, only slower. ``kind`` is ``spark`` or ``kafka`` everywhere.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import logging
import os
import re
import shutil
import subprocess
import urllib.request
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import quoteattr

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from lakehouse.contract.errors import ConfigError, EnvironmentProblem, install_extra
from lakehouse.contract.settings import LOG_VARIABLE, conf_dir
from lakehouse.contract.storage import locked

MINIMUM_JAVA = 17

_VERSION = re.compile(r'version "(?:1\.)?(\d+)')
_REMEDY = f"Install a Java {MINIMUM_JAVA} runtime (such as openjdk-17-jre-headless) and put it on PATH or in JAVA_HOME"

JAR_SETS: tuple[str, ...] = ("spark", "kafka", "s3")
ON_DEMAND: tuple[str, ...] = ("s3server",)
"""Sets that only tests use."""
OFFLINE_REMEDY = (
    "Connect to the internet once, set MILLRACE_MAVEN_URL to a Maven mirror that you reach, or copy a filled jar "
    "folder from another machine and set MILLRACE_JARS_DIR to it"
)
_LINE = re.compile(r"(\w+) ([\w.-]+):([\w.-]+):([\w.-]+) ([0-9a-f]{64})")
_FETCHED = re.compile(r"\[SUCCESSFUL ] [^#]+#([^;]+);")
_FAILED = re.compile(r"\s*(module not found: .+|Server access error.+|\[FAILED +] .+)")

_KEPT = 3  # archives of a kind: other installations, other Javas
_QUIET = ["-Xlog:cds=off", "-Xlog:cds+dynamic=off"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Java:
    """A Java runtime."""

    path: Path
    major: int
    version: str


def find_java() -> Java:
    """Java of ``JAVA_HOME``, else of ``PATH``.

    Raises EnvironmentProblem: there is none, or it is older than :data:`MINIMUM_JAVA`.
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


@dataclass(frozen=True, slots=True)
class Jar:
    """One jar of the lock file.

    Attributes:
        set_name: one of :data:`JAR_SETS` and :data:`ON_DEMAND`.
    """

    set_name: str
    group: str
    artifact: str
    version: str
    sha256: str

    @property
    def place(self) -> Path:
        """Where it lies, relative to the cache."""
        return Path(self.group) / f"{self.artifact}-{self.version}.jar"

    def is_in(self, folder: Path) -> bool:
        """Whether it lies there with the right checksum."""
        try:
            with (folder / self.place).open("rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest() == self.sha256
        except FileNotFoundError:
            return False


def jar_paths(set_name: str) -> list[Path]:
    """The jars of a set, in the order of the lock file; missing or damaged are fetched. Raises EnvironmentProblem."""
    jars = locked_jars(set_name)
    cache = jars_dir()
    if missing_jars(set_name):
        with locked(cache / ".lock", f"another process is fetching jars into {cache}; waiting for it"):
            missing = missing_jars(set_name)  # another process may have fetched them meanwhile
            if missing:
                _fetch(missing, cache)
    return [cache / jar.place for jar in jars]


def missing_jars(set_name: str) -> list[Jar]:
    """Jars of a set that the cache lacks or holds damaged."""
    cache = jars_dir()
    jars = locked_jars(set_name)
    with ThreadPoolExecutor(4) as pool:
        return [jar for jar, there in zip(jars, pool.map(lambda jar: jar.is_in(cache), jars), strict=True) if not there]


def jars_dir() -> Path:
    """The cache: ``MILLRACE_JARS_DIR``, else ``millrace/jars`` below the user's cache folder."""
    if named := os.environ.get("MILLRACE_JARS_DIR"):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "millrace" / "jars"


def locked_jars(set_name: str) -> list[Jar]:
    """Jars of a set as the lock file names them. Raises ConfigError: no such set, or the lock file is wrong."""
    if set_name not in JAR_SETS + ON_DEMAND:
        raise ConfigError(f"there is no jar set {set_name!r}", remedy=f"Sets: {', '.join(JAR_SETS)}")
    return [jar for jar in _read_lock(conf_dir() / "jars.lock") if jar.set_name == set_name]


@functools.cache
def _read_lock(path: Path) -> tuple[Jar, ...]:
    jars: list[Jar] = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise ConfigError("there is no such file", file=path) from None
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith("#"):
            continue
        match = _LINE.fullmatch(line)
        if match is None or match[1] not in JAR_SETS + ON_DEMAND:
            raise ConfigError("not SET GROUP:ARTIFACT:VERSION SHA256", file=path, line=number)
        jars.append(Jar(*match.groups()))
    return tuple(jars)


def _fetch(jars: Sequence[Jar], cache: Path) -> None:
    staging = cache / ".staging"  # kept when Ivy fails: the next try goes on from there
    staging.mkdir(exist_ok=True)
    _run_ivy(jars, staging)
    wrong = [jar for jar in jars if not jar.is_in(staging / "jars")]
    for jar in jars:
        if jar not in wrong:
            (cache / jar.place).parent.mkdir(exist_ok=True)
            (staging / "jars" / jar.place).replace(cache / jar.place)
    shutil.rmtree(staging)
    if wrong:
        names = ", ".join(f"{jar.group}:{jar.artifact}:{jar.version}" for jar in wrong)
        raise EnvironmentProblem(
            f"the repository's {names} is not the jar that {conf_dir() / 'jars.lock'} names (SHA-256 differs)",
            "Use another MILLRACE_MAVEN_URL, or none; if the lock was edited, correct its checksum",
        )


def _run_ivy(jars: Sequence[Jar], staging: Path) -> None:
    (staging / "settings.xml").write_text(_ivy_settings(staging), encoding="utf-8")
    (staging / "ivy.xml").write_text(_ivy_module(jars), encoding="utf-8")
    command = [str(find_java().path), "-XX:TieredStopAtLevel=1", *jvm_proxy_flags(urllib.request.getproxies())]
    command += ["-cp", str(_ivy_jar()), "org.apache.ivy.Main"]
    command += ["-settings", str(staging / "settings.xml"), "-ivy", str(staging / "ivy.xml")]
    command += ["-retrieve", f"{staging}/jars/[organisation]/[artifact]-[revision].[ext]"]
    failures: list[str] = []
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process,
        _progress(f"fetching {len(jars)} jars ({jars[0].set_name})", len(jars)) as bar,
    ):
        task = bar.task_ids[0]
        for line in process.stdout or ():
            if fetched := _FETCHED.search(line):
                bar.update(task, advance=1, jar=fetched[1])
            elif failed := _FAILED.match(line):
                failures.append(failed[1].strip())
    if process.returncode != 0:
        said = failures[-1] if failures else f"Ivy ended with code {process.returncode}"
        raise EnvironmentProblem(f"{len(jars)} jars ({jars[0].set_name}) could not be fetched: {said}", OFFLINE_REMEDY)


def _progress(what: str, total: int) -> Progress:
    console = Console(stderr=True)
    logger.info("%s into %s", what, jars_dir())
    if not console.is_terminal:
        console.print(f"{what} …", highlight=False, soft_wrap=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[jar]}"))
    progress = Progress(*columns, console=console, disable=not console.is_terminal)
    progress.add_task(what, total=total, jar="")
    return progress


def _ivy_jar() -> Path:
    spec = importlib.util.find_spec("pyspark")  # looked up, not imported
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for jar in sorted((Path(folder) / "jars").glob("ivy-*.jar")):
            return jar
    raise EnvironmentProblem(
        "jars are fetched by Apache Ivy, which comes with pyspark, and pyspark is not installed",
        f"{install_extra('lakehouse')}; or copy a filled jar folder here and set MILLRACE_JARS_DIR to it",
    )


def _ivy_settings(staging: Path) -> str:
    mirror = os.environ.get("MILLRACE_MAVEN_URL")
    root = f"root={quoteattr(mirror.rstrip('/') + '/')}" if mirror else ""
    return f"""<ivysettings>
  <property name="ivy.checksums" value=""/>
  <settings defaultResolver="maven"/>
  <caches defaultCacheDir={quoteattr(str(staging / "ivy"))}/>
  <timeout-constraints>
    <timeout-constraint name="slow" connectionTimeout="15000" readTimeout="60000"/>
  </timeout-constraints>
  <resolvers><ibiblio name="maven" m2compatible="true" usepoms="false" timeoutConstraint="slow" {root}/></resolvers>
</ivysettings>
"""


def _ivy_module(jars: Sequence[Jar]) -> str:
    wanted = "\n".join(
        f'    <dependency org="{jar.group}" name="{jar.artifact}" rev="{jar.version}" transitive="false" '
        f'conf="default->default"><artifact name="{jar.artifact}" type="jar" ext="jar"/></dependency>'
        for jar in jars
    )
    return f"""<ivy-module version="2.0">
  <info organisation="millrace" module="jars"/>
  <configurations><conf name="default"/></configurations>
  <dependencies>
{wanted}
  </dependencies>
</ivy-module>
"""


def archive(kind: str, class_path: Iterable[Path]) -> Path | None:
    """The whole archive for the Java that is found and these jars; None: there is none.

    Raises EnvironmentProblem: there is no Java.
    """
    place = _place(kind, class_path)
    for path in place.parent.glob(f"{place.name}-*.jsa"):
        if path.stem.rpartition("-")[2] == str(path.stat().st_size):  # a JVM dies of one that is cut off
            return path
    return None


def sharing(kind: str, class_path: Iterable[Path]) -> list[str]:
    """The JVM's flags for its archive, as far as there is one."""
    try:
        path = archive(kind, class_path)
    except (EnvironmentProblem, OSError):
        return []
    if path is None or any(letter.isspace() for letter in str(path)):
        return []
    return [f"-XX:SharedArchiveFile={path}", "-Xshare:auto", *_QUIET]


def recording(path: Path) -> list[str]:
    """The JVM's flags to write an archive when it ends."""
    return [f"-XX:ArchiveClassesAtExit={path}", *_QUIET]


@contextmanager
def making(kind: str, class_path: Iterable[Path]) -> Iterator[Path | None]:
    """A block that makes the archive where this says; None: there is one. One process at a time makes them; the oldest
    of other class paths go."""
    place = _place(kind, class_path)
    place.parent.mkdir(parents=True, exist_ok=True)
    with locked(place.parent / ".lock"):
        if archive(kind, class_path) is not None:
            yield None
            return
        for left in place.parent.glob("*.part"):  # by one that was killed
            left.unlink(missing_ok=True)
        part = place.with_suffix(".part")
        try:
            yield part
            with part.open("rb") as file:
                os.fsync(file.fileno())
            part.rename(place.with_name(f"{place.name}-{part.stat().st_size}.jsa"))
        finally:
            part.unlink(missing_ok=True)
        made = sorted(place.parent.glob(f"{kind}-*.jsa"), key=lambda path: path.stat().st_mtime, reverse=True)
        for old in made[_KEPT:]:
            old.unlink(missing_ok=True)


def _place(kind: str, class_path: Iterable[Path]) -> Path:
    """The archive's name, less its size."""
    digest = hashlib.blake2b(find_java().version.encode(), digest_size=8)
    for jar in class_path:
        found = jar.stat()
        digest.update(f"{jar} {found.st_size} {found.st_mtime_ns}\n".encode())
    return jars_dir() / "classes" / f"{kind}-{digest.hexdigest()}"

"""A single-node Apache Kafka broker, run as a child process from its jars: for demos, tests and small installations.

Everything it owns is in one folder::

    FOLDER/broker.json          ports and cluster id, chosen on the first start, so that the address stays
    FOLDER/server.properties    written on each start from conf/kafka/server.properties
    FOLDER/data                 Kafka's log
    FOLDER/broker.lock          locked by the running JVM itself, which inherits the file, so it is never stale
    FOLDER/broker.pid           process id, for signals from any process
    FOLDER/broker.log           output of the broker; that of the last run is broker.log.1
    FOLDER/secrets              certificates and passwords of a secure broker (0700, files 0600), made once and kept:
        ca.pem                  the authority that signed the broker's certificate; its key was discarded after signing
        broker.pem              the broker's private key and certificate; also its client certificate for itself
        USER.password           of each of USERS, 192 random bits

Passwords reach a secure broker over mutual TLS on a separate listener, never on a command line. Certificates that
expire within a month are renewed at the next start.
"""

from __future__ import annotations

import fcntl
import functools
import json
import logging
import os
import random
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from string import Template
from typing import IO, Any

from kafka import KafkaAdminClient
from kafka.admin import (
    ACL,
    ACLOperation,
    ACLPermissionType,
    ACLResourcePatternType,
    ResourcePattern,
    ResourceType,
    ScramMechanism,
    UserScramCredentialUpsertion,
)
from kafka.errors import KafkaError

from ingest.border.admission import RAW_SUFFIX
from lakehouse.contract.errors import EnvironmentProblem, install_extra
from lakehouse.contract.jvm import find_java, jar_paths, log_flags, recording, sharing
from lakehouse.contract.pipeline import Pipeline
from lakehouse.contract.settings import ClientSecurity, conf_dir
from lakehouse.contract.storage import write_whole

logger = logging.getLogger(__name__)

BROKER_NAME = "millrace-broker"
USERS = ("admin", "collector", "lakehouse", "reader")

_LIFE = timedelta(days=3650)
_RENEW = timedelta(days=30)
_PORTS = range(20_000, 32_000)  # below Linux's range for outgoing ports, so that a restart finds the port free
_POLL_S = 0.02
# Runs in a new process that then becomes the JVM: a hook between fork and exec is unsafe with threads.
_DIE_WITH_PARENT = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


@dataclass(frozen=True, slots=True)
class _Identity:
    port: int
    controller_port: int
    cluster_id: str
    inner_port: int = 0  # of a secure broker


class EmbeddedBroker:
    """A broker in a folder. Several objects, also in several processes, may stand for the same broker.

    Args:
        port: on the loopback address; 0: the one used before in this folder, initially any free one.
        heap_mb: Java heap in MiB; the process takes about 150 MiB more.
        die_with_parent: stop the broker when this process ends in any way (Linux only).
        secure: TLS, passwords and access rules; data of insecure runs stays.
        record_classes: file for an archive of the JVM's classes (:mod:`lakehouse.contract.jvm`); None: use the
            existing archive.
    """

    def __init__(
        self,
        folder: Path,
        *,
        port: int = 0,
        heap_mb: int = 320,
        die_with_parent: bool = False,
        secure: bool = False,
        record_classes: Path | None = None,
    ) -> None:
        self.folder = folder.resolve()
        self.secrets = Secrets(self.folder / "secrets")
        self._properties = self.folder / "server.properties"
        self._secure = secure
        self._port = port
        self._heap_mb = heap_mb
        self._die_with_parent = die_with_parent
        self._record_classes = record_classes
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, timeout_s: float = 60.0) -> str:
        """Start the broker and wait until it serves topics and consumer groups; returns :attr:`bootstrap`.

        Raises:
            EnvironmentProblem: it already runs, its port is taken, Java or the jars are missing, or it did not start in
                time (then it has been stopped again).
        """
        deadline = time.monotonic() + timeout_s
        self.folder.mkdir(parents=True, exist_ok=True)
        with self._claim() as lock:
            identity = self._settle_identity()
            self._write_properties(identity)
            output = self.folder / "broker.log"
            if output.exists():
                output.replace(self.folder / "broker.log.1")
            with output.open("ab") as log:
                if not (self.folder / "data" / "meta.properties").is_file():
                    self._format(identity)
                self._process = self._launch(lock, log)
            (self.folder / "broker.pid").write_text(str(self._process.pid), encoding="ascii")
        try:
            self._await_ready(self._process, identity, deadline)
        except BaseException:
            self.kill()
            raise
        return self.bootstrap

    def settle(self) -> str:
        """Choose the address, ``host:port``, before the broker is started."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if self._read_identity() is None:
            with self._claim():
                self._settle_identity()
        return self.bootstrap

    def security(self, user: str) -> ClientSecurity:
        """How a client logs in as one of :data:`USERS`; an insecure broker needs no login."""
        return self.secrets.client(user) if self._secure else ClientSecurity()

    def stop(self, timeout_s: float = 15.0) -> None:
        """Stop it; after ``timeout_s`` seconds, kill it. Does nothing if it is not running."""
        pid = self.pid
        if pid is None:
            return
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
        if not self._await_end(timeout_s):
            logger.warning("the broker (process %d) did not stop within %g s; killing it", pid, timeout_s)
            self.kill()

    def kill(self) -> None:
        """Kill it like a crash (SIGKILL). Does nothing if it is not running."""
        pid = self.pid
        if pid is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            self._await_end(10.0)

    def running(self) -> bool:
        """Whether the process lives; it may still be starting."""
        path = self.folder / "broker.lock"
        if not path.is_file():
            return False
        with path.open("rb") as lock:
            alive = not _try_lock(lock, fcntl.LOCK_SH)
        if not alive and self._process is not None:
            self._process.wait(timeout=10)  # it is ending; reap it
            self._process = None
        return alive

    def exists(self) -> bool:
        """Whether it was ever started in this folder, or its address was chosen."""
        return self._read_identity() is not None

    @property
    def pid(self) -> int | None:
        """Process id while it runs. The process's command line is checked, because the id may have been reused."""
        if not self.running():
            return None
        try:
            pid = int((self.folder / "broker.pid").read_text(encoding="ascii"))
        except (FileNotFoundError, ValueError):
            return None
        return pid if str(self._properties) in _command_line(pid) else None

    @property
    def bootstrap(self) -> str:
        """Its address, ``host:port``. Raises EnvironmentProblem: it was never started in this folder."""
        identity = self._read_identity()
        if identity is None:
            raise EnvironmentProblem(f"there is no broker in {self.folder}", "Start it once")
        return f"127.0.0.1:{identity.port}"

    @contextmanager
    def _claim(self) -> Iterator[IO[bytes]]:
        """The locked lock file of the folder. A process that inherits it holds the lock while it lives."""
        with (self.folder / "broker.lock").open("ab") as lock:
            for _ in range(10):  # running() of another process holds it for a moment
                if _try_lock(lock, fcntl.LOCK_EX):
                    break
                time.sleep(_POLL_S)
            else:
                pid = self.pid
                where = f"process {pid}, at {self.bootstrap}" if pid else "another process that is starting it"
                remedy = f"Use it: MILLRACE_KAFKA={self.bootstrap}; or stop it: kill {pid}" if pid else "Wait for it"
                raise EnvironmentProblem(f"the broker in {self.folder} is held by {where}", remedy)
            yield lock

    def _read_identity(self) -> _Identity | None:
        try:
            return _Identity(**json.loads((self.folder / "broker.json").read_bytes()))
        except FileNotFoundError:
            return None

    def _settle_identity(self) -> _Identity:
        old = self._read_identity()
        port = self._port or (old.port if old else _free_port())
        controller_port = old.controller_port if old else _free_port(port)
        # 16 random bytes in base64; a dash in front would look like an option.
        cluster_id = old.cluster_id if old else "M" + secrets.token_urlsafe(16)[1:]
        inner_port = old.inner_port if old else 0
        if self._secure:
            self.secrets.make()
            inner_port = inner_port or _free_port(port, controller_port)
        for number in (port, controller_port, inner_port):
            if number and not _is_free(number):
                raise EnvironmentProblem(
                    f"port {number} of the broker in {self.folder} is taken by another process",
                    f"Stop that process, or change the port in {self.folder / 'broker.json'}",
                )
        identity = _Identity(port, controller_port, cluster_id, inner_port)
        if identity != old:
            write_whole(self.folder / "broker.json", json.dumps(asdict(identity)).encode())
        return identity

    def _write_properties(self, identity: _Identity) -> None:
        files = ("server.properties", "secure.properties" if self._secure else "plain.properties")
        text = "\n".join((conf_dir() / "kafka" / name).read_text(encoding="utf-8") for name in files)
        places = {"data": self.folder / "data", "ca_pem": self.secrets.ca, "broker_pem": self.secrets.broker}
        self._properties.write_text(Template(text).substitute(asdict(identity), **places), encoding="utf-8")

    def _java(self, *flags: str, record: Path | None = None) -> list[str]:
        jars = jar_paths("kafka")
        flags = (*flags, *log_flags(), *(recording(record) if record else sharing("kafka", jars)))
        path = os.pathsep.join(map(str, jars))
        return [str(find_java().path), "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", *flags, "-cp", path]

    def _format(self, identity: _Identity) -> None:
        command = [*self._java("-Xmx128m"), "kafka.tools.StorageTool", "format", "--ignore-formatted"]
        command += ["-t", identity.cluster_id, "-c", str(self._properties)]
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
        )
        if done.returncode != 0:
            said = done.stdout.decode(errors="replace")
            logger.error("Kafka could not format %s: %s", self.folder / "data", said)
            raise EnvironmentProblem(f"Kafka could not format {self.folder / 'data'}: {_last_words(said)}")

    def _launch(self, lock: IO[bytes], log: IO[bytes]) -> subprocess.Popen[bytes]:
        sizes = [f"-Xms{min(64, self._heap_mb)}m", f"-Xmx{self._heap_mb}m", "-XX:MaxDirectMemorySize=48m"]
        sizes += ["-XX:ReservedCodeCacheSize=48m", "-Xss512k"]
        command = [*self._java(*sizes, record=self._record_classes), "kafka.Kafka", str(self._properties)]
        if self._die_with_parent:
            command = [sys.executable, "-S", "-c", _DIE_WITH_PARENT, str(os.getpid()), *command]

        def spawn() -> subprocess.Popen[bytes]:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[lock.fileno()],
                start_new_session=True,  # Ctrl-C is for the foreground process, which stops the broker in order
                env=os.environ | {"MALLOC_ARENA_MAX": "2"},
            )

        return _spawner().submit(spawn).result()

    def _await_ready(self, process: subprocess.Popen[bytes], identity: _Identity, deadline: float) -> None:
        bootstrap = f"127.0.0.1:{identity.inner_port if self._secure else identity.port}"
        found = self.secrets if self._secure else None
        while time.monotonic() < deadline:
            if process.poll() is not None:
                said = (self.folder / "broker.log").read_text(encoding="utf-8", errors="replace")
                raise EnvironmentProblem(
                    f"the broker ended with code {process.returncode} while starting: {_last_words(said)}",
                    f"See {self.folder / 'broker.log'}",
                )
            if _answers(bootstrap, deadline, found):
                return
            time.sleep(_POLL_S)
        raise EnvironmentProblem(
            f"the broker at {bootstrap} was not ready in time", f"See {self.folder / 'broker.log'}, or allow more time"
        )

    def _await_end(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if not self.running():
                return True
            time.sleep(_POLL_S)
        return False


def _last_words(log: str) -> str:
    """The last line of a log, as text or JSON, outside a stack trace."""
    lines: list[str] = []
    for line in log.split("\n"):
        try:
            content = json.loads(line)
            lines += f"{content['message']}\n{content.get('error', '')}".split("\n")
        except (ValueError, TypeError, KeyError):
            lines.append(line)
    said = [line.strip() for line in lines if line.strip() and not line.startswith("\t")]
    return said[-1] if said else "it said nothing"


@functools.cache
def _spawner() -> ThreadPoolExecutor:
    """A thread that lives as long as this process: to Linux, a process's parent is the *thread* that started it."""
    return ThreadPoolExecutor(1, thread_name_prefix="broker-spawner")


def _answers(bootstrap: str, deadline: float, found: Secrets | None) -> bool:
    """Whether the broker serves metadata and its group coordinator answers.

    A secure broker (``found``) is then told its passwords.
    """
    host, _, port = bootstrap.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=1).close()
    except OSError:
        return False
    left_ms = max(1_000, int((deadline - time.monotonic()) * 1_000))
    admin: KafkaAdminClient | None = None
    try:
        admin = KafkaAdminClient(
            bootstrap_servers=bootstrap,
            bootstrap_timeout_ms=left_ms,
            request_timeout_ms=left_ms,
            **(found.itself() if found else ClientSecurity()).for_kafka_python(),
        )
        admin.list_topics()
        admin.list_group_offsets("millrace-probe")
        if found is not None:
            wanted = [
                UserScramCredentialUpsertion(user, ScramMechanism.SCRAM_SHA_512, found.client(user).read_password())
                for user in USERS
            ]
            refused = {user: error for user, error in admin.alter_user_scram_credentials(wanted).items() if error}
            if refused:
                raise EnvironmentProblem(f"the broker does not take passwords: {refused}")
    except KafkaError as error:
        if not error.retriable:
            raise
        return False
    finally:
        if admin is not None:
            admin.close()
    return True


def _try_lock(file: IO[bytes], kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _command_line(pid: int) -> str:
    proc = Path("/proc")
    if (proc / "self").exists():
        try:
            return (proc / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            return ""
    return subprocess.run(
        ["ps", "-ww", "-o", "command=", "-p", str(pid)], capture_output=True, text=True, check=False
    ).stdout


def _free_port(*others: int) -> int:
    for port in random.sample(_PORTS, 200):
        if port not in others and _is_free(port):
            return port
    raise EnvironmentProblem(f"no free port between {_PORTS.start} and {_PORTS.stop}")


def _is_free(port: int) -> bool:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as Java does
        try:
            listener.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


# --- security


@dataclass(frozen=True, slots=True)
class Secrets:
    """The folder of secrets of one broker."""

    folder: Path

    @property
    def ca(self) -> Path:
        return self.folder / "ca.pem"

    @property
    def broker(self) -> Path:
        return self.folder / "broker.pem"

    def client(self, user: str) -> ClientSecurity:
        """How a client logs in as one of :data:`USERS`."""
        password = self.folder / f"{user}.password"
        return ClientSecurity("SASL_SSL", "SCRAM-SHA-512", user, str(password), str(self.ca))

    def itself(self) -> ClientSecurity:
        """How the broker logs in to itself, on the inner listener; it may do everything."""
        return ClientSecurity("SSL", ca_file=str(self.ca), cert_file=str(self.broker))

    def make(self) -> None:
        """Create what is absent or about to expire. Raises EnvironmentProblem: ``cryptography`` is not installed."""
        try:
            from cryptography import x509
        except ImportError:
            raise EnvironmentProblem("the package cryptography is not installed", install_extra("secure")) from None
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        ends = datetime.min.replace(tzinfo=UTC)
        if self.ca.is_file() and self.broker.is_file():
            ends = x509.load_pem_x509_certificate(self.broker.read_bytes()).not_valid_after_utc
        if ends < datetime.now(UTC) + _RENEW:
            ca, broker = _certificates()
            write_whole(self.ca, ca, 0o600)
            write_whole(self.broker, broker, 0o600)
        for user in USERS:
            if not (self.folder / f"{user}.password").is_file():
                write_whole(self.folder / f"{user}.password", secrets.token_urlsafe(24).encode() + b"\n", 0o600)


def access_rules(pipeline: Pipeline) -> list[ACL]:
    """Access rules for a pipeline's topics; the broker refuses everything else.

    ``admin`` and the broker itself may do everything. Collectors write topics and raw topics, and refine the raw ones.
    The lakehouse reads topics and writes compacted ones (``millrace collect --role latest``), which ``reader`` reads.
    """
    sources = pipeline.sources.values()
    written = [source.topic for source in sources]
    raw = [source.topic + RAW_SUFFIX for source in sources]
    latest = [source.latest for source in sources if source.latest_topic]
    referenced = [spec.topic for source in sources for spec in source.enrich.values() if spec.topic]
    look = (ACLOperation.DESCRIBE, ACLOperation.DESCRIBE_CONFIGS)
    of_topics = (
        ("collector", [*written, *raw], (ACLOperation.WRITE, *look)),
        ("collector", [*raw, *referenced], (ACLOperation.READ, *look)),
        ("collector", latest, look),  # it checks that they exist
        ("lakehouse", written, (ACLOperation.READ, *look)),
        ("lakehouse", latest, (ACLOperation.WRITE, *look)),
        ("reader", latest, (ACLOperation.READ, ACLOperation.DESCRIBE)),
    )
    of_groups = (
        ("collector", "millrace-refine-"),
        ("lakehouse", "spark-kafka-"),
        ("lakehouse", "millrace-latest-"),
        ("reader", "reader-"),
    )
    found: list[ACL] = []
    for user, topics, operations in of_topics:
        for topic in dict.fromkeys(topics):
            found += _allow(user, operations, ResourcePattern(ResourceType.TOPIC, topic))
    for user, prefix in of_groups:
        pattern = ResourcePattern(ResourceType.GROUP, prefix, ACLResourcePatternType.PREFIXED)
        found += _allow(user, (ACLOperation.READ, ACLOperation.DESCRIBE), pattern)
    return found


def _allow(user: str, operations: Iterable[ACLOperation], pattern: ResourcePattern) -> list[ACL]:
    return [ACL(f"User:{user}", "*", operation, ACLPermissionType.ALLOW, pattern) for operation in operations]


def _certificates() -> tuple[bytes, bytes]:
    """An authority's certificate, and a key with a certificate by it, in PEM; the authority's key is discarded."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    now = datetime.now(UTC)
    ca_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    ca_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "millrace-ca")])
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, BROKER_NAME)])

    def begin(subject: Any, public_key: Any) -> Any:
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(ca_name)
            .public_key(public_key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(hours=1))
            .not_valid_after(now + _LIFE)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
        )

    usage = x509.KeyUsage(True, False, False, False, False, True, True, False, False)
    ca = (
        begin(ca_name, ca_key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .sign(ca_key, hashes.SHA256())
    )
    hosts = [x509.DNSName("localhost"), *(x509.IPAddress(ip_address(text)) for text in ("127.0.0.1", "::1"))]
    both = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    leaf = (
        begin(name, key.public_key())
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName(hosts), critical=False)
        .add_extension(x509.ExtendedKeyUsage(both), critical=False)
        .sign(ca_key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return ca.public_bytes(pem), private + leaf.public_bytes(pem) + ca.public_bytes(pem)

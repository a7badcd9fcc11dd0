"""Security of the embedded broker: certificates, users, and access rules.

FOLDER/secrets (0700, files 0600) is created at the first secure start and kept::

    ca.pem           the authority that signed the broker's certificate; its key was discarded after signing
    broker.pem       the broker's private key and certificate; also its client certificate for itself (mutual TLS)
    USER.password    of each of USERS, 192 random bits

Passwords reach the broker over mutual TLS on a separate listener, never on a command line. Certificates that expire
within a month are renewed at the next start.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any

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

from lakehouse.contract.errors import EnvironmentProblem, install_extra
from lakehouse.contract.settings import ClientSecurity
from lakehouse.contract.storage import write_whole

__all__ = ["BROKER_NAME", "USERS", "Grants", "Secrets"]

BROKER_NAME = "millrace-broker"
USERS = ("admin", "collector", "lakehouse", "reader")

_LIFE = timedelta(days=3650)
_RENEW = timedelta(days=30)
_MECHANISM = "SCRAM-SHA-512"


@dataclass(frozen=True, slots=True)
class Secrets:
    """The folder of secrets of one broker."""

    folder: Path

    @property
    def ca(self) -> Path:
        """PEM file that clients trust."""
        return self.folder / "ca.pem"

    @property
    def broker(self) -> Path:
        """PEM file of the broker's key and certificate."""
        return self.folder / "broker.pem"

    def client(self, user: str) -> ClientSecurity:
        """How a client logs in as one of :data:`USERS`."""
        password = self.folder / f"{user}.password"
        return ClientSecurity("SASL_SSL", _MECHANISM, user, str(password), str(self.ca))

    def itself(self) -> ClientSecurity:
        """How the broker logs in to itself, on the inner listener; it may do everything."""
        return ClientSecurity("SSL", ca_file=str(self.ca), cert_file=str(self.broker))

    def make(self) -> None:
        """Create what is absent or about to expire.

        Raises:
            EnvironmentProblem: the package ``cryptography`` is not installed.
        """
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not self._certificates_good():
            ca, broker = _certificates()
            write_whole(self.ca, ca, 0o600)
            write_whole(self.broker, broker, 0o600)
        for user in USERS:
            if not (self.folder / f"{user}.password").is_file():
                write_whole(self.folder / f"{user}.password", secrets.token_urlsafe(24).encode() + b"\n", 0o600)

    def _certificates_good(self) -> bool:
        if not (self.ca.is_file() and self.broker.is_file()):
            return False
        x509 = _x509()
        ends = x509.load_pem_x509_certificate(self.broker.read_bytes()).not_valid_after_utc
        return bool(ends - datetime.now(UTC) > _RENEW)


def set_passwords(admin: KafkaAdminClient, found: Secrets) -> None:
    wanted = [
        UserScramCredentialUpsertion(user, ScramMechanism.SCRAM_SHA_512, found.client(user).read_password())
        for user in USERS
    ]
    refused = {user: error for user, error in admin.alter_user_scram_credentials(wanted).items() if error}
    if refused:
        raise EnvironmentProblem(f"the broker does not take passwords: {refused}")


@dataclass(frozen=True, slots=True)
class Grants:
    """Access rules; everything else is refused. ``admin`` and the broker itself may do everything.

    Attributes:
        written: topics that collectors write and the lakehouse reads.
        raw: topics of a two-step collection, which collectors write and refine.
        latest: compacted topics, which the lakehouse writes (``millrace latest``) and ``reader`` reads.
        referenced: topics of reference data, which collectors read.
    """

    written: tuple[str, ...]
    raw: tuple[str, ...] = ()
    latest: tuple[str, ...] = ()
    referenced: tuple[str, ...] = ()

    def acls(self) -> list[ACL]:
        look = (ACLOperation.DESCRIBE, ACLOperation.DESCRIBE_CONFIGS)
        found = [
            *_on_topics("collector", (*self.written, *self.raw), (ACLOperation.WRITE, *look)),
            *_on_topics("collector", (*self.raw, *self.referenced), (ACLOperation.READ, *look)),
            *_on_topics("collector", self.latest, look),  # it checks that they exist
            *_on_topics("lakehouse", self.written, (ACLOperation.READ, *look)),
            *_on_topics("lakehouse", self.latest, (ACLOperation.WRITE, *look)),
            *_on_topics("reader", self.latest, (ACLOperation.READ, ACLOperation.DESCRIBE)),
        ]
        groups = (
            ("collector", "millrace-refine-"),
            ("lakehouse", "spark-kafka-"),
            ("lakehouse", "millrace-latest-"),
            ("reader", "reader-"),
        )
        for user, prefix in groups:
            pattern = ResourcePattern(ResourceType.GROUP, prefix, ACLResourcePatternType.PREFIXED)
            found += [_allow(user, operation, pattern) for operation in (ACLOperation.READ, ACLOperation.DESCRIBE)]
        return found

    def apply(self, admin: KafkaAdminClient) -> None:
        """Add the rules to the broker's."""
        result: Mapping[str, Any] = admin.create_acls(self.acls())
        if result["failed"]:
            raise EnvironmentProblem(f"the broker does not take ACLs: {result['failed'][0]}")


def _on_topics(user: str, topics: Iterable[str], operations: Iterable[ACLOperation]) -> list[ACL]:
    operations = tuple(operations)
    return [
        _allow(user, operation, ResourcePattern(ResourceType.TOPIC, topic))
        for topic in dict.fromkeys(topics)
        for operation in operations
    ]


def _allow(user: str, operation: ACLOperation, pattern: ResourcePattern) -> ACL:
    return ACL(f"User:{user}", "*", operation, ACLPermissionType.ALLOW, pattern)


def _x509() -> Any:
    try:
        from cryptography import x509
    except ImportError:
        problem = "the package cryptography is not installed"
        raise EnvironmentProblem(problem, install_extra("secure")) from None
    return x509


def _certificates() -> tuple[bytes, bytes]:
    """An authority's certificate, and a key with a certificate by it, in PEM; the authority's key is discarded."""
    x509 = _x509()
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

"""How a client of ours proves to Kafka who it is: one description, given to each client library in its own words."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lakehouse.contract.errors import ConfigError
from lakehouse.contract.tomlfile import one_of

PROTOCOLS = ("PLAINTEXT", "SSL", "SASL_SSL", "SASL_PLAINTEXT")
MECHANISMS = ("SCRAM-SHA-512", "SCRAM-SHA-256", "PLAIN")


@dataclass(frozen=True, slots=True)
class ClientSecurity:
    """Names files only: the password is read when a client is made, and is no part of what this prints.

    Attributes:
        protocol: one of :data:`PROTOCOLS`, in Kafka's words.
        password_file: holds the password and nothing else.
        ca_file: PEM file of the authority that signed the broker's certificate; empty: those the system trusts.
        cert_file: PEM file of the client's private key and certificate, in this order; empty: none.
    """

    protocol: str = "PLAINTEXT"
    mechanism: str = "SCRAM-SHA-512"
    user: str = ""
    password_file: str = ""
    ca_file: str = ""
    cert_file: str = ""

    def __post_init__(self) -> None:
        one_of("kafka.protocol", self.protocol, PROTOCOLS)
        one_of("kafka.mechanism", self.mechanism, MECHANISMS)
        if self.sasl and not (self.user and self.password_file):
            raise ConfigError(
                f"{self.protocol} needs a user and a password",
                key="kafka.user, kafka.password_file",
                remedy="Name the user, and a file with the password in it",
            )
        if not self.tls and (self.ca_file or self.cert_file):
            raise ConfigError(
                f"{self.protocol} has no use for certificates", key="kafka.protocol", remedy="Set SSL or SASL_SSL"
            )

    @property
    def tls(self) -> bool:
        return self.protocol.endswith("SSL")

    @property
    def sasl(self) -> bool:
        """Whether there is a user and a password."""
        return self.protocol.startswith("SASL")

    def read_password(self) -> str:
        """The password. Raises ConfigError."""
        try:
            found = Path(self.password_file).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            raise ConfigError(
                f"{self.password_file} cannot be read: {reason}",
                key="kafka.password_file",
                remedy=f"Put the password of {self.user} there; for the embedded broker: millrace kafka start",
            ) from None
        if not found:
            raise ConfigError(f"{self.password_file} is empty", key="kafka.password_file")
        return found

    def for_kafka_python(self) -> dict[str, Any]:
        """Keyword arguments of kafka-python's clients; none for PLAINTEXT."""
        options: dict[str, Any] = {}
        if self.protocol != "PLAINTEXT":
            options["security_protocol"] = self.protocol
        if self.sasl:
            options |= {
                "sasl_mechanism": self.mechanism,
                "sasl_plain_username": self.user,
                "sasl_plain_password": self.read_password(),
            }
        files = {"ssl_cafile": self.ca_file, "ssl_certfile": self.cert_file}
        return options | {name: file for name, file in files.items() if file}

    def for_librdkafka(self) -> dict[str, str]:
        """Settings of librdkafka (confluent-kafka); none for PLAINTEXT."""
        options: dict[str, str] = {}
        if self.protocol != "PLAINTEXT":
            options["security.protocol"] = self.protocol
        if self.sasl:
            options |= {
                "sasl.mechanism": self.mechanism,
                "sasl.username": self.user,
                "sasl.password": self.read_password(),
            }
        files = {
            "ssl.ca.location": self.ca_file,
            "ssl.certificate.location": self.cert_file,
            "ssl.key.location": self.cert_file,
        }
        return options | {name: file for name, file in files.items() if file}

    def for_java(self) -> dict[str, str]:
        """Settings of the Java client, as Spark's reader takes them behind ``kafka.``; none for PLAINTEXT.

        They hold the authority's certificate itself, because executors may be on machines without the file.

        Raises:
            ConfigError: the password or the certificate cannot be read.
        """
        options: dict[str, str] = {}
        if self.protocol != "PLAINTEXT":
            options["security.protocol"] = self.protocol
        if self.sasl:
            scram = self.mechanism.startswith("SCRAM")
            module = "scram.ScramLoginModule" if scram else "plain.PlainLoginModule"
            user, password = _quoted(self.user), _quoted(self.read_password())
            options["sasl.mechanism"] = self.mechanism
            options["sasl.jaas.config"] = (
                f"org.apache.kafka.common.security.{module} required username={user} password={password};"
            )
        if self.ca_file:
            options |= {"ssl.truststore.type": "PEM", "ssl.truststore.certificates": _pem(self.ca_file)}
        if self.cert_file:
            options |= {"ssl.keystore.type": "PEM", "ssl.keystore.location": self.cert_file}
        return options


PLAINTEXT = ClientSecurity()


def _pem(file: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no PEM file"
        remedy = "Name the PEM file of the authority that signed the broker's certificate"
        raise ConfigError(f"{file} cannot be read: {reason}", key="kafka.ca_file", remedy=remedy) from None


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'

"""The embedded broker, on real JVMs."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from kafka import KafkaAdminClient, KafkaConsumer, KafkaProducer, TopicPartition
from kafka.admin import NewTopic

from ingest.broker import EmbeddedBroker
from lakehouse.contract.errors import EnvironmentProblem

pytestmark = pytest.mark.broker


@pytest.fixture
def own(tmp_path: Path) -> EmbeddedBroker:
    return EmbeddedBroker(tmp_path / "kafka", heap_mb=192, die_with_parent=True)


def create_topic(bootstrap: str, name: str) -> None:
    admin = KafkaAdminClient(bootstrap_servers=bootstrap)
    admin.create_topics([NewTopic(name, num_partitions=1, replication_factor=1)])
    admin.wait_for_topics([name])
    admin.close()


def produce(bootstrap: str, topic: str, values: list[bytes]) -> None:
    producer = KafkaProducer(bootstrap_servers=bootstrap, acks="all", enable_idempotence=True)
    sent = [producer.send(topic, value) for value in values]
    for future in sent:
        future.get(timeout=60)
    producer.close()


def consume(bootstrap: str, topic: str, count: int) -> list[bytes]:
    consumer = KafkaConsumer(bootstrap_servers=bootstrap, auto_offset_reset="earliest")
    consumer.assign([TopicPartition(topic, 0)])
    found: list[bytes] = []
    deadline = time.monotonic() + 60
    while len(found) < count and time.monotonic() < deadline:
        for records in consumer.poll(timeout_ms=200).values():
            found += [record.value for record in records]
    consumer.close()
    return found


def resident_mb(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 1024


def test_serves_as_soon_as_it_is_started(broker: EmbeddedBroker) -> None:
    create_topic(broker.bootstrap, "broker-serves")
    values = [b"%d" % i for i in range(100)]
    produce(broker.bootstrap, "broker-serves", values)
    assert consume(broker.bootstrap, "broker-serves", 100) == values


def test_takes_no_unknown_topic(broker: EmbeddedBroker) -> None:
    admin = KafkaAdminClient(bootstrap_servers=broker.bootstrap)
    producer = KafkaProducer(bootstrap_servers=broker.bootstrap, max_block_ms=300)
    with pytest.raises(Exception, match="Timeout"):
        producer.send("broker-never-made", b"x").get(timeout=2)
    producer.close(timeout=1)
    assert "broker-never-made" not in admin.list_topics()
    admin.close()


def test_stays_small(broker: EmbeddedBroker) -> None:
    create_topic(broker.bootstrap, "broker-small")
    produce(broker.bootstrap, "broker-small", [os.urandom(1_000)] * 5_000)
    assert broker.pid is not None
    assert resident_mb(broker.pid) < 512


def test_second_start_says_who_holds_the_folder(broker: EmbeddedBroker) -> None:
    with pytest.raises(EnvironmentProblem) as caught:
        EmbeddedBroker(broker.folder).start()
    assert str(broker.pid) in caught.value.problem
    assert broker.bootstrap in caught.value.problem


def test_survives_kill_with_same_address_and_data(own: EmbeddedBroker) -> None:
    address = own.start()
    create_topic(address, "kept")
    values = [b"%d" % i for i in range(1_000)]
    produce(address, "kept", values)
    first = own.pid
    own.kill()
    assert not own.running()
    assert own.start() == address
    assert own.pid != first
    assert consume(address, "kept", 1_000) == values
    assert (own.folder / "broker.log.1").is_file()
    # and it is the same broker for whoever knows the folder
    other = EmbeddedBroker(own.folder)
    assert (other.running(), other.pid, other.bootstrap) == (True, own.pid, address)
    other.stop()
    assert not own.running()
    assert own.pid is None


def test_never_signals_a_process_that_only_has_its_number(own: EmbeddedBroker) -> None:
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    own.folder.mkdir(parents=True)
    (own.folder / "broker.pid").write_text(str(stranger.pid))
    lock = own.folder / "broker.lock"
    holder = subprocess.Popen(
        [sys.executable, "-c", "import fcntl, sys; f = open(sys.argv[1], 'ab'); fcntl.flock(f, 2); input()", str(lock)],
        stdin=subprocess.PIPE,
    )
    try:
        deadline = time.monotonic() + 60
        while not own.running() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert own.running()
        assert own.pid is None
        own.stop()
        own.kill()
        assert stranger.poll() is None
    finally:
        for process in (stranger, holder):
            process.kill()
            process.wait()
        assert holder.stdin is not None
        holder.stdin.close()


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal is of Linux")
def test_dies_with_its_parent(tmp_path: Path) -> None:
    code = (
        "import pathlib, sys, threading, time; from ingest.broker import EmbeddedBroker\n"
        "b = EmbeddedBroker(pathlib.Path(sys.argv[1]), heap_mb=128, die_with_parent=True)\n"
        "t = threading.Thread(target=b.start); t.start(); t.join(); time.sleep(0.5)\n"  # the thread may end
        "print(b.pid, flush=True); time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    assert parent.stdout.readline().strip().isdigit()
    there = EmbeddedBroker(tmp_path)
    assert there.running()
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 60
    while there.running() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not there.running()


def test_taken_port_is_named(tmp_path: Path) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        port = held.getsockname()[1]
        with pytest.raises(EnvironmentProblem, match=str(port)):
            EmbeddedBroker(tmp_path, port=port).start()


def test_with_json_logs_every_line_is_an_object(own: EmbeddedBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLRACE_LOG", "json")
    with socket.socket() as held:
        port = int(own.settle().rsplit(":", 1)[1])
        monkeypatch.setattr("ingest.broker._is_free", lambda _: True)  # somebody takes it just after we looked
        held.bind(("127.0.0.1", port))
        with pytest.raises(EnvironmentProblem, match="Address already in use"):
            own.start()
    lines = (own.folder / "broker.log").read_text(encoding="utf-8").split("\n")
    said = [json.loads(line) for line in lines if line]
    assert {"at", "level", "logger", "message", "process"} <= set.intersection(*map(set, said))
    errors = [line for line in said if "error" in line]
    assert errors and {line["level"] for line in errors} == {"ERROR"}
    assert any("BindException" in line["error"] and "\n\tat " in line["error"] for line in errors)


def test_a_broker_that_cannot_start_says_why(own: EmbeddedBroker) -> None:
    own.folder.mkdir(parents=True)
    (own.folder / "data").write_text("a file where a folder is needed")
    with pytest.raises(EnvironmentProblem, match="format"):
        own.start()
    assert not own.running()


def test_unknown_folder_has_no_address(tmp_path: Path) -> None:
    empty = EmbeddedBroker(tmp_path / "nothing")
    assert not empty.running()
    assert empty.pid is None
    empty.stop()
    with pytest.raises(EnvironmentProblem, match="no broker"):
        _ = empty.bootstrap

"""What the border lets in, what it says of the rest, and that it keeps all of it."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingest.border.admission import KEPT_BYTES, MAX_DEPTH, Border, Refusal
from lakehouse.contract.envelope import fingerprint
from lakehouse.contract.pipeline import Source
from lakehouse.contract.pipeline.expectations import Expectation

CLICKS = Source(
    topic="clicks", schema="id BIGINT", event_time="received_at", event_id="{id}:{at}", key="{who.name}",
    max_event_bytes=100_000, name="clicks",
)  # fmt: skip


def border(source: Source = CLICKS) -> Border:
    return Border(source, tenant="acme", collector="n1", clock=lambda: 1_700_000_000_123_456_789)


def test_a_good_event() -> None:
    payload = b'{"id": 7, "at":"noon", "who": {"name": "Zo\\u00eb"} }'
    admitted = border().admit(payload)
    assert admitted.refusal is None
    assert admitted.payload is payload
    assert admitted.key == "Zoë".encode()
    envelope = admitted.envelope
    assert (envelope.event_id, envelope.source, envelope.tenant, envelope.collector) == (
        "7:noon",
        "clicks",
        "acme",
        "n1",
    )
    assert envelope.received_at == 1_700_000_000_123_456
    assert envelope.fingerprint == fingerprint(payload)
    assert not envelope.suspect and envelope.reject is None


@pytest.mark.parametrize(
    ("payload", "status", "says"),
    [
        (b"{", 400, "not JSON: "),
        (b"", 400, "not JSON: "),
        (b'{"id": "\xff"}', 400, "not JSON: "),
        (b'{"id": NaN}', 400, "not JSON: "),
        (b"[" * 5000, 400, "not JSON: "),
        (b"[1]", 422, "an event is a JSON object, not an array"),
        (b"null", 422, "an event is a JSON object, not null"),
        (b'"x"', 422, "an event is a JSON object, not a string"),
        (b'{"id":1}', 422, "the event id {id}:{at} needs fields that are absent, null or not plain values"),
        (b'{"id":1,"at":{}}', 422, "the event id {id}:{at} needs fields"),
        (b'{"id":1,"at":2,"who":{"name":null}}', 422, "the key {who.name} needs fields"),
        (
            b'{"id":1,"at":"%s","who":{"name":"a"}}' % (b"x" * 600),
            422,
            "the event id is longer than 512 bytes",
        ),
        (b'{"id":1,"at":2,"who":{"name":"%s"}}' % (b"x" * 600), 422, "the key is longer than 512 bytes"),
    ],
)
def test_what_is_wrong_is_named_and_the_event_is_kept(payload: bytes, status: int, says: str) -> None:
    admitted = border().admit(payload)
    assert admitted.refusal is not None
    assert admitted.refusal.status == status
    assert admitted.refusal.reason.startswith(says)
    assert admitted.envelope.reject == admitted.refusal.reason
    assert admitted.payload == payload
    assert admitted.envelope.event_id
    assert admitted.key == admitted.envelope.event_id.encode()


def test_a_rejected_event_has_its_own_id_where_it_has_one() -> None:
    assert border().admit(b'{"id":1,"at":2}').envelope.event_id == "1:2"


def test_of_an_event_that_is_too_large_the_beginning_is_kept() -> None:
    admitted = border().admit(b'{"id":' + b"1" * 100_000 + b"}")
    assert admitted.refusal is not None and admitted.refusal.status == 413
    assert "100007 bytes, more than the 100000" in admitted.refusal.reason
    assert len(admitted.payload) == KEPT_BYTES
    assert admitted.envelope.fingerprint == fingerprint(admitted.payload)


def test_ids_that_are_not_in_the_payload() -> None:
    plain = border(Source(topic="t", schema="", event_time="received_at", name="t"))
    first, second = plain.admit(b"{}"), plain.admit(b"{}")
    assert first.envelope.event_id != second.envelope.event_id, "two events, though they are equal"
    again = [plain.admit(b"{}", origin="t/websocket/0#5").envelope.event_id for _ in range(2)]
    assert again[0] == again[1], "the same message of the upstream, read again after a crash"
    others = {
        plain.admit(b"{}", origin="t/websocket/0#6").envelope.event_id,
        plain.admit(b'{"other":1}', origin="t/websocket/0#5").envelope.event_id,
    }
    assert len({again[0], *others}) == 3


def test_suspect_is_passed_on() -> None:
    assert border().admit(b'{"id":1,"at":2,"who":{"name":"a"}}', suspect=True).envelope.suspect


def test_required_fields_and_their_types() -> None:
    strict = border(
        Source(
            topic="t",
            event_time="received_at",
            name="t",
            required=("a", "b.c", "d"),
            schema="a BIGINT, b STRUCT<c: BOOLEAN, x: INT>, d STRING",
        )
    )
    assert strict.admit(b'{"a":1,"b":{"c":false},"d":{"any":"thing"}}').refusal is None
    for payload, reason in [
        (b'{"b":{"c":true},"d":1}', "missing a"),
        (b'{"a":1,"b":{"c":null},"d":1}', "missing b.c"),
        (b'{"a":1,"b":[],"d":1}', "missing b.c"),
        (b'{"a":1,"b":"c","d":1}', "missing b.c"),
        (b'{"a":1,"b":{"c":true}}', "missing d"),
        (b'{"a":"1","b":{"c":true},"d":1}', "does not fit the schema: a is a string"),
        (b'{"a":true,"b":{"c":true},"d":1}', "does not fit the schema: a is a boolean"),
        (b'{"a":1,"b":{"c":1},"d":1}', "does not fit the schema: b.c is a number"),
        (b'{"a":{},"b":{"c":true},"d":1}', "does not fit the schema: a is an object"),
    ]:
        refusal = strict.admit(payload).refusal
        assert refusal is not None and (refusal.reason, refusal.status) == (reason, 422)


def test_depth_is_counted_only_where_it_may_be_too_deep() -> None:
    plain = border(Source(topic="t", schema="", event_time="received_at", name="t"))

    def nested(depth: int) -> bytes:
        return b'{"x":' * (depth // 2) + b"[" * (depth - depth // 2) + b"]" * (depth - depth // 2) + b"}" * (depth // 2)

    assert plain.admit(nested(MAX_DEPTH)).refusal is None
    refusal = plain.admit(nested(MAX_DEPTH + 1)).refusal
    assert refusal is not None and refusal.code == "too-deep"
    wide = b'{"x":[' + b",".join([b"{}"] * 5_000) + b"]}"
    assert plain.admit(wide).refusal is None


def test_numbers_that_are_not_exact_are_no_ids() -> None:
    by_id = border(Source(topic="t", schema="", event_time="received_at", name="t", event_id="{id}"))
    assert by_id.admit(b'{"id":18446744073709551615}').envelope.event_id == "18446744073709551615"
    refusal = by_id.admit(b'{"id":18446744073709551616}').refusal
    assert refusal is not None and refusal.code == "bad-id"
    assert by_id.admit(b'{"id":"1e+99"}').refusal is None, "a text may look as it likes"


def test_a_senders_tenant_and_limit_go_before_the_nodes() -> None:
    admitted = border().admit(b'{"id":1,"at":2,"who":{"name":"a"}}', tenant="other", max_bytes=30)
    assert admitted.envelope.tenant == "other"
    assert admitted.refusal is not None and "more than the 30" in admitted.refusal.reason
    assert border().admit(b'{"id":1,"at":2,"who":{"name":"a"}}', max_bytes=10**9).refusal is None


def test_an_expectation_that_fails() -> None:
    expected = {"small": Expectation("n < 100", at="border"), "even": Expectation("n % 2 = 0")}
    source = Source(
        "t", "n INT, x INT", "received_at", event_id="{id}", required=("x",), expectations=expected, name="t"
    )
    made = border(source)
    payloads = [b'{"id":1,"x":1,"n":%b}' % n for n in (b"99", b"100", b"null", b'"100"', b"100.0", b"9999999999")]
    for found in (made.admit_all(payloads), [made.admit(payload) for payload in payloads]):
        failed = [event for event in found if event.refusal is not None]
        assert [event.payload for event in failed] == payloads[1:3], "what is no INT is left to Spark"
        for event in failed:
            assert event.refusal == Refusal("expectation small failed", 422, "expectation")
            assert (event.envelope.reject, event.envelope.event_id) == ("expectation small failed", "1")
    first = made.admit(b'{"id":1,"n":100}').refusal
    assert first is not None and first.code == "missing-field", "in the order of Spark's readers"


IDS = st.one_of(
    st.integers(-(2**70), 2**70), st.floats(allow_nan=False), st.text(max_size=200), st.booleans(), st.none(),
    st.just("x" * 600), st.just("é" * 200), st.just({"a": 1}),
)  # fmt: skip
DEEP = [b'{"id":1,"at":' + b"[" * depth + b"]" * depth + b"}" for depth in (MAX_DEPTH - 1, MAX_DEPTH)]
EVENTS = st.fixed_dictionaries(
    {}, optional={"id": IDS, "at": IDS, "who": st.fixed_dictionaries({}, optional={"name": IDS}), "n": IDS}
)
BODIES = st.one_of(
    EVENTS.map(lambda fields: json.dumps(fields).encode()),
    st.binary(max_size=20),
    st.sampled_from([b"", b"[]", b"{", b"1", b"null", *DEEP, b"[" * 3000]),
)


SMALL = Expectation("n < 100 OR n IS NULL", at="border")


@pytest.mark.parametrize(
    "options",
    [
        {"event_id": "{id}:{at}", "key": "{who.name}"},
        {
            "event_id": "{id}",
            "key": "{at}",
            "required": ("n", "who.name"),
            "schema": "n BIGINT, who STRUCT<name: STRING>",
        },
        {"event_id": "{id}", "key": "", "required": ("at",)},
        {
            "event_id": "{id}",
            "required": ("at", "who.name"),
            "schema": "n BIGINT, at STRING, who STRUCT<name: STRING>",
            "expectations": {"small": SMALL, "named": Expectation("who.name <> '' OR n = 0", at="border")},
        },
        {"event_id": "{id}", "schema": "n BIGINT, at STRING", "expectations": {"small": SMALL}},
    ],
)
@given(bodies=st.lists(BODIES, max_size=8), most=st.integers(0, 200))
@settings(max_examples=30)
def test_many_are_judged_as_each_of_them_is(options: dict[str, object], bodies: list[bytes], most: int) -> None:
    made = border(dataclasses.replace(CLICKS, **options))  # type: ignore[arg-type]
    together = made.admit_all(bodies, tenant="other", max_bytes=most)
    apart = [made.admit(body, tenant="other", max_bytes=most) for body in bodies]
    for one, other in zip(together, apart, strict=True):
        if one.envelope.event_id.startswith("~") and other.envelope.event_id.startswith("~"):
            one.envelope.event_id, one.key = other.envelope.event_id, other.key  # by chance, where the payload has none
        assert one == other

"""CloudEvents 1.0 by HTTP: structured, batched and binary mode. The data is the payload, byte for byte.

The attributes travel in headers named as in the CloudEvents binding for Kafka (``ce_id``, ``ce_source``, ``ce_type``,
``ce_time``, …). Where the source takes no event id from the payload, the event's id is its CloudEvents source and id,
which name an event together.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import msgspec
import orjson

from lakehouse.contract.envelope import MAX_ID_BYTES

STRUCTURED = "application/cloudevents+json"
BATCHED = "application/cloudevents-batch+json"
MAX_ATTRIBUTE_BYTES = 8_192  # of all attributes of an event
_NAME = re.compile(r"[a-z0-9]{1,64}")
_JSON = re.compile(r"[^/;]+/(?:json|[^/;]+\+json)(?:\s*;.*)?", re.IGNORECASE)
_MEMBERS = msgspec.json.Decoder(dict[str, msgspec.Raw])


class NotACloudEvent(ValueError):
    """An event that breaks the specification; the text is the reason."""


@dataclass(frozen=True, slots=True)
class CloudEvent:
    """One CloudEvent.

    Attributes:
        event_id: its source and its id; a space, which a URI cannot hold, is between them.
        headers: the attributes, as Kafka headers.
    """

    payload: bytes
    event_id: str
    headers: tuple[tuple[str, str], ...]


def structured(text: bytes) -> CloudEvent:
    """An event in the JSON format. Raises NotACloudEvent: it is not one, or its data is not JSON."""
    try:
        orjson.loads(text)  # the stricter of the two
        members = _MEMBERS.decode(text)
    except (orjson.JSONDecodeError, msgspec.DecodeError, RecursionError) as error:
        raise NotACloudEvent(f"it is not a JSON object: {error}") from None
    data, coded = members.pop("data", None), members.pop("data_base64", None)
    attributes = {name: value for name, raw in members.items() if (value := orjson.loads(bytes(raw))) is not None}
    if data is not None and coded is not None:
        raise NotACloudEvent("it has both data and data_base64")
    if coded is not None:
        try:
            payload = base64.b64decode(orjson.loads(bytes(coded)), validate=True)
        except (TypeError, binascii.Error, ValueError):
            raise NotACloudEvent("data_base64 is not base64") from None
        return _checked(attributes, payload)
    if data is None:
        raise NotACloudEvent("it has no data")
    return _checked(attributes, bytes(data))


def binary(attributes: Mapping[str, str], body: bytes) -> CloudEvent:
    """An event whose attributes came as headers.

    Args:
        attributes: without ``ce-``.

    Raises:
        NotACloudEvent: an attribute is absent or wrong.
    """
    return _checked(attributes, body)


def _checked(attributes: Mapping[str, Any], payload: bytes) -> CloudEvent:
    if attributes.get("specversion") != "1.0":
        raise NotACloudEvent("specversion is not 1.0")
    for name in ("id", "source", "type"):
        if not isinstance(attributes.get(name), str) or not attributes[name]:
            raise NotACloudEvent(f"{name} is missing")
    if not _JSON.fullmatch(kind := str(attributes.get("datacontenttype", "application/json"))):
        raise NotACloudEvent(f"datacontenttype is {kind[:100]}; an event's data is JSON")
    headers = []
    for name, value in attributes.items():
        if not _NAME.fullmatch(name):
            raise NotACloudEvent(f"{name[:64]!r} is no name of an attribute")
        if isinstance(value, bool):
            value = str(value).lower()
        if not isinstance(value, str | int) or any(ord(c) < 32 or ord(c) == 127 for c in str(value)):
            raise NotACloudEvent(f"{name} is no plain value")
        headers.append(("content-type" if name == "datacontenttype" else f"ce_{name}", str(value)))
    if " " in attributes["source"]:
        raise NotACloudEvent("source is no URI")
    if sum(len(name) + len(value.encode()) for name, value in headers) > MAX_ATTRIBUTE_BYTES:
        raise NotACloudEvent(f"its attributes have more than {MAX_ATTRIBUTE_BYTES} bytes")
    if "time" in attributes:
        try:
            if datetime.fromisoformat(str(attributes["time"])).tzinfo is None:
                raise ValueError
        except ValueError:
            raise NotACloudEvent("time is no RFC 3339 timestamp") from None
    event_id = f"{attributes['source']} {attributes['id']}"
    if len(event_id.encode()) > MAX_ID_BYTES:
        raise NotACloudEvent(f"its source and id have more than {MAX_ID_BYTES} bytes")
    return CloudEvent(payload, event_id, tuple(headers))

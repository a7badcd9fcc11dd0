"""Payloads in Avro, decoded in Spark by schemas that a registry has and the lake keeps.

Bronze keeps the bytes. Where events get their types, each record is decoded to JSON text by the schema that it was
written with (docs/decisions/0018-avro-decoded-in-silver.md). A replay needs no registry and gives the same.
"""

from __future__ import annotations

import base64
import functools
import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any, cast
from urllib.parse import quote, unquote, urlsplit

import pyarrow as pa
from pyspark.sql import Column, SparkSession
from pyspark.sql import functions as F

from lakehouse.contract.avro import decode, parsed_schema, schema_file
from lakehouse.contract.storage import lake_path, write_whole
from lakehouse.errors import RegistryProblem

FOLDER, REGISTRY = "spark.millrace.schemas", "spark.millrace.registry"
"""Settings of the Spark context: where schemas are kept, and the registry's address."""

_TIMEOUT_S = 10.0
_NO_SCHEMA = 40403  # error code of registries for an id that nobody registered
_DECODED = "STRUCT<text: STRING, flaw: STRING>"


def decoded(payload: Column) -> Column:
    """The JSON ``text`` of a payload; where it cannot be decoded, null, and the ``flaw`` says why."""
    conf = SparkSession.active().sparkContext.getConf()
    folder, registry = conf.get(FOLDER, "") or "", conf.get(REGISTRY, "") or ""

    def decode(payloads: pa.Array) -> pa.Array:
        found = [_decode(payload, folder, registry) for payload in payloads.to_pylist()]
        return pa.array(found, pa.struct([("text", pa.string()), ("flaw", pa.string())]))

    return cast(Column, F.arrow_udf(decode, _DECODED)(payload))  # type: ignore[attr-defined]


def _decode(payload: bytes | None, folder: str, registry: str) -> Mapping[str, str | None] | None:
    return decode(payload, functools.partial(_schema, folder=folder, registry=registry))


@functools.lru_cache(maxsize=1_024)
def _schema(number: int, folder: str, registry: str) -> Any:
    """The parsed schema, or as text why there is none.

    Raises:
        RegistryProblem: the lake does not have it, and the registry does not say.
    """
    file = schema_file(lake_path(folder), number)
    if file.is_file():
        found = json.loads(file.read_bytes())
    else:
        found = _fetch(number, registry)
        write_whole(file, json.dumps(found).encode(), durable=True)
    return parsed_schema(number, found)


def _fetch(number: int, registry: str) -> dict[str, Any]:
    if not registry:
        raise RegistryProblem(number, "no registry is named", "Set kafka.schema_registry to its address")
    found = _get(registry, f"/schemas/ids/{number}", number)
    if found is None:
        return {"flaw": f"the registry has no schema {number}"}
    if (kind := found.get("schemaType", "AVRO")) != "AVRO":
        return {"flaw": f"schema {number} is {str(kind)[:20]}, not Avro"}
    return {"schema": found["schema"], "references": _references(registry, found, number)}


def _references(registry: str, schema: Mapping[str, Any], number: int) -> list[str]:
    """Texts of the schemas that this one refers to, each behind those that it refers to itself."""
    texts: list[str] = []
    for reference in schema.get("references") or ():
        place = f"/subjects/{quote(reference['subject'], safe='')}/versions/{int(reference['version'])}"
        found = _get(registry, place, number)
        if found is None:
            raise RegistryProblem(number, f"the registry has no {place}, which it refers to", "Register it again")
        texts += [text for text in (*_references(registry, found, number), found["schema"]) if text not in texts]
    return texts


def _get(registry: str, path: str, number: int) -> dict[str, Any] | None:
    """The registry's answer; None: it knows no such schema."""
    parts = urlsplit(registry)
    shown = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path.rstrip('/')}"
    request = urllib.request.Request(shown + path, headers={"accept": "application/json"})  # noqa: S310 - http(s), checked
    if parts.username:
        given = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        request.add_header("authorization", f"Basic {base64.b64encode(given.encode()).decode()}")
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:  # noqa: S310
            found: dict[str, Any] = json.load(answer)
            return found
    except urllib.error.HTTPError as error:
        try:
            code = json.load(error).get("error_code")
        except (ValueError, AttributeError):
            code = None
        if error.code == 404 and code == _NO_SCHEMA:
            return None
        problem = f"{shown} answers {error.code}"
    except (OSError, ValueError) as error:
        problem = f"{shown} gives no answer: {getattr(error, 'reason', error)}"
    raise RegistryProblem(number, problem, "It is asked again when the driver is started again")

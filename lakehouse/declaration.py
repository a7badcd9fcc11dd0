"""Fingerprints of what a pipeline declares, so that a changed declaration is noticed and never mixed with the old one.

Only what makes a difference to rows goes in, and only where it differs from the default: new options of Millrace leave
the fingerprints of existing declarations as they were.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Any

import sqlglot
from sqlglot.errors import SqlglotError

from lakehouse.contract.lake import Lake
from lakehouse.contract.pipeline import Product, Source
from lakehouse.contract.pipeline.expectations import QUARANTINE, WARN
from lakehouse.contract.storage import LakePath, write_whole

_JUDGES = ("schema", "event_id", "event_time", "required")  # fields of a source that decide what an event is
# Fields of a product that change no row.
_NO_ROWS = {"name", "channel", "confirm", "positions", "expectations", "trigger", "tenant"}


def source_declaration(source: Source) -> str:
    """Fingerprint of how a source's events are read, judged and told apart; 32 hexadecimal characters."""
    found = {name: _plain(getattr(source, name)) for name in _JUDGES}
    found |= {name: getattr(source, name) for name in ("format", "unwrap") if getattr(source, name) not in ("", "json")}
    if source.dedupe_horizon:
        found["dedupe_horizon"] = source.dedupe_horizon_ms
    return _digest({**found, "expectations": sorted(source.expected(QUARANTINE).items())})


def product_declaration(product: Product, source: Source) -> str:
    """Fingerprint of everything that a product's rows are made by; 32 hexadecimal characters."""
    found = {
        field.name: _plain(getattr(product, field.name))
        for field in dataclasses.fields(product)
        if field.name not in _NO_ROWS and not _is_default(field, getattr(product, field.name))
    }
    if source.lateness:
        found["late"] = source.lateness  # holds for the product that says nothing else
    return _digest({**found, "sql": _tokens(product.sql), "of": source_declaration(source)})


def _is_default(field: dataclasses.Field[Any], value: object) -> bool:
    if field.default_factory is not dataclasses.MISSING:
        return bool(value == field.default_factory())
    return bool(value == field.default)


def _plain(value: Any) -> Any:
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else value


def _tokens(sql: str) -> Any:
    """The text without its comments and spacing, which change nothing."""
    try:
        return [token.text for token in sqlglot.tokenize(sql, dialect="spark")]
    except SqlglotError:
        return sql


def _digest(found: Any) -> str:
    text = json.dumps(found, sort_keys=True, default=repr)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


class DedupeDeclaration:
    """Declaration of its source that an index of seen events, and what follows from it, were built with.

    A changed declaration requires a rebuild, because it decides which copy of an event counts. It is noted beside the
    index's folder, and only once everything is built: a crash in between begins the rebuild again. The tables follow
    from it too. So where machines share a lake, it is noted in the lake as well.

    Args:
        lake: whose index it is.
        name: of the index.
    """

    def __init__(self, lake: Lake, name: str, source: Source) -> None:
        self.folder = lake.state / "seen" / name
        self._files = declaration_files(lake, name)
        self._declaration = source_declaration(source)
        self._warned = json.dumps(source.expected(WARN), sort_keys=True)

    def is_stale(self) -> bool:
        """Whether index or tables were built with another declaration; where none is noted, they were not."""
        return any(_noted(file)[0] not in ("", self._declaration) for file in self._files)

    def warned_otherwise(self) -> bool:
        """Whether other events were noted as warnings until now than would be."""
        return _noted(self._files[-1])[-1] != self._warned

    def begin(self) -> None:
        """A rebuild begins. Until :meth:`note` every declaration counts as changed, also the one of before."""
        self._write("rebuilding\n")

    def note(self) -> None:
        self._write(f"{self._declaration}\n{self._warned}")

    def _write(self, text: str) -> None:
        for file in self._files:
            write_whole(file, text.encode())


def declaration_files(lake: Lake, name: str) -> list[LakePath]:
    """Where the declaration of an index is noted: on this machine, and last in the lake, which may be the same."""
    return list(dict.fromkeys(place / "seen" / f"{name}.declaration" for place in (lake.state, lake.shared)))


def _noted(file: LakePath) -> list[str]:
    try:
        return file.read_text(encoding="utf-8").split("\n")
    except FileNotFoundError:
        return ["", "{}"]

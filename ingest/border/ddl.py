"""Parses as much of Spark's DDL as is needed to know, without Spark, which JSON a field may hold.

Only values that Spark would certainly refuse are told apart. Spark itself judges the rest in bronze's readers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

_TOKEN = re.compile(r"\s*(`(?:[^`]|``)*`|'(?:[^'\\]|\\.)*'|[A-Za-z_0-9]+|[<>(),:])")
_ANYTHING: frozenset[type] = frozenset()
_NUMBER = frozenset({int, float})
_JSON_TYPES: Mapping[str, frozenset[type]] = {
    "TINYINT": _NUMBER,
    "BYTE": _NUMBER,
    "SMALLINT": _NUMBER,
    "SHORT": _NUMBER,
    "INT": _NUMBER,
    "INTEGER": _NUMBER,
    "BIGINT": _NUMBER,
    "LONG": _NUMBER,
    "BOOLEAN": frozenset({bool}),
    "ARRAY": frozenset({list}),
    "MAP": frozenset({dict}),
    "STRUCT": frozenset({dict}),
}


@dataclass(frozen=True, slots=True)
class Field:
    """A declared field.

    Attributes:
        declared: type in capitals, without parameters; followed by ``COLLATE`` if it has a collation.
        json: Python types that its JSON may have; empty: any.
        fields: members of a struct.
    """

    declared: str
    json: frozenset[type]
    fields: Mapping[str, Field] = field(default_factory=dict)


def parse_ddl(text: str) -> Mapping[str, Field]:
    """The fields of a DDL schema by name; empty if it cannot be parsed, which bronze's readers then report."""
    tokens = list(_tokens(text))
    try:
        return _fields(tokens, end="")
    except (IndexError, ValueError):
        return {}


def find_field(fields: Mapping[str, Field], path: tuple[str, ...]) -> Field | None:
    found = fields.get(path[0])
    for step in path[1:]:
        found = found.fields.get(step) if found is not None else None
    return found


def _tokens(text: str) -> Iterator[str]:
    at = 0
    text = text.strip()
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            return
        yield match[1]
        at = match.end()


def _fields(tokens: list[str], end: str) -> dict[str, Field]:
    """Consume ``name[:] type [NOT NULL] [COMMENT '…'], …`` up to ``end``."""
    found: dict[str, Field] = {}
    while tokens and tokens[0] != end:
        name = tokens.pop(0).strip("`").replace("``", "`")
        if tokens[0] == ":":
            tokens.pop(0)
        made = _type(tokens)
        while tokens and tokens[0] not in (",", end):
            if tokens.pop(0).upper() == "COLLATE":
                made = replace(made, declared=f"{made.declared} COLLATE")  # its texts compare differently
        found[name] = made
        if tokens and tokens[0] == ",":
            tokens.pop(0)
    return found


def _type(tokens: list[str]) -> Field:
    name = tokens.pop(0).upper()
    if not re.fullmatch(r"[A-Z_0-9]+", name):
        raise ValueError(name)
    fields: dict[str, Field] = {}
    if tokens and tokens[0] == "<":
        tokens.pop(0)
        if name == "STRUCT":
            fields = _fields(tokens, ">")
            tokens.pop(0)
        else:
            _skip(tokens, "<", ">")
    elif tokens and tokens[0] == "(":
        tokens.pop(0)
        _skip(tokens, "(", ")")
    return Field(name, _JSON_TYPES.get(name, _ANYTHING), fields)


def _skip(tokens: list[str], opening: str, closing: str) -> None:
    depth = 1
    while depth:
        token = tokens.pop(0)
        depth += (token == opening) - (token == closing)

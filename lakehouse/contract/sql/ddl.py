"""The one reader of Spark's DDL without Spark: fields of a source's schema, and which JSON each may hold.

Only values that Spark would certainly refuse are told apart. Spark itself judges the rest in bronze's readers. There is
no parser of SQL here: a collector that judges no SQL does not load one (17 MB).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from lakehouse.contract.errors import nearest

JSON_NAMES: Mapping[type, str] = {
    list: "an array",
    str: "a string",
    int: "a number",
    float: "a number",
    bool: "a boolean",
    type(None): "null",
}
_TOKEN = re.compile(r"\s*(`(?:[^`]|``)*`|'(?:[^'\\]|\\.)*'|[A-Za-z_0-9]+|[<>(),:])")
_NUMBER = frozenset({int, float})
_INTEGERS = ("TINYINT", "BYTE", "SMALLINT", "SHORT", "INT", "INTEGER", "BIGINT", "LONG")
_JSON_TYPES: Mapping[str, frozenset[type]] = {
    **dict.fromkeys(_INTEGERS, _NUMBER),
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
    """

    declared: str
    text: str
    fields: Mapping[str, Field] = field(default_factory=dict)
    element: Field | None = None

    @property
    def json(self) -> frozenset[type]:
        """Python types that its JSON may have; empty: any."""
        return _JSON_TYPES.get(self.declared, frozenset())

    @property
    def below(self) -> Mapping[str, Field]:
        """Members of the struct, or of the structs in the array."""
        return self.fields if self.element is None else self.element.below


def parse_ddl(text: str) -> Mapping[str, Field]:
    """The fields of a DDL schema by name; empty if it cannot be parsed, which bronze's readers then report."""
    tokens = list(_tokens(text))
    try:
        return _fields(tokens, end="")
    except (IndexError, ValueError):
        return {}


_TYPES = (
    *(*_INTEGERS, "BOOLEAN", "FLOAT", "REAL", "DOUBLE", "DECIMAL", "DEC", "NUMERIC", "STRING", "CHAR", "CHARACTER"),
    *(
        "VARCHAR",
        "BINARY",
        "DATE",
        "TIME",
        "TIMESTAMP",
        "TIMESTAMP_NTZ",
        "TIMESTAMP_LTZ",
        "INTERVAL",
        "VOID",
        "VARIANT",
    ),
    *("ARRAY", "MAP", "STRUCT", "GEOMETRY", "GEOGRAPHY"),
)


def unknown_type(fields: Mapping[str, Field]) -> tuple[str, str] | None:
    """The first type that Spark does not have, as it is written, and the nearest one that it has (or nothing)."""
    for one in fields.values():
        while one.element is not None:
            one = one.element
        if one.declared.removesuffix(" COLLATE") not in _TYPES:
            word = one.text.split()[0]
            return word, nearest(word.upper(), _TYPES)
        if found := unknown_type(one.fields):
            return found
    return None


def find_field(fields: Mapping[str, Field], path: tuple[str, ...]) -> Field | None:
    """The field at a path of names."""
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
    before = list(tokens)
    name = tokens.pop(0).upper()
    if not re.fullmatch(r"[A-Z_0-9]+", name):
        raise ValueError(name)
    fields: dict[str, Field] = {}
    element = None
    opening = tokens[0] if tokens and tokens[0] in "<(" else ""
    if opening:
        tokens.pop(0)
        if name == "STRUCT":
            fields = _fields(tokens, ">")
            tokens.pop(0)
        else:
            element = _type(list(tokens)) if name == "ARRAY" else None
            _skip(tokens, opening, ">" if opening == "<" else ")")
    return Field(name, " ".join(before[: len(before) - len(tokens)]), fields, element)


def _skip(tokens: list[str], opening: str, closing: str) -> None:
    depth = 1
    while depth:
        token = tokens.pop(0)
        depth += (token == opening) - (token == closing)

"""TOML into frozen dataclasses: unknown keys and wrong types fail with file, line and the nearest known key."""

from __future__ import annotations

import dataclasses
import json
import re
import tomllib
import types
import typing
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin

from lakehouse.contract.errors import ConfigError, did_you_mean
from lakehouse.contract.storage import LakePath, lake_path

T = TypeVar("T")

_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|milliseconds?|s|seconds?|m|minutes?|h|hours?|d|days?)")
_MS = {"ms": 1, "mi": 60_000, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}


def read_toml(path: LakePath) -> dict[str, Any]:
    """The parsed file. Raises ConfigError."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError("there is no such file", file=path) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"not valid TOML: {error}", file=path) from None


def toml_text(values: Mapping[str, Any], at: str = "") -> str:
    """The TOML of texts, numbers, truth values, and lists and tables of these.

    Args:
        at: the table that they stand in.
    """
    tables = {name: value for name, value in values.items() if isinstance(value, Mapping)}
    lines = [f"[{at}]"] if at else []
    lines += [f"{_key(name)} = {_value(value)}" for name, value in values.items() if name not in tables]
    text = "\n".join([*lines, ""])
    return text + "".join(toml_text(table, f"{at}.{name}" if at else name) for name, table in tables.items())


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else json.dumps(name)


def _value(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_key(name)} = {_value(one)}' for name, one in value.items())}}}"
    return json.dumps(value, ensure_ascii=False)


def duration_ms(text: str) -> int:
    """Milliseconds in a duration such as ``30 seconds``, ``5s`` or ``40 days``. Raises ValueError."""
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a duration such as '30 seconds' or '5m'")
    unit = match[2]
    scale = 1 if unit.startswith(("ms", "milli")) else _MS[unit[0]]
    return int(float(match[1]) * scale)


class Milliseconds:
    """A property: the duration in another attribute, in milliseconds; 0 if that is empty."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, declared: object, kind: type | None = None) -> int:
        return duration_ms(getattr(declared, self._name) or "0 s")


def build(cls: type[T], values: Mapping[str, Any], *, file: LakePath, at: str = "") -> T:
    """An instance of the dataclass ``cls`` from a TOML table.

    Nested dataclasses, ``tuple[X, ...]`` and ``dict[str, X]`` are followed; ``Path`` is taken as written. A field whose
    key is a word of Python's has the key in its metadata: ``field(metadata={"key": "from"})``.

    Raises:
        ConfigError: unknown key, missing key, or a value of another type, with the place and the remedy.
    """
    hints = _hints(cls)  # type: ignore[arg-type]
    fields = {f.metadata.get("key", f.name): f for f in dataclasses.fields(cls) if f.init}  # type: ignore[arg-type]
    arguments: dict[str, Any] = {}
    for name, value in values.items():
        key = f"{at}.{name}" if at else name
        if name not in fields:
            remedy = did_you_mean(name, sorted(fields), "Known keys")
            raise ConfigError("unknown key", key=key, remedy=remedy, file=file, line=line_of(file, key))
        arguments[fields[name].name] = _convert(hints[fields[name].name], value, file=file, key=key)
    for name, field in fields.items():
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and field.name not in arguments:
            raise ConfigError(
                f"key {name!r} is missing", key=at, remedy=f"Add {name} = …", file=file, line=line_of(file, at)
            )
    try:
        return cls(**arguments)
    except ConfigError as error:  # a check in __post_init__ knows the key, not the file
        raise placed(error, file, ".".join(part for part in (at, error.key) if part)) from None


def placed(error: ConfigError, file: LakePath, key: str) -> ConfigError:
    """The error with the file and the line that sets the dotted ``key``, as far as it does not know them."""
    line = error.line or line_of(file, key)
    return ConfigError(error.problem, key=key, remedy=error.remedy, file=error.file or file, line=line)


@lru_cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def line_of(file: LakePath, key: str) -> int | None:
    """The line of the file that sets the dotted ``key``, 1-based; else that of the table nearest above it, or None."""
    if not key or not file.is_file():
        return None
    steps = re.sub(r"\[\d+\]", "", key).split(".")
    places = [int(number) for number in re.findall(r"\[(\d+)\]", key)]
    found, best, table, seen = None, 0, [""], 0
    for number, line in enumerate(file.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        if header := re.match(r"\s*(\[+)\s*([^\]#]+?)\s*\]", line):
            table = [step.strip(" '\"") for step in header[2].split(".")]
            seen += header[1] == "[[" and table == steps[: len(table)]
            path = table
        elif setting := re.match(r"""\s*([A-Za-z0-9_."'-]+)\s*=""", line):
            path = [*table, *(step.strip("'\"") for step in setting[1].split("."))]
            path = path[path[0] == "" :]
        else:
            continue
        in_place = not places or seen == places[0] + 1 or not seen
        if in_place and len(path) > best and path == steps[: len(path)]:
            found, best = number, len(path)
    if best < len(steps) and len(steps) == 1:
        return _first_line_of(file, steps[0])
    return found


def _first_line_of(file: LakePath, key: str) -> int | None:
    pattern = re.compile(rf"\s*(\[+.*\b{re.escape(key)}\]+|{re.escape(key)}\s*=)")
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    return next((number for number, line in enumerate(lines, 1) if pattern.match(line)), None)


def _convert(hint: Any, value: Any, *, file: LakePath, key: str) -> Any:
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        options = [option for option in get_args(hint) if option is not type(None)]
        return _convert(options[0], value, file=file, key=key)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        if isinstance(value, (str, bool)) and (short := getattr(hint, "SHORTHAND", "")):
            value = {short: value}  # a table that says one thing may be written as that thing
        if isinstance(value, Mapping):
            return build(hint, value, file=file, at=key)
    elif origin is tuple and isinstance(value, list):
        return tuple(_convert(get_args(hint)[0], v, file=file, key=f"{key}[{i}]") for i, v in enumerate(value))
    elif origin is dict and isinstance(value, Mapping):
        inner = get_args(hint)[1]
        return {k: _convert(inner, v, file=file, key=f"{key}.{k}") for k, v in value.items()}
    elif hint is Path and isinstance(value, str):
        return Path(value)
    elif hint == LakePath and isinstance(value, str):
        return lake_path(value)
    elif hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    elif hint is Any or (isinstance(hint, type) and type(value) is hint):
        return value
    wanted = getattr(hint, "__name__", str(hint))
    raise ConfigError(
        f"{value!r} is not of type {wanted}",
        key=key,
        remedy=f"Give a {wanted}",
        file=file,
        line=line_of(file, key),
    )


def one_of(key: str, value: str, allowed: tuple[str, ...]) -> None:
    """Refuse a value that is not among the allowed ones."""
    if value not in allowed:
        raise ConfigError(f"{value!r} is not known", key=key, remedy=did_you_mean(value, allowed, "Use one of"))


def http_address(key: str, value: str) -> str:
    """The value, unless it is neither empty nor the address of an HTTP server."""
    if value and not re.fullmatch(r"https?://[^\s/]+(/\S*)?", value):
        raise ConfigError("is no http address", key=key, remedy="Write http://HOST:PORT")
    return value


def durations(declared: object, *keys: str) -> None:
    """Refuse attributes that are neither empty nor durations."""
    for key in keys:
        try:
            duration_ms(getattr(declared, key) or "0 s")
        except ValueError as error:
            raise ConfigError(str(error), key=key) from None


def between(key: str, value: int, low: int, high: int) -> None:
    """Refuse a number outside of ``low`` to ``high``."""
    if not low <= value <= high:
        raise ConfigError(f"must be between {low} and {high}", key=key)


def at_least(key: str, value: int, low: int) -> None:
    """Refuse a number below ``low``."""
    if value < low:
        raise ConfigError(f"must be at least {low}", key=key)

"""Dataclasses as settings: plain data -> typed tree and back, with errors that name the key and the fix.

A field's help text is the docstring under it. Nothing here knows what the settings mean.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import inspect
import math
import re
import textwrap
import types
import typing
from collections.abc import Iterable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

import yaml

from flexor.core import foreign_files
from flexor.core.errors import ConfigError

T = TypeVar("T")


class Text(str):
    """A value as typed on the command line. The field it is for decides its type."""


class Partial(dict[str, Any]):
    """Some entries of a dictionary, given by dotted keys; the other entries keep their values."""


@dataclasses.dataclass(frozen=True)
class Rules:
    """The allowed values of a setting, and whether it may change when a run is resumed."""

    at_least: float | None = None
    more_than: float | None = None
    less_than: float | None = None
    may_change: bool = False

    def broken_rule(self, value: Any) -> str | None:
        """The rule that a value breaks, in words; None if the value is valid."""
        if isinstance(value, tuple | list):
            return next((broken for item in value if (broken := self.broken_rule(item))), None)
        if value is None or isinstance(value, str):
            return None
        low = (self.at_least is None or value >= self.at_least) and (
            self.more_than is None or value > self.more_than
        )
        if low and (self.less_than is None or value < self.less_than):
            return None
        limits = {"at least": self.at_least, "more than": self.more_than, "less than": self.less_than}
        return " and ".join(f"{words} {limit:g}" for words, limit in limits.items() if limit is not None)


def setting(default: Any, **rules: Any) -> Any:
    """A field of settings with its rules: `steps: int = setting(100, at_least=1, may_change=True)`.

    A class, such as `list` or a group of settings, is called for each default.
    """
    kind = "default_factory" if isinstance(default, type) else "default"
    return dataclasses.field(**{kind: default}, metadata={"rules": Rules(**rules)})


def rules_of(cls: Any) -> dict[str, Rules]:
    """The rules of each field of a class of settings."""
    return {field.name: field.metadata.get("rules", Rules()) for field in dataclasses.fields(cls)}


def check_values(settings: Any, where: str = "") -> None:
    """Raise an error that names the setting if a value breaks its field's rules."""
    for name, rules in rules_of(settings).items():
        value, key = getattr(settings, name), join(where, name)
        if dataclasses.is_dataclass(value):
            check_values(value, key)
        elif rule := rules.broken_rule(value):
            printed = list(value) if isinstance(value, tuple) else value
            raise ConfigError(f"{key}={printed} must be {rule}.")


def changeable(cls: Any, where: str = "") -> list[str]:
    """Settings that may change when a run is resumed; a group as `group.*` if all of it may."""
    keys = []
    for name, rules in rules_of(cls).items():
        inner = field_types(cls)[name]
        group = dataclasses.is_dataclass(inner)
        if rules.may_change:
            keys.append(f"{join(where, name)}.*" if group else join(where, name))
        elif group:
            keys += changeable(inner, join(where, name))
    return keys


class UnknownSetting(ConfigError):
    """A setting that does not exist."""

    def __init__(self, name: str, value: Any, hint: str = ""):
        super().__init__(f"Unknown setting {name}={value!r}. {hint}")
        self.name, self.value = name, value


ALIKE = 0.06  # of similarities: names that are meant as likely as the most similar one


def closest(name: str, names: Iterable[str]) -> str:
    """The hint "Did you mean ...?", or the list of all names if none is similar."""
    names = list(names)
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.6)
    ratios = [difflib.SequenceMatcher(None, name, other).ratio() for other in near]
    near = [other for other, ratio in zip(near, ratios) if ratio > ratios[0] - ALIKE]
    if near:
        return f"Did you mean {' or '.join(near)}?"
    return f"Available: {', '.join(names)}."


def from_plain(cls: type[T], data: Any, where: str = "") -> T:
    """Build the dataclass `cls` from nested dictionaries; `where` is its key, for messages."""
    if not isinstance(data, dict):
        raise ConfigError(f"{where or cls.__name__}: expected settings (key: value), got {data!r}.")
    types_of = field_types(cls)
    values = {}
    for key, value in data.items():
        if key not in types_of:
            raise UnknownSetting(
                join(where, key), value, closest(join(where, key), (join(where, n) for n in types_of))
            )
        partly = isinstance(value, Partial) and _is_dict(types_of[key])
        default = (getattr(cls(), key) or {}) if partly else {}
        values[key] = coerce(_completed(value, default), types_of[key], join(where, key))
        if default:
            values[key] = {**default, **values[key]}
    return cls(**values)


def _is_dict(expected: Any) -> bool:
    return any(typing.get_origin(option) is dict for option in _options(expected))


def _completed(value: Any, default: dict[str, Any]) -> Any:
    """Entries that are groups of settings themselves, given in part, with the other settings of the default."""
    part = {
        name: {**to_plain(default[name]), **entry}
        for name, entry in (value.items() if default else ())
        if isinstance(entry, Partial) and dataclasses.is_dataclass(default.get(name))
    }
    return {**value, **part} if part else value


def to_plain(value: Any) -> Any:
    """The tree as nested dictionaries, lists and scalars, fit for YAML and JSON."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(k): to_plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(v) for v in value]
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Path):
        return str(value)
    return value


_hints = functools.cache(typing.get_type_hints)


def field_types(cls: Any) -> dict[str, Any]:
    hints = _hints(cls)
    return {f.name: hints[f.name] for f in dataclasses.fields(cls)}


@functools.cache
def help_texts(cls: type) -> dict[str, str]:
    """field -> the docstring under it, base classes included."""
    texts: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        assert isinstance(body, ast.ClassDef)
        for statement, following in zip(body.body, body.body[1:]):
            if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
                continue
            if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
                texts[statement.target.id] = " ".join(str(following.value.value).split())
    return texts


def with_settings(settings: T, changes: Mapping[str, Any], where: str = "") -> T:
    """A copy of the settings with other values, given by dotted keys; groups are copied too."""
    for key, value in changes.items():
        name, _, inner = key.partition(".")
        if inner:
            value = with_settings(getattr(settings, name), {inner: value}, join(where, name))
        else:
            value = coerce(value, field_types(type(settings))[name], join(where, name))
        settings = dataclasses.replace(settings, **{name: value})  # type: ignore[type-var]
    return settings


def join(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key


def type_name(expected: Any) -> str:
    """A type as a person would say it."""
    origin, args = typing.get_origin(expected), typing.get_args(expected)
    if expected is type(None):
        return "null"
    if origin is typing.Literal:
        return "|".join(str(a) for a in args)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(type_name(a) for a in args)
    if isinstance(expected, type) and issubclass(expected, Enum):
        return "|".join(str(e.value) for e in expected)
    if origin in (list, tuple, dict):
        inner = ", ".join(type_name(a) for a in args if a is not Ellipsis)
        return f"{origin.__name__} of {inner}" if inner else origin.__name__
    return {bool: "true|false", int: "integer", float: "number", str: "text", Path: "path"}.get(
        expected, getattr(expected, "__name__", str(expected))
    )


def coerce(value: Any, expected: Any, where: str) -> Any:
    """`value` as the field's type, or an error naming key, value and what was expected."""
    if isinstance(value, Text):
        value = _parse_text(value, expected)
    try:
        return _coerce(value, expected, where)
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"{where}={value!r} is not valid: expected {type_name(expected)}.") from error


def _parse_text(text: str, expected: Any) -> Any:
    """The typed text as data; it stays text if the field accepts text."""
    options = _options(expected)
    if type(None) in options and text.lower() in ("null", "none", ""):
        return None
    structured = {list, dict, tuple} & {typing.get_origin(o) for o in options}
    # Numbers are not read as YAML, where 010 is eight, 1:30 is ninety and 1e5 is text.
    plain = {int, float, str} & set(options) or any(typing.get_origin(o) is typing.Literal for o in options)
    if plain and not (structured and text[:1] in ("[", "{")):
        return str(text)
    return parse_yaml(text)


class _Loader(yaml.SafeLoader):
    """YAML in which 5:9 is text. YAML 1.1 reads it as a number to the base of 60."""


_Loader.yaml_implicit_resolvers = {
    first: [
        (tag, re.compile("(?!.*:)" + regexp.pattern, re.X) if tag.endswith((":int", ":float")) else regexp)
        for tag, regexp in resolvers
    ]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


# libyaml's, where PyYAML has it: ten times as fast
QuickDumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


def load_yaml(text: str) -> Any:
    """The text as YAML; a ValueError if it is not valid."""
    return foreign_files.parse_yaml(str(text), _Loader)  # libyaml takes no subclass of str


def parse_yaml(text: str) -> Any:
    """The text parsed as YAML, or unchanged if it is not valid YAML."""
    try:
        return load_yaml(text)
    except ValueError:
        return str(text)


def _options(expected: Any) -> tuple[Any, ...]:
    if typing.get_origin(expected) in (typing.Union, types.UnionType):
        return typing.get_args(expected)
    return (expected,)


def _coerce(value: Any, expected: Any, where: str) -> Any:
    origin, args = typing.get_origin(expected), typing.get_args(expected)
    if expected is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        return _coerce_union(value, args, where)
    if origin is typing.Literal:
        # an unquoted `no`, `off`, `yes` or `on` in a YAML file is a boolean before we see it
        names = {True: ("true", "yes", "on"), False: ("false", "no", "off")}
        texts = names[value] if isinstance(value, bool) else (value,)
        match = [a for a in args if a in texts]
        return match[0] if match else _refuse(value)
    if origin is list:
        items = value if isinstance(value, (list, tuple)) else _refuse(value)
        return [_coerce(v, args[0], where) for v in items]
    if origin is tuple:
        items = list(value) if isinstance(value, (list, tuple)) else _refuse(value)
        kinds = [args[0]] * len(items) if args[-1] is Ellipsis else list(args)
        return tuple(_coerce(v, k, where) for v, k in zip(items, kinds, strict=True))
    if origin is dict:
        items = value if isinstance(value, dict) else _refuse(value)
        return {_coerce(k, args[0], where): coerce(v, args[1], join(where, k)) for k, v in items.items()}
    if dataclasses.is_dataclass(expected):
        cls = typing.cast(type, expected)
        return value if isinstance(value, cls) else from_plain(cls, value, where)
    return _coerce_scalar(value, expected)


def _coerce_union(value: Any, options: tuple[Any, ...], where: str) -> Any:
    if value is None and type(None) in options:
        return None
    for option in options:
        if option is type(None):
            continue
        try:
            return _coerce(value, option, where)
        except (TypeError, ValueError, OverflowError):
            continue
    return _refuse(value)


def _coerce_scalar(value: Any, expected: type) -> Any:
    if value is None and expected is not type(None):
        return _refuse(value)
    if expected is bool:
        return value if isinstance(value, bool) else _refuse(value)
    if expected is int:
        if isinstance(value, float) and value.is_integer():
            return int(value)
        if isinstance(value, str):
            value = float(value) if "e" in value.lower() else int(value.replace("_", ""))
            return int(value) if value == int(value) else _refuse(value)
        return value if isinstance(value, int) and not isinstance(value, bool) else _refuse(value)
    if expected is float:
        if isinstance(value, bool):
            return _refuse(value)
        number = float(value)  # "1e-4" is text in YAML
        return number if math.isfinite(number) else _refuse(value)
    if expected is str:
        return value if isinstance(value, str) else _refuse(value)
    return expected(value)


def _refuse(value: Any) -> Any:
    raise TypeError(f"{value!r}")

"""Fields of typed configurations: their type, range and choices stand at the field, with a comment that documents it.

A configuration is a dataclass of sections, each a dataclass. A field is written once::

    steps: Count = 120  # number of training steps
    mode: Annotated[str, OneOf("warn", "stop", "off")] = "warn"  # before the first step: warn, stop or off
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from difflib import get_close_matches
from functools import cache
from typing import Annotated, Any, get_args, get_type_hints

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from torchrl_rloo.runtime.lookup import did_you_mean


class SettingError(ValueError):
    """Error for a setting that a configuration does not have, or a value of the wrong type."""


# ------------------------------------------------------------------------------------------ ranges and choices
@dataclass(frozen=True)
class Range:
    """Range of a number, with its ends unless ``above``."""

    low: float
    high: float | None = None
    above: bool = False  # whether low itself is too low

    def check(self, name: str, value: Any) -> None:
        """Raise ``ValueError`` if a value is outside."""
        if self.above and not value > self.low:
            raise ValueError(f"{name}={value} must be above {self.low}")
        if self.high is not None and not self.low <= value <= self.high:
            raise ValueError(f"{name}={value} must be between {self.low} and {self.high}")
        if not value >= self.low:
            raise ValueError(f"{name}={value} must be at least {self.low}")

    def __str__(self) -> str:
        return f"{'>' if self.above else '≥'} {self.low}{'' if self.high is None else f', ≤ {self.high}'}"


class OneOf:
    """Choices of a text, with remedies for words that are none of them; with ``numbers``, also any step from 0."""

    def __init__(self, *choices: str, numbers: bool = False, **remedies: str):
        self.choices, self.numbers, self.remedies = choices, numbers, remedies

    def check(self, name: str, value: Any) -> None:
        """Raise ``ValueError`` if a value is not among the choices."""
        if self.numbers and type(value) is int and value >= 0:
            return
        if value not in self.choices:
            number = ", or a step of at least 0" if self.numbers else ""
            listed = f"unknown{did_you_mean(value, self.choices)}; valid: {', '.join(self.choices)}{number}"
            raise ValueError(f"{name}={value}: {self.remedies.get(str(value), listed)}")

    def __str__(self) -> str:
        return ", ".join(f"`{choice}`" for choice in self.choices)


Count = Annotated[int, Range(1)]
Whole = Annotated[int, Range(0)]
NonNegative = Annotated[float, Range(0)]
Positive = Annotated[float, Range(0, above=True)]
Share = Annotated[float, Range(0, 1)]
DType = Annotated[str, OneOf("float32", "bfloat16", "float16", "float64")]


def check_values(config: Any, prefix: str = "") -> None:
    """Raise ``ValueError`` on the first setting that is out of range or none of its choices."""
    for name, value, limit in _limited(config, prefix):
        for each in value if isinstance(value, list) else [value]:
            limit.check(name, each)


def _limited(section: Any, prefix: str) -> Iterator[tuple[str, Any, Range | OneOf]]:
    """Yield name, value and limit of all settings that have one and are not null."""
    limits = field_limits(type(section))
    for f in fields(section):
        value = getattr(section, f.name)
        if is_dataclass(value):
            yield from _limited(value, f"{prefix}{f.name}.")
        elif value is not None:
            yield from ((f"{prefix}{f.name}", value, limit) for limit in limits.get(f.name, ()))


@cache
def field_limits(config: type) -> dict[str, list[Range | OneOf]]:
    """Return the limits of each field that has one, by name."""
    found = {name: list(_find_limits(hint)) for name, hint in get_type_hints(config, include_extras=True).items()}
    return {name: limits for name, limits in found.items() if limits}


def _find_limits(hint: Any) -> Iterator[Range | OneOf]:
    yield from (limit for limit in getattr(hint, "__metadata__", ()) if isinstance(limit, Range | OneOf))
    for part in get_args(hint):
        yield from _find_limits(part)


# ------------------------------------------------------------------------------------------ names and documentation
@dataclass(frozen=True)
class Setting:
    """Setting or section of a configuration; a section has no default."""

    name: str  # with dots
    default: str
    comment: str
    limits: str = ""


def iter_settings(config: type) -> Iterator[Setting]:
    """Yield each field and section; fields of sections come last."""
    comments, hints, limits = _comments(config), get_type_hints(config), field_limits(config)
    for f in sorted(fields(config), key=lambda f: is_dataclass(hints[f.name])):
        section, comment = hints[f.name], comments.get(f.name, "")
        if is_dataclass(section):
            yield Setting(f.name, "", comment)
            for inner in iter_settings(section):
                yield Setting(f"{f.name}.{inner.name}", inner.default, inner.comment, inner.limits)
        else:
            yield Setting(f.name, _yaml(_default(f)), comment, ", ".join(map(str, limits.get(f.name, ()))))


@cache  # it is read for each override
def known_settings(config: type) -> tuple[str, ...]:
    """Return all dotted names of a configuration."""
    return tuple(setting.name for setting in iter_settings(config))


@cache
def free_sections(config: type) -> tuple[str, ...]:
    """Return the dotted names of fields that accept any keys: mappings that are checked later."""
    found, hints = [], get_type_hints(config)
    for name, hint in ((f.name, hints[f.name]) for f in fields(config)):
        if is_dataclass(hint):
            found += [f"{name}.{section}" for section in free_sections(hint)]
        elif "dict" in str(hint) or hint is Any:
            found.append(name)
    return tuple(found)


@cache
def text_settings(config: type, prefix: str = "") -> tuple[str, ...]:
    """Return the dotted names of fields that hold text."""
    found = []
    for name, hint in get_type_hints(config).items():
        if is_dataclass(hint):
            found += text_settings(hint, f"{prefix}{name}.")
        elif hint in (str, str | None):
            found.append(f"{prefix}{name}")
    return tuple(found)


def check_names(names: list[str], config: type, groups: list[str] = ()) -> None:
    """Raise a :class:`SettingError` on the first name that a configuration does not have, with the nearest one."""
    known, free = [*known_settings(config), *groups], tuple(f"{name}." for name in free_sections(config))
    for name in names:
        if name not in known and not name.startswith(free):
            raise SettingError(f"unknown setting {name}{near_match_hint(name, known)}")


def near_match_hint(name: str, known: list[str]) -> str:
    """Return a hint at the nearest known name, or at the list of names."""
    last = {k.rpartition(".")[2]: k for k in reversed(known)}  # so a right name in a wrong section is near as well
    leaf = get_close_matches(name.rpartition(".")[2], last, n=1, cutoff=0.75)
    matches = get_close_matches(name, known, n=1) or [last[match] for match in leaf]
    return f": did you mean {matches[0]}?" if matches else ": --help-all lists the settings"


def help_text(config: type, values: DictConfig, common: tuple[str, ...] = ()) -> str:
    """Return settings with their values and comments, one line each, by section; ``common`` selects some of them."""
    lines, section = [], ""
    for setting in iter_settings(config):
        name = setting.name
        if not setting.default:
            section = f"\n{name}:  {setting.comment}".rstrip(": ")
            continue
        if common and name not in common:
            continue
        if section and not common:
            lines.append(section)
        section = ""
        value = OmegaConf.select(values, name)
        text = f"  {name}={_yaml(OmegaConf.to_container(value) if OmegaConf.is_config(value) else value)}"
        lines.append(f"{text:<44} {setting.comment}" if setting.comment else text)
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------ sections
def non_null_fields(section: Any, *without: str) -> dict[str, Any]:
    """Return the fields of a section that are not null, so the callee's defaults apply; ``without`` excludes fields.

    Example:
        >>> from torchrl_rloo.cli.config import GenerateConfig
        >>> non_null_fields(GenerateConfig(top_p=0.9))["top_p"], "top_k" in non_null_fields(GenerateConfig())
        (0.9, False)
    """
    values = {f.name: getattr(section, f.name) for f in fields(section) if f.name not in without}
    return {name: value for name, value in values.items() if value is not None}


def check_settings(name: str, values: Any) -> None:
    """Raise ``ValueError`` if a value is neither null nor a mapping of settings."""
    if values is not None and not isinstance(values, dict):
        raise ValueError(f"{name}={values} must be null or a mapping of settings such as {{key: value}}")


def parse_section(config: type, values: Any, name: str) -> Any:
    """Return a section that may be null as its dataclass; null and instances of ``config`` are returned unchanged.

    Raises:
        ValueError: if a name is unknown, or a value has the wrong type or is out of range.
    """
    if values is None or isinstance(values, config):
        return values
    if not isinstance(values, dict):
        raise SettingError(f"{name}={values} must be null or a mapping of settings such as {{}}")
    known = {f.name: f"{name}.{f.name}" for f in fields(config)}
    for key in values:
        if key not in known:
            raise SettingError(f"unknown setting {name}.{key}{near_match_hint(f'{name}.{key}', [*known.values()])}")
    try:
        section = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(config), values))
    except OmegaConfBaseException as error:
        raise SettingError(f"{name}.{explain_error(error)}") from error
    check_values(section, f"{name}.")
    return section


def to_object(cfg: DictConfig) -> Any:
    """Return the dataclass instance of a composed configuration."""
    try:
        return OmegaConf.to_object(cfg)
    except OmegaConfBaseException as error:
        raise SettingError(explain_error(error)) from error


def explain_error(error: OmegaConfBaseException) -> str:
    """Return an OmegaConf error as one line: name, value and expected type."""
    message = str(error.msg or error).splitlines()[0]
    key = error.full_key or ""
    value = re.match(
        r"Value '(.*?)'(?: of type '[^']*')? (?:could not be converted|is not convertible) to (\w+)", message
    )
    if value:
        kinds = {"Integer": "an integer", "Float": "a number", "Boolean": "true or false", "String": "text"}
        return f"{key}={value[1]} must be {kinds.get(value[2], value[2])}"
    if "is not a ListConfig" in message:
        return f"{key} must be a list, {key}=[...]"
    if "to Dict[" in message:
        return f"{key} must be a mapping, {key}={{name: value}}"
    return f"{key}: {message}" if key and key not in message else message


def _default(f: Field) -> Any:
    return f.default_factory() if f.default_factory is not MISSING else f.default


def _yaml(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{','.join(map(_yaml, value))}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{k}:{_yaml(v)}" for k, v in value.items()) + "}"
    text = str(value)
    return text if text.isprintable() else json.dumps(text, ensure_ascii=False)


def _comments(config: type) -> dict[str, str]:
    """Return the trailing comment of each field in the source, including those of base classes."""
    found: dict[str, str] = {}
    for cls in reversed(config.__mro__):
        if not is_dataclass(cls):
            continue
        try:
            source = textwrap.dedent(inspect.getsource(cls))
        except OSError:  # a class defined interactively has no source
            continue
        lines = source.splitlines()
        for node in ast.parse(source).body[0].body:
            if isinstance(node, ast.AnnAssign):
                comment = lines[node.end_lineno - 1].encode()[node.end_col_offset :].decode().strip()
                found[node.target.id] = comment.lstrip("# ").strip()
    return found

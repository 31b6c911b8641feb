"""Typed configurations: their documentation, and one-line errors with a near match."""

from __future__ import annotations

import ast
import inspect
import json
import re
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from difflib import get_close_matches
from functools import cache
from typing import Any, get_type_hints

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException


class SettingError(ValueError):
    """Error for a setting that a configuration does not have, or a value of the wrong type."""


def non_null_fields(section: Any, *without: str) -> dict[str, Any]:
    """Return the fields of a section that are not null, so the callee's defaults apply; ``without`` excludes fields.

    Example:
        >>> from torchrl_rloo.cli.sampling_config import GenerateConfig
        >>> non_null_fields(GenerateConfig(top_p=0.9))["top_p"], "top_k" in non_null_fields(GenerateConfig())
        (0.9, False)
    """
    values = {f.name: getattr(section, f.name) for f in fields(section) if f.name not in without}
    return {name: value for name, value in values.items() if value is not None}


def iter_settings(config: type) -> Iterator[tuple[str, str, str]]:
    """Yield ``(name, default, comment)`` of each field; fields of sections come last, with dotted names.

    A section itself has an empty default and its own comment.
    """
    comments, hints = _comments(config), get_type_hints(config)
    for f in sorted(fields(config), key=lambda f: is_dataclass(hints[f.name])):
        section, comment = hints[f.name], comments.get(f.name, "")
        if is_dataclass(section):
            yield f.name, "", comment
            for name, default, text in iter_settings(section):
                yield f"{f.name}.{name}", default, text
        else:
            yield f.name, _yaml(_default(f)), comment


@cache  # it is read for each override
def known_settings(config: type) -> tuple[str, ...]:
    """Return all dotted names of a configuration."""
    return tuple(name for name, _, _ in iter_settings(config))


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
    """Raise on the first name that a configuration does not have.

    Raises:
        SettingError: with the nearest known name.
    """
    known, free = [*known_settings(config), *groups], tuple(f"{name}." for name in free_sections(config))
    for name in names:
        if name not in known and not name.startswith(free):
            raise SettingError(f"unknown setting {name}{near_match_hint(name, known)}")


def near_match_hint(name: str, known: list[str]) -> str:
    """Return a hint at the nearest known name, or at the list of names."""
    last = {k.rpartition(".")[2]: k for k in reversed(known)}  # so a right name in a wrong section is near as well
    leaf = get_close_matches(name.rpartition(".")[2], last, n=1, cutoff=0.75)
    matches = get_close_matches(name, known, n=1) or [last[match] for match in leaf]
    return f": did you mean {matches[0]}?" if matches else ": --help lists the settings"


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


def check_settings(name: str, values: Any) -> None:
    """Raise ``ValueError`` if a value is neither null nor a mapping of settings."""
    if values is not None and not isinstance(values, dict):
        raise ValueError(f"{name}={values} must be null or a mapping of settings such as {{key: value}}")


def parse_section(config: type, values: Any, name: str) -> Any:
    """Return a section that may be null as its dataclass.

    Args:
        config: dataclass of the section.
        values: settings of the section. None and instances of ``config`` are returned unchanged.
        name: dotted name of the section.

    Raises:
        SettingError: if a name is unknown or a value has the wrong type.
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
        return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(config), values))
    except OmegaConfBaseException as error:
        raise SettingError(f"{name}.{explain_error(error)}") from error


def to_object(cfg: DictConfig) -> Any:
    """Return the dataclass instance of a composed configuration."""
    try:
        return OmegaConf.to_object(cfg)
    except OmegaConfBaseException as error:
        raise SettingError(explain_error(error)) from error


def help_text(config: type, values: DictConfig | None = None) -> str:
    """Return all settings with their values and comments, one line each, by section."""
    lines = []
    for name, default, comment in iter_settings(config):
        if values is not None and default:
            value = OmegaConf.select(values, name)
            default = _yaml(OmegaConf.to_container(value) if OmegaConf.is_config(value) else value)
        if not default:
            lines.append(f"\n{name}:  {comment}".rstrip(": ") if comment else f"\n{name}")
            continue
        text = f"  {name}={default}"
        lines.append(f"{text:<44} {comment}" if comment else text)
    return "\n".join(lines)


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

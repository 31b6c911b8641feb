"""Schemas of functions, and whether the arguments of a call fit one."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Collection, Iterator, Mapping
from difflib import get_close_matches
from types import FunctionType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from torchrl_rloo.envs.tools.json_calls import literal

_KINDS = {
    "string": (str, "a string"),
    "integer": (int, "an integer"),
    "number": ((int, float), "a number"),
    "boolean": (bool, "a boolean"),
    "array": (list, "an array"),
    "object": (dict, "an object"),
    "null": (type(None), "null"),
}
_SPELLED = {"true": True, "false": False, "none": None}  # as Python writes them, in any case
_PLAIN = (str, int, float, bool, list, dict, Any, type(None))
_SHOWN = 80  # characters of a wrong value


def function_schema(function: Callable[..., Any], *, hidden: Collection[str] = ()) -> dict[str, Any]:
    """The schema of a typed function in the format that chat templates take as one of ``tools``.

    Args:
        function: with type hints and a Google docstring.
        hidden: names of parameters that are left out.

    Raises:
        ValueError: if the docstring, or the type hint or the description of an argument is missing; for types that
            JSON has not, and for arguments that cannot be given by name.
    """
    from transformers.utils import chat_template_utils, get_json_schema  # takes 2 s

    signature = inspect.signature(function)
    shown = [p for name, p in signature.parameters.items() if name not in hidden]
    name = getattr(function, "__name__", type(function).__name__)
    hints = get_type_hints(function)
    for p in shown:
        if p.kind not in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY):
            raise ValueError(f"{name} cannot become a tool: its argument {p.name!r} cannot be given by name")
        if p.name in hints and not _is_json_type(hints[p.name]):
            raise ValueError(
                f"{name} cannot become a tool: its argument {p.name!r} is {p.annotation}, which JSON has not; use str, "
                "int, float, bool, list[...], dict[str, ...], Literal[...], or a union of these and None"
            )

    def stand_in() -> None: ...

    described = FunctionType(stand_in.__code__, {}, name)
    described.__doc__ = inspect.getdoc(function)
    described.__annotations__ = {p.name: hints[p.name] for p in shown if p.name in hints}
    described.__signature__ = signature.replace(parameters=shown, return_annotation=signature.empty)
    try:
        return get_json_schema(described)
    except (chat_template_utils.DocstringParsingException, chat_template_utils.TypeHintParsingException) as error:
        raise ValueError(f"{name} cannot become a tool: {' '.join(map(str, error.args))}") from error


def _is_json_type(hint: Any) -> bool:
    origin, args = get_origin(hint), get_args(hint)
    if origin is None:
        return hint in _PLAIN
    if origin is dict and args[0] is not str:
        return False
    return origin is Literal or (origin in (list, dict, Union, UnionType) and all(map(_is_json_type, args)))


def fit_arguments(
    arguments: Mapping[str, Any], parameters: Mapping[str, Any], *, untyped: bool = False
) -> dict[str, Any]:
    """The arguments of a call as its tool takes them.

    Looked at are ``properties``, ``required``, ``additionalProperties`` (others are refused unless it is there and not
    False), ``type``, ``nullable``, ``enum``, ``const``, ``anyOf``, ``oneOf`` and ``items``. Whatever else a schema asks
    for is the tool's to check.

    Args:
        arguments: by name.
        parameters: the JSON Schema of a tool's arguments.
        untyped: whether they are texts, which stand for JSON where the schema wants something else than a string.

    Raises:
        ValueError: with all that does not fit, in words for the policy.

    Example:
        >>> parameters = {"properties": {"n": {"type": "integer"}}, "required": ["n"]}
        >>> fit_arguments({"n": "3"}, parameters, untyped=True)
        {'n': 3}
        >>> fit_arguments({"n": "3"}, parameters)
        Traceback (most recent call last):
        ValueError: argument "n" must be an integer, got "3" (a string)
    """
    properties = parameters.get("properties", {})
    if untyped:
        arguments = {k: _read(text, properties.get(k, {})) for k, text in arguments.items()}
    if problems := list(_object_misfits("", arguments, parameters, closed=True)):
        raise ValueError("; ".join(problems[:8]))
    return dict(arguments)


def _object_misfits(
    path: str, value: Mapping[str, Any], schema: Mapping[str, Any], *, closed: bool = False
) -> Iterator[str]:
    properties, more = schema.get("properties", {}), schema.get("additionalProperties", not closed)
    for name in schema.get("required", ()):
        if name not in value:
            yield f"argument {_quoted(path + name)} is missing"
    for name, item in value.items():
        if name in properties:
            yield from _misfits(path + name, item, properties[name])
        elif more is False:
            near = get_close_matches(name[:_SHOWN], properties, n=1)
            known = near or list(properties)
            yield f"there is no argument {_quoted(path + name)}" + (
                f"; did you mean {_quoted(near[0])}?"
                if near
                else f", only {', '.join(map(_quoted, known))}" * bool(known)
            )
        elif isinstance(more, dict):
            yield from _misfits(path + name, item, more)


def _misfits(path: str, value: Any, schema: Any) -> Iterator[str]:
    """What is wrong with one value, in words; nothing if it fits."""
    if not isinstance(schema, dict) or (value is None and schema.get("nullable")):
        return
    if choices := schema.get("anyOf", schema.get("oneOf")):
        if all(any(True for _ in _misfits(path, value, choice)) for choice in choices):
            wanted = [w for choice in choices for w in _wanted(choice)]
            yield _says(path, wanted or ["something else"], value)
        return
    kinds = _types(schema)
    if kinds and not any(_is_a(value, kind) for kind in kinds):
        yield _says(path, _wanted(schema), value)
    elif "enum" in schema and not any(_same(value, choice) for choice in schema["enum"]):
        yield _says(path, [f"one of {_shown(schema['enum'], 4 * _SHOWN)}"], value)
    elif "const" in schema and not _same(value, schema["const"]):
        yield _says(path, [_shown(schema["const"])], value)
    elif isinstance(value, list) and "items" in schema:
        for i, item in enumerate(value):
            yield from _misfits(f"{path}[{i}]", item, schema["items"])
    elif isinstance(value, dict):
        yield from _object_misfits(f"{path}.", value, schema)


def _types(schema: Mapping[str, Any]) -> list[str]:
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else list(kinds)
    return kinds if all(kind in _KINDS for kind in kinds) else []


def _wanted(schema: Mapping[str, Any]) -> list[str]:
    return [_KINDS[kind][1] for kind in _types(schema)] + ["null"] * bool(schema.get("nullable"))


def _is_a(value: Any, kind: str) -> bool:
    return isinstance(value, _KINDS[kind][0]) and (kind == "boolean" or not isinstance(value, bool))


def _same(value: Any, choice: Any) -> bool:
    return value == choice and isinstance(value, bool) == isinstance(choice, bool)


def _says(path: str, wanted: list[str], value: Any) -> str:
    kind = next((words for kind, (_, words) in _KINDS.items() if _is_a(value, kind)), type(value).__name__)
    return f"argument {_quoted(path)} must be {' or '.join(wanted)}, got {_shown(value)} ({kind})"


def _shown(value: Any, most: int = _SHOWN) -> str:
    if isinstance(value, str):
        value = value[:most]
    text = json.dumps(value, ensure_ascii=False, default=repr)
    return text if len(text) <= most + 2 else text[:most] + "..."


def _quoted(name: str) -> str:
    return json.dumps(name[:_SHOWN], ensure_ascii=False)


def _read(text: Any, schema: Any) -> Any:
    """A text as the value that a schema wants."""
    kinds = _any_types(schema)
    if not isinstance(text, str) or not kinds or "string" in kinds:
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        body = text.strip()
    if body.lower() in _SPELLED:
        return _SPELLED[body.lower()]
    value = literal(body)
    return text if value is None else value


def _any_types(schema: Any) -> list[str]:
    """The types that a schema takes, at least one of them if it says so at all."""
    if not isinstance(schema, dict):
        return []
    choices = schema.get("anyOf", schema.get("oneOf", ()))
    return _types(schema) + [kind for choice in choices for kind in _any_types(choice)]

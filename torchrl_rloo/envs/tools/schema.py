"""JSON Schemas of functions, and checks of a call's arguments against them."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Collection, Iterator, Mapping
from difflib import get_close_matches
from types import FunctionType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from torchrl_rloo.envs.tools.json_calls import DECODER, parse_literal

_KINDS = {
    "string": (str, "a string"),
    "integer": (int, "an integer"),
    "number": ((int, float), "a number"),
    "boolean": (bool, "a boolean"),
    "array": (list, "an array"),
    "object": (dict, "an object"),
    "null": (type(None), "null"),
}
_PYTHON_CONSTANTS = {"true": True, "false": False, "none": None}  # matched in any case
_JSON_TYPES = (str, int, float, bool, list, dict, Any, type(None))
_MAX_DEPTH = 32  # nested schemas
_MAX_SHOWN_CHARS = 80  # of a wrong value


def function_schema(function: Callable[..., Any], *, hidden: Collection[str] = ()) -> dict[str, Any]:
    """Return the schema of a typed function, in the format that chat templates take as one of ``tools``.

    Args:
        function: function with type hints and a Google docstring.
        hidden: names of parameters to leave out.

    Raises:
        ValueError: if the docstring, a type hint or an argument's description is missing; if a type is not a JSON type;
            if an argument cannot be passed by name.
    """
    from transformers.utils import chat_template_utils, get_json_schema  # takes 2 s

    # Refuse parameters that JSON arguments cannot fill
    signature = inspect.signature(function)
    shown = [p for name, p in signature.parameters.items() if name not in hidden]
    name = getattr(function, "__name__", type(function).__name__)
    hints = get_type_hints(function)
    for p in shown:
        if p.kind not in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY):
            raise ValueError(f"{name} cannot become a tool: its argument {p.name!r} cannot be passed by name")
        if p.name in hints and not _is_json_type(hints[p.name]):
            raise ValueError(
                f"{name} cannot become a tool: its argument {p.name!r} is {p.annotation}, which is not a JSON type; "
                "use str, int, float, bool, list[...], dict[str, ...], Literal[...], or a union of these and None"
            )

    # Describe a copy of the function that lacks the hidden parameters
    def empty() -> None: ...

    visible = FunctionType(empty.__code__, {}, name)
    visible.__doc__ = inspect.getdoc(function)
    visible.__annotations__ = {p.name: hints[p.name] for p in shown if p.name in hints}
    visible.__signature__ = signature.replace(parameters=shown, return_annotation=signature.empty)
    try:
        return get_json_schema(visible)
    except (chat_template_utils.DocstringParsingException, chat_template_utils.TypeHintParsingException) as error:
        raise ValueError(f"{name} cannot become a tool: {' '.join(map(str, error.args))}") from error


def _is_json_type(hint: Any) -> bool:
    origin, args = get_origin(hint), get_args(hint)
    if origin is None:
        return hint in _JSON_TYPES
    if origin is dict and args[0] is not str:
        return False
    return origin is Literal or (origin in (list, dict, Union, UnionType) and all(map(_is_json_type, args)))


def check_schema(schema: Any, where: str, depth: int = _MAX_DEPTH) -> None:
    """Raise if the keywords that :func:`fit_arguments` reads do not have the form that JSON Schema gives them.

    Args:
        schema: JSON Schema, or True or False.
        where: location for error messages.
        depth: largest number of nested schemas.

    Raises:
        ValueError: if a keyword has another form, or schemas are nested too deeply.
    """
    if isinstance(schema, bool):
        return
    if not isinstance(schema, Mapping) or depth == 0:
        wanted = f"nested less than {_MAX_DEPTH} deep" if depth == 0 else "an object"
        raise ValueError(f"{where} must be a JSON Schema, {wanted}, got {schema!r:.100}")
    for keyword, (fits, wanted) in _KEYWORDS.items():
        if keyword in schema and not fits(schema[keyword]):
            raise ValueError(f"{where} has {keyword}={schema[keyword]!r:.100}, which must be {wanted}; correct it")
    # Check the schemas within
    more = [schema[keyword] for keyword in ("items", "additionalProperties") if keyword in schema]
    for inner in (*schema.get("properties", {}).values(), *schema.get("anyOf", ()), *schema.get("oneOf", ()), *more):
        check_schema(inner, where, depth - 1)


def _is_texts(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(entry, str) for entry in value)


_KEYWORDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "type": (lambda value: isinstance(value, str) or _is_texts(value), "text or a list of texts"),
    "properties": (lambda value: isinstance(value, Mapping) and _is_texts(list(value)), "an object"),
    "required": (_is_texts, "a list of texts"),
    "enum": (lambda value: isinstance(value, list | tuple), "a list"),
    "anyOf": (lambda value: isinstance(value, list | tuple), "a list"),
    "oneOf": (lambda value: isinstance(value, list | tuple), "a list"),
}


def fit_arguments(
    arguments: Mapping[str, Any], parameters: Mapping[str, Any], *, untyped: bool = False
) -> dict[str, Any]:
    """Check the arguments of a call against the schema, and return them as the tool takes them.

    The check covers ``properties``, ``required``, ``additionalProperties``, ``type``, ``nullable``, ``enum``,
    ``const``, ``anyOf``, ``oneOf`` and ``items``. Unknown arguments are refused unless ``additionalProperties`` allows
    them. The tool must check other keywords itself.

    Args:
        arguments: arguments by name.
        parameters: JSON Schema of the tool's arguments.
        untyped: True if the arguments are strings, to be decoded as JSON where the schema does not take a string.

    Raises:
        ValueError: with up to 8 problems, in words for the policy.

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
        arguments = {k: _decode(text, properties.get(k, {})) for k, text in arguments.items()}
    if problems := list(_object_misfits("", arguments, parameters, closed=True)):
        raise ValueError("; ".join(problems[:8]))
    return dict(arguments)


def _object_misfits(
    path: str, value: Mapping[str, Any], schema: Mapping[str, Any], *, closed: bool = False
) -> Iterator[str]:
    properties, more = schema.get("properties", {}), schema.get("additionalProperties", not closed)
    for name in schema.get("required", ()):
        if name not in value:
            yield f"argument {_quote(path + name)} is missing"
    # Check each given argument; for an unknown one, suggest known names
    for name, item in value.items():
        if name in properties:
            yield from _value_misfits(path + name, item, properties[name])
        elif more is False:
            near = get_close_matches(name[:_MAX_SHOWN_CHARS], properties, n=1)
            known = near or list(properties)
            yield f"there is no argument {_quote(path + name)}" + (
                f"; did you mean {_quote(near[0])}?"
                if near
                else f", only {', '.join(map(_quote, known))}" * bool(known)
            )
        elif isinstance(more, dict):
            yield from _value_misfits(path + name, item, more)


def _value_misfits(path: str, value: Any, schema: Any) -> Iterator[str]:
    """Yield messages about a value that does not fit its schema."""
    if not isinstance(schema, dict) or (value is None and schema.get("nullable")):
        return
    # Accept a value that fits any alternative
    if choices := schema.get("anyOf", schema.get("oneOf")):
        if all(any(True for _ in _value_misfits(path, value, choice)) for choice in choices):
            expected = [words for choice in choices for words in _expected(choice)]
            yield _misfit(path, expected or ["something else"], value)
        return
    # Check the type first, because the other keywords presume it
    kinds = _types(schema)
    if kinds and not any(_is_a(value, kind) for kind in kinds):
        yield _misfit(path, _expected(schema), value)
    elif "enum" in schema and not any(_is_same(value, choice) for choice in schema["enum"]):
        yield _misfit(path, [f"one of {_show(schema['enum'], 4 * _MAX_SHOWN_CHARS)}"], value)
    elif "const" in schema and not _is_same(value, schema["const"]):
        yield _misfit(path, [_show(schema["const"])], value)
    elif isinstance(value, list) and "items" in schema:
        for i, item in enumerate(value):
            yield from _value_misfits(f"{path}[{i}]", item, schema["items"])
    elif isinstance(value, dict):
        yield from _object_misfits(f"{path}.", value, schema)


def _types(schema: Mapping[str, Any]) -> list[str]:
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else list(kinds)
    return kinds if all(kind in _KINDS for kind in kinds) else []


def _expected(schema: Mapping[str, Any]) -> list[str]:
    return [_KINDS[kind][1] for kind in _types(schema)] + ["null"] * bool(schema.get("nullable"))


def _is_a(value: Any, kind: str) -> bool:
    return isinstance(value, _KINDS[kind][0]) and (kind == "boolean" or not isinstance(value, bool))


def _is_same(value: Any, choice: Any) -> bool:
    return value == choice and isinstance(value, bool) == isinstance(choice, bool)


def _misfit(path: str, expected: list[str], value: Any) -> str:
    kind = next((words for kind, (_, words) in _KINDS.items() if _is_a(value, kind)), type(value).__name__)
    return f"argument {_quote(path)} must be {' or '.join(expected)}, got {_show(value)} ({kind})"


def _show(value: Any, max_chars: int = _MAX_SHOWN_CHARS) -> str:
    if isinstance(value, str):
        value = value[:max_chars]
    text = json.dumps(value, ensure_ascii=False, default=repr)
    return text if len(text) <= max_chars + 2 else text[:max_chars] + "..."


def _quote(name: str) -> str:
    return json.dumps(name[:_MAX_SHOWN_CHARS], ensure_ascii=False)


def _decode(text: Any, schema: Any) -> Any:
    """Decode an untyped argument, unless its schema takes a string."""
    kinds = _any_types(schema)
    if not isinstance(text, str) or not kinds or "string" in kinds:
        return text
    try:
        return DECODER.decode(text)
    except (ValueError, RecursionError):
        body = text.strip()
    if body.lower() in _PYTHON_CONSTANTS:
        return _PYTHON_CONSTANTS[body.lower()]
    value = parse_literal(body)
    return text if value is None else value


def _any_types(schema: Any) -> list[str]:
    """Return the types that a schema names, those of its choices included."""
    if not isinstance(schema, dict):
        return []
    choices = schema.get("anyOf", schema.get("oneOf", ()))
    return _types(schema) + [kind for choice in choices for kind in _any_types(choice)]

"""Tools: named, typed callables for the policy, with an optional state per trajectory."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from difflib import get_close_matches
from functools import partial
from types import FunctionType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from torchrl_rloo.envs.tools.parsers import DECODER, parse_literal
from torchrl_rloo.runtime.lookup import is_async

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
    """Return the schema of a typed function, in the format that chat templates take as one of ``tools``."""
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
    """Raise if the keywords that :func:`fit_arguments` reads do not have the form that JSON Schema gives them."""
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


_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class ToolError(Exception):
    """Error of a tool whose message is shown to the policy as it is; the call counts as failed."""


class ToolTimeoutError(ToolError, TimeoutError):
    """Error of a tool whose call took too long, with the tool's own message."""


class ToolHostError(Exception):
    """Error of a tool whose host failed: the conversation ends as failed and abstains, since no policy caused it."""


class State(dict):
    """Dict that a function keeps for one trajectory; a parameter annotated with it is hidden from the policy."""


class Columns(dict):
    """Dataset columns of the trajectory's row; a parameter annotated with it is hidden from the policy."""


class Tool:
    """Base of tools that the policy calls by name, with arguments described by a JSON Schema.

    For a plain function use :func:`tool`. A subclass implements :meth:`call` and, if it has a state per trajectory,
    :meth:`open` and :meth:`close`. Each may be sync or async. A sync call runs on one of the
    threads for user code, an async call on the loop of user code (:func:`torchrl_rloo.runtime.event_loop.call`).

    Args:
        name: name of at most 64 letters, digits and ``_ . -``.
        description: description for the policy.
        parameters: JSON Schema of the arguments: ``{"type": "object", "properties": ..., "required": [...]}``.
        timeout: limit of a call, in seconds. None leaves it to the caller. After a timeout the state is closed, and the
            next call opens another. A tool that can continue with its state should enforce a shorter limit itself.

    Attributes:
        sequential: True if the calls of a trajectory run one at a time, in the policy's order; otherwise the calls of a
            turn run concurrently. True by default for tools with a state.
        state_key: key of the state in a trajectory; the name by default. Tools with the same key share one state, which
            any of them may open or close, and one order of calls.
        returns_images: True if the tool is known to return images. It is then an error before the run if the chat
            template cannot show them.

    Raises:
        ValueError: if the name, schema or limit is invalid.

    Example:
        >>> class Dice(Tool):
        ...     def __init__(self):
        ...         parameters = {"type": "object", "properties": {"sides": {"type": "integer"}}, "required": ["sides"]}
        ...         super().__init__("dice", "Throws a die.", parameters)
        ...     def open(self, columns):
        ...         return random.Random(columns.get("seed", 0))
        ...     def call(self, state, /, sides):
        ...         return state.randint(1, sides)
        >>> import random
        >>> dice = Dice()
        >>> 1 <= dice.call(dice.open({}), sides=6) <= 6
        True
    """

    returns_images = False

    def __init__(self, name: str, description: str, parameters: Mapping[str, Any], *, timeout: float | None = None):
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ValueError(f"name={name!r} must be 1 to 64 letters, digits and _ . -")
        if not isinstance(parameters, Mapping) or parameters.get("type") != "object":
            raise ValueError(f"parameters of {name} must be a schema of type 'object', got {parameters!r:.200}")
        if not isinstance(description, str):
            raise ValueError(f"description={description!r:.100} of {name} must be text")
        check_schema(parameters, f"parameters of {name}")
        if timeout is not None and not timeout > 0:
            raise ValueError(f"timeout={timeout} of {name} must be None or above 0")
        self.name, self.description, self.parameters, self.timeout = name, description, dict(parameters), timeout
        self.sequential = type(self).open is not Tool.open
        self.state_key: Hashable = name

    @property
    def schema(self) -> dict[str, Any]:
        """Schema that chat templates take as one of ``tools``."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}

    def open(self, columns: Mapping[str, Any]) -> Any:
        """Open the state of a trajectory, at its first call; ``columns`` are the dataset's columns of its row."""
        return None

    def call(self, state: Any, /, **arguments: Any) -> Any:
        """Run one call of the policy; return a string for it, or any value that JSON can represent.

        Images are a ``PIL.Image``, a part ``{"type": "image", "url": "data:..."}``, or a list with some of both and of
        texts. A result has at most 8 of them. One that cannot be read becomes a text that says so.

        ``state`` is that of :meth:`open`, and the arguments fit the schema. The policy sees the message of a
        :class:`ToolError`, and the type and message of other errors.
        """
        raise NotImplementedError

    def close(self, state: Any) -> None:
        """Release a state; called exactly once for each opened state."""


class FunctionTool(Tool):
    """Tool made of a function; see :func:`tool`."""

    def __init__(self, function: Callable[..., Any], *, name: str | None = None, timeout: float | None = None):
        self.function, self._hidden_types = function, _hidden_types(function)
        schema = function_schema(function, hidden=self._hidden_types)["function"]
        super().__init__(name or schema["name"], schema["description"], schema["parameters"], timeout=timeout)
        self.sequential = State in self._hidden_types.values()
        self.call = self._call_async if is_async(function) else self._call

    def _call(self, state: Mapping[str, Any] | None, /, **arguments: Any) -> Any:
        return self.function(**(state or {}), **arguments)

    async def _call_async(self, state: Mapping[str, Any] | None, /, **arguments: Any) -> Any:
        return await self.function(**(state or {}), **arguments)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function directly."""
        return self.function(*args, **kwargs)


class _StatefulFunctionTool(FunctionTool):
    """Tool made of a function with hidden parameters."""

    def open(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of the hidden parameters by name."""
        return {name: kind() if kind is State else kind(columns) for name, kind in self._hidden_types.items()}


def _hidden_types(function: Callable[..., Any]) -> dict[str, type]:
    return {n: kind for n, kind in get_type_hints(function).items() if n != "return" and kind in (State, Columns)}


def tool(
    function: Callable[..., Any] | None = None, *, name: str | None = None, timeout: float | None = None
) -> FunctionTool | Callable[[Callable[..., Any]], FunctionTool]:
    """Make a tool of a typed function, sync or async; its schema comes from its signature and Google docstring.

    A parameter annotated with :class:`State` receives a dict kept for the trajectory, one annotated with
    :class:`Columns` the dataset columns of its row. Both are hidden from the policy and need no description.

    Args:
        function: function with a description and a type hint for each argument: ``str``, ``int``, ``float``, ``bool``,
            ``list[...]``, ``dict[str, ...]``, ``Literal[...]``, or unions of these and None.
        name: name of the tool. None is the function's name.
        timeout: limit of a call, in seconds. None leaves it to the caller.

    Raises:
        ValueError: if the docstring, a type hint or an argument's description is missing, or ``function`` is not a
            function or method.

    Example:
        >>> @tool
        ... def add(a: int, b: int = 1) -> int:
        ...     '''Adds two numbers.
        ...
        ...     Args:
        ...         a: the first.
        ...         b: the second.
        ...     '''
        ...     return a + b
        >>> add.name, add(2), add.parameters["required"]
        ('add', 3, ['a'])
    """
    if function is None:
        return partial(tool, name=name, timeout=timeout)
    if not inspect.isroutine(function):
        raise ValueError(f"{function!r:.100} cannot become a tool: wrap it in a function or a method")
    tool_class = _StatefulFunctionTool if _hidden_types(function) else FunctionTool
    return tool_class(function, name=name, timeout=timeout)


class ToolRegistry(Mapping[str, Tool]):
    """Mapping of names to tools, in order."""

    def __init__(self, tools: Iterable[Tool | Callable[..., Any]]):
        self._tools: dict[str, Tool] = {}
        for item in tools:
            new = item if isinstance(item, Tool) else tool(item)
            if new.name in self._tools:
                raise ValueError(f"there are two tools named {new.name!r}: rename one with tool(name=...)")
            self._tools[new.name] = new

    def __getitem__(self, name: str) -> Tool:
        return self._tools[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tools)

    def __len__(self) -> int:
        return len(self._tools)

    def select(self, names: Collection[str]) -> ToolRegistry:
        """Return a registry of the named tools, in the same order."""
        if unknown := [name for name in names if name not in self._tools]:
            raise ValueError(f"unknown tools {unknown}: use names from {list(self._tools)}")
        return ToolRegistry(tool for name, tool in self._tools.items() if name in names)

    def schemas(self) -> list[dict[str, Any]]:
        """Return the schemas that chat templates take as ``tools``."""
        return [tool.schema for tool in self._tools.values()]

    def unknown_message(self, name: str) -> str:
        """Return the message for a policy that calls an unknown tool."""
        near = get_close_matches(name[:64], self._tools, n=1)
        hint = f'; did you mean "{near[0]}"?' if near else f", only {', '.join(self._tools) or 'none at all'}"
        return f'there is no tool "{name[:64]}"' + hint

"""Tools: named, typed callables for the policy, with an optional state per trajectory."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Hashable, Mapping
from functools import partial
from typing import Any, get_type_hints

from torchrl_rloo.envs.tools.schema import check_schema, function_schema
from torchrl_rloo.runtime.lookup import is_async

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class ToolError(Exception):
    """Error of a tool whose message is shown to the policy as it is; the call counts as failed."""


class ToolTimeoutError(ToolError, TimeoutError):
    """Error of a tool whose call took too long, with the tool's own message."""


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
        """Open the state of a trajectory, at its first call.

        Args:
            columns: dataset columns of the trajectory's row.
        """
        return None

    def call(self, state: Any, /, **arguments: Any) -> Any:
        """Run one call of the policy.

        Args:
            state: state from :meth:`open`.
            **arguments: arguments of the policy, which fit the schema.

        Returns:
            A string for the policy, or any value that JSON can represent.

        Raises:
            ToolError: with a message for the policy. The policy sees other errors with their type and message.
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

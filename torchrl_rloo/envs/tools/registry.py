"""Registry of tools by name."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from difflib import get_close_matches
from typing import Any

from torchrl_rloo.envs.tools.tool import Tool, tool


class ToolRegistry(Mapping[str, Tool]):
    """Mapping of names to tools, in order.

    Args:
        tools: tools, or functions to make tools of; see :func:`~torchrl_rloo.envs.tools.tool.tool`.

    Raises:
        ValueError: if two tools share a name, or a function cannot become a tool.

    Example:
        >>> from torchrl_rloo.envs.tools.calculator import calculator
        >>> tools = ToolRegistry([calculator])
        >>> list(tools), tools.unknown_message("calculater")
        (['calculator'], 'there is no tool "calculater"; did you mean "calculator"?')
    """

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
        """Return a registry of the named tools, in the same order.

        Raises:
            ValueError: if no tool has one of the names.
        """
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

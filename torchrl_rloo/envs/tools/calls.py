"""Tool calls of a turn, and their results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class ToolCall:
    """Call that a parser could read.

    Args:
        name: name of the tool, which need not exist.
        arguments: arguments by name, not yet checked against the tool's schema.
        id: id that the policy gave the call; None in formats without ids.
        untyped: True if all arguments are strings, to be converted as the tool's schema says.
    """

    name: str
    arguments: dict[str, Any]
    id: str | None = None
    untyped: bool = False


@dataclass(frozen=True)
class MalformedCall:
    """Call that a parser could not read.

    Args:
        text: text of the call, or its beginning.
        error: error message for the policy.
    """

    text: str
    error: str


Outcome = Literal["ok", "failed", "invalid", "timed_out", "unknown", "malformed"]


@dataclass(frozen=True)
class ToolResult:
    """Result of a call.

    Args:
        name: name of the tool; empty for a call that could not be read.
        text: text that the policy is shown.
        outcome: ``"ok"``; ``"failed"``, the tool raised; ``"invalid"``, the arguments do not fit the schema;
            ``"timed_out"``; ``"unknown"``, no tool has that name; ``"malformed"``, the call could not be read.
    """

    name: str
    text: str
    outcome: Outcome

"""Rewards for completions that follow a format."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from torchrl_rloo.rewards.protocol import final_text


def think_format(
    prompts: Sequence[Any], completions: Sequence[Any], completion_ids: Sequence[Any], **columns: Any
) -> list[float | None]:
    """Score 1.0 where a completion starts with reasoning in ``<think>...</think>``, else 0.0.

    The completion must begin with ``<think>``, close it, and contain no second ``<think>``. Empty reasoning, an empty
    answer and further ``</think>`` tags are allowed, as in TRL. If the chat template writes ``<think>`` into the
    prompt, all completions score 0.0.

    Args:
        prompts: unused.
        completions: ``B`` completions, plain text or a list of messages, of which the last assistant message is judged.
        completion_ids: unused.
        **columns: unused.

    Returns:
        ``B`` scores, 1.0 or 0.0.

    Example:
        >>> think_format(["47+38?"] * 2, ["<think>carry</think>85", "85"], [[1], [2]])
        [1.0, 0.0]
    """
    return [float(_is_think(final_text(completion))) for completion in completions]


def _is_think(text: str) -> bool:
    return text.startswith("<think>") and text.count("<think>") == 1 and "</think>" in text


class RegexFormat:
    """Reward of 1.0 where a completion matches a regular expression, else 0.0.

    Patterns with nested repetitions, such as ``(a+)+b``, can take exponential time on a text that does not match. Use a
    process executor with a time limit for them.

    Args:
        pattern: regular expression for the whole completion, in the syntax of :mod:`re`.
        search: True accepts a match anywhere in the completion.
        flags: letters of inline flags of :mod:`re`. ``i`` ignores case, ``m`` matches ``^`` and ``$`` at each line,
            ``s`` (default) lets a dot match line breaks, and ``x`` allows comments. ``""`` sets none.

    Raises:
        ValueError: if ``pattern`` is not a regular expression, or ``flags`` holds an unknown letter.

    Example:
        >>> reward = RegexFormat("<think>.*</think>\\s*<answer>.*</answer>")
        >>> reward(["?"] * 2, ["<think>carry</think><answer>85</answer>", "<answer>85</answer>"], [[1], [2]])
        [1.0, 0.0]
    """

    __name__ = "regex_format"

    def __init__(self, pattern: str, *, search: bool = False, flags: str = "s"):
        if unknown := sorted(set(flags) - set("aimsx")):
            raise ValueError(f"flags={flags!r}: unknown flag {unknown[0]!r}; valid: a, i, m, s, x")
        try:
            self.pattern = re.compile(pattern, sum(re.RegexFlag[flag.upper()] for flag in set(flags)))
        except (re.error, TypeError, OverflowError, RecursionError) as error:
            raise ValueError(f"pattern={pattern!r:.200} must be a valid regular expression: {error}") from error
        self.search = search

    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], completion_ids: Sequence[Any], **columns: Any
    ) -> list[float | None]:
        """Return ``B`` scores, 1.0 or 0.0."""
        matches = self.pattern.search if self.search else self.pattern.fullmatch
        return [float(matches(final_text(completion)) is not None) for completion in completions]

"""Whether a completion keeps to a format."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from torchrl_rloo.rewards.protocol import final_text


def think_format(
    prompts: Sequence[Any], completions: Sequence[Any], completion_ids: Sequence[Any], **columns: Any
) -> list[float | None]:
    """1.0 where a completion starts with reasoning in ``<think>...</think>``, else 0.0.

    It must begin with ``<think>``, without even a space before it, close it, and open no second one. Empty reasoning,
    an empty answer and further ``</think>`` pass, as in TRL. Where the chat template itself writes ``<think>`` into the
    prompt, no completion begins with it and all score 0.0.

    Args:
        prompts: not used.
        completions: ``B`` completions, plain text or a list of messages, of which the last assistant message is judged.
        completion_ids: not used.
        **columns: not used.

    Example:
        >>> think_format(["47+38?"] * 2, ["<think>carry</think>85", "85"], [[1], [2]])
        [1.0, 0.0]
    """
    return [float(_is_think(final_text(completion))) for completion in completions]


def _is_think(text: str) -> bool:
    return text.startswith("<think>") and text.count("<think>") == 1 and "</think>" in text


class RegexFormat:
    """1.0 where a completion matches a regular expression, else 0.0.

    Some patterns take time exponential in the text on what does not match, such as ``(a+)+b``, and nothing interrupts
    them: with patterns of nested repetitions use an executor with a time-out.

    Args:
        pattern: what the whole completion must match, in the syntax of :mod:`re`.
        search: let it match anywhere in the completion instead.
        flags: letters of :mod:`re`'s inline flags: ``i`` ignores case, ``m`` lets ``^`` and ``$`` match at lines, ``s``
            lets a dot match line breaks too (here the default), ``x`` allows for comments; ``""`` for none.

    Raises:
        ValueError: if ``pattern`` is no regular expression, or ``flags`` holds another letter.

    Example:
        >>> reward = RegexFormat("<think>.*</think>\\s*<answer>.*</answer>")
        >>> reward(["?"] * 2, ["<think>carry</think><answer>85</answer>", "<answer>85</answer>"], [[1], [2]])
        [1.0, 0.0]
    """

    __name__ = "regex_format"

    def __init__(self, pattern: str, *, search: bool = False, flags: str = "s"):
        if unknown := sorted(set(flags) - set("aimsx")):
            raise ValueError(f"flags={flags!r} has {unknown[0]!r}, which is none of the letters a, i, m, s and x")
        try:
            self.pattern = re.compile(pattern, sum(re.RegexFlag[flag.upper()] for flag in set(flags)))
        except (re.error, TypeError, OverflowError, RecursionError) as error:
            raise ValueError(f"pattern={pattern!r:.200} is no regular expression: {error}") from error
        self.search = search

    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], completion_ids: Sequence[Any], **columns: Any
    ) -> list[float | None]:
        """``B`` scores, 1.0 or 0.0."""
        matches = self.pattern.search if self.search else self.pattern.fullmatch
        return [float(matches(final_text(completion)) is not None) for completion in completions]

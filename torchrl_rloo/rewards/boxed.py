r"""Exact match of the answer that a completion puts in ``\boxed{...}``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from torchrl_rloo.rewards.protocol import final_text

_ARGUMENT = r"(?:\{[^{}]*\}|[0-9A-Za-z])"
# As MATH writes them: \boxed 2, \boxed\frac12 and \boxed A, but not a word after \boxed, or a part of a longer formula
_BARE = (
    rf"-?[0-9]+(?:[.,/][0-9]+)*|-?\\[dt]?frac\s?{_ARGUMENT}\s?{_ARGUMENT}|\\sqrt\s?{_ARGUMENT}|"
    r"\\pi|[A-Za-z](?!\s+[A-Za-z])"
)
_BRACE = re.compile(rf"\\boxed\s*(?:\{{|(?P<bare>{_BARE})(?![.,/]?[0-9]|[A-Za-z^_(]|\\[A-Za-z]))|[{{}}]")


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last closed ``\boxed{...}`` in ``text``, stripped of outer whitespace.

    A number, fraction, root, ``\pi`` or letter needs no braces: ``\boxed 7`` is a box.
    Braces inside the box are matched, and a box that is never closed does not count. Of nested boxes the inner one is
    the last. The time is linear in the length of the text.

    Returns:
        Content of the box, possibly empty, or None without a closed box.

    Example:
        >>> last_boxed(r"First \boxed{1}, rather \boxed{\frac{1}{2}}.")
        '\\frac{1}{2}'
        >>> last_boxed(r"It is \boxed{85") is None
        True
    """
    span = find_last_box(text)
    return None if span is None else text[slice(*span)].strip()


def find_last_box(text: str) -> tuple[int, int] | None:
    """Return start and end of the content of the last closed box, see :func:`last_boxed`; None without one."""
    opened: list[tuple[int, bool]] = []  # for each open brace: start of its content, True if it opens a box
    start, end = -1, -1
    for match in _BRACE.finditer(text):
        if match["bare"]:
            start, end = match.span("bare")
        elif match[0] != "}":
            opened.append((match.end(), match[0] != "{"))
        elif opened:
            begin, is_box = opened.pop()
            if is_box and begin > start:
                start, end = begin, match.start()
    return None if start < 0 else (start, end)


def boxed_accuracy(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    answer: Sequence[str | None],
    **columns: Any,
) -> list[float | None]:
    r"""Score 1.0 where the last ``\boxed{...}`` of a completion is exactly the answer, else 0.0.

    Args:
        prompts: ``B`` prompts; only their number is used.
        completions: ``B`` completions, each plain text or a list of messages. The last assistant message is judged; a
            completion without one scores 0.0.
        answer: ``B`` expected contents of the box, compared as strings after the box (not the answer) is stripped.
            None abstains.
        **columns: other columns of the rows, unused.

    Returns:
        ``B`` values: 1.0, 0.0, or None where ``answer`` is None.

    Raises:
        ValueError: if the three lengths differ.
        TypeError: if an answer is neither a string nor None.

    Example:
        >>> boxed_accuracy(["47+38?"] * 2, [r"\boxed{85}", "85"], answer=["85", "85"])
        [1.0, 0.0]
    """
    if not len(prompts) == len(completions) == len(answer):
        raise ValueError(
            f"prompts, completions and answer must have equal lengths, got {len(prompts)}, {len(completions)} and "
            f"{len(answer)}"
        )
    return [_score(completion, expected) for completion, expected in zip(completions, answer, strict=True)]


def _score(completion: str | Sequence[dict[str, Any]], expected: str | None) -> float | None:
    if expected is None:
        return None
    if not isinstance(expected, str):
        raise TypeError(f"answer={expected!r} ({type(expected).__name__}) must be a string or None; use str()")
    return float(last_boxed(final_text(completion)) == expected)

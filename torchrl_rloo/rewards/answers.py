"""Canonical answers of completions, for majority votes."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

from torchrl_rloo.rewards.boxed import last_boxed
from torchrl_rloo.rewards.matching import Number, find_number, read_number
from torchrl_rloo.rewards.protocol import final_text

_LOGGER = logging.getLogger(__name__)

_STYLE = re.compile(
    r"\\(?:left|right|displaystyle|,|!|;|:)(?![A-Za-z])|(?<=\\)[dtc](?=frac)|\$|(?<![0-9])[\s~]|[\s~](?![0-9])"
)
_TEXT = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
_ONE_CHARACTER = re.compile(r"\{([0-9A-Za-z])\}")
_FRACTION = re.compile(r"\\frac(?:\{([0-9A-Za-z]+)\}|([0-9A-Za-z]))\s?(?:\{([0-9A-Za-z]+)\}|([0-9A-Za-z]))")
_NAMED = re.compile(r"[A-Za-z]\s*=(?=[^=]+$)")


def extract_answer(extract: Callable[[str], str | None], completion: Any) -> str | None:
    """Return the answer of a completion's final text, or None if it has none or ``extract`` fails on it.

    Args:
        extract: function from text to answer, such as :func:`final_answer`.
        completion: text, or messages.
    """
    try:
        return extract(final_text(completion))
    except Exception:
        _LOGGER.exception("extract failed on a completion; it does not vote")
        return None


def final_answer(text: str) -> str | None:
    r"""Return the canonical answer of a completion, or None if the text is blank.

    The answer is the last closed ``\boxed{...}``, else the last number of the last line, else the last line. Equal
    numbers in different notations give the same answer, as do texts that differ in case, spaces or style. The task
    ``math`` has a vote that also compares formulas.

    Example:
        >>> final_answer(r"So it is \boxed{1,234.0}."), final_answer("2+2 = 5\nno, 4."), final_answer("It is  B.")
        ('1234', '4', 'itisb')
    """
    if last_boxed(text) is not None:
        return boxed_answer(text)
    line = next((line for line in reversed(text.splitlines()) if line.strip()), "")
    return number_form(find_number(line, ("text",))) or _normalize(line)


def boxed_answer(text: str) -> str | None:
    r"""Return the last closed ``\boxed{...}`` as in :func:`final_answer`; None if it is missing or blank.

    Example:
        >>> boxed_answer(r"\boxed{\dfrac{1}{2}}") == boxed_answer(r"\boxed{0.5}"), boxed_answer("It is 4.")
        (True, None)
    """
    boxed = last_boxed(text)
    return None if boxed is None else _normalize(boxed)


def number_form(number: Number | None) -> str | None:
    """Return the canonical form of a number, ``"1/2"`` or ``"50%"``; None for numbers that are always wrong."""
    if number is None or number.value is None:
        return None
    return str(number.value) + "%" * number.percent


def _normalize(answer: str) -> str | None:
    # Drop what changes no meaning: style, the name in front of a value, and the dot at the end
    answer = _NAMED.sub("", _TEXT.sub(r"\1", answer), count=1).strip().rstrip(".")
    if (form := number_form(read_number(answer))) is not None:
        return form
    # Keep braces, except where one character needs none: \frac{11}{2} and \frac{1}{12} differ
    bare = _FRACTION.sub(lambda m: rf"\frac{{{m[1] or m[2]}}}{{{m[3] or m[4]}}}", _STYLE.sub("", answer))
    return _ONE_CHARACTER.sub(r"\1", bare).casefold() or None

"""Normalized answers of completions, for majority votes."""

from __future__ import annotations

import re
from decimal import Decimal

from torchrl_rloo.rewards.boxed import last_boxed

_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|[-+]?\.\d+")
_FRACTION = re.compile(r"\\[dt](?=frac)")
_LAYOUT = re.compile(r"\\(?:left|right|,|!|;|:|text|mathrm|mathbf)(?![A-Za-z])|[\s${}]")


def final_answer(text: str) -> str | None:
    r"""Return the normalized answer of a completion, or None if the text is blank.

    The answer is the last closed ``\boxed{...}``, else the last number of the last line, else the last line. Equal
    numbers in different notations give the same answer, as do texts that differ in case, spaces or braces.

    Example:
        >>> final_answer(r"So it is \boxed{1,234.0}."), final_answer("2+2 = 5\nno, 4."), final_answer("It is  B.")
        ('1234', '4', 'itisb')
    """
    if last_boxed(text) is not None:
        return boxed_answer(text)
    line = next((line for line in reversed(text.splitlines()) if line.strip()), "")
    numbers = _NUMBER.findall(line)
    return _format_number(numbers[-1]) if numbers else _normalize(line)


def boxed_answer(text: str) -> str | None:
    r"""Return the last closed ``\boxed{...}``, normalized as in :func:`final_answer`; None if it is missing or blank.

    Example:
        >>> boxed_answer(r"\boxed{\dfrac{1}{2}}") == boxed_answer(r"\boxed{\frac12}"), boxed_answer("It is 4.")
        (True, None)
    """
    boxed = last_boxed(text)
    return None if boxed is None else _normalize(boxed)


def _normalize(answer: str) -> str | None:
    bare = _LAYOUT.sub("", _FRACTION.sub(r"\\", answer)).rstrip(".").casefold()
    return (_format_number(bare) if _NUMBER.fullmatch(bare) else bare) or None


def _format_number(text: str) -> str:
    value = Decimal(text.replace(",", ""))
    value = value.to_integral() if value == value.to_integral() else value.normalize()
    return format(value if value else Decimal(0), "f")  # avoids "-0"

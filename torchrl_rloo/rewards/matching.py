r"""Rewards for completions that give the gold answer: in ``\boxed{...}``, as text or as a number."""

from __future__ import annotations

import logging
import math
import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from fractions import Fraction
from numbers import Rational, Real
from typing import Any, NamedTuple

from torchrl_rloo.rewards.protocol import RowReward, check_column, final_text

_LOGGER = logging.getLogger(__name__)

_ARGUMENT = r"(?:\{[^{}]*\}|[0-9A-Za-z])"
# As MATH writes them: \boxed 2, \boxed\frac12 and \boxed A, but not a word after \boxed, or a part of a longer formula
_BARE = (
    rf"-?[0-9]+(?:[.,/][0-9]+)*|-?\\[dt]?frac\s?{_ARGUMENT}\s?{_ARGUMENT}|\\sqrt\s?{_ARGUMENT}|"
    r"\\pi|[A-Za-z](?!\s+[A-Za-z])"
)
_BRACE = re.compile(rf"\\boxed\s*(?:\{{|(?P<bare>{_BARE})(?![.,/]?[0-9]|[A-Za-z^_(]|\\[A-Za-z]))|[{{}}]")


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last closed ``\boxed{...}`` in ``text``, stripped of outer whitespace; None without.

    A number, fraction, root, ``\pi`` or letter needs no braces: ``\boxed 7`` is a box. Braces inside the box are
    matched. Of nested boxes the inner one is the last. The time is linear in the length of the text.

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
    prompts: Sequence[Any], completions: Sequence[Any], answer: Sequence[str | None], **columns: Any
) -> list[float | None]:
    r"""Score 1.0 where the last ``\boxed{...}`` of a completion is exactly the answer, else 0.0.

    Args:
        prompts: ``B`` prompts; only their number is used.
        completions: ``B`` completions, texts or lists of messages, of which the last assistant message is judged.
        answer: ``B`` contents of the box, compared as strings after the box is stripped. None abstains.
        **columns: other columns of the rows, unused.

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
    for expected in answer:
        if not isinstance(expected, str | None):
            raise TypeError(f"answer={expected!r} ({type(expected).__name__}) must be a string or None; use str()")
    rows = zip(completions, answer, strict=True)
    return [None if gold is None else float(last_boxed(final_text(completion)) == gold) for completion, gold in rows]


class ExactMatch(RowReward):
    r"""Reward of 1.0 where the normalized answer of a completion equals the gold, else 0.0.

    Runs of white space count as one space, white space at the ends is removed, and Unicode is normalized to NFC.

    Args:
        column: dataset column of golds: strings, lists of accepted strings, or None, which abstains.
        where: places of the answer. The first place that a completion has is used; without any it scores 0.0:

            - ``"text"``: the whole completion;
            - ``"boxed"``: the content of the last closed ``\boxed{}``;
            - ``"last_line"``: the last line that is not blank;
            - any other text, such as ``"####"``, ``"Answer:"`` or ``"</think>"``: a marker. The answer is the rest of
              the line after its last occurrence or, if that is blank, the next line that is not.

        ignore_case: True ignores case.
        ignore_punctuation: True replaces punctuation and symbols by spaces in both texts.

    Raises:
        ValueError: if ``column`` is not a name, or ``where`` is not a list of places.

    Example:
        >>> capital = ExactMatch(where=["Answer:"], ignore_case=True)
        >>> capital(["?"] * 2, ["A city. Answer: paris", "Paris"], [[1], [2]], answer=["Paris", "Paris"])
        [1.0, 0.0]
    """

    __name__ = "exact_match"

    def __init__(
        self,
        column: str = "answer",
        *,
        where: Sequence[str] = ("text",),
        ignore_case: bool = False,
        ignore_punctuation: bool = False,
    ):
        self.column, self.where = check_column(column), _checked_where(where)
        self.reads = (column,)
        self.ignore_case, self.ignore_punctuation = ignore_case, ignore_punctuation

    def score(self, text: str, gold: str | Sequence[str] | None) -> float | None:
        """Return 1.0, 0.0 or None; raise ``TypeError`` for a gold that is not a string, a list of strings or None."""
        if gold is None:
            return None
        golds = [gold] if isinstance(gold, str) else gold
        if not isinstance(golds, list | tuple) or not all(isinstance(g, str) for g in golds):
            raise TypeError(f"{self.column}={gold!r} must be a string, a list of strings or None; use str()")
        answer = next(find_answers(text, self.where), ("", None))[1]
        return float(answer is not None and self._normalize(answer) in {self._normalize(g) for g in golds})

    def _normalize(self, text: str) -> str:
        text = unicodedata.normalize("NFC", text)
        if self.ignore_case:
            text = text.casefold()
        if self.ignore_punctuation:
            text = "".join(" " if unicodedata.category(c)[0] in "PS" else c for c in text)
        return " ".join(text.split())


class NumericMatch(RowReward):
    r"""Reward of 1.0 where the number of a completion equals the gold, else 0.0.

    Numbers are compared exactly, as fractions. They may have a sign, thousands separators (``1,234``), decimals, an
    exponent (``1.5e3``, ``1.5 \times 10^{3}``), and a currency or percent sign. Fractions (``3/4``, ``\frac{3}{4}``)
    and mixed numbers (``1 3/4``) are read, also after a sign as ``-(3/4)``, and repeating decimals
    (``0.\overline{3}``). ``50%`` equals 50 and 0.5. There is no decimal comma: ``3,5`` is two
    numbers. Digits in a word, an index or an exponent are not numbers. The time is linear in the length of the text.

    Some numbers are always wrong, and abstain as golds: more than 400 digits or such an exponent, fractions over 0,
    roots, multiples of pi or of a root, and powers of other bases than 10.

    Golds are parsed like completions, so whole solutions such as GSM8K's, which end in ``#### 72``, are golds.

    Args:
        column: dataset column of golds: numbers, strings or None. None and golds without a number abstain.
        where: places of the number, see :class:`ExactMatch`. The first place with a number is used; without any the
            completion scores 0.0. The first number after a marker counts, and the last one in ``"text"`` and
            ``"last_line"``. A box must hold exactly one, after its last ``=`` if it has any, else the answer is wrong.
        rel_tol: maximum deviation from the gold, relative to the gold.
        abs_tol: maximum absolute deviation; the larger tolerance applies.

    Raises:
        ValueError: if ``column`` is not a name, ``where`` is not a list of places, or a tolerance is negative or not
            finite.

    Example:
        >>> texts = ["So 48 + 24 = 72 clips.", r"\\boxed{72.0}", "#### $1,072", "72 or 73"]
        >>> NumericMatch()(["?"] * 4, texts, [[1]] * 4, answer=["#### 72", 72, "1072", "72"])
        [1.0, 1.0, 1.0, 0.0]
    """

    __name__ = "numeric_match"

    def __init__(
        self,
        column: str = "answer",
        *,
        where: Sequence[str] = ("boxed", "####", "text"),
        rel_tol: float = 0.0,
        abs_tol: float = 0.0,
    ):
        self.column, self.where = check_column(column), _checked_where(where)
        self.reads = (column,)
        for name, tolerance in (("rel_tol", rel_tol), ("abs_tol", abs_tol)):
            if not 0 <= tolerance < math.inf:
                raise ValueError(f"{name}={tolerance} must be finite and not negative")
        self.rel_tol, self.abs_tol = rel_tol, abs_tol

    def score(self, text: str, gold: Real | Decimal | str | None) -> float | None:
        """Return 1.0, 0.0 or None; raise ``TypeError`` for a gold that is no number, string or None."""
        if gold is None:
            return None
        if isinstance(gold, bool) or not isinstance(gold, Real | Decimal | str):
            raise TypeError(f"{self.column}={gold!r} ({type(gold).__name__}) must be a number, a string or None")
        if isinstance(gold, Rational):
            expected = Number(Fraction(int(gold.numerator), int(gold.denominator)), False)
        else:
            expected = find_number(str(gold), (*self.where, "text"))
        if expected is None or expected.value is None:
            return None
        answer = find_number(text, self.where)
        return float(answer is not None and answer.value is not None and self._is_equal(expected, answer))

    def _is_equal(self, gold: Number, answer: Number) -> bool:
        if gold.percent == answer.percent:
            return self._is_close(gold.value, answer.value)
        hundredth = Fraction(1, 100)
        scaled = (gold.value * hundredth, answer.value) if gold.percent else (gold.value, answer.value * hundredth)
        return self._is_close(gold.value, answer.value) or self._is_close(*scaled)

    def _is_close(self, gold: Fraction, answer: Fraction) -> bool:
        return abs(gold - answer) <= max(Fraction(self.rel_tol) * abs(gold), Fraction(self.abs_tol))


class Number(NamedTuple):
    """Number in a text."""

    value: Fraction | None  # None if it is always wrong, see `NumericMatch`
    percent: bool


def find_answers(text: str, where: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield ``(place, answer)`` for the places of ``where`` that ``text`` has; see :class:`ExactMatch`."""
    for place in where:
        if place == "text":
            yield place, text
        elif place == "boxed":
            if (content := last_boxed(text)) is not None:
                yield place, content
        else:
            _, marker, rest = ("", "", text) if place == "last_line" else text.rpartition(place)
            lines = [line for line in rest.splitlines() if line.strip()]
            if lines and (marker or place == "last_line"):
                yield place, lines[-1 if place == "last_line" else 0]


def find_number(text: str, where: Sequence[str]) -> Number | None:
    """Return the number that ``text`` answers, None without one; see :class:`NumericMatch`."""
    for place, answer in find_answers(text, where):
        if place == "####":
            if (found := _number_of_line(text)) is not None:
                return _parse_number(found)
            continue
        if place == "boxed":
            answer = _SPACED.sub(_without_spaces, "=" + answer.rpartition("=")[2])  # after "=", "- 5" is negative
        answer, first, last = _simplify(answer), None, None
        if place == "boxed" and _FORMULA.search(answer):
            return Number(None, False)
        for found in _NUMBER.finditer(answer):
            first, last = first or found, found
        if last is not None:
            if place == "boxed" and first is not last:
                return Number(None, False)
            return _parse_number(last if place in ("text", "last_line") else first)
    return None


def read_number(text: str) -> Number | None:
    """Return the number that is the whole text, None for other texts."""
    simple = _simplify("=" + _SPACED.sub(_without_spaces, text)).strip()
    found = _NUMBER.fullmatch(simple, 1) or _NUMBER.fullmatch(simple.removeprefix("=").strip("{} "))
    return None if found is None else _parse_number(found)


def _number_of_line(text: str) -> re.Match[str] | None:
    """Return the number that follows the last ``####`` with a number; a heading such as ``#### Step 3`` has none."""
    for rest in reversed(text.split("####")[1:]):
        line = next((line for line in rest.splitlines() if line.strip()), "")
        if found := _NUMBER.match(_simplify("=" + line.lstrip(" \t*_:({\\")).replace(" ", "", 1), 1):
            return found
    return None


def _without_spaces(found: re.Match[str]) -> str:
    return found[0].replace(" ", "")


_SPACED = re.compile(r"(?<![0-9.])[0-9]{1,3}(?: [0-9]{3}){1,9}(?![ ]?[0-9/])")  # 1 000 in a box


def _part(name: str) -> str:
    """Return the pattern of one argument of a fraction: one digit, or a number in braces."""
    return rf"(?:(?P<{name}_digit>[0-9])|\{{\s?(?P<{name}>[-+]?\s?(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+))\s?\}})"


def _write_fraction(found: re.Match[str]) -> str:
    above, below = (found[name] or found[f"{name}_digit"] for name in ("above", "below"))
    sign = (found["sign"] or "").strip()
    # Move the signs of both arguments to the front
    if above.startswith("-") != below.startswith("-"):
        sign = "+" if sign == "-" else "-"
    return f"{sign}{above.lstrip('-+ ')}/{below.lstrip('-+ ')} "


_REPEATING = re.compile(
    r"""
    (?<![0-9.]) (?P<whole>[0-9]{0,50}) \. (?P<fixed>[0-9]{0,50})
    (?P<repeat> \\(?:overline|bar) \s? (?:\{[0-9]{1,50}\} | [0-9])
      | \\dot \s? (?:\{[0-9]\} | [0-9]) (?:[0-9]{0,50} \\dot \s? (?:\{[0-9]\} | [0-9]))?
      | (?<=\.) \([0-9]{1,50}\) )
    (?! [0-9(^] | \\(?:overline|bar|dot) )
    """,
    re.VERBOSE,
)


def write_repeating(text: str) -> str:
    r"""Write repeating decimals as fractions, so that no reader takes ``0.\overline{3}`` for 0 or 3.

    The forms are ``0.1\overline{6}``, ``0.1\bar{6}``, ``0.1\dot{6}`` and ``0.(3)``. Digits before parentheses are left,
    since ``0.1(6)`` may be a product.

    Example:
        >>> write_repeating(r"$0.1\overline{6}$ or 0.(3)")
        '$\\frac{1}{6}$ or \\frac{1}{3}'
    """
    return _REPEATING.sub(_write_repeating, text)


def _write_repeating(found: re.Match[str]) -> str:
    whole, fixed, repeat = found["whole"] or "0", found["fixed"], re.sub(r"[^0-9]", "", found["repeat"])
    scale = 10 ** len(fixed)
    value = Fraction(int(whole + fixed), scale) + Fraction(int(repeat), scale * (10 ** len(repeat) - 1))
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


_THOUSANDS = re.compile(r"[0-9]{1,3}(?:,[0-9]{2,3})*,[0-9]{3}")  # groups of two digits are used in India
_SPELLINGS = [  # applied in this order; each must take linear time
    (
        re.compile(r"\\!|\\,|\{(?=,\})|(?<=,)\}|(?<=[0-9])(?:_|(?:\\[;: ]|~)(?=[0-9]{3}(?![0-9])))(?=[0-9])"),
        "",
    ),  # 1{,}000, 1\,000, 1_000
    (re.compile("[\u2212\ufe63\uff0d]"), "-"),
    (re.compile("(?<=[0-9])[\u00a0\u2009\u202f](?=[0-9]{3})"), ","),
    (re.compile(r"(?<!\w)\\?[$\u20ac\u00a3\u00a5\u20b9](?=[-+]?[.0-9])"), ""),
    (re.compile(r"\\?[$\u20ac\u00a3\u00a5\u20b9]"), " "),
    (re.compile(r"\\%"), "%"),
    (
        re.compile(r"(?<![0-9.])[0-9]+(?:,[0-9]+)+"),
        lambda m: m[0].replace(",", "" if _THOUSANDS.fullmatch(m[0]) else ", "),
    ),
    (_REPEATING, _write_repeating),
    (re.compile(r"(?<=[0-9])\s?\\[dtc]?frac"), r" \\frac"),  # 1\frac{3}{4}
    (re.compile(rf"(?P<sign>-\s?|\+\s?)?\\[dtc]?frac\s?{_part('above')}\s?{_part('below')}"), _write_fraction),
    (re.compile(r"(?<=[0-9])\s?(?:\\times|\\cdot|[*x\u00d7\u00b7])\s?10\^\{?([-+]?[0-9]+)\}?"), r"e\1"),
    (re.compile(r"(?<![\w.])10\^\{?([-+]?[0-9]+)\}?"), r"1e\1"),
    (re.compile(r"\^\{?\\circ\}?"), ""),
    (re.compile(r"(?<=[A-Za-z}])_(?:\{[^{}]*\}|\w)"), ""),
    (re.compile(r"\^(?:\{[^{}]*\}|[-+]?\w+)"), "^"),
    (re.compile(r"([={(:]\s?)-\s(?=[.0-9(]|\\left\()"), r"\1-"),
    (
        re.compile(
            r"(?P<sign>[-+])(?:\\left)?\(\s?(?P<inner>[-+]?)"
            r"(?P<number>(?:[0-9]+\s)?(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)(?:\s?/\s?[0-9]+)?%?)\s?(?:\\right)?\)"
        ),
        lambda m: ("-" if {m["sign"], m["inner"] or "+"} == {"+", "-"} else "+") + m["number"],
    ),  # -(3/4)
]
_NUMBER = re.compile(
    r"""
    (?<![\w.]) (?: (?<![\w)\]}%.]) (?P<sign>[-+]) )?
    (?: (?P<whole>[0-9]+) \s (?=[0-9]+/[0-9]) )?
    (?P<digits> [0-9]+ (?:\.[0-9]+)? | \.[0-9]+ ) (?: [eE] (?P<exponent>[-+]?[0-9]+) )?
    (?: \s?/\s? (?P<below>[0-9]+ (?:\.[0-9]+)?) )?
    \s? (?: (?P<percent>%) | (?P<never>\^|(?<=[0-9])i\b|\\pi|\\sqrt|\u03c0|\u221a) )?
    """,
    re.VERBOSE,
)
_FORMULA = re.compile(r"\\(?:sqrt|pi|[dtc]?frac)(?![A-Za-z])|[\u03c0\u221a]")  # fractions of numbers are rewritten
_MAX_DIGITS = 400


def _simplify(text: str) -> str:
    """Rewrite the numbers of a text in the notations that ``_NUMBER`` matches."""
    for pattern, replacement in _SPELLINGS:
        text = pattern.sub(replacement, text)
    return text


def _parse_number(found: re.Match[str]) -> Number:
    parts = [found["whole"] or "0", found["digits"], found["exponent"] or "0", found["below"] or "1"]
    if found["never"] or any(len(part) > _MAX_DIGITS for part in parts) or abs(int(parts[2])) > _MAX_DIGITS:
        return Number(None, False)
    below = Fraction(parts[3])
    if not below:
        return Number(None, False)
    value = Fraction(parts[0]) + Fraction(parts[1]) * Fraction(10) ** int(parts[2]) / below
    return Number(-value if found["sign"] == "-" else value, bool(found["percent"]))


def _checked_where(where: Sequence[str]) -> tuple[str, ...]:
    places = () if isinstance(where, str) else tuple(where)
    if not places or not all(isinstance(place, str) and place.strip() for place in places):
        raise ValueError(f"where={where!r} must be a list of places and markers, such as ['boxed', '####', 'text']")
    return places


_STYLE = re.compile(
    r"\\(?:left|right|displaystyle|,|!|;|:)(?![A-Za-z])|(?<=\\)[dtc](?=frac)|\$|(?<![0-9])[\s~]|[\s~](?![0-9])"
)
_TEXT = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
_ONE_CHARACTER = re.compile(r"\{([0-9A-Za-z])\}")
_FRACTION = re.compile(r"\\frac(?:\{([0-9A-Za-z]+)\}|([0-9A-Za-z]))\s?(?:\{([0-9A-Za-z]+)\}|([0-9A-Za-z]))")
_NAMED = re.compile(r"[A-Za-z]\s*=(?=[^=]+$)")


def extract_answer(extract: Callable[[str], str | None], completion: Any) -> str | None:
    """Return the answer of a completion's final text, or None if it has none or ``extract`` fails on it."""
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

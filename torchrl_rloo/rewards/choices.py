"""Multiple-choice reward: the completion must choose the right lettered option."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torchrl_rloo.rewards.matching import last_boxed
from torchrl_rloo.rewards.protocol import RowReward, check_column

_MARKUP = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\s?\{|[{}*_`$\"']")
_IS = (
    r"(?i:answer\b[^.\n]{0,60}?(?:\s?[:=]|\s(?:is|be))|(?:option|choice)\s?(?:(?:is\s?)?[:=]|is\b)"
    # The writer chooses, not others
    r"|(?:\b(?:I|we|Id|Ill|lets|let\sus|so|thus|hence|therefore|must|should|to)\s(?:(?:will|would|must|now|then|\w+ly)\s){0,2}"
    r"|^|(?<=[.!?:;,]\s))(?:choose|select|pick|go\swith)"
    r"|(?:so|but|thus|hence|therefore|then|,)\s(?:it|this|that)\s(?:is|must\sbe|has\sto\sbe))"
)
_ENDING = r"(?=\s?(?:[.,;!)]|$)|\s(?:because|since|as|here|to|for|given)\b)"
_IS_ALONE = (
    r"(?i:(?:^|(?<=[.!?:;,]\s))(?:it|this|that)(?:\sis|s|\smust\sbe|\shas\sto\sbe)|\b(?:so|thus|hence|therefore|no|rather|"
    r"instead|actually)\b,?)"
)
_IS_RIGHT = (
    r"(?i:(?:is|must\sbe|has\sto\sbe)\s(?:\w+ly\s)?(?:(?:the\s)?(?:only\s)?(?:correct|right|best)(?:\s(?:answer|option|"
    r"choice|one))?|(?:the|my)\s(?:final\s)?(?:answer|choice)))"
)
# Words in front of a letter that rule it out or doubt it, in its clause, or suppose it, in its sentence
_RULED_OUT = re.compile(
    r"\b(?:not|never|nor|neither|cannot|(?:ca|is|do|does|did|was|would|could|might|must|should|wo|are)n.?t|wrong|incorrect|"
    r"false|avoid|reject|eliminate|exclude|rule\sout|ruled\sout|instead\sof|rather\sthan|unlikely|hardly|least|maybe|perhaps|"
    r"possibly|thought|pretend|imagine|(?:would|could|might|may)\s(?:\w+\s){0,2}(?:be|have)|anything\sbut|refuse\sto|used\sto|"
    r"disagree|(?<!no\s)(?<!a\s)(?<!any\s)(?<!of\s)doubt(?:ful)?)\b",
    re.IGNORECASE,
)
_SUPPOSED = re.compile(r"\b(?:if|unless|whether|suppos(?:e|ing)|assum(?:e|ing)|hypothetically|were)\b", re.IGNORECASE)
_SENTENCE_END = re.compile(r"[.!?;](?=\s)|\n|\b(?:so|but|thus|hence|therefore)\b", re.IGNORECASE)
_DOUBTED_BEHIND = re.compile(
    r"\s?[,(]?\s?(?:\?|(?:(?:or|and)\s)?(?:maybe|perhaps|possibly|if|unless|would|could|might|may|was|cannot|can.?t|isn.?t|"
    r"is\s(?:not|wrong|incorrect|false|impossible)|seems\swrong)\b)"
    r"|\s?[.!,;]\s(?:(?:no|wait|oops|actually|hmm|but)[,.!]?\s){0,3}(?:that|this|it|which)s?(?:\s(?:is|was|seems))?\s"
    r"(?:wrong|incorrect|false|a\smistake|not\s(?:right|correct|true))\b",
    re.IGNORECASE,
)
_SENTENCE_CHARS = 200  # searched in front of an announcement


class MultipleChoice(RowReward):
    r"""Reward of 1.0 where a completion chooses the right letter, else 0.0.

    The choice is the first of these that the completion contains:

    1. its last closed box, else its last closed ``<answer>``, if that begins with a letter: ``\boxed{C}``,
       ``\boxed{\text{(C) 42}}``, ``<answer>C</answer>``;
    2. its last announcement: "the answer is (C)", "Answer: **C**", "the correct option is C", "I choose C",
       "option C is correct", "it's C.";
    3. its last line, if that is a single letter: ``C``, ``(C)``, ``C.``;
    4. the letter of a line that begins like an option: ``C) Paris``. Lines with different letters are not a choice.

    Other letters are prose ("A good idea"). So are lower-case letters in announcements, unless they are in brackets
    ("the answer is a matter of taste"). A choice of several letters ("A or B") scores 0.0. Announcements that rule a
    letter out, suppose or doubt it do not count: "the answer cannot be A", "would be A if", "might be A", "is A?". The
    time is linear in the length of the text.

    Args:
        column: dataset column of golds: a letter of ``choices`` (``C`` or ``(C)``), the text of an option, the index
            of an option (int, from 0), or None, which abstains.
        choices: letters or digits of the options, in order.
        options: dataset column of option texts, a list per row, required for golds that are texts. None if unused.

    Raises:
        ValueError: if ``choices`` are not at least two different letters or digits, or ``column`` is empty.

    Example:
        >>> texts = ["A good idea. The answer is (B).", r"\\boxed{B}", "B) Paris", "A or B"]
        >>> MultipleChoice()(["?"] * 4, texts, [[1]] * 4, answer=["B", 1, "(b)", "B"])
        [1.0, 1.0, 1.0, 0.0]
    """

    __name__ = "multiple_choice"

    def __init__(self, column: str = "answer", choices: Sequence[str] = "ABCDEFGHIJ", *, options: str | None = None):
        letters = [str(choice).upper() for choice in choices]
        if not len(set(letters)) == len(letters) > 1 or not all(re.fullmatch("[A-Z0-9]", c) for c in letters):
            raise ValueError(f"choices={choices!r} must be at least two different letters or digits, such as 'ABCD'")
        self.column, self.choices, self.options = check_column(column), "".join(letters), options
        self.reads = (column, options) if options else (column,)
        # Compile the patterns that depend on the letters, in both cases except in prose
        one = f"[{self.choices}{self.choices.lower()}]"
        others = rf"\(?(?:,|;|/|&|\||or\b|and\b|,\s?or\b|,\s?and\b)\s?[(\[]?[{self.choices}]\b[)\]]?"
        ends = rf"(?=\s?(?:[,.;/&|)]|$|or\b|and\b|[{self.choices}]\b))"
        self._several = re.compile(rf"(?:\s?{others}|\s[{self.choices}]\b){ends}", re.MULTILINE)
        self._listed = re.compile(rf"[).:]?\s?[(\[]?[{self.choices}]\b[).:]")  # "A. B. C." in a box
        self._boxed = re.compile(rf"[(\[]?({one})(?:[)\].:,]|(?=\s?$|/|\s(?:or|and|&)\b))")
        bare = rf"[{self.choices}](?![\w-])(?!\.\d)"
        listed = rf"(?<![{self.choices}],\s)(?<![{self.choices}]\sor\s)(?<![{self.choices}]\sand\s)(?<!nor\s)"
        self._announced = re.compile(
            rf"\b{_IS}\s?(?i:\w+ly\s)?(?i:(?:the\s)?(?:option|choice|letter)\s?:?\s?)?"
            rf"(?:[(\[](?P<bracketed>{one})[)\]]|(?!I\s[a-z])(?P<bare>{bare}))"
            rf"|{_IS_ALONE}\s(?:[(\[](?P<bracketed_alone>{one})[)\]]|(?P<bare_alone>{bare})){_ENDING}"
            rf"|{listed}(?:[(\[](?P<bracketed_first>{one})[)\]]|(?<![\w-])(?P<bare_first>{bare}))\s{_IS_RIGHT}{_ENDING}",
            re.MULTILINE,
        )
        self._line = re.compile(rf"[(\[]?({one})[)\].:]{{0,2}}")
        self._option = re.compile(rf"(?:[(\[]({one})[)\]]|({one})[).:])(?=\s|$)")

    def score(self, text: str, gold: str | int | None, options: Sequence[str] = ()) -> float | None:
        """Return 1.0, 0.0 or None; raise ``ValueError`` for a gold that matches none of the choices."""
        return None if gold is None else float(self.find_choice(text) == self._letter(gold, options))

    def find_choice(self, text: str) -> str | None:
        """Return the letter of ``choices`` that a completion chooses; None if it chooses none or several."""
        tagged, closed, _ = text.rpartition("<answer>")[2].partition("</answer>")
        boxed = _strip_markup(last_boxed(text) or (tagged if closed else ""))
        if found := self._boxed.match(boxed):
            several = self._several.match(boxed, found.end(1)) or self._listed.match(boxed, found.end(1))
            return None if several else found[1].upper()
        text = _strip_markup(text)
        if announced := [found for found in self._announced.finditer(text) if not _is_doubted(text, found)]:
            found = announced[-1]
            return None if self._several.match(text, found.end()) else found[found.lastgroup].upper()
        lines = text.splitlines()
        if lines and (found := self._line.fullmatch(lines[-1])):
            return found[1].upper()
        letters = {(m[1] or m[2]).upper() for line in lines if (m := self._option.match(line))}
        return letters.pop() if len(letters) == 1 else None

    def _letter(self, gold: str | int, texts: Sequence[str]) -> str:
        # Datasets give golds as indices, letters or texts of options
        if isinstance(gold, int) and not isinstance(gold, bool) and 0 <= gold < len(self.choices):
            return self.choices[gold]
        if isinstance(gold, str):
            if found := self._line.fullmatch(_strip_markup(gold)):
                return found[1].upper()
            matches = [
                i for i, text in enumerate(texts) if _strip_markup(text).casefold() == _strip_markup(gold).casefold()
            ]
            if matches and matches[0] < len(self.choices):
                return self.choices[matches[0]]
        raise ValueError(
            f"{self.column}={gold!r} must be one of the choices {self.choices}, an index 0 to {len(self.choices) - 1}"
            + (
                f" or one of the options {list(texts)!r:.200}"
                if self.options
                else "; set options= to the column of texts if golds are texts"
            )
        )


def _is_doubted(text: str, found: re.Match[str]) -> bool:
    """Return whether an announcement rules its letter out, supposes it or doubts it."""
    letter = found.start(found.lastgroup)
    place = max(0, found.start() - _SENTENCE_CHARS)
    ends = [
        end.end()
        for end in _SENTENCE_END.finditer(text, place, letter)
        if text[end.start()] != "\n" or end.start() < found.start()
    ]
    sentence = text[max(ends, default=place) : letter]
    # A comma in front of the announcement, or of its last part ("is not A, it is B"), ends a clause
    comma = max(sentence.rfind(",", 0, max(0, found.start() - letter + len(sentence))), sentence.rfind(", it "))
    if found.lastgroup.endswith("_first"):  # "A is wrong and B is correct"
        comma = max(comma, sentence.rfind(" and "), sentence.rfind(" while "))
    doubted = _RULED_OUT.search(sentence, comma + 1) or _SUPPOSED.search(sentence)
    return doubted is not None or _DOUBTED_BEHIND.match(text, found.end()) is not None


def _strip_markup(text: str) -> str:
    """Remove markup, blank lines and repeated spaces."""
    lines = (" ".join(_MARKUP.sub("", line).split()) for line in text.splitlines())
    return "\n".join(filter(None, lines))

"""Reward for completions that follow verifiable instructions."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from torchrl_rloo.rewards.protocol import RowReward

_LANGUAGES = (
    "af ar bg bn ca cs cy da de el en es et fa fi fr gu he hi hr hu id it ja kn ko lt lv mk ml mr ne nl no pa pl pt ro "
    "ru sk sl so sq sv sw ta te th tl tr uk ur vi zh zxx"  # zxx is no language
).split()
_UNDECIDED = 0.25  # share of the best language's probability at which a short text may be English


def is_in_language(text: str, language: str) -> bool:
    """Return whether a text is in a language, such as ``"de"``; True for texts without letters, as in IFEval."""
    return not _has_letters(text) or _rank(text)[0][0] == language.lower().split("-")[0]


def is_english(text: str) -> bool:
    """Return whether a text may be English: no other language is more than four times as probable."""
    if not _has_letters(text):
        return True
    ranks = _rank(text)
    return dict(ranks)["en"] >= _UNDECIDED * ranks[0][1]


def _has_letters(text: str) -> bool:
    return any(character.isalpha() for character in text)


def _rank(text: str) -> list[tuple[str, float]]:
    return _identifier().rank(text)


@cache
def _identifier() -> Any:
    try:
        from py3langid.langid import MODEL_FILE, LanguageIdentifier
    except ImportError as error:
        raise ImportError('language checks require py3langid: pip install "torchrl_rloo[rewards]"') from error
    identifier = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
    identifier.set_languages(_LANGUAGES)
    return identifier


_CLOSERS = "\"')]}*_\u201d\u2019"
_TITLES = frozenset("mr mrs ms dr prof rev gen sen rep st capt lt col sgt vs fig no vol pp cf approx".split())
_ABBREVIATIONS = frozenset("etc inc ltd co corp jr sr dept univ assn bros jan feb aug sept oct nov dec".split())
_STARTERS = frozenset(
    "a an and but he her his how i if in it its my no she so that the then there these they this those we what when "
    "where who why you your".split()
)


def count_sentences(text: str) -> int:
    """Return the number of sentences; the time is linear in the length of the text.

    A sentence ends with ``.``, ``!`` or ``?`` before white space, or with their full-width forms. The dot of a title
    or an initial (``Dr. J. Smith``) ends none. The dot of another abbreviation (``5 p.m.``, ``etc.``) and an ellipsis
    end one only before a capital letter that begins a common first word. Source: the idea of NLTK's Punkt (Kiss and
    Strunk 2006), without its learned tables.
    """
    for mark in "\u3002\uff01\uff1f":
        text = text.replace(mark, "! ")
    tokens = text.split()
    count = sum(_ends_sentence(token, following) for token, following in zip(tokens, tokens[1:], strict=False))
    return count + bool(tokens)


def _ends_sentence(token: str, following: str) -> bool:
    token = token.rstrip(_CLOSERS)
    if token.endswith(("!", "?")):
        return True
    if not token.endswith("."):
        return False
    stem, first = token.rstrip(".").lstrip("\"'([{*_\u201c\u2018").lower(), following.lstrip("\"'([{*_\u201c\u2018")
    begins = first[:1].isupper() and first.rstrip(".,;:!?'\")").lower() in _STARTERS
    if token.endswith(".."):
        return first[:1].isupper()
    if stem in _TITLES or len(stem) == 1 and stem.isalpha() and stem != "i":
        return False
    return begins if stem in _ABBREVIATIONS or "." in stem and stem.replace(".", "").isalpha() else True


_WORD = re.compile(r"\w+")
_BULLET = re.compile(r"^[^\S\n]*(?:\*[^*].*|-.*)$", re.MULTILINE)
_HIGHLIGHTS = (re.compile(r"\*([^\n*]*)\*"), re.compile(r"\*\*([^\n*]*)\*\*"))
_POSTSCRIPTS = {"P.S.": re.compile(r"p\.\s?s\."), "P.P.S": re.compile(r"p\.\s?p\.\s?s")}
_CONTRACTION = re.compile(r"(n't|'(?:s|m|d|ll|re|ve))\b", re.IGNORECASE)
_ANSWERS = ("yes", "no", "maybe")
_TOKEN = re.compile(r"[^\s,;:!?()\[\]{}\"]+")


def compare(count: int, bound: int, relation: str) -> bool:
    """Return whether a count is ``"at least"``, ``"less than"``, ``"at most"`` or ``"exactly"`` the bound."""
    relations = {
        "at least": count >= bound,
        "less than": count < bound,
        "at most": count <= bound,
        "exactly": count == bound,
    }
    if relation not in relations:
        raise ValueError(f"relation={relation!r} must be one of {sorted(relations)}")
    return relations[relation]


def _count_keyword(text: str, keyword: str) -> int:
    return len(re.findall(re.escape(keyword), text, re.IGNORECASE))


def _has_first_word(text: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    paragraphs = text.split("\n\n")
    count = sum(bool(paragraph.strip()) for paragraph in paragraphs)
    if count != num_paragraphs or not 1 <= nth_paragraph <= count or not paragraphs[nth_paragraph - 1].strip():
        return False
    word = paragraphs[nth_paragraph - 1].split(maxsplit=1)[0].lstrip("'").lstrip('"')
    return re.split(r"[.,?!'\"]", word, maxsplit=1)[0].lower() == first_word.lower()


def _has_placeholders(text: str, num_placeholders: int) -> bool:
    count = 0
    for line in text.split("\n"):
        place = 0
        while (start := line.find("[", place)) >= 0 and (end := line.find("]", start)) >= 0:
            count, place = count + 1, end + 1
    return count >= num_placeholders


def _is_json(text: str) -> bool:
    text = text.strip()
    for fence in ("```json", "```Json", "```JSON", "```"):
        text = text.removeprefix(fence)
    try:
        json.loads(text.removesuffix("```").strip())
    except (ValueError, RecursionError):
        return False
    return True


def _has_title(text: str) -> bool:
    for line in text.split("\n"):
        start, end = line.find("<<"), line.rfind(">>")
        if 0 <= start < end and line[start:end].lstrip("<").rstrip(">").strip():
            return True
    return False


def _is_quoted(text: str) -> bool:
    text = text.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


def _split(text: str, separator: str) -> list[str]:
    """Split a text at separators; return nothing if a part other than the first and last is blank."""
    parts = [part.strip() for part in text.split(separator)]
    return [part for part in parts if part] if all(parts[1:-1]) else []


# Name -> function of a text and of IFEval's arguments
CHECKS: dict[str, Callable[..., bool]] = {
    "keywords:existence": lambda text, keywords: all(_count_keyword(text, keyword) for keyword in keywords),
    "keywords:frequency": lambda text, keyword, frequency, relation: compare(
        _count_keyword(text, keyword), frequency, relation
    ),
    "keywords:forbidden_words": lambda text, forbidden_words: (
        not any(re.search(rf"\b{re.escape(word)}\b", text, re.IGNORECASE) for word in forbidden_words)
    ),
    "keywords:letter_frequency": lambda text, letter, let_frequency, let_relation: compare(
        text.lower().count(letter.strip().lower()), let_frequency, let_relation
    ),
    "language:response_language": is_in_language,
    "length_constraints:number_sentences": lambda text, num_sentences, relation: compare(
        count_sentences(text), num_sentences, relation
    ),
    "length_constraints:number_paragraphs": lambda text, num_paragraphs: len(_split(text, "***")) == num_paragraphs,
    "length_constraints:number_words": lambda text, num_words, relation: compare(
        len(_WORD.findall(text)), num_words, relation
    ),
    "length_constraints:nth_paragraph_first_word": _has_first_word,
    "detectable_content:number_placeholders": _has_placeholders,
    "detectable_content:postscript": lambda text, postscript_marker: bool(
        re.search(_POSTSCRIPTS.get(postscript_marker) or re.escape(postscript_marker.lower()), text.lower())
    ),
    "detectable_format:number_bullet_lists": lambda text, num_bullets: len(_BULLET.findall(text)) == num_bullets,
    "detectable_format:constrained_response": lambda text: any(f"My answer is {word}." in text for word in _ANSWERS),
    "detectable_format:number_highlighted_sections": lambda text, num_highlights: (
        sum(bool(content.strip()) for pattern in _HIGHLIGHTS for content in pattern.findall(text)) >= num_highlights
    ),
    "detectable_format:multiple_sections": lambda text, section_spliter, num_sections: (
        len(re.findall(rf"{re.escape(section_spliter.strip())}\s?\d+", text)) >= num_sections
    ),
    "detectable_format:json_format": _is_json,
    "detectable_format:title": _has_title,
    "combination:two_responses": lambda text: len(set(responses := _split(text, "******"))) == 2 == len(responses),
    "combination:repeat_prompt": lambda text, prompt_to_repeat: (
        text.strip().lower().startswith(prompt_to_repeat.strip().lower())
    ),
    "startend:end_checker": lambda text, end_phrase: (
        text.strip().strip('"').lower().endswith(end_phrase.strip().lower())
    ),
    "startend:quotation": _is_quoted,
    "change_case:capital_word_frequency": lambda text, capital_frequency, capital_relation: compare(
        sum(token.isupper() for token in _TOKEN.findall(_CONTRACTION.sub(r" \1", text))),
        capital_frequency,
        capital_relation,
    ),
    "change_case:english_capital": lambda text: text.isupper() and is_english(text),
    "change_case:english_lowercase": lambda text: text.islower() and is_english(text),
    "punctuation:no_comma": lambda text: "," not in text,
}


class InstructionFollowing(RowReward):
    """Reward of 1.0 where a completion follows all instructions of its row, else 0.0. ``partial`` scores their share.

    This is IFEval's accuracy, by its published definitions. It is strict, or with ``loose`` by any reading of the text
    without its first line, its last line or asterisks. An empty text follows no instruction. Checks of languages and of
    letter case require py3langid, from the extra ``rewards``.

    Source: Zhou et al. 2023, arXiv 2311.07911.

    Args:
        partial: True scores the share of followed instructions (IFEval's instruction level), False 1.0 for all and 0.0
            otherwise (prompt level).
        loose: True accepts the loose readings.
        ids_column: dataset column of lists of instruction ids in
            :data:`~torchrl_rloo.rewards.instructions.CHECKS`, or None, which abstains.
        arguments_column: dataset column of lists of arguments, a mapping per instruction. None values are dropped.

    Example:
        >>> follow = InstructionFollowing(partial=True)
        >>> ids = ["punctuation:no_comma", "length_constraints:number_words"]
        >>> arguments = [{}, {"num_words": 3, "relation": "at least"}]
        >>> columns = {"instruction_id_list": [ids] * 2, "kwargs": [arguments] * 2}
        >>> follow(["?"] * 2, ["no, never", "one two three"], [[1]] * 2, **columns)
        [0.0, 1.0]
    """

    __name__ = "instruction_following"

    def __init__(
        self,
        *,
        partial: bool = False,
        loose: bool = False,
        ids_column: str = "instruction_id_list",
        arguments_column: str = "kwargs",
    ):
        self.partial, self.loose, self.ids_column, self.arguments_column = partial, loose, ids_column, arguments_column
        self.reads = (ids_column, arguments_column)

    def score(self, text: str, ids: Sequence[str], arguments: Sequence[Mapping[str, Any] | None]) -> float | None:
        """Return the score, None without instructions; raise ``ValueError`` if one is unknown or lacks an argument."""
        if not ids:
            return None
        if len(ids) != len(arguments):
            raise ValueError(
                f"{len(ids)} instructions {ids} must have as many {self.arguments_column}, got {len(arguments)}"
            )
        lines, texts = text.split("\n"), [text]
        if self.loose:
            parts = ["\n".join(part).strip() for part in (lines, lines[1:], lines[:-1], lines[1:-1])]
            texts += parts + [part.replace("*", "") for part in parts]
        rows = zip(ids, arguments, strict=True)
        followed = [any(_follows(reading, name, given or {}) for reading in texts) for name, given in rows]
        return sum(followed) / len(followed) if self.partial else float(all(followed))


def _follows(text: str, name: str, arguments: Mapping[str, Any]) -> bool:
    if name not in CHECKS:
        raise ValueError(f"unknown instruction {name!r}; valid: {sorted(CHECKS)}")
    given = {k: v for k, v in arguments.items() if v is not None}
    try:
        return bool(text.strip()) and CHECKS[name](text, **given)
    except TypeError as error:
        raise ValueError(f"instruction {name!r} with {given}: {error}") from error

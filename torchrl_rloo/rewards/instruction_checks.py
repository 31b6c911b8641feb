"""Checks of the 25 kinds of IFEval instructions, which a program can verify.

Each check is ``f(text, **arguments) -> bool``, with arguments named as IFEval's columns, and follows the definitions of
IFEval's published program, so that scores compare with published ones. The time is linear in the length of the text.

Differences: keywords, markers and splitters are text, not regular expressions. py3langid detects languages, of those
that langdetect knows. Sentences and words in capitals are split by rules that approximate NLTK's.

Source: Zhou et al. 2023, arXiv 2311.07911.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from torchrl_rloo.rewards.languages import is_english, is_in_language
from torchrl_rloo.rewards.sentences import count_sentences

_WORD = re.compile(r"\w+")
_BULLET = re.compile(r"^[^\S\n]*(?:\*[^*].*|-.*)$", re.MULTILINE)
_HIGHLIGHTS = (re.compile(r"\*([^\n*]*)\*"), re.compile(r"\*\*([^\n*]*)\*\*"))
_POSTSCRIPTS = {"P.S.": re.compile(r"p\.\s?s\."), "P.P.S": re.compile(r"p\.\s?p\.\s?s")}
_CONTRACTION = re.compile(r"(n't|'(?:s|m|d|ll|re|ve))\b", re.IGNORECASE)
_TOKEN = re.compile(r"[^\s,;:!?()\[\]{}\"]+")


def compare(count: int, bound: int, relation: str) -> bool:
    """Return whether a count satisfies a bound.

    Args:
        count: number of occurrences.
        bound: number to compare with.
        relation: ``"at least"``, ``"less than"``, ``"at most"`` or ``"exactly"``.

    Raises:
        ValueError: if ``relation`` is unknown.
    """
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


def _has_keywords(text: str, keywords: list[str]) -> bool:
    return all(_count_keyword(text, keyword) for keyword in keywords)


def _has_keyword_frequency(text: str, keyword: str, frequency: int, relation: str) -> bool:
    return compare(_count_keyword(text, keyword), frequency, relation)


def _avoids_words(text: str, forbidden_words: list[str]) -> bool:
    return not any(re.search(rf"\b{re.escape(word)}\b", text, re.IGNORECASE) for word in forbidden_words)


def _has_letter_frequency(text: str, letter: str, let_frequency: int, let_relation: str) -> bool:
    return compare(text.lower().count(letter.strip().lower()), let_frequency, let_relation)


def _has_sentences(text: str, num_sentences: int, relation: str) -> bool:
    return compare(count_sentences(text), num_sentences, relation)


def _has_paragraphs(text: str, num_paragraphs: int) -> bool:
    paragraphs = _split(text, "***")
    return paragraphs is not None and len(paragraphs) == num_paragraphs


def _has_words(text: str, num_words: int, relation: str) -> bool:
    return compare(len(_WORD.findall(text)), num_words, relation)


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


def _has_postscript(text: str, postscript_marker: str) -> bool:
    pattern = _POSTSCRIPTS.get(postscript_marker) or re.compile(re.escape(postscript_marker.lower()))
    return pattern.search(text.lower()) is not None


def _has_bullets(text: str, num_bullets: int) -> bool:
    return len(_BULLET.findall(text)) == num_bullets


def _has_constrained_answer(text: str) -> bool:
    return any(option in text for option in ("My answer is yes.", "My answer is no.", "My answer is maybe."))


def _has_highlights(text: str, num_highlights: int) -> bool:
    found = [content for pattern in _HIGHLIGHTS for content in pattern.findall(text)]
    return sum(bool(content.strip()) for content in found) >= num_highlights


def _has_sections(text: str, section_spliter: str, num_sections: int) -> bool:
    return len(re.findall(rf"{re.escape(section_spliter.strip())}\s?\d+", text)) >= num_sections


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


def _has_two_responses(text: str) -> bool:
    responses = _split(text, "******")
    return responses is not None and len(responses) == 2 and responses[0] != responses[1]


def _repeats_prompt(text: str, prompt_to_repeat: str) -> bool:
    return text.strip().lower().startswith(prompt_to_repeat.strip().lower())


def _ends_with(text: str, end_phrase: str) -> bool:
    return text.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def _has_capital_words(text: str, capital_frequency: int, capital_relation: str) -> bool:
    tokens = _TOKEN.findall(_CONTRACTION.sub(r" \1", text))
    return compare(sum(token.isupper() for token in tokens), capital_frequency, capital_relation)


def _is_quoted(text: str) -> bool:
    text = text.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


def _split(text: str, separator: str) -> list[str] | None:
    """Split a text at separators; None if a part other than the first and last is blank."""
    parts = [part.strip() for part in text.split(separator)]
    return None if not all(parts[1:-1]) else [part for part in parts if part]


CHECKS: dict[str, Callable[..., bool]] = {
    "keywords:existence": _has_keywords,
    "keywords:frequency": _has_keyword_frequency,
    "keywords:forbidden_words": _avoids_words,
    "keywords:letter_frequency": _has_letter_frequency,
    "language:response_language": is_in_language,
    "length_constraints:number_sentences": _has_sentences,
    "length_constraints:number_paragraphs": _has_paragraphs,
    "length_constraints:number_words": _has_words,
    "length_constraints:nth_paragraph_first_word": _has_first_word,
    "detectable_content:number_placeholders": _has_placeholders,
    "detectable_content:postscript": _has_postscript,
    "detectable_format:number_bullet_lists": _has_bullets,
    "detectable_format:constrained_response": _has_constrained_answer,
    "detectable_format:number_highlighted_sections": _has_highlights,
    "detectable_format:multiple_sections": _has_sections,
    "detectable_format:json_format": _is_json,
    "detectable_format:title": _has_title,
    "combination:two_responses": _has_two_responses,
    "combination:repeat_prompt": _repeats_prompt,
    "startend:end_checker": _ends_with,
    "startend:quotation": _is_quoted,
    "change_case:capital_word_frequency": _has_capital_words,
    "change_case:english_capital": lambda text: text.isupper() and is_english(text),
    "change_case:english_lowercase": lambda text: text.islower() and is_english(text),
    "punctuation:no_comma": lambda text: "," not in text,
}

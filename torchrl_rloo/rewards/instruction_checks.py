"""Checks of the 25 kinds of IFEval instructions, which a program can verify.

Each check is ``f(text, **arguments) -> bool``, with arguments named as IFEval's columns. Source: Zhou et al. 2023,
arXiv 2311.07911.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

_WORD = re.compile(r"[^\W_]+(?:['’-][^\W_]+)*")
_SENTENCE_END = re.compile(r"[.!?]+[\"')\]]*(?:\s+|$)")
_FENCE = re.compile(r"^```[a-zA-Z]*\n(.*?)\n?```$", re.DOTALL)


def words(text: str) -> list[str]:
    """Return the words of a text, where hyphens and apostrophes join words.

    >>> words("It's a well-known fact.")
    ["It's", 'a', 'well-known', 'fact']
    """
    return _WORD.findall(text)


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
    return len(re.findall(rf"(?<!\w){re.escape(keyword)}(?!\w)", text, re.IGNORECASE))


def _has_keywords(text: str, keywords: list[str]) -> bool:
    return all(_count_keyword(text, keyword) for keyword in keywords)


def _has_keyword_frequency(text: str, keyword: str, frequency: int, relation: str) -> bool:
    return compare(_count_keyword(text, keyword), frequency, relation)


def _avoids_words(text: str, forbidden_words: list[str]) -> bool:
    return not any(_count_keyword(text, word) for word in forbidden_words)


def _has_letter_frequency(text: str, letter: str, let_frequency: int, let_relation: str) -> bool:
    return compare(text.lower().count(letter.lower()), let_frequency, let_relation)


def _is_in_language(text: str, language: str) -> bool:
    return _detect_language(text) == language.lower().split("-")[0]


def _detect_language(text: str) -> str:
    try:
        import py3langid
    except ImportError as error:
        raise ImportError('language checks require py3langid: pip install "torchrl_rloo[rewards]"') from error
    return py3langid.classify(text)[0]


def _has_sentences(text: str, num_sentences: int, relation: str) -> bool:
    parts = [part for part in _SENTENCE_END.split(text) if words(part)]
    return compare(len(parts), num_sentences, relation)


def _has_paragraphs(text: str, num_paragraphs: int) -> bool:
    return len(_split(text, r"\n?\*\*\*\n?")) == num_paragraphs


def _has_words(text: str, num_words: int, relation: str) -> bool:
    return compare(len(words(text)), num_words, relation)


def _has_first_word(text: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    paragraphs = _split(text, r"\n\s*\n")
    if len(paragraphs) != num_paragraphs or not 1 <= nth_paragraph <= num_paragraphs:
        return False
    found = words(paragraphs[nth_paragraph - 1])
    return bool(found) and found[0].lower() == first_word.lower()


def _has_placeholders(text: str, num_placeholders: int) -> bool:
    return len(re.findall(r"\[[^\[\]]+\]", text)) >= num_placeholders


def _has_postscript(text: str, postscript_marker: str) -> bool:
    marker = r"\s*".join(re.escape(c) for c in re.sub(r"\s", "", postscript_marker))
    return re.search(rf"^[^\S\n]*{marker}\s*\S", text, re.IGNORECASE | re.MULTILINE) is not None


def _has_bullets(text: str, num_bullets: int) -> bool:
    return len(re.findall(r"^[^\S\n]*[*-][ \t]+\S", text, re.MULTILINE)) == num_bullets


def _has_constrained_answer(text: str) -> bool:
    return any(option in text for option in ("My answer is yes.", "My answer is no.", "My answer is maybe."))


def _has_highlights(text: str, num_highlights: int) -> bool:
    return len(re.findall(r"\*\*[^*\n]*[^*\s][^*\n]*\*\*|\*[^*\n]*[^*\s][^*\n]*\*", text)) >= num_highlights


def _has_sections(text: str, section_spliter: str, num_sections: int) -> bool:
    return len(re.findall(rf"\b{re.escape(section_spliter.strip())}\s*\d+", text)) >= num_sections


def _is_json(text: str) -> bool:
    fenced = _FENCE.match(text.strip())
    try:
        json.loads(fenced[1] if fenced else text)
    except (ValueError, RecursionError):
        return False
    return True


def _has_title(text: str) -> bool:
    return re.search(r"<<[^<>\n]*[^<>\s][^<>\n]*>>", text) is not None


def _has_two_responses(text: str) -> bool:
    found = _split(text, r"\*{6}")
    return len(found) == 2 and found[0] != found[1]


def _repeats_prompt(text: str, prompt_to_repeat: str) -> bool:
    return text.strip().lower().startswith(prompt_to_repeat.strip().lower())


def _ends_with(text: str, end_phrase: str) -> bool:
    return text.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def _has_capital_words(text: str, capital_frequency: int, capital_relation: str) -> bool:
    return compare(sum(word.isupper() for word in words(text)), capital_frequency, capital_relation)


def _is_quoted(text: str) -> bool:
    text = text.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


def _split(text: str, separator: str) -> list[str]:
    """Split a text at separators into its non-empty parts."""
    return [part.strip() for part in re.split(separator, text) if part.strip()]


CHECKS: dict[str, Callable[..., bool]] = {
    "keywords:existence": _has_keywords,
    "keywords:frequency": _has_keyword_frequency,
    "keywords:forbidden_words": _avoids_words,
    "keywords:letter_frequency": _has_letter_frequency,
    "language:response_language": _is_in_language,
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
    "change_case:english_capital": lambda text: text.isupper(),
    "change_case:english_lowercase": lambda text: text.islower(),
    "punctuation:no_comma": lambda text: "," not in text,
}

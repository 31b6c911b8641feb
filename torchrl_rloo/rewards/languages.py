"""Language of a text, detected by py3langid among the languages that langdetect knows."""

from __future__ import annotations

from functools import cache
from typing import Any

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

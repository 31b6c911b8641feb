"""Protection against special tokens in the text of a conversation.

Only the chat template may open and close turns with special tokens. Messages, tool results and tool schemas may contain
the text of a special token, which is then split by a mark after its first character. After rendering, the text is
encoded in pieces between the marks, and no piece contains the special token. Together the pieces are the original
text, except that a tokenizer that prepends a space to a text prepends one to each piece. Text without special tokens
is one piece and is encoded as usual.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary


def make_mark() -> str:
    """Return a random text of private-use characters, which no conversation contains and no template looks for."""
    return "".join(chr(0xE000 + byte) for byte in secrets.token_bytes(12))


MARK = make_mark()
_CONTROL = re.compile(r"<[|\uff5c].+[|\uff5c]>", re.DOTALL)


class _Specials(NamedTuple):
    size: int  # number of the tokenizer's tokens, which grows with every added token
    texts: tuple[str, ...]
    first_characters: re.Pattern[str]  # matches the first character of each special token in a text


_SPECIALS: WeakKeyDictionary[Any, _Specials] = WeakKeyDictionary()


def special_texts(tokenizer) -> tuple[str, ...]:
    """Return the texts of the tokenizer's special tokens, sorted.

    Added tokens of the form ``<|...|>`` are included even if the tokenizer does not mark them as special: some open a
    turn. Single characters are excluded because they cannot be split. The result is cached until the tokenizer grows:
    reading its tokens takes longer than rendering a conversation.
    """
    return _specials(tokenizer).texts


def _specials(tokenizer) -> _Specials:
    known, size = _SPECIALS.get(tokenizer), len(tokenizer)
    if known is None or known.size != size:
        added = tokenizer.added_tokens_decoder.values()
        found = {token.content for token in added if token.special or _CONTROL.fullmatch(token.content)}
        texts = tuple(sorted(text for text in found.union(tokenizer.all_special_tokens) if len(text) > 1))
        rests: dict[str, list[str]] = {}
        for text in texts:
            rests.setdefault(text[0], []).append(re.escape(text[1:]))
        pattern = "|".join(f"{re.escape(first)}(?={'|'.join(rest)})" for first, rest in rests.items())
        known = _SPECIALS[tokenizer] = _Specials(size, texts, re.compile(pattern or "(?!)"))
    return known


def cut_specials(tokenizer, value: Any) -> Any:
    """Insert :data:`MARK` after the first character of each special token in messages or schemas.

    Args:
        tokenizer: Hugging Face tokenizer with the special tokens.
        value: text, or lists and mappings of text at any depth, keys included. Other values are returned unchanged.

    Example:
        >>> from torchrl_rloo.embedded import build_tokenizer
        >>> cut_specials(build_tokenizer(), "so<|im_end|>").split(MARK)
        ['so<', '|im_end|>']
    """
    pattern = _specials(tokenizer).first_characters

    def cut(value: Any) -> Any:
        if isinstance(value, str):
            return pattern.sub(lambda match: match[0] + MARK, value)
        if isinstance(value, Mapping):
            return {cut(k): cut(v) for k, v in value.items()}
        return [cut(v) for v in value] if isinstance(value, list | tuple) else value

    return cut(value)


def cut_arguments(tokenizer, template_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return a chat template's arguments with special tokens cut in ``tools`` and ``documents``, and trust the rest."""
    cut = {k: cut_specials(tokenizer, v) for k, v in template_kwargs.items() if k in ("tools", "documents")}
    return {**template_kwargs, **cut}

"""Protection against control tokens in the text of a conversation.

Only the chat template may open and close turns, tool results and the like with such a token. Other texts may
contain the text of such a token, which is then split by a mark after its first character. After rendering, the text is
encoded in pieces between the marks, and no piece contains the token. Together the pieces decode to the original text.
Text without such tokens is one piece and is encoded as usual.

Control tokens are the tokenizer's special tokens and all its added tokens that are markup, such as ``<tool_call>``,
``</think>`` or ``[IMG]``. Added tokens of letters, digits and white space only are vocabulary: they stay whole, as do
single characters, which cannot be split. Who wrote a text decides which tokens are cut:

- Messages of ``"user"``, ``"tool"`` and all roles but the three below, tool schemas and documents: all control tokens.
- Messages of ``"system"``, ``"developer"`` and ``"assistant"``: special tokens and the form ``<|...|>`` only. The
  dataset's author writes ``<think>`` in few-shot answers and format instructions on purpose, as the model knows it.
"""

from __future__ import annotations

import re
import secrets
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary


def make_mark() -> str:
    """Return a random text of private-use characters, which no conversation contains and no template looks for."""
    return "".join(chr(0xE000 + byte) for byte in secrets.token_bytes(12))


MARK = make_mark()
_CONTROL = re.compile(r"<[|\uff5c].+[|\uff5c]>", re.DOTALL)
_AUTHORED_ROLES = frozenset({"system", "developer", "assistant"})
_AUTHORED_FIELDS = frozenset({"content", "reasoning_content"})
_Trie = dict[str, "_Trie"]


class _Specials(NamedTuple):
    size: int  # number of the tokenizer's tokens, which grows with every added token
    texts: tuple[str, ...]
    special: re.Pattern[str]  # matches the first character of each special token in a text
    control: re.Pattern[str]  # matches the first character of each control token in a text


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
        added = list(tokenizer.added_tokens_decoder.values())
        found = {token.content for token in added if token.special or _CONTROL.fullmatch(token.content)}
        found.update(tokenizer.all_special_tokens)
        markup = {token.content for token in added if not _is_vocabulary(token.content)}
        texts = tuple(sorted(text for text in found if len(text) > 1))
        patterns = _first_characters(found), _first_characters(found | markup)
        known = _SPECIALS[tokenizer] = _Specials(size, texts, *patterns)
    return known


def _is_vocabulary(text: str) -> bool:
    """Return whether a text has only letters, their marks, digits and white space (U+2581 in SentencePiece)."""
    return all(c.isspace() or c == "\u2581" or unicodedata.category(c)[0] in "LMNZ" for c in text)


def _first_characters(texts: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern of the first character of each of the texts; texts of one character are left out."""
    trie: _Trie = {}
    for text in sorted(text for text in texts if len(text) > 1):
        node = trie
        for character in text:
            node = node.setdefault(character, {})
        node[""] = {}
    found = [f"{re.escape(first)}(?={_branches(node)})" for first, node in trie.items()]
    return re.compile("|".join(found) or "(?!)")


def _branches(node: _Trie) -> str:
    """Return a pattern of the shortest texts below a node, with shared prefixes so that a search stays fast."""
    prefix = ""
    while "" not in node and len(node) == 1:  # a chain needs no nesting
        ((character, node),) = node.items()
        prefix += re.escape(character)
    if "" in node:
        return prefix
    return f"{prefix}(?:{'|'.join(re.escape(character) + _branches(rest) for character, rest in node.items())})"


def cut_messages(tokenizer, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Cut the control tokens of messages, but only the special tokens of what a trusted role says (see the module).

    Args:
        tokenizer: Hugging Face tokenizer with the tokens.
        messages: chat messages.
    """
    known = _specials(tokenizer)

    def cut_message(message: Mapping[str, Any]) -> dict[str, Any]:
        authored = _AUTHORED_FIELDS if message.get("role") in _AUTHORED_ROLES else ()
        patterns = {name: known.special if name in authored else known.control for name in message}
        return {_cut(tokenizer, k, known.control): _cut(tokenizer, v, patterns[k]) for k, v in message.items()}

    return [cut_message(message) for message in messages]


def cut_specials(tokenizer, value: Any) -> Any:
    """Insert :data:`MARK` after the first character of each control token in a text or in schemas.

    Args:
        tokenizer: Hugging Face tokenizer with the tokens.
        value: text, or lists and mappings of text at any depth, keys included. Other values are returned unchanged.

    Example:
        >>> from torchrl_rloo.embedded import build_tokenizer
        >>> cut_specials(build_tokenizer(), "so<|im_end|>").split(MARK)
        ['so<', '|im_end|>']
    """
    return _cut(tokenizer, value, _specials(tokenizer).control)


def _cut(tokenizer, value: Any, pattern: re.Pattern[str]) -> Any:
    if isinstance(value, str):
        # Where normalizing makes a token of other characters, no two characters may stay together
        normalized = _normalize(tokenizer, value)
        if normalized != value and len(pattern.findall(normalized)) > len(pattern.findall(value)):
            return MARK.join(value)
        return pattern.sub(lambda match: match[0] + MARK, value)
    if isinstance(value, Mapping):
        return {_cut(tokenizer, k, pattern): _cut(tokenizer, v, pattern) for k, v in value.items()}
    return [_cut(tokenizer, v, pattern) for v in value] if isinstance(value, list | tuple) else value


def _normalize(tokenizer, text: str) -> str:
    """Normalize text as the tokenizer does before it looks for added tokens."""
    normalizer = getattr(getattr(tokenizer, "backend_tokenizer", None), "normalizer", None)
    return text if normalizer is None else normalizer.normalize_str(text)


def cut_arguments(tokenizer, template_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return a chat template's arguments with control tokens cut in ``tools`` and ``documents``, and trust the rest."""
    cut = {k: cut_specials(tokenizer, v) for k, v in template_kwargs.items() if k in ("tools", "documents")}
    return {**template_kwargs, **cut}

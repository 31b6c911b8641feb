"""Text of each token of a sequence; the texts join to the decoded sequence."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from itertools import groupby
from os.path import commonprefix

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_CONTROL = re.compile(r"<[|\uff5c].+[|\uff5c]>", re.DOTALL)
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_REMAPPED = sorted(set(range(256)) - set(_PRINTABLE))
# Byte of each character in the vocabulary of byte-level BPE
_BYTES = {chr(b): b for b in _PRINTABLE} | {chr(256 + i): b for i, b in enumerate(_REMAPPED)}


class TokenTexts:
    """Splitter of decoded text into the characters that each token completes, for any tokenizer.

    A character whose bytes span several tokens belongs to the last of them, and the tokens before it have empty text.
    Invalid bytes become replacement characters, as in the decoded text.

    Example:
        >>> from torchrl_rloo.embedded import build_tokenizer
        >>> tokenizer = build_tokenizer()
        >>> TokenTexts(tokenizer)(tokenizer("What is 5°")["input_ids"])
        ['Wh', 'at', ' is', ' ', '5', '', '°']
    """

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
        state = b"" if decoder is None else decoder.__getstate__()
        self._byte_level, self._byte_fallback = b'"ByteLevel"' in state, b'"ByteFallback"' in state
        self._known: dict[int, bytes | str] = {}

    def __call__(self, ids: Sequence[int]) -> list[str]:
        """Return the text of each of ``T`` ids."""
        whole = self.decode(ids)
        texts = self._texts_by_bytes(ids) if self._byte_level else self._texts_by_token(ids)
        return texts if "".join(texts) == whole else self._texts_by_prefixes(ids, whole)

    def decode(self, ids: Sequence[int]) -> str:
        """Decode a sequence, including special tokens."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def vocabulary_entry(self, token: int) -> str | None:
        """Return a token as the vocabulary spells it, or None for an unknown id."""
        try:
            return self.tokenizer.convert_ids_to_tokens(token)
        except (IndexError, KeyError, OverflowError, TypeError):
            return None

    def token_text(self, token: int) -> str | None:
        """Return the text of a token, or None if it depends on neighboring tokens."""
        known = self._get_own(token)
        if isinstance(known, str):
            return known
        try:
            return known.decode()
        except UnicodeDecodeError:
            return None

    def token_bytes(self, token: int) -> bytes | None:
        """Return the bytes of a token that is not valid text by itself, or None."""
        known = self._get_own(token)
        return known if isinstance(known, bytes) and self.token_text(token) is None else None

    def is_special(self, token: int) -> bool:
        """Return whether a token is special to the tokenizer, or looks special (``<|...|>``)."""
        return token in self._special

    @cached_property
    def _special(self) -> frozenset[int]:
        added = getattr(self.tokenizer, "added_tokens_decoder", {})
        marks = {i for i, token in added.items() if token.special or _CONTROL.fullmatch(token.content)}
        return frozenset(self.tokenizer.all_special_ids) | marks

    @cached_property
    def _anchor(self) -> tuple[list[int], str]:
        """Ordinary token and its text, after which another token keeps its leading space."""
        ids = self.tokenizer("a", add_special_tokens=False)["input_ids"][-1:]
        return ids, self.decode(ids)

    def _get_own(self, token: int) -> bytes | str:
        if token not in self._known:
            self._known[token] = self._find_own(token)
        return self._known[token]

    def _find_own(self, token: int) -> bytes | str:
        piece = self.vocabulary_entry(token)
        if piece is None:
            return ""
        if self._byte_level:  # as in tokenizers, a piece with any other character is literal text
            return bytes(_BYTES[c] for c in piece) if all(c in _BYTES for c in piece) else piece.encode()
        if self._byte_fallback and (byte := _BYTE_TOKEN.fullmatch(piece)):
            return bytes.fromhex(byte[1])
        ids, before = self._anchor
        text = self.decode([*ids, token])
        return text[len(before) :] if text.startswith(before) else self.decode([token])

    def _texts_by_bytes(self, ids: Sequence[int]) -> list[str]:
        """Return the texts if all tokens are bytes; replacement characters stand for invalid ones."""
        parts = [own if isinstance(own, bytes) else own.encode() for own in map(self._get_own, ids)]
        texts, ends, end = [""] * len(parts), [], 0
        for part in parts:
            ends.append(end := end + len(part))
        place = position = 0
        for text, size in _characters(b"".join(parts)):
            position += size
            while ends[place] < position:
                place += 1
            texts[place] += text
        return texts

    def _texts_by_token(self, ids: Sequence[int]) -> list[str]:
        """Return the texts if all tokens but single bytes are text; a run of bytes decodes as a whole or not at all."""
        texts: list[str] = []
        for is_bytes, run in groupby(map(self._get_own, ids), key=lambda own: isinstance(own, bytes)):
            own = list(run)
            if is_bytes:
                try:
                    own = _completed_characters(b"".join(own))
                except UnicodeDecodeError:
                    own = ["\ufffd"] * len(own)
            texts += own
        return texts

    def _texts_by_prefixes(self, ids: Sequence[int], whole: str) -> list[str]:
        """Return the texts by decoding every prefix, which is slow but correct for any tokenizer."""
        texts, done = [], 0
        for i in range(1, len(ids) + 1):
            end = len(whole) if i == len(ids) else len(commonprefix([self.decode(ids[:i]), whole]))
            texts.append(whole[done:end])
            done = max(done, end)
        return texts


def _characters(data: bytes) -> list[tuple[str, int]]:
    """Decode UTF-8 into characters with their number of bytes; invalid bytes become replacement characters."""
    found: list[tuple[str, int]] = []
    while data:
        try:
            good, bad, data = data.decode(), 0, b""
        except UnicodeDecodeError as error:
            good, bad, data = data[: error.start].decode(), error.end - error.start, data[error.end :]
        found += [(c, len(c.encode())) for c in good]
        if bad:
            found.append(("\ufffd", bad))
    return found


def _completed_characters(data: bytes) -> list[str]:
    """Return the character that each byte completes, or an empty text."""
    return [text for c in data.decode() for text in [""] * (len(c.encode()) - 1) + [c]]

"""Masks for secrets in settings and command lines, wherever these are shown, logged or written.

A secret is found by its place: a name that ends like that of a key, the headers of requests, the environment of a
process, the user and query of any URL. Masking what is masked changes nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

MASK = "***"
# Ends of names, without separators. A key is a separate word, unlike that of "monkey"
_SECRET_END = re.compile(
    r"(?:token|password|passwd|pwd|passphrase|secret|credential|cookie|auth|authorization|bearer|signature"
    r"|(?:api|access|private|secret|client|auth|account|encryption|ssh|hf)key)s?$"
)
_INSIDE = ("secret", "password", "credential", "passphrase")
_PLAIN_END = ("env", "file", "path", "name", "column")  # of names of places that hold a secret
_VOCABULARY = frozenset(
    "eos bos pad unk cls sep mask stop end start image video audio prefix suffix new max min".split()
)
_HEADERS = frozenset({"header", "headers"})
_COLUMNS = frozenset({"columnmap"})  # mappings from names to names
_ENVIRONMENTS = frozenset({"env", "environment", "environ", "envvars"})  # if they hold variables
_VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]*")
_ASSIGNED = re.compile(r"\{?\s?['\"]?[A-Z_][A-Z0-9_]*['\"]?\s?[:=]")
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_NO_SECRET = re.compile(r"(?i)[-+]?[0-9][0-9_.]*(?:e[-+]?[0-9]+)?|null|none|true|false|")
_URL = re.compile(r"(//)([^\s/?#'\"<>]*@)?([^\s?#'\"<>]*)([?#][^\s'\"<>]*)?")
_NAMED = re.compile(r"(?<![\w.-])([\w.-]+)(['\"]?\s{0,9}[:=]\s{0,9})(?!//)")
_WORD = re.compile(r"(?:[^\s'\"\\]|\\.?|'[^']*'?|\"(?:[^\"\\]|\\.)*\\?\"?)+", re.DOTALL)
_SCHEMES = frozenset({"bearer", "basic", "token", "digest"})
_MAX_DEPTH = 60
_CLOSING = {"{": "}", "[": "]", "(": ")"}


def is_secret(name: Any, value: Any = "") -> bool:
    """Return whether a setting of this name, and of this value, is a key or a password.

    Names of tokens of the vocabulary, such as ``eos_token``, are none. In the plural, numbers are none: ``max_tokens``.
    """
    if isinstance(value, bool | None):
        return False
    words = [word.lower() for word in _WORDS.findall(str(name).rpartition(".")[2])]
    squashed = "".join(words)
    if not words or len(words) > 1 and words[-1] in _PLAIN_END:
        return False
    if words[-1].endswith("s") and _NO_SECRET.fullmatch(str(value).strip()) and value != "":
        return False
    if words[-1].startswith("token") and len(words) > 1 and words[-2] in _VOCABULARY:
        return False
    return words[-1] == "key" or _SECRET_END.search(squashed) is not None or any(part in squashed for part in _INSIDE)


def mask_settings(value: Any, name: str = "", depth: int = _MAX_DEPTH) -> Any:
    """Return nested settings with masks instead of secrets; names, structure and other values are kept.

    A mask replaces what is nested deeper than ``depth``.
    """
    if isinstance(value, Mapping | list | tuple) and not depth:
        return MASK
    if isinstance(value, Mapping) and _word(name) in _COLUMNS:
        return dict(value)
    if isinstance(value, Mapping):
        whole = is_secret(name) or _word(name) in _HEADERS
        whole = whole or _word(name) in _ENVIRONMENTS and all(_VARIABLE.fullmatch(str(key)) for key in value)
        return {k: _mask_all(item) if whole else mask_settings(item, str(k), depth - 1) for k, item in value.items()}
    if isinstance(value, list | tuple):
        if any(isinstance(item, str) and _hides(name, item) for item in value):
            return [_mask_all(item) for item in value]
        masked = [mask_settings(item, name, depth - 1) for item in value]
        for i, item in enumerate(value[1:], 1):  # a command
            if _is_flag(value[i - 1], item):
                masked[i] = MASK
        return masked
    if isinstance(value, str):
        return MASK if is_secret(name, value) and value else mask_text(value)
    return MASK if is_secret(name, value) else value


def mask_text(text: str) -> str:
    """Return a text with masks for the users and queries of URLs, and for what ``name: value`` says of a secret."""
    text = mask_urls(text)
    kept, place = [], 0
    while (found := _NAMED.search(text, place)) is not None:
        end = found.end()
        kept.append(text[place:end])
        place = end
        if is_secret(found[1]) or _word(found[1]) in _HEADERS | _ENVIRONMENTS:
            place = end + len(MASK) if text.startswith(MASK, end) else _value_end(text, end)
            value = text[end:place]
            kept.append(MASK if _hides(found[1], value.strip("'\"")) else value)
    return "".join(kept) + text[place:]


def mask_urls(text: str) -> str:
    """Return a text with masks for the users and queries of URLs."""
    return _URL.sub(_mask_url, text)


def mask_command(command: str) -> str:
    """Return a command line with masks for its secrets: ``name=value``, ``--name value``, and those in values."""
    kept, place, flag = [], 0, ""
    while (found := _WORD.search(command, place)) is not None:
        word, end = found[0], found.end()
        name, separator, value = word.lstrip("'\"").partition("=")
        start = end - len(value)
        if flag and _is_flag(flag, word):
            start = found.start()
        elif not separator or not _hides(name, value.strip("'\"")):
            start = end
            word = mask_text(word)
        elif value[:1] in _CLOSING:  # the quotes of a joined command may be lost
            end = max(end, _value_end(command, start))
        elif value.lower() in _SCHEMES and (following := _WORD.search(command, end)):
            end = following.end()
        kept.append(command[place : found.start()])
        if start < end:
            # Keep the closing quote, so that the next words stay apart
            quote = word[0] if word[0] in "'\"" and command[end - 1] == word[0] and start > found.start() else ""
            word = word[: start - found.start()] + MASK + quote
        kept.append(word)
        place, flag = end, found[0]
    return "".join(kept) + command[place:]


def _hides(name: str, value: str) -> bool:
    """Return whether a name and a value in text are a secret, headers, or variables of a process."""
    if _word(name) in _HEADERS:
        return re.search("[=:{]", value) is not None
    return is_secret(name, value) or _word(name) in _ENVIRONMENTS and _ASSIGNED.match(value) is not None


def _word(name: str) -> str:
    """Return the last part of a dotted name, without separators."""
    return "".join(_WORDS.findall(name.rpartition(".")[2])).lower()


def _is_flag(word: Any, following: Any) -> bool:
    """Return whether a word of a command is a flag whose value is a secret."""
    if not isinstance(word, str) or not word.startswith("-") or "=" in word or str(following).startswith("--"):
        return False
    return word in ("-H", "--header", "--headers") or is_secret(word, following)


def _mask_all(value: Any) -> Any:
    """Return a mask; None, True and False are no secrets."""
    return value if value is None or isinstance(value, bool) else MASK


def _mask_url(found: re.Match[str]) -> str:
    user, query = found[2], found[4] or ""
    hidden = query[:1] + MASK if query.startswith("?") and len(query) > 1 or "=" in query else query
    return f"{found[1]}{MASK + '@' if user else ''}{found[3]}{hidden}"


def _value_end(text: str, start: int) -> int:
    """Return the end of a value: of its quotes or brackets, else in front of the next comma, bracket or line."""
    opening = text[start : start + 1]
    if opening in ("'", '"') and opening:
        end = text.find(opening, start + 1)
        return len(text) if end < 0 else end + 1
    if opening in _CLOSING:
        depth, place = 0, start
        for place in range(start, len(text)):
            depth += (text[place] == opening) - (text[place] == _CLOSING[opening])
            if not depth:
                break
        return place + 1
    end = re.compile(r"[,}\])\n]|$").search(text, start)
    return end.start() if end else len(text)

"""Values of dataset rows: plain Python values that every later part of a run can encode, copy and save, and prompts."""

from __future__ import annotations

import datetime
import decimal
import re
from collections.abc import Iterator, Mapping
from typing import Any

MAX_DEPTH = 64  # nested lists and mappings in a column
MAX_DIGITS = 4000  # of an integer: Python refuses to print or parse longer ones

_SCALARS = (str, bytes, bool, int, float, type(None), decimal.Decimal, datetime.date, datetime.time, datetime.timedelta)
_ROLE = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")
_MAX_INTEGER = 10**MAX_DIGITS


class PlainRow(Mapping):
    """View of a source row that converts a column with :func:`plain_value` when it is read.

    Columns that are never read may hold anything.
    """

    def __init__(self, row: Mapping[str, Any]):
        self._row = row

    def __getitem__(self, name: str) -> Any:
        return plain_value(self._row[name], f"column {name!r}")

    def __iter__(self) -> Iterator[str]:
        return iter(self._row)

    def __len__(self) -> int:
        return len(self._row)


def plain_value(value: Any, where: str = "a value", depth: int = MAX_DEPTH) -> Any:
    """Copy a value as plain Python values: arrays, tensors and tuples become lists.

    Args:
        value: scalar, or lists and mappings of scalars.
        where: location for error messages.
        depth: largest number of nested lists and mappings.

    Raises:
        ValueError: if the value has another type, a mapping key that is not text, invalid text, too many levels, or an
            integer of too many digits.

    Example:
        >>> plain_value({"a": (1, 2)})
        {'a': [1, 2]}
    """
    if hasattr(value, "tolist") and not isinstance(value, type):
        value = value.tolist()
    if isinstance(value, (list, tuple, Mapping)):
        if depth == 0:
            raise ValueError(f"{where} is nested deeper than {MAX_DEPTH} levels; flatten it or set columns")
        if isinstance(value, Mapping):
            return {_key(key, where): plain_value(entry, where, depth - 1) for key, entry in value.items()}
        return [plain_value(entry, where, depth - 1) for entry in value]
    if isinstance(value, str):
        return _text(value, where)
    if not isinstance(value, _SCALARS):
        kind = type(value).__name__
        raise ValueError(
            f"{where} has a value of type {kind}, but requires plain values with text keys; convert it or set columns"
        )
    if isinstance(value, int) and not -_MAX_INTEGER < value < _MAX_INTEGER:
        raise ValueError(f"{where} has an integer of more than {MAX_DIGITS} digits; store it as text or set columns")
    return value


def check_query(query: Any, where: str, column: str) -> str | list[dict[str, Any]]:
    """Return a prompt, text or messages, without message fields that are None.

    Args:
        query: plain value of the prompt column.
        where: location for error messages.
        column: name of the prompt column.

    Raises:
        ValueError: if it is neither text nor messages, is blank, or has a role that is not a word.
    """
    if not isinstance(query, (str, list)) or not query:
        raise ValueError(f"{where}: prompt column {column!r} must contain text or messages, got {query!r:.200}")
    if isinstance(query, str):
        contents = [query]
    else:
        for k, message in enumerate(query):
            place = f"{where}: message {k} of prompt column {column!r}"
            if not isinstance(message, dict) or not all(isinstance(message.get(f), str) for f in ("role", "content")):
                raise ValueError(f"{place} must have text as 'role' and 'content', got {message!r:.200}")
            if not _ROLE.fullmatch(message["role"]):  # a template writes the role outside of the content
                raise ValueError(f"{place} has role {message['role']!r:.80}, which must be one word; correct it")
        contents = [message["content"] for message in query if message["role"] != "system"]
        if column == "messages" and query[-1]["role"] == "assistant":
            remedy = "drop it or set prompt_column; use column_map={'messages': 'prompt'} to let the policy continue it"
            raise ValueError(f"{where}: column 'messages' must not end with an assistant message; {remedy}")
        # Drop None: Arrow adds it for optional fields that a message lacks, and templates take it for a value
        query = [{field: value for field, value in message.items() if value is not None} for message in query]
    if not any(content.strip() for content in contents):
        raise ValueError(f"{where}: prompt column {column!r} must not be blank, got {query!r:.200}; remove the row")
    return query


def _key(key: Any, where: str) -> str:
    if not isinstance(key, str):
        raise ValueError(f"{where} has a key {key!r:.80}, but requires plain values with text keys; convert it")
    return _text(key, where)


def _text(value: str, where: str) -> str:
    """Return text that UTF-8 can encode: no tokenizer takes lone surrogates."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        found = f"{ascii(value[error.start])} at character {error.start}"
        raise ValueError(f"{where} has invalid Unicode, a lone surrogate {found}; repair or remove it") from None
    return str(value)

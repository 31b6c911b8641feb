"""Quotes and escapes in values of the command line."""

from __future__ import annotations

import json
import re

_PARTS = re.compile(r"""'(?:[^'\\]|\\.)*\\?(?:'|\Z)|"(?:[^"\\]|\\.)*\\?(?:"|\Z)|[^'"]+""", re.DOTALL)
_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{4}|.)", re.DOTALL)
_KNOWN = re.compile(r'\\(?:u.{4}|[nrt"\\])')
_BARE = re.compile(r"(?<!\\)\\[nrtu]")  # what a shell leaves of "\n" when it removes the quotes


def quote(text: str, mark: str = "'") -> str:
    r"""Return text as a quoted string of Hydra, which takes all backslashes literally but those before a quote.

    Example:
        >>> print(quote("it's"))
        'it\'s'
    """
    return mark + re.sub(rf"(?<!\\)(\\*)({mark}|\Z)", r"\1\1\2", text).replace(mark, f"\\{mark}") + mark


def decode(name: str, value: str) -> str:
    r"""Decode the escapes of double-quoted strings, as JSON and YAML do; leave single-quoted ones as they are.

    Args:
        name: setting.
        value: value in Hydra's grammar.

    Returns:
        The value for Hydra.

    Raises:
        ValueError: if an escape is unknown, or outside quotes.

    Example:
        >>> decode("stop", r'["\n", 7]') == '["\n", 7]'
        True
    """
    return "".join(_decode_part(name, part) for part in _PARTS.findall(value))


def _decode_part(name: str, part: str) -> str:
    if part[0] == '"' and len(part) > 1:
        if unknown := [escape for escape in _ESCAPE.findall(part) if not _KNOWN.fullmatch(escape)]:
            raise ValueError(
                f'{name}: escape {unknown[0]} in {part} must be one of \\n, \\r, \\t, \\", \\\\, \\uXXXX; write '
                f"\\{unknown[0]}, or put the text in single quotes, where a backslash is itself"
            )
        try:
            return quote(json.loads(part, strict=False), '"')
        except json.JSONDecodeError:  # a quote that is not closed, which Hydra refuses
            return part
    if part[0] not in "'\"":
        refuse_bare_escapes(name, part)
    return part


def refuse_bare_escapes(name: str, text: str) -> None:
    r"""Raise ``ValueError`` for a line break or the like outside quotes; a template decodes its own strings."""
    if "{{" not in text and "{%" not in text and (bare := _BARE.search(text)):
        raise ValueError(
            f"{name} has {bare[0]} outside quotes, which a shell removes; put double quotes around the text, or "
            f"single ones if it has a backslash, and single ones around the setting, as in '{name}=[\"{bare[0]}\"]'"
        )

"""Fenced code blocks of Markdown texts."""

from __future__ import annotations

import re
from collections.abc import Collection

_FENCE = re.compile(r"^\ufeff?[ \t]*```([^\n`]*)$", re.MULTILINE)


def last_block(text: str, languages: Collection[str]) -> str:
    """Return the content of the last closed block between fences of three backticks, or the text without one.

    A fence that names a language inside a block starts a new block: the earlier one was never closed. The time is
    linear in the length of the text.

    Args:
        text: Markdown text.
        languages: languages of the blocks to consider, in lower case; ``""`` selects blocks without a language.

    Example:
        >>> last_block("So:\\n```python\\nx = 1\\n```\\nDone.", ("", "python"))
        'x = 1\\n'
    """
    found, language, start = text, None, 0
    for fence in _FENCE.finditer(text):
        info = fence[1].strip()
        if language is None or info:
            language, start = re.match(r"\w*", info)[0].lower(), fence.end() + 1
        else:
            found = text[start : fence.start()] if language in languages else found
            language = None
    return found

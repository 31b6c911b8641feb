"""The fenced blocks of a text in Markdown."""

from __future__ import annotations

import re
from collections.abc import Collection

_FENCE = re.compile(r"^[ \t]*```([^\n`]*)$", re.MULTILINE)


def last_block(text: str, languages: Collection[str]) -> str:
    """The content of the last closed block between fences of three backticks; all of the text if there is none.

    Where a fence names a language within a block, that block was never closed and another begins. Takes time linear in
    the text, whatever a policy writes.

    Args:
        text: what to search.
        languages: the blocks that count, by language in lower case; ``""`` for those that name none.

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

"""Fenced code blocks of Markdown texts."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Collection
from typing import NamedTuple

_FENCE = re.compile(r"^\ufeff?([ \t]*)(`{3,}|~{3,})([^\n`]*)$", re.MULTILINE)
_INLINE = re.compile(r"```([^\n`]+)```")
_PYTHON = re.compile(r"i?py(thon|py)?[\d.]*", re.IGNORECASE)
_LANGUAGE = re.compile(r"[\w.+#-]*")
_MAX_INDENT = 3  # further columns of a fence in a block that still ends it
_MAX_TRIES, _MAX_CHARS = 8, 100_000  # fences that are checked for standing in a string of a program, and its length
_MAX_BLOCKS = 50  # last blocks that are ranked


class Block(NamedTuple):
    """Content of a block between fences, its language in lower case, and whether a fence ends it."""

    language: str
    content: str
    closed: bool


def find_blocks(text: str, is_open: Callable[[str], bool] | None = None) -> list[Block]:
    """Return the blocks of a text. The time is linear in its length.

    A block ends at a fence of the same character, at least as long and not indented further. A fence that names a
    language inside a block starts a new block: the earlier one was never closed. Lines of an indented block lose that
    indentation.

    Args:
        text: Markdown text.
        is_open: function that returns True if a fence cannot end a block with this content.

    Example:
        >>> find_blocks("1. So:\\n   ~~~python\\n   x = 1\\n   ~~~")
        [Block(language='python', content='x = 1\\n', closed=True)]
    """
    blocks: list[Block] = []
    opening, start, tries = None, 0, 0

    def add(end: int, closed: bool) -> None:
        content = text[start:end]
        if indent := opening[1]:
            content = re.sub(f"^{indent}", "", content, flags=re.MULTILINE)
        # Languages are also written {.python}, python:main.py and python title="main"
        language = _LANGUAGE.match(opening[3].strip().lstrip("{. "))[0]
        blocks.append(Block(language.lower(), content, closed))

    for fence in _FENCE.finditer(text):
        info = fence[3].strip()
        if opening is not None:
            inside = len(fence[1]) > len(opening[1]) + _MAX_INDENT
            if inside or fence[2][0] != opening[2][0] or len(fence[2]) < len(opening[2]):
                continue
            if is_open is not None and tries < _MAX_TRIES:
                tries += 1
                if is_open(text[start : fence.start()]):
                    continue
            add(fence.start(), not info)
        opening, start = (fence, fence.end() + 1) if opening is None or info else (None, 0)
    if opening is not None:
        add(len(text), False)
    return blocks


def last_block(text: str, languages: Collection[str]) -> str:
    """Return the content of the last closed block, or the text without one.

    Args:
        text: Markdown text.
        languages: languages of the blocks to consider, in lower case; ``""`` selects blocks without a language.

    Example:
        >>> last_block("So:\\n```python\\nx = 1\\n```\\nDone.", ("", "python"))
        'x = 1\\n'
    """
    found = [block.content for block in find_blocks(text) if block.closed and block.language in languages]
    return found[-1] if found else text


def find_program(text: str, rank: Callable[[str], int]) -> str:
    """Return the Python program of an answer, or the whole text if there is no block of it.

    Blocks of Python count before blocks without a language. Of those with the highest rank, the last one is the
    program. One that is cut off counts only if no other is left.

    Args:
        text: answer, which may be Markdown.
        rank: function from the content of a block to its fitness for the task.

    Example:
        >>> find_program("```python\\nx = 1\\n```\\nOutput:\\n```\\n1\\n```", len)
        'x = 1\\n'
    """
    blocks = find_blocks(text, _ends_in_string)
    if blocks and not blocks[-1].closed:  # a string without end has hidden the fences
        blocks = find_blocks(text)
    python = [block for block in blocks if _PYTHON.fullmatch(block.language)]
    blocks = python or [block for block in blocks if not block.language]
    blocks = [block for block in blocks if block.closed] or blocks
    if blocks:
        return max(reversed(blocks[-_MAX_BLOCKS:]), key=lambda block: rank(block.content)).content
    if inline := _INLINE.findall(text):
        return inline[-1]
    return text.rpartition("<answer>")[2].partition("</answer>")[0]


def _ends_in_string(program: str) -> bool:
    """Return whether a program ends in the middle of a string of several lines."""
    if ('"""' not in program and "'''" not in program) or len(program) > _MAX_CHARS:
        return False
    try:
        ast.parse(program)
    except SyntaxError as error:
        return "unterminated triple-quoted" in str(error)
    except (ValueError, RecursionError, MemoryError):
        return False
    return False

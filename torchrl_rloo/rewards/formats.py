"""Rewards for completions that follow a format: a pattern, a think block, JSON of a schema."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple

from torchrl_rloo.rewards.judge_worker import read_schema
from torchrl_rloo.rewards.process_judge import ProcessJudge
from torchrl_rloo.rewards.protocol import RowReward, final_text, take_columns

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
    """Return the blocks of a Markdown text. The time is linear in its length.

    A block ends at a fence of the same character, at least as long and not indented further, unless ``is_open`` of its
    content. A fence that names a language inside a block starts a new block: the earlier one was never closed. Lines of
    an indented block lose that indentation.
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

    Blocks of Python count before blocks without a language. Of those whose content has the highest rank, the last one
    is the program. One that is cut off counts only if no other is left.

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


def think_format(
    prompts: Sequence[Any], completions: Sequence[Any], completion_ids: Sequence[Any], **columns: Any
) -> list[float | None]:
    """Score 1.0 where a completion starts with reasoning in ``<think>...</think>``, else 0.0.

    The completion must begin with ``<think>``, close it, and contain no second ``<think>``. Empty reasoning, an empty
    answer and further ``</think>`` tags are allowed, as in TRL. If the chat template writes ``<think>`` into the
    prompt, all completions score 0.0. The last assistant message is judged, and no other argument is used.

    Example:
        >>> think_format(["47+38?"] * 2, ["<think>carry</think>85", "85"], [[1], [2]])
        [1.0, 0.0]
    """
    texts = [final_text(completion) for completion in completions]
    return [float(t.startswith("<think>") and t.count("<think>") == 1 and "</think>" in t) for t in texts]


class RegexFormat(RowReward):
    """Reward of 1.0 where a completion matches a regular expression, else 0.0.

    Patterns with nested repetitions, such as ``(a+)+b``, can take exponential time on a text that does not match. Use a
    process executor with a time limit for them.

    Args:
        pattern: regular expression for the whole completion, in the syntax of :mod:`re`.
        search: True accepts a match anywhere in the completion.
        flags: letters of inline flags of :mod:`re`, such as ``i`` (ignore case) and ``s`` (a dot matches line breaks).

    Raises:
        ValueError: if ``pattern`` is not a regular expression, or ``flags`` holds an unknown letter.

    Example:
        >>> reward = RegexFormat("<think>.*</think>\\\\s*<answer>.*</answer>")
        >>> reward(["?"] * 2, ["<think>carry</think><answer>85</answer>", "<answer>85</answer>"], [[1], [2]])
        [1.0, 0.0]
    """

    __name__ = "regex_format"

    def __init__(self, pattern: str, *, search: bool = False, flags: str = "s"):
        if unknown := sorted(set(flags) - set("aimsx")):
            raise ValueError(f"flags={flags!r}: unknown flag {unknown[0]!r}; valid: a, i, m, s, x")
        try:
            self.pattern = re.compile(pattern, sum(re.RegexFlag[flag.upper()] for flag in set(flags)))
        except (re.error, TypeError, OverflowError, RecursionError) as error:
            raise ValueError(f"pattern={pattern!r:.200} must be a valid regular expression: {error}") from error
        self.search = search

    def score(self, text: str) -> float:
        """Return 1.0 or 0.0."""
        return float((self.pattern.search if self.search else self.pattern.fullmatch)(text) is not None)


class JSONSchema:
    """Reward of 1.0 where a completion is JSON that a JSON Schema allows, else 0.0.

    The last fenced block of language ``json`` is judged, else the whole completion. NaN, infinities, decimals too large
    for a float (``1e999``) and objects that repeat a name are not JSON. Values that are nested too deeply to check
    score 0.0. References are resolved only within the schema; nothing is fetched. In ``pattern``, ``$`` is the end of
    the text.

    Worker processes read schemas and judge completions, with limits of CPU time and memory. A schema that exceeds one
    abstains: it is too large to read, or takes too long even for a number. A completion that does so scores 0.0.

    Args:
        schema: schema of all rows, as a mapping or JSON. None requires ``column``.
        column: dataset column of schemas per row, as JSON, since a column of mappings gives each of them the keys of
            all others. None in the column abstains.
        timeout: seconds of CPU time per row.

    Raises:
        ValueError: unless exactly one of ``schema`` and ``column`` is given, or if ``schema`` is not a JSON Schema.
        ImportError: if jsonschema is not installed.

    Example:
        >>> reward = JSONSchema({"type": "object", "required": ["answer"]})
        >>> reward(["?"] * 3, ['{"answer": 85}', '{"result": 85}', "85?"], [[1]] * 3)
        [1.0, 0.0, 0.0]
    """

    __name__ = "json_schema"

    def __init__(
        self, schema: Mapping[str, Any] | bool | str | None = None, *, column: str | None = None, timeout: float = 5.0
    ):
        if find_spec("jsonschema") is None:
            raise ImportError('JSONSchema requires jsonschema: pip install "torchrl_rloo[rewards]"')
        if (schema is None) == (not column):
            raise ValueError(f"schema={schema!r} and column={column!r}: set exactly one of them")
        self.schema, self.column = None if schema is None else _as_json(schema), column
        self.timeout = _shared_judge(timeout).timeout
        if self.schema is not None:
            read_schema(self.schema)

    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], completion_ids: Sequence[Any], **columns: Any
    ) -> list[float | None]:
        """Return ``B`` scores, None where a schema is None or exceeds a limit; raise ``ValueError`` if it is none."""
        given = take_columns(self.__name__, [self.column] if self.column else [], columns)
        schemas = given[0] if given else [self.schema] * len(completions)
        texts = [last_block(final_text(completion), ("json",)) for completion in completions]
        rows = [(_as_json(s), text) for s, text in zip(schemas, texts, strict=True) if s is not None]
        verdicts = iter(_shared_judge(self.timeout).judge_rows(rows))
        scores = [None if schema is None else next(verdicts) for schema in schemas]
        if errors := [score for score in scores if isinstance(score, str)]:
            raise ValueError(errors[0])
        return [None if score is None else float(score) for score in scores]


def _as_json(schema: Mapping[str, Any] | bool | str) -> str:
    return schema if isinstance(schema, str) else json.dumps(schema, sort_keys=True)


@cache
def _shared_judge(timeout: float) -> ProcessJudge:
    """Return the judge that the rewards of this process share."""
    return ProcessJudge("json", timeout)

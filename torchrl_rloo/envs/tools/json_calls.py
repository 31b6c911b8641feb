"""Reader of tool calls in JSON, or in nearly valid JSON, within other text.

Its time is linear in the length of the text, even for hostile text.
"""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from typing import Any

from torchrl_rloo.envs.tools.calls import MalformedCall, ToolCall
from torchrl_rloo.runtime.http import MAX_DEPTH, is_deep

MAX_SOURCE_CHARS = 20_000  # of Python source: parsing takes about 100 times its size in memory
MAX_MALFORMED_CHARS = 200  # kept of a malformed call


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):  # either value may be meant
        name = next(name for name, number in Counter(name for name, _ in pairs).items() if number > 1)
        raise ValueError(f'there are two values of "{name[:80]}"')
    return found


DECODER = json.JSONDecoder(strict=False, object_pairs_hook=_unique)  # models write line breaks in strings of code
_SPACE = re.compile(r"\s*")
_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_MAX_LONG_READS = 8


def decode(text: str, start: int) -> tuple[Any, int, str | None]:
    """Decode the JSON value at an offset.

    Returns:
        ``(value, end, None)``, or ``(None, start, error message)``.
    """
    try:
        value, end = DECODER.raw_decode(text, start)
    except json.JSONDecodeError as error:
        return None, start, f"invalid JSON: {error.msg} at character {error.pos - start}"
    except (ValueError, RecursionError) as error:  # an integer with too many digits, or too deep nesting
        return None, start, f"invalid JSON: {error}"
    return value, end, None


class Scanner:
    """Reader of JSON values between tags.

    Args:
        text: text that holds the values.
        tag: pattern of the tags that may follow a value.
    """

    def __init__(self, text: str, tag: re.Pattern[str]):
        self.text, self.tag = text, tag
        self._long_reads = _MAX_LONG_READS  # left: reading past a tag may cost the length of the text

    def read(self, start: int) -> tuple[Any, int, str | None]:
        """Read the JSON value or Python literal at an offset, up to the next tag outside of its strings.

        Returns:
            ``(value, offset of the tag after it, None)``, or ``(None, offset of the next tag, error message)``.
        """
        start = _SPACE.match(self.text, start).end()
        end = self._next_tag(start)
        body = self.text[start:end].rstrip()
        if not body:
            return None, end, "there is no JSON"
        value, after, error = decode(body, 0)
        if error is None:
            return (value, end, None) if after == len(body) else (None, end, "unexpected text after the JSON")

        # The tag may be part of a string: try to read past it
        if "Unterminated" in error and end < len(self.text) and self._long_reads:
            value, after, long_error = decode(self.text, start)
            after = _SPACE.match(self.text, after).end()
            if long_error is None and (after == len(self.text) or self.tag.match(self.text, after)):
                return value, after, None
            self._long_reads -= 1

        # Models also write Python literals: single quotes, True, None
        value = parse_literal(body)
        return (None, end, error) if value is None else (value, end, None)

    def _next_tag(self, start: int) -> int:
        tag = self.tag.search(self.text, start)
        return len(self.text) if tag is None else tag.start()


def parse_literal(body: str) -> Any:
    """Return the value of a Python dict or list literal as JSON types, or None if it has none."""
    if (
        not body.startswith(("{", "["))
        or "'" not in body
        and "True" not in body
        and "False" not in body
        and "None" not in body
    ):
        return None
    if len(body) > MAX_SOURCE_CHARS:
        return None
    try:
        tree = ast.parse(body, mode="eval")
        if repeats_name(tree):
            return None
        return json.loads(json.dumps(ast.literal_eval(tree)))
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None


def repeats_name(tree: ast.AST) -> bool:
    """Return whether a dict of a Python expression, or a call, has two values of one name."""
    names = [
        [ast.dump(key) for key in node.keys if key] if isinstance(node, ast.Dict) else [k.arg for k in node.keywords]
        for node in ast.walk(tree)
        if isinstance(node, ast.Dict | ast.Call)
    ]
    return any(len(set(each)) < len(each) for each in names)


def parse_calls(value: Any, text: str, ids: re.Pattern[str] = _ID) -> list[ToolCall | MalformedCall]:
    """Return the call of a decoded JSON object, or the calls of a list of them.

    Args:
        value: ``{"name": ..., "arguments": {...}}``. The arguments may be named ``"parameters"`` and may be a JSON
            string. A ``"function"`` may hold the name, or all of it.
        text: source text, kept in malformed calls.
        ids: pattern of valid call ids; others are dropped.
    """
    return [_parse_call(item, text, ids) for item in (value if isinstance(value, list) else [value])]


def _parse_call(value: Any, text: str, ids: re.Pattern[str]) -> ToolCall | MalformedCall:
    error = None
    # Read both forms of a call: flat, or with the name and arguments inside "function"
    outer = value if isinstance(value, dict) else {}
    inner = outer["function"] if isinstance(outer.get("function"), dict) else outer
    name = inner.get("name", inner.get("function"))
    arguments = inner.get("arguments", inner.get("parameters"))
    if isinstance(arguments, str):
        try:
            arguments = DECODER.decode(arguments)
        except (ValueError, RecursionError):
            error = '"arguments" must be an object, got a string that is not JSON with distinct names'
    # Check the parts, and report one error; a wrong name comes first
    if not isinstance(name, str) or not name:
        error = 'a call must be an object with a "name" and "arguments"'
    elif not isinstance(arguments, dict | None) and error is None:
        error = '"arguments" must be an object'
    elif error is None and is_deep(arguments, MAX_DEPTH):
        error = f'"arguments" must have at most {MAX_DEPTH} levels'
    if error is not None:
        return MalformedCall(text[:MAX_MALFORMED_CHARS], error)
    call_id = outer.get("id")
    return ToolCall(name, arguments or {}, call_id if isinstance(call_id, str) and ids.fullmatch(call_id) else None)

"""Parsers of the tool calls of a turn, in the formats of common models.

A parser maps a turn's text, special tokens included, to its calls in order. It raises for no text, and its time is
linear in the length of the text.
"""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from torchrl_rloo.runtime.http import MAX_DEPTH, is_deep


@dataclass(frozen=True)
class ToolCall:
    """Call that a parser could read."""

    name: str
    arguments: dict[str, Any]  # not yet checked against the tool's schema
    id: str | None = None  # that the policy gave the call
    untyped: bool = False  # whether all arguments are strings, to be converted as the schema says


@dataclass(frozen=True)
class MalformedCall:
    """Call that a parser could not read."""

    text: str
    error: str


Outcome = Literal["ok", "failed", "invalid", "timed_out", "unknown", "malformed"]


@dataclass(frozen=True)
class ToolResult:
    """Result of a call."""

    name: str  # empty for a call that could not be read
    text: str  # that the policy is shown
    outcome: Outcome
    parts: list[dict[str, Any]] | None = None  # content of texts and images that it is shown instead of the text


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
    """Decode the JSON value at an offset."""
    try:
        value, end = DECODER.raw_decode(text, start)
    except json.JSONDecodeError as error:
        return None, start, f"invalid JSON: {error.msg} at character {error.pos - start}"
    except (ValueError, RecursionError) as error:  # an integer with too many digits, or too deep nesting
        return None, start, f"invalid JSON: {error}"
    return value, end, None


class Scanner:
    """Reader of JSON values between tags."""

    def __init__(self, text: str, tag: re.Pattern[str]):
        self.text, self.tag = text, tag
        self._long_reads = _MAX_LONG_READS  # left: reading past a tag may cost the length of the text

    def read(self, start: int) -> tuple[Any, int, str | None]:
        """Read the JSON value or Python literal at an offset, up to the next tag outside of its strings."""
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
    """Return the call of a decoded JSON object, or the calls of a list of them."""
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


Parser = Callable[[str], "list[ToolCall | MalformedCall]"]


def without_thinking(text: str, opening: str = "<think>", closing: str = "</think>") -> str:
    """Remove the text between thinking tags; the opening tag may be in the prompt, the closing one may be missing."""
    first_close, first_open = text.find(closing), text.find(opening)
    place = 0
    if first_close >= 0 and not 0 <= first_open < first_close:
        place = first_close + len(closing)
    kept = []
    while (start := text.find(opening, place)) >= 0:
        kept.append(text[place:start])
        end = text.find(closing, start)
        if end < 0:
            return "".join(kept)
        place = end + len(closing)
    return "".join(kept) + text[place:]


_OPENING, _CLOSING = "<tool_call>", "</tool_call>"
_TAG = re.compile(f"{_OPENING}|{_CLOSING}")


def hermes(text: str) -> list[ToolCall | MalformedCall]:
    """Parse the calls of Hermes, Qwen 2.5 and Qwen 3: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``."""
    scanner, found, place = Scanner(text, _TAG), [], 0
    while (start := text.find(_OPENING, place)) >= 0:
        start += len(_OPENING)
        value, place, error = scanner.read(start)
        found += parse_calls(value, text[start:place]) if error is None else [_malformed(text, start, place, error)]
    return found


def _malformed(text: str, start: int, end: int, error: str) -> MalformedCall:
    return MalformedCall(text[start : min(end, start + MAX_MALFORMED_CHARS)], error)


_FUNCTION = re.compile(r"<function=([^<>\n]{0,256})>\s*")
_PARAMETER = re.compile(r"\s*<parameter=([^<>\n]{0,256})>")
_END = re.compile(r"\s*</function>")


def qwen_xml(text: str) -> list[ToolCall | MalformedCall]:
    """Parse the calls of Qwen3-Coder: ``<function=name><parameter=x>value</parameter></function>``.

    A ``<tool_call>`` may enclose each. Values are strings, without one line break at each end.
    """
    found, place = [], 0
    while (head := _FUNCTION.search(text, place)) is not None:
        name, place, arguments, repeated = head[1].strip(), head.end(), {}, False
        # Read each parameter up to its end tag, since its value may contain any other text
        while (parameter := _PARAMETER.match(text, place)) is not None:
            end = text.find("</parameter>", parameter.end())
            if end < 0:
                error = f"<parameter={parameter[1]}> is not closed by </parameter>"
                return [*found, _malformed(text, head.start(), len(text), error)]
            value = text[parameter.end() : end]
            repeated = repeated or parameter[1].strip() in arguments
            arguments[parameter[1].strip()] = value.removeprefix("\n").removesuffix("\n")
            place = end + len("</parameter>")
        # Require the end tag: without it, parameters may be missing
        if (end_tag := _END.match(text, place)) is not None and repeated:
            found.append(_malformed(text, head.start(), end_tag.end(), "a parameter has two values"))
            place = end_tag.end()
        elif end_tag is not None:
            found.append(ToolCall(name, arguments, untyped=True))
            place = end_tag.end()
        else:
            error = "the parameters must be followed by </function>"
            found.append(_malformed(text, head.start(), len(text), error))
    return found


_CALL_START = re.compile(r'\[?\{\s*"(name|type|function|parameters|arguments)"')
_SEPARATOR = re.compile(r"(?:[\s;,]|<\|python_tag\|>)*")
_BUILT_IN = re.compile(r"([A-Za-z_]\w{0,255})\.call\(")


def llama(text: str) -> list[ToolCall | MalformedCall]:
    """Parse the calls of Llama 3: a turn that is ``{"name": ..., "parameters": {...}}``.

    Several calls are separated by ``;`` or form a list. ``<|python_tag|>`` may also precede ``name.call(x="...")`` or
    code, which becomes a call of the tool ``python`` with the argument ``code``. Without the tag, JSON that is not a
    call is an answer.
    """
    tag = "<|python_tag|>"
    start = text.find(tag)
    if start < 0:
        body = text.strip()
        return list(_llama_json(body, tagged=False))
    body = text[start + len(tag) :].strip()
    if body.startswith(("{", "[{")):
        return list(_llama_json(body, tagged=True))
    if _BUILT_IN.match(body):
        return [_built_in(body)]
    return [ToolCall("python", {"code": body})] if body else [MalformedCall("", f"nothing follows {tag}")]


def _llama_json(body: str, *, tagged: bool) -> Iterator[ToolCall | MalformedCall]:
    place = 0
    while body.startswith(("{", "[{"), place):
        value, end, error = decode(body, place)
        if error is not None:
            if tagged or place or _CALL_START.match(body):
                yield _malformed(body, place, len(body), error)
            return
        for item in value if isinstance(value, list) else [value]:
            if tagged or _is_call(item):
                yield from parse_calls(item, body[place:end])
        place = _SEPARATOR.match(body, end).end()


def _is_call(value: Any) -> bool:
    """Return whether a JSON value is meant as a call, not as an answer."""
    if not isinstance(value, dict):
        return False
    if isinstance(value.get("function"), dict):
        value = value["function"]
    return ("name" in value or "function" in value) and ("parameters" in value or "arguments" in value)


def _built_in(body: str) -> ToolCall | MalformedCall:
    end = body.rfind(")") + 1
    try:
        if end > MAX_SOURCE_CHARS:
            raise ValueError
        call = ast.parse(body[:end], mode="eval").body
        if (
            not isinstance(call, ast.Call)
            or call.args
            or any(k.arg is None for k in call.keywords)
            or repeats_name(call)
        ):
            raise ValueError
        arguments = {k.arg: ast.literal_eval(k.value) for k in call.keywords}
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return _malformed(body, 0, len(body), 'a call must look like name.call(argument="value")')
    return ToolCall(_BUILT_IN.match(body)[1], arguments)


_TOOL_CALLS = re.compile(r"\[TOOL_CALLS\]")
_MISTRAL_HEAD = re.compile(
    r"\s*([A-Za-z0-9_.-]{1,256})\s*(?:\[CALL_ID\]\s*([A-Za-z0-9_-]{1,64})\s*)?(?:\[ARGS\]\s*)?(?=\{)"
)
_MISTRAL_ID = re.compile(r"[A-Za-z0-9]{9}")  # Mistral's templates refuse any other id


def mistral(text: str) -> list[ToolCall | MalformedCall]:
    """Parse the calls of Mistral: ``[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]``.

    Newer models write ``[TOOL_CALLS]name[ARGS]{...}`` for each call.
    """
    scanner, found, place = Scanner(text, _TOOL_CALLS), [], 0
    while (tag := _TOOL_CALLS.search(text, place)) is not None:
        start = tag.end()
        head = _MISTRAL_HEAD.match(text, start)
        value, place, error = scanner.read(head.end() if head else start)
        if error is not None:
            found.append(_malformed(text, start, place, error))
        elif head is None:
            found += parse_calls(value, text[start:place], _MISTRAL_ID)
        else:
            call = {"name": head[1], "arguments": value} | ({"id": head[2]} if head[2] else {})
            found += parse_calls(call, text[start:place], _MISTRAL_ID)
    return found


_FENCE = re.compile(r"^[ \t]*```([^\n`]*)$", re.MULTILINE)


class PythonBlocks:
    """Parser of Markdown blocks fenced as ``python`` or ``py``, each a call of one tool with the code."""

    def __init__(self, tool: str = "python", argument: str = "code"):
        self.tool, self.argument = tool, argument

    def __call__(self, text: str) -> list[ToolCall | MalformedCall]:
        """Return a call for each block in order; a block without a closing fence is malformed."""
        found, language, start = [], None, 0
        for fence in _FENCE.finditer(text):
            info = fence[1].strip()
            ours = language in ("python", "py")
            if language is None or info:  # a fence with a language inside a block: the block was never closed
                found += [self._unclosed(text, start)] * ours
                language, start = re.match(r"\w*", info)[0].lower(), fence.end() + 1
            else:
                found += [ToolCall(self.tool, {self.argument: text[start : fence.start()]})] * ours
                language = None
        return found + [self._unclosed(text, start)] * (language in ("python", "py"))

    @staticmethod
    def _unclosed(text: str, start: int) -> MalformedCall:
        return _malformed(text, start, len(text), "the block of code is not closed by ```")


class RegexParser:
    """Parser of calls of one tool in a custom format.

    Args:
        pattern: regular expression whose named groups are the arguments; groups that did not match are left out. Its
            time should be linear in the text: write ``[^<]*`` up to the next tag, not ``.*?``.
        tool: name of the tool.

    Raises:
        ValueError: if the pattern has no named group.

    Example:
        >>> RegexParser(r"<tool>(?P<expression>[^<]*)</tool>", tool="calculator")("<tool>47*38</tool>")
        [ToolCall(name='calculator', arguments={'expression': '47*38'}, id=None, untyped=True)]
    """

    def __init__(self, pattern: str | re.Pattern[str], *, tool: str):
        self.pattern, self.tool = re.compile(pattern), tool
        if not self.pattern.groupindex:
            raise ValueError(
                f"pattern={self.pattern.pattern!r} must have a named group for each argument: (?P<name>...)"
            )

    def __call__(self, text: str) -> list[ToolCall | MalformedCall]:
        """Return a call for each match, in order."""
        return [
            ToolCall(self.tool, {k: v for k, v in match.groupdict().items() if v is not None}, untyped=True)
            for match in self.pattern.finditer(text)
        ]


PARSERS: dict[str, Parser] = {
    "hermes": hermes,
    "qwen_xml": qwen_xml,
    "llama": llama,
    "mistral": mistral,
    "python": PythonBlocks(),
}


def resolve_parser(parser: str | Parser) -> Parser:
    """Return the parser of a name, or the given function."""
    if callable(parser):
        return parser
    if parser not in PARSERS:
        raise ValueError(f"parser={parser!r} must be one of {sorted(PARSERS)} or a function of a turn's text")
    return PARSERS[parser]

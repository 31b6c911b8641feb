"""Parsers: typical outputs of models, malformed ones, and texts that would take quadratic time."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from support.cost import assert_linear
from torchrl_rloo.envs.tools.parsers import (
    PARSERS,
    MalformedCall,
    PythonBlocks,
    RegexParser,
    ToolCall,
    resolve_parser,
    without_thinking,
)

HERMES, QWEN, LLAMA, MISTRAL, PYTHON = (PARSERS[k] for k in ("hermes", "qwen_xml", "llama", "mistral", "python"))
TOOL = RegexParser(r"<tool>(?P<expression>[^<]*)</tool>", tool="calculator")


def call(name: str, arguments: dict | None = None, **kwargs) -> ToolCall:
    return ToolCall(name, arguments or {}, **kwargs)


def untyped(name: str, **arguments: str) -> ToolCall:
    return ToolCall(name, arguments, untyped=True)


# outputs of common models


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("The answer is 4.", []),
        ("", []),
        (
            'Let me see.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>',
            [call("get_weather", {"city": "Oslo"})],
        ),
        (
            '<tool_call>{"name": "a", "arguments": {"x": {"y": [1, {"z": null}]}}}</tool_call>\n'
            'and\n<tool_call>{"name": "b", "arguments": {}}</tool_call> done',
            [call("a", {"x": {"y": [1, {"z": None}]}}), call("b")],
        ),
        ('<tool_call>{"name": "a", "arguments": "{\\"x\\": 1}"}</tool_call>', [call("a", {"x": 1})]),
        ('<tool_call>{"name": "a"}</tool_call>', [call("a")]),
        ('<tool_call>{"name": "a", "arguments": null}</tool_call>', [call("a")]),
        ('<tool_call>{"name": "a", "parameters": {"x": 1}}</tool_call>', [call("a", {"x": 1})]),
        ('<tool_call>{"name": "a", "arguments": {"x": 1}}', [call("a", {"x": 1})]),
        (
            '<tool_call>{"name": "a", "arguments": {}}\n<tool_call>{"name": "b", "arguments": {}}</tool_call>',
            [call("a"), call("b")],
        ),
        (
            '<tool_call>{"id": "c-1", "function": {"name": "a", "arguments": {"x": 1}}}</tool_call>',
            [call("a", {"x": 1}, id="c-1")],
        ),
        (
            '<tool_call>[{"name": "a", "arguments": {}}, {"name": "b", "arguments": {}}]</tool_call>',
            [call("a"), call("b")],
        ),
        (
            "<tool_call>{'name': 'a', 'arguments': {'x': True, 'y': None, 's': 'it\\'s'}}</tool_call>",
            [call("a", {"x": True, "y": None, "s": "it's"})],
        ),
        (
            '<tool_call>{"name": "a", "arguments": {"s": "naïve \\u00e9 日本 😀"}}</tool_call>',
            [call("a", {"s": "naïve é 日本 😀"})],
        ),
        ('<tool_call>{"name": "a", "arguments": {"s": "two\nlines"}}</tool_call>', [call("a", {"s": "two\nlines"})]),
        (
            '<tool_call>{"name": "write", "arguments": {"text": "<tool_call>{}</tool_call> {\\"}"}}</tool_call>',
            [call("write", {"text": '<tool_call>{}</tool_call> {"}'})],
        ),
    ],
)
def test_hermes(text: str, calls: list[ToolCall]) -> None:
    assert HERMES(text) == calls


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('<tool_call>{"name": "a", "arguments": {"x": 1}</tool_call>', "Expecting ',' delimiter at character 35"),
        ('<tool_call>{"name": "a", "arguments": {"x": "un', "Unterminated string"),
        ("<tool_call></tool_call>", "no JSON"),
        ("<tool_call>", "no JSON"),
        ("<tool_call>calculator(1+2)</tool_call>", "invalid JSON"),
        ('<tool_call>{"arguments": {}}</tool_call>', '"name"'),
        ('<tool_call>{"name": 3, "arguments": {}}</tool_call>', '"name"'),
        ('<tool_call>{"name": "a", "arguments": [1]}</tool_call>', '"arguments" must be an object'),
        ('<tool_call>{"name": "a", "arguments": "x"}</tool_call>', '"arguments" must be an object'),
        ('<tool_call>"a"</tool_call>', '"name"'),
        ('<tool_call>{"name": "a", "arguments": {}}}</tool_call>', "unexpected text after the JSON"),
        ("<tool_call>{'name': 'a', 'arguments': {'x': {1, 2}}}</tool_call>", "invalid JSON"),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "invalid JSON"),
        ('<tool_call>{"name": "a", "arguments": {"x": ' + "1" * 10_000 + "}}</tool_call>", "invalid JSON"),
    ],
)
def test_hermes_malformed(text: str, words: str) -> None:
    (found,) = HERMES(text)
    assert isinstance(found, MalformedCall) and words in found.error
    assert found.text in text and len(found.text) <= 200


def test_a_malformed_call_costs_no_other() -> None:
    good = '<tool_call>{"name": "b", "arguments": {}}</tool_call>'
    for bad in ('{"name": "a", "arg: 1}', '{"name": "a", ', "{'name': 'a'", "[[", '"'):
        first, second = HERMES(f"<tool_call>{bad}</tool_call>\n{good}")
        assert isinstance(first, MalformedCall) and second == call("b"), bad
        assert HERMES(f"{good}<tool_call>{bad}")[0] == call("b")


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        (
            "I will look.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo, Norway\n</parameter>\n"
            "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
            [untyped("get_weather", city="Oslo, Norway", days="3")],
        ),
        (
            "<function=run><parameter=code>\nif a < b:\n    print('</p>')\n\n</parameter></function>",
            [untyped("run", code="if a < b:\n    print('</p>')\n")],
        ),
        ("<tool_call>\n<function=now>\n</function>\n</tool_call>", [untyped("now")]),
        (
            "<function=a></function> and <function=b><parameter=x>1</parameter></function>",
            [untyped("a"), untyped("b", x="1")],
        ),
        (
            "<function=a><parameter=s><function=b></function></parameter></function>",
            [untyped("a", s="<function=b></function>")],
        ),
        ("no call", []),
    ],
)
def test_qwen_xml(text: str, calls: list[ToolCall]) -> None:
    assert QWEN(text) == calls


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("<tool_call><function=a><parameter=x>1", "<parameter=x> is not closed"),
        ("<function=a><parameter=x>1</parameter>", "must be followed by </function>"),
        ("<function=a>x=1</function>", "must be followed by </function>"),
    ],
)
def test_qwen_xml_malformed(text: str, words: str) -> None:
    (found,) = QWEN(text)
    assert isinstance(found, MalformedCall) and words in found.error


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('{"name": "f", "parameters": {"x": "1"}}', [call("f", {"x": "1"})]),
        ('\n {"type": "function", "name": "f", "parameters": {}} ', [call("f")]),
        ('<|python_tag|>{"type": "function", "name": "f", "parameters": {"x": 1}}', [call("f", {"x": 1})]),
        ('<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}', [call("f"), call("g")]),
        ('{"name": "f", "parameters": {}}\n{"name": "g", "arguments": {}}', [call("f"), call("g")]),
        ('Sure.<|python_tag|>brave_search.call(query="a (b)")', [call("brave_search", {"query": "a (b)"})]),
        (
            "<|python_tag|>wolfram_alpha.call(query='x', n=2, deep=True)",
            [call("wolfram_alpha", {"query": "x", "n": 2, "deep": True})],
        ),
        ("<|python_tag|>import math\nprint(math.pi)", [call("python", {"code": "import math\nprint(math.pi)"})]),
        ('[{"name": "f", "parameters": {}}, {"name": "g", "parameters": {}}]', [call("f"), call("g")]),
        ('<|python_tag|>[{"name": "f", "parameters": {"x": 1}}]', [call("f", {"x": 1})]),
        ('{"type": "function", "function": {"name": "f", "parameters": {"x": 1}}}', [call("f", {"x": 1})]),
        ('{"type": "function", "function": "f", "parameters": {"x": 1}}', [call("f", {"x": 1})]),
        ('{"answer": 4}', []),
        ('{"function": {"f": "x"}, "arguments_of": 2}', []),
        ('[{"answer": 4}, 5]', []),
        ("[1, 2]", []),
        ('{"name": "Bob"}', []),
        ('The weather is {"name": "f", "parameters": {}}', []),
        ("{oops", []),
    ],
)
def test_llama(text: str, calls: list[ToolCall]) -> None:
    assert LLAMA(text) == calls


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"name": "f", "parameters": {"x": ', "invalid JSON"),
        ('[{"name": "f", "parameters": {"x": ', "invalid JSON"),
        ('{"name": {"a": 1}, "parameters": {}}', '"name"'),
        ('<|python_tag|>{"x": 1}', '"name"'),
        ("<|python_tag|>", "nothing follows"),
        ('<|python_tag|>brave_search.call("a")', "name.call("),
        ("<|python_tag|>brave_search.call(query=open('x'))", "name.call("),
        ('<|python_tag|>brave_search.call(query="a', "name.call("),
        ("<|python_tag|>f.call(" + "(" * 10_000 + ")" * 10_001, "name.call("),
    ],
)
def test_llama_malformed(text: str, words: str) -> None:
    (found,) = LLAMA(text)
    assert isinstance(found, MalformedCall) and words in found.error


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        (
            '[TOOL_CALLS] [{"name": "f", "arguments": {"x": 1}, "id": "VvvODy9mT"}]',
            [call("f", {"x": 1}, id="VvvODy9mT")],
        ),
        ('[TOOL_CALLS][{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}]', [call("f"), call("g")]),
        (
            '[TOOL_CALLS]f[ARGS]{"x": "[TOOL_CALLS]"}[TOOL_CALLS]g[ARGS]{}',
            [call("f", {"x": "[TOOL_CALLS]"}), call("g")],
        ),
        ('Hm.[TOOL_CALLS]f[CALL_ID]abc123def[ARGS]{"x": 1}', [call("f", {"x": 1}, id="abc123def")]),
        ('[TOOL_CALLS]get_weather{"city": "Oslo"}', [call("get_weather", {"city": "Oslo"})]),
        ('[TOOL_CALLS]f[CALL_ID]call_1[ARGS]{"x": 1}', [call("f", {"x": 1})]),
        ('[TOOL_CALLS] [{"name": "f", "arguments": {}, "id": "call-1"}]', [call("f")]),
        ("No calls at all", []),
    ],
)
def test_mistral(text: str, calls: list[ToolCall]) -> None:
    assert MISTRAL(text) == calls


@pytest.mark.parametrize(
    "text", ["[TOOL_CALLS]", "[TOOL_CALLS]f[ARGS]", '[TOOL_CALLS][{"name": "f"', "[TOOL_CALLS]f[ARGS]{x}"]
)
def test_mistral_malformed(text: str) -> None:
    (found,) = MISTRAL(text)
    assert isinstance(found, MalformedCall) and "JSON" in found.error


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("So:\n```python\nprint(1)\n```\nThen", [call("python", {"code": "print(1)\n"})]),
        (
            "```py\na\n```\n```json\n{}\n```\n```python\nb\n```",
            [call("python", {"code": "a\n"}), call("python", {"code": "b\n"})],
        ),
        ("```\nplain\n```", []),
        ("inline ```python x``` only", []),
    ],
)
def test_python_blocks(text: str, calls: list[ToolCall]) -> None:
    assert PYTHON(text) == calls


def test_python_blocks_that_are_not_closed() -> None:
    (found,) = PYTHON("```python\nprint(1)")
    assert isinstance(found, MalformedCall) and "not closed" in found.error
    first, second = PYTHON("```python\na\n```python\nb\n```")
    assert isinstance(first, MalformedCall) and second == call("python", {"code": "b\n"})
    assert PythonBlocks("run", "source")("```python\na\n```") == [call("run", {"source": "a\n"})]


def test_a_custom_pattern() -> None:
    assert TOOL("I <tool>47*38</tool> and <tool>1+1</tool>, <tool>") == [
        untyped("calculator", expression="47*38"),
        untyped("calculator", expression="1+1"),
    ]
    optional = RegexParser(r"CALL (?P<x>\d+)(?: (?P<y>\d+))?", tool="f")
    assert optional("CALL 1\nCALL 2 3") == [untyped("f", x="1"), untyped("f", x="2", y="3")]
    with pytest.raises(ValueError, match="named group"):
        RegexParser(r"<tool>([^<]*)</tool>", tool="f")


def test_the_table_of_parsers() -> None:
    assert resolve_parser("hermes") is HERMES and resolve_parser(TOOL) is TOOL
    with pytest.raises(ValueError, match="'hermse'.*hermes"):
        resolve_parser("hermse")


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("a", "a"),
        ("<think>a</think>b", "b"),
        ("a</think>b", "b"),
        ("a<think>b", "a"),
        ("<think>a<think>b</think>c<think>d</think>e", "ce"),
        ("a</think>b<think>c</think>d", "bd"),
    ],
)
def test_thinking_is_left_out(text: str, left: str) -> None:
    assert without_thinking(text) == left


# arbitrary text

PIECES = [
    *"<tool_call> </tool_call> <function=f> </function> <parameter=x> </parameter> <tool> </tool>".split(),
    *"[TOOL_CALLS] [ARGS] [CALL_ID] <|python_tag|> f.call( <think> </think>".split(),
    *("```python\n", "\n```\n", '{"name": "f", "arguments": {"x": 1}}', '{"name": "f"', '"arguments": ', "\n", " "),
    *"{ } [ ] \" ' \\ , : f 1 True é \0 \ud800 ( ) ; - x= None".split(" "),
]
texts = st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=40).map("".join)


@pytest.mark.parametrize(
    "parser", [HERMES, QWEN, LLAMA, MISTRAL, PYTHON, TOOL], ids=["hermes", "qwen", "llama", "mistral", "python", "tool"]
)
@settings(max_examples=150)
@given(text=texts)
@example(text="")
def test_no_text_makes_a_parser_raise(parser: Callable, text: str) -> None:
    for found in parser(without_thinking(text)):
        if isinstance(found, ToolCall):
            assert isinstance(found.name, str) and all(isinstance(k, str) for k in found.arguments)
            json.dumps(found.arguments)
        else:
            assert isinstance(found, MalformedCall) and found.error and len(found.text) <= 200


names = st.from_regex(r"[a-z_]{1,8}", fullmatch=True)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.text(max_size=20) | st.sampled_from(PIECES),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
calls = st.lists(st.tuples(names, st.dictionaries(names, values, max_size=3)), min_size=1, max_size=4)


@given(calls, st.booleans())
def test_what_a_model_means_is_read(calls: list[tuple[str, dict]], ascii_only: bool) -> None:
    expected = [call(name, arguments) for name, arguments in calls]
    spelled = [json.dumps({"name": n, "arguments": a}, ensure_ascii=ascii_only) for n, a in calls]
    assert HERMES("I see.\n" + "\n".join(f"<tool_call>\n{s}\n</tool_call>" for s in spelled)) == expected
    assert MISTRAL(f"[TOOL_CALLS] [{', '.join(spelled)}]") == expected
    assert LLAMA(
        "; ".join(s.replace('"arguments"', '"parameters"', 1) for s in spelled).replace("<|python_tag|>", "")
    ) == [call(c.name, json.loads(json.dumps(c.arguments).replace("<|python_tag|>", ""))) for c in expected]
    dumped = [f"[TOOL_CALLS]{n}[ARGS]{json.dumps(a, ensure_ascii=ascii_only)}" for n, a in calls]
    assert MISTRAL("".join(dumped)) == expected


UNITS = [
    *"""<tool_call> <tool_call>{" <tool_call>["",""," <tool_call>[[ <tool_call>{"a":[ <tool_call>["","a</tool_call>
    </tool_call> <tool_call></tool_call> <tool_call>"\\"
    <function=f> <function=f><parameter=x> <function=f><parameter=x></parameter> <function= <parameter=x>
    [TOOL_CALLS] [TOOL_CALLS]f [TOOL_CALLS]f[ARGS] [TOOL_CALLS]f[ARGS]{" [TOOL_CALLS]["",""
    { [ {" ( - a. <|python_tag|> f.call( {"a":1}; 1 <tool> <think> </think> <think></think> \\ " '""".split(),
    *('<tool_call>{"a": "', '<tool_call>["", "', "<tool_call>{'a': '", "[TOOL_CALLS]" + " " * 50),
    *("```python\n", "```\n", "\n", " ", "\t"),
]


@pytest.mark.parametrize("name", [*PARSERS, "regex"])
def test_time_is_linear_in_the_text(name: str) -> None:
    """Repeating any unit takes linear time, even where a search could rescan the text."""
    parser, prefix = PARSERS.get(name, TOOL), "<|python_tag|>" if name == "llama" else ""
    for unit in UNITS:
        assert_linear(lambda n, unit=unit: parser(without_thinking(prefix + unit * (n // len(unit)))), 10_000)

"""Tools and calls that misbehave: the policy reads a short text, and nothing else changes."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from support.waiting import PATIENCE
from torchrl_rloo.envs.tools.parsers import PARSERS, MalformedCall, ToolCall, ToolResult
from torchrl_rloo.envs.tools.session import ToolSession
from torchrl_rloo.envs.tools.tool import Columns, Tool, ToolRegistry, tool
from torchrl_rloo.runtime import event_loop

MAX_CHARS = 300
OBJECT = {"type": "object", "properties": {}}


class Give(Tool):
    """Tool whose result, or error, a function makes; the work is sync or async."""

    def __init__(self, make: Callable[[], Any], is_async: bool = False):
        super().__init__("give", "Gives.", OBJECT)
        self.call = self.give_async if is_async else self.give
        self.make = make

    def give(self, state: None, /) -> Any:
        return self.make()

    async def give_async(self, state: None, /) -> Any:
        return self.make()


def run(
    item: Tool | Callable, *calls: ToolCall, timeout: float = PATIENCE, columns: dict | None = None
) -> list[ToolResult]:
    session = ToolSession(ToolRegistry([item]), columns or {}, timeout=timeout, max_chars=MAX_CHARS)

    async def make() -> list[ToolResult]:
        try:
            return [await session.call(call) for call in calls]
        finally:
            await session.close()

    return event_loop.run(make())


def check_shown(result: ToolResult) -> None:
    """Check that a tokenizer can encode the text, and that it is short."""
    assert type(result.text) is str and len(result.text) < MAX_CHARS + 60
    assert "\0" not in result.text and result.text.encode()


class Bad:
    def __init__(self, text: Any):
        self.text = text

    def __str__(self) -> str:
        if isinstance(self.text, BaseException):
            raise self.text
        return self.text

    __repr__ = __str__


class Liar(str):
    """Text that answers wrongly about itself."""

    def __len__(self) -> int:
        return 0

    def __getitem__(self, index: Any) -> str:
        raise RuntimeError("no part")

    def __format__(self, spec: str) -> str:
        raise RuntimeError("no format")

    def encode(self, *args: Any) -> bytes:
        raise RuntimeError("no bytes")

    def __str__(self) -> str:
        raise RuntimeError("no text")


class Endless(list):
    def __iter__(self):
        while True:
            yield "x"

    def __len__(self) -> int:
        return 1

    def __bool__(self) -> bool:
        return True


class EndlessDict(dict):
    def items(self):
        number = 0
        while True:
            number += 1
            yield str(number), number

    def __bool__(self) -> bool:
        return True


class LyingError(Exception):
    def __str__(self) -> str:
        return Liar("lied")


def raising(error: BaseException) -> Callable[[], Any]:
    def make() -> Any:
        raise error

    return make


def generator():
    while True:
        yield "x"


def looped() -> list:
    itself: list = []
    itself.append(itself)
    return itself


def nested(depth: int = 100_000) -> list:
    value: list = []
    for _ in range(depth):
        value = [value]
    return value


OUTPUTS: dict[str, tuple[Callable[[], Any], str]] = {
    "100_mb": (lambda: "x" * 100_000_000, "more characters are left out"),
    "many_items": (lambda: ["x"] * 3_000_000, "all more characters are left out"),
    "endless_list": (Endless, "all more characters are left out"),
    "endless_dict": (EndlessDict, "all more characters are left out"),
    "generator": (generator, "generator object"),
    "surrogates": (lambda: "\ud800" * 1000, "\ufffd{200}"),
    "surrogate_in_json": (lambda: {"\udfff": ["\ud800"]}, "\ufffd"),
    "cut_pair": (lambda: "\ud83d\ude00" * 1000, "\U0001f600"),
    "nul": (lambda: "\0" * 1000, "\ufffd{200}"),
    "nan": (lambda: [float("nan"), float("inf")], r"\[NaN, Infinity\]"),
    "object": (object, "object object"),
    "none": (lambda: None, "null"),
    "bytes": (lambda: b"\xff" * 10_000, "xff"),
    "type": (lambda: dict, "class"),
    "set": (lambda: {1}, "1"),
    "lying_text": (lambda: Liar("y" * 1000), "y{200}"),
    "lying_item": (lambda: [Liar("y" * 1000)], "y|Error"),
    "str_raises": (lambda: Bad(ValueError("inside")), "Error: ValueError: inside"),
    "str_exits": (lambda: Bad(SystemExit(3)), "Error: SystemExit: 3"),
    "str_is_none": (lambda: Bad(None), "Error: TypeError"),
    "looped": (looped, "Error: ValueError"),
    "nested": (nested, "Error: RecursionError|left out"),
    "odd_keys": (lambda: {(1, 2): 3}, "Error: TypeError"),
    "digits": (lambda: 10**5000, "Error: ValueError|0{200}"),
    "raises": (raising(RuntimeError("r" * 10_000_000)), "Error: RuntimeError: r"),
    "raises_badly": (raising(RuntimeError(Bad(RuntimeError()))), "its message raised RuntimeError"),
    "raises_no_text": (raising(RuntimeError(Bad(5))), "its message raised TypeError"),
    "raises_liar": (raising(LyingError()), "Error: LyingError: lied"),
    "raises_surrogates": (raising(RuntimeError("\ud800\0")), "\ufffd\ufffd"),
    "stops": (raising(StopIteration()), "Error: .*StopIteration"),
    "exits": (raising(SystemExit("bye")), "Error: SystemExit: bye"),
    "interrupts": (raising(KeyboardInterrupt()), "Error: KeyboardInterrupt"),
    "cancels": (raising(asyncio.CancelledError("mine")), "Error: CancelledError"),
    "leaves": (raising(GeneratorExit()), "Error: GeneratorExit"),
    "times_out": (raising(TimeoutError("late")), "Error: .*late"),
}


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("name", OUTPUTS)
def test_outputs_of_any_kind_become_short_text(name, is_async):
    make, pattern = OUTPUTS[name]
    results = run(Give(make, is_async), *[ToolCall("give", {})] * 2)
    for result in results:
        check_shown(result)
        assert re.search(pattern, result.text), result.text
        assert (result.outcome == "ok") != result.text.startswith("Error: ")


def test_an_async_tool_that_swallows_its_cancellation_times_out():
    freed = asyncio.Event()

    @tool
    async def stubborn() -> str:
        """Ignores cancellation."""
        while not freed.is_set():
            try:
                await asyncio.wait_for(freed.wait(), PATIENCE)
            except asyncio.CancelledError:
                pass
        return "late"

    results = run(stubborn, *[ToolCall("stubborn", {})] * 3, timeout=0.1)
    assert [result.outcome for result in results] == ["timed_out"] * 3
    event_loop.run(event_loop.call(lambda: None))
    freed.set()


def test_a_tool_changes_neither_the_row_nor_the_next_calls_arguments():
    @tool
    def change(items: list[int], columns: Columns) -> int:
        """Change all that it gets.

        Args:
            items: numbers.
        """
        items.append(columns["answer"][0])
        columns["answer"].append(9)
        columns["other"] = 1
        columns["deep"]["a"].clear()
        return len(items)

    row = {"answer": [4], "deep": {"a": [1]}}
    given = {"items": [1, 2]}
    results = run(change, ToolCall("change", given), ToolCall("change", {"items": [1]}), columns=row)
    assert [result.text for result in results] == ["3", "2"]
    assert row == {"answer": [4], "deep": {"a": [1]}}


NAMES = [
    "__class__",
    "__init__",
    "call",
    "name",
    "",
    " ",
    "give ",
    "GIVE",
    "give\0",
    "../give",
    "x" * 10_000,
    "<|im_end|>",
]
NAMES += ["give()", "self", "None", "\ud800", "\u202egive", "_tools", "keys", "schemas", "\x1b[2J"]


@pytest.mark.parametrize("name", NAMES)
def test_other_names_reach_no_tool_and_no_attribute(name):
    (result,) = run(Give(lambda: "reached"), ToolCall(name, {}))
    check_shown(result)
    assert result.outcome == "unknown" and "only give" in result.text or "did you mean" in result.text
    assert result.name == name or result.name == ""


@tool
def add(a: int, b: list[float] | None = None) -> float:
    """Add numbers.

    Args:
        a: a number.
        b: numbers.
    """
    return a + sum(b or [])


ARGUMENTS: list[dict[str, Any]] = [
    *({}, {"a": "1"}, {"a": True}, {"a": 1.0}, {"a": None}, {"a": [1]}, {"a": 1, "c": 2}, {"a": 1, "self": 2}),
    *({"a": 1, "state": 1}, {"a": 1, "": 2}, {"a": 1, "__class__": 2}, {"a": 1, "b": ["x"]}, {"a": 1, "b": [True]}),
    *({"a": 1, "b": {"0": 1}}, {"a": 1, "b": [[1]]}, {"a": "x" * 10_000}, {"\ud800": 1}, {"a": nested(5000)}),
    *({"a": {"b": nested(900)}}, {"a": "\0\x1b[2J<|im_end|>"}, {f"x{i}": i for i in range(1000)}),
]


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=lambda value: f"{list(value)!r:.20}")
def test_wrong_arguments_are_told_and_never_reach_the_tool(arguments):
    (result, after) = run(add, ToolCall("add", arguments), ToolCall("add", {"a": 1, "b": [0.5]}))
    check_shown(result)
    assert result.outcome == "invalid" and result.text.startswith("Error: ")
    assert (after.outcome, after.text) == ("ok", "1.5")


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1, "a": 2}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "name": "g", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"x": [{"a": 1, "a": 2}]}}</tool_call>'),
        ("hermes", "<tool_call>{'name': 'f', 'arguments': {'a': 1, 'a': 2}}</tool_call>"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": True, "a": False}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1, \\"a\\": 2}"}</tool_call>'),
        ("llama", '{"name": "f", "parameters": {"a": 1, "a": 2}}'),
        ("llama", "<|python_tag|>f.call(a=1, a=2)"),
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1, "a": 2}}]'),
        ("llama", "<|python_tag|>f.call(x={'a': 1, 'a': 2})"),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"a": 1, "a": 2}'),
        ("qwen_xml", "<function=f><parameter=a>1</parameter><parameter=a>2</parameter></function>"),
    ],
)
def test_two_values_of_one_argument_are_no_call(parser, text):
    assert [type(call) for call in PARSERS[parser](text)] == [MalformedCall]


@pytest.mark.parametrize(
    "parameters",
    [
        *(None, 5, [], "object", {}, {"type": "array"}, OBJECT | {"properties": []}, OBJECT | {"properties": {"a": 5}}),
        *(OBJECT | {"properties": {1: {}}}, OBJECT | {"required": "abc"}, OBJECT | {"required": [5]}),
        *(OBJECT | {"properties": {"a": {"type": kind}}} for kind in (5, [5], {}, [["string"]])),
        *(OBJECT | {"properties": {"a": {key: 5}}} for key in ("enum", "anyOf", "oneOf", "items", "properties")),
        *(OBJECT | {"properties": {"a": {"anyOf": [5]}}}, OBJECT | {"additionalProperties": "yes"}),
        OBJECT | {"properties": {"a": json.loads('{"items":' * 50 + "{}" + "}" * 50)}},
    ],
)
def test_schemas_of_another_form_are_refused_when_the_tool_is_made(parameters):
    with pytest.raises(ValueError, match="^parameters of give ") as raised:
        Tool("give", "Gives.", parameters)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("description", [None, 5, b"x", ["x"]])
def test_descriptions_must_be_text(description):
    with pytest.raises(ValueError, match="description=.* of give must be text"):
        Tool("give", description, OBJECT)

"""Time of every reader of completions on hostile texts: linear in their length, and no exception."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.attacks_text import ELSEWHERE, PIECES, attack, readers
from torchrl_rloo.envs.tools.parsers import PARSERS, llama
from torchrl_rloo.rewards.instructions import CHECKS
from torchrl_rloo.rewards.registry import REWARDS

LARGE = 20_000
NEGLIGIBLE = 0.1  # seconds at the large size, below which noise would decide
MOST = 25  # ratio for ten times the size; quadratic time has 100
# Beginnings that are never closed, before repeated pieces
HEADS = ('["', '{"a": "', "<tool_call>", '<tool_call>{"name": "f", "arguments": {"a": "', "```json\n", "\\boxed{", "$",
         "<answer>", '[TOOL_CALLS][{"', "<think>", "[" * 101 + '"')  # fmt: skip
OPEN = [(head, piece) for head in HEADS for piece in ('\\"', "\\", " ", "{", "[1,", '{"a":', head)]


def growth(call: Callable[[str], Any], piece: str, head: str = "x", large_size: int = LARGE) -> float:
    """Return the ratio of CPU times at ten times the size; 0 if the larger one is negligible."""

    def seconds(size: int) -> float:
        text = head + (piece * (size // len(piece) + 1))[:size] + "x"
        start = time.thread_time()
        call(text)
        return time.thread_time() - start

    large = small = float("inf")
    for _ in range(3):  # a busy neighbor spoils one measurement, not three
        large = min(large, seconds(large_size))
        if large < NEGLIGIBLE * large_size / LARGE:
            return 0.0
        small = min(small, seconds(large_size // 10))
    return large / small


def test_every_reward_check_and_parser_is_here():
    kinds = {f"reward {name}" for name in REWARDS.keys() - ELSEWHERE} | {f"check {name}" for name in CHECKS}
    assert kinds | {f"parser {name}" for name in PARSERS} <= readers().keys()


@pytest.mark.parametrize("name", [name for name in readers() if "accuracy" not in name or "boxed" in name])
def test_time_is_linear_in_the_text(name):
    cases = [("x", piece) for piece in PIECES] + OPEN
    slow = {case: ratio for case in cases if (ratio := growth(readers()[name], case[1], case[0])) > MOST}
    assert not slow


def test_hostile_texts_are_contained():
    result = attack(count=4, seed=0, max_seconds=2.0)
    assert result["failures"] == [] and result["tried"] == result["contained"] == 4 * len(readers())


@settings(max_examples=10, deadline=None, derandomize=True, database=None)
@given(st.lists(st.tuples(st.sampled_from(PIECES), st.integers(1, 300)), max_size=6) | st.text(max_size=60))
def test_no_text_raises(parts):
    text = parts if isinstance(parts, str) else "".join(piece * times for piece, times in parts)
    for name, reader in readers().items():
        if "accuracy" not in name and name != "vote math":
            reader(text)


@pytest.mark.parametrize("depth", [90, 900, 5_000, 100_000])
@pytest.mark.parametrize("name", PARSERS)
def test_nested_brackets_are_a_refused_call(name, depth):
    nested = "[" * depth + "]" * depth
    for text in (
        f"<tool_call>{nested}</tool_call>",
        f"[TOOL_CALLS]{nested}",
        f'[TOOL_CALLS]f[ARGS]{{"a": {nested}}}',
        f'<|python_tag|>{{"name": "f", "parameters": {{"a": {nested}}}}}',
        f'<tool_call>{{"name": "f", "arguments": {{"a": {nested}}}}}</tool_call>',
        f'<tool_call>{{"name": "f", "arguments": "{nested}"}}</tool_call>',
        "<tool_call>" + '{"arguments":' * depth + "1" + "}" * depth + "</tool_call>",
        f"<function=f><parameter=a>{nested}</parameter></function>",
    ):
        for call in PARSERS[name](text):
            assert depth == 90 or not getattr(call, "arguments", None) or name == "qwen_xml"


def test_a_tag_in_a_string_is_text():
    (call,) = llama('<|python_tag|>{"name": "f", "parameters": {"a": "x <|python_tag|> y"}}')
    assert call.arguments == {"a": "x <|python_tag|> y"}
    two = llama('<|python_tag|>{"name": "f", "parameters": {}}<|python_tag|>{"name": "g", "parameters": {}}')
    assert [call.name for call in two] == ["f", "g"]

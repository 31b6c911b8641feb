"""Time of every reader of completions on hostile texts: linear in their length, and no exception."""

from __future__ import annotations

import importlib
import pkgutil
import re
import time
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.attacks_text import ELSEWHERE, PIECES, attack, readers
from torchrl_rloo import data, diagnostics, envs, rewards
from torchrl_rloo.envs.tools.parsers import PARSERS, llama
from torchrl_rloo.rewards.instruction_checks import CHECKS
from torchrl_rloo.rewards.registry import REWARDS

LARGE = 20_000
NEGLIGIBLE = 0.1  # seconds at the large size, below which noise would decide
MOST = 25  # ratio for ten times the size; quadratic time has 100
# Used with `match` at one place each, after a search, so that their time adds up to the length of the text
ANCHORED = {"_PARAMETER", "_END", "_MISTRAL_HEAD", "_SEPARATOR", "_IN_TEXT", "_DOUBTED_BEHIND", "_ERROR", "_CONTROL"}


def growth(call: Callable[[str], Any], piece: str, large_size: int = LARGE) -> float:
    """Return the ratio of CPU times at ten times the size; 0 if the larger one is negligible."""

    def seconds(size: int) -> float:
        text = "x" + (piece * (size // len(piece) + 1))[:size] + "x"
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


def patterns() -> Iterator[tuple[str, re.Pattern[str]]]:
    """Yield all compiled patterns of the modules that read texts, also those in lists and of objects."""
    for package in (rewards, envs, data, diagnostics):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            values = vars(importlib.import_module(module.name))
            for name, value in values.items():
                nested = [
                    value,
                    *(value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()),
                ]
                nested += [item for pair in nested if isinstance(pair, tuple) for item in pair]
                nested += (
                    list(getattr(value, "__dict__", {}).values()) if not isinstance(value, type | ModuleType) else []
                )
                for i, pattern in enumerate(
                    p for p in nested if isinstance(p, re.Pattern) and isinstance(p.pattern, str)
                ):
                    yield f"{module.name}.{name}[{i}]", pattern


def test_every_reward_check_and_parser_is_here():
    kinds = {f"reward {name}" for name in REWARDS.keys() - ELSEWHERE} | {f"check {name}" for name in CHECKS}
    assert kinds | {f"parser {name}" for name in PARSERS} <= readers().keys()


@pytest.mark.parametrize("name", [name for name in readers() if "accuracy" not in name or "boxed" in name])
def test_time_is_linear_in_the_text(name):
    slow = {piece: ratio for piece in PIECES if (ratio := growth(readers()[name], piece)) > MOST}
    assert not slow


def test_every_pattern_takes_linear_time():
    found = dict(patterns())
    found = {pattern.pattern: (name, pattern) for name, pattern in found.items()}
    assert len(found) > 50
    slow = []
    for name, pattern in found.values():
        anchored = name.rpartition(".")[2].partition("[")[0] in ANCHORED
        call = pattern.match if anchored else lambda text, pattern=pattern: sum(1 for _ in pattern.finditer(text))
        slow += [(name, piece) for piece in PIECES if growth(call, piece, 4_000) > MOST]
    assert not slow


def test_a_quadratic_pattern_is_found():
    pattern = re.compile(r"\*[^*\n]*[^*\s][^*\n]*\*")
    assert growth(lambda text: pattern.findall(text[:3000]), "*a") == 0.0
    assert growth(re.compile(r"<<[^<>\n]*[^<>\s][^<>\n]*>>").search, "<<" + "a" * LARGE) > MOST


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

"""TRL's reward functions, recorded: ours give the same scores, to completions as text and as messages, in both calls.

See ``test_trl.py`` for where ``trl_cases.json`` comes from.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from torchrl_rloo import rewards
from torchrl_rloo.rewards.accuracy import CosineScaled, MathAccuracy, ReasoningAccuracy
from torchrl_rloo.rewards.formats import think_format
from torchrl_rloo.rewards.lengths import RepetitionPenalty, SoftOverlong
from torchrl_rloo.rewards.protocol import RewardBatch, RewardFunction, call_reward

CASES = {
    case["name"]: case
    for case in json.loads((Path(__file__).parent / "trl_cases.json").read_text())["cases"]
    if case["kind"] == "reward"
}

# TRL's function -> ours, from a case's inputs
OURS: dict[str, Callable[[dict[str, Any]], RewardFunction]] = {
    "think_format_reward": lambda inputs: think_format,
    "get_soft_overlong_punishment": lambda inputs: SoftOverlong(
        inputs["max_completion_len"], inputs["soft_punish_cache"]
    ),
    "get_repetition_penalty_reward": lambda inputs: RepetitionPenalty(inputs["ngram_size"], inputs["max_penalty"]),
    "accuracy_reward": lambda inputs: MathAccuracy(),
    "reasoning_accuracy_reward": lambda inputs: ReasoningAccuracy(inputs["reasoning_delimiters"] or ("</think>",)),
    "get_cosine_scaled_reward": lambda inputs: CosineScaled(inputs["max_len"]),
}


@pytest.mark.parametrize("messages", [False, True], ids=["text", "messages"])
@pytest.mark.parametrize("name", CASES)
def test_our_reward_gives_the_recorded_scores(name, messages):
    inputs, expected = CASES[name]["inputs"], CASES[name]["outputs"]["rewards"]
    ids = inputs.get("completion_ids") or [[1] * n for n in inputs.get("lengths", [0] * len(expected))]
    contents = inputs.get("contents", [""] * len(expected))
    completions = [[{"role": "assistant", "content": text}] for text in contents] if messages else contents
    columns = {"solution": inputs["solutions"]} if "solutions" in inputs else {}
    call = call_reward(OURS[inputs["function"]](inputs), RewardBatch(["?"] * len(expected), completions, ids, columns))
    assert call.scores == [value if value is None else pytest.approx(value, abs=1e-5) for value in expected]


@pytest.mark.parametrize("name", CASES)
def test_trls_name_takes_trls_call(name):
    """The columns come after the completions, by position, as TRL's documentation calls its functions."""
    inputs, expected = CASES[name]["inputs"], CASES[name]["outputs"]["rewards"]
    function, logged = getattr(rewards, inputs["function"]), {}
    settings = {
        k: inputs[k] for k in ("max_completion_len", "soft_punish_cache", "ngram_size", "max_penalty") if k in inputs
    }
    settings |= {"max_len": inputs["max_len"]} if "max_len" in inputs else {}
    ids = inputs.get("completion_ids") or [[1] * n for n in inputs.get("lengths", [])]
    completions = [[{"content": text}] for text in inputs.get("contents", [])]
    if settings:
        function = pickle.loads(pickle.dumps(function(**settings)))
        arguments = [completions, inputs["solutions"], ids] if "solutions" in inputs else [ids]
    elif "solutions" in inputs:
        arguments = [completions, inputs["solutions"]]
        arguments += [inputs["reasoning_delimiters"]] if "reasoning_delimiters" in inputs else []
    else:
        arguments = [completions]
    scores = function(*arguments, prompts=["?"] * len(expected), log_extra=logged.__setitem__, truncated=[])
    assert scores == [value if value is None else pytest.approx(value, abs=1e-5) for value in expected]
    if "accuracy_reward" in inputs["function"]:
        assert logged["solution"] == inputs["solutions"] and {len(v) for v in logged.values()} == {len(expected)}
        assert [g == "[unparseable]" for g in logged["gold_parsed"]] == [score is None for score in scores]
        right = [answer for answer, score in zip(logged["answer_parsed"], scores, strict=True) if score == 1]
        assert not {"[unparseable]", "[skipped]"} & set(right)


def test_every_function_is_recorded():
    assert {case["inputs"]["function"] for case in CASES.values()} == set(OURS)

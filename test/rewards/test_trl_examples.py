"""Examples of custom reward functions in TRL's documentation, unchanged, with their documented results.

Source: https://huggingface.co/docs/trl/rloo_trainer, section "Using a custom reward function". The texts of EXAMPLES
and CALLS are from there: Copyright 2020-2026 The HuggingFace Team, Apache License 2.0,
https://www.apache.org/licenses/LICENSE-2.0. Example 4 uses the documented functions and rows without the trainer. The
checks that it calls are not documented and are defined below.
"""

from __future__ import annotations

import asyncio
import doctest
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from tensordict import TensorDictBase

from torchrl_rloo.data import keys, load_prompts
from torchrl_rloo.envs import DatasetChatEnv
from torchrl_rloo.envs.transforms import RewardTransform
from torchrl_rloo.rewards.protocol import RewardBatch, call_reward, call_reward_async
from torchrl_rloo.runtime.lookup import is_async

EXAMPLES = {
    "1": r'''
def reward_func(completion_ids, **kwargs):
    """Reward function that assigns higher scores to longer completions (in terms of token count)."""
    return [float(len(ids)) for ids in completion_ids]
''',
    "1.1": r'''
def reward_func(completions, **kwargs):
    """Reward function that assigns higher scores to longer completions (in terms of character count)."""
    return [float(len(completion)) for completion in completions]
''',
    "2": r'''
import re

def format_reward_func(completions, **kwargs):
    """Reward function that checks if the completion has a specific format."""
    pattern = r"^<think>.*?</think><answer>.*?</answer>$"
    completion_contents = [completion[0]["content"] for completion in completions]
    matches = [re.match(pattern, content) for content in completion_contents]
    return [1.0 if match else 0.0 for match in matches]
''',
    "3": r"""
import re

def reward_func(completions, ground_truth, **kwargs):
    # Regular expression to capture content inside \boxed{}
    matches = [re.search(r"\\boxed\{(.*?)\}", completion) for completion in completions]
    contents = [match.group(1) if match else "" for match in matches]
    # Reward 1 if the content is the same as the ground truth, 0 otherwise
    return [1.0 if c == gt else 0.0 for c, gt in zip(contents, ground_truth)]
""",
    "4": r"""
# Math-specific reward function
def math_reward_func(prompts, completions, task, **kwargs):
    rewards = []
    for prompt, completion, t in zip(prompts, completions, task):
        if t == "math":
            # Calculate math-specific reward
            correct = check_math_solution(prompt, completion)
            reward = 1.0 if correct else -1.0
            rewards.append(reward)
        else:
            # Return None for non-math tasks
            rewards.append(None)
    return rewards

# Coding-specific reward function
def coding_reward_func(prompts, completions, task, **kwargs):
    rewards = []
    for prompt, completion, t in zip(prompts, completions, task):
        if t == "coding":
            # Calculate coding-specific reward
            works = test_code_solution(prompt, completion)
            reward = 1.0 if works else -1.0
            rewards.append(reward)
        else:
            # Return None for non-coding tasks
            rewards.append(None)
    return rewards
""",
    "5": r"""
import asyncio

async def async_reward_func(prompts, completions, **kwargs):
    # Simulate an I/O-bound call (e.g., HTTP request, database lookup)
    await asyncio.sleep(0.01)
    # Simple toy reward: 1.0 if the completion is non-empty, else 0.0
    return [1.0 if completion else 0.0 for completion in completions]
""",
    "6": r"""
import re

def reward_func(completions, ground_truth, log_extra=None, log_metric=None, **kwargs):
    extracted = [re.search(r"\\boxed\{(.*?)\}", c) for c in completions]
    extracted = [m.group(1) if m else None for m in extracted]
    rewards = [1.0 if e == gt else 0.0 for e, gt in zip(extracted, ground_truth)]

    if log_extra:
        log_extra("golden_answer", list(ground_truth))
        log_extra("extracted_answer", [e or "[none]" for e in extracted])

    if log_metric:
        log_metric("accuracy", sum(rewards) / len(rewards))

    return rewards
""",
}

CALLS = {
    "1": r"""
>>> prompts = ["The sky is", "The sun is"]  # not used in the reward function, but the trainer will pass it
>>> completions = [" blue.", " in the sky."]  # not used in the reward function, but the trainer will pass it
>>> completion_ids = [[6303, 13], [304, 279, 12884, 13]]
>>> reward_func(prompts=prompts, completions=completions, completion_ids=completion_ids)
[2.0, 4.0]
""",
    "1.1": r"""
>>> prompts = ["The sky is", "The sun is"]
>>> completions = [" blue.", " in the sky."]
>>> completion_ids = [[6303, 13], [304, 279, 12884, 13]]  # not used in the reward function, but the trainer will pass it
>>> reward_func(prompts=prompts, completions=completions, completion_ids=completion_ids)
[6.0, 12.0]
""",  # noqa: E501
    "2": r"""
>>> prompts = [
...     [{"role": "assistant", "content": "What is the result of (1 + 2) * 4?"}],
...     [{"role": "assistant", "content": "What is the result of (3 + 1) * 2?"}],
... ]
>>> completions = [
...     [{"role": "assistant", "content": "<think>The sum of 1 and 2 is 3, which we multiply by 4 to get 12.</think><answer>(1 + 2) * 4 = 12</answer>"}],
...     [{"role": "assistant", "content": "The sum of 3 and 1 is 4, which we multiply by 2 to get 8. So (3 + 1) * 2 = 8."}],
... ]
>>> format_reward_func(prompts=prompts, completions=completions)
[1.0, 0.0]
""",  # noqa: E501
    "3": r"""
>>> prompts = ["Problem: Solve the equation $2x + 3 = 7$. Solution:", "Problem: Solve the equation $3x - 5 = 10$."]
>>> completions = [r" The solution is \boxed{2}.", r" The solution is \boxed{6}."]
>>> ground_truth = ["2", "5"]
>>> reward_func(prompts=prompts, completions=completions, ground_truth=ground_truth)
[1.0, 0.0]
""",
}

TASKS = [  # the rows of the dataset in example 4
    {"prompt": "What is 2+2?", "task": "math"},
    {"prompt": "Write a function that returns the sum of two numbers.", "task": "code"},
    {"prompt": "What is 3*4?", "task": "math"},
    {"prompt": "Write a function that returns the product of two numbers.", "task": "code"},
]


def example(number: str) -> dict[str, Any]:
    """Return the names that a user's module with the example defines."""
    namespace: dict[str, Any] = {
        "check_math_solution": lambda prompt, completion: (
            completion == {"What is 2+2?": "4", "What is 3*4?": "12"}[prompt]
        ),
        "test_code_solution": lambda prompt, completion: "def " in completion,
    }
    exec(EXAMPLES[number], namespace)
    return namespace


def function(number: str, name: str = "reward_func") -> Callable:
    return example(number)[name]


@pytest.mark.parametrize("number", CALLS)
def test_the_documented_call(number):
    namespace = example(number)
    test = doctest.DocTestParser().get_doctest(CALLS[number], namespace, number, None, 0)
    arguments_of = test.globs  # filled by the run
    assert doctest.DocTestRunner(verbose=False).run(test, clear_globs=False) == (0, len(test.examples))

    # The protocol passes more arguments
    (reward,) = (f for name, f in namespace.items() if name.endswith("reward_func"))
    completions = arguments_of["completions"]
    ids = arguments_of.get("completion_ids", [[1]] * len(completions))
    columns = {name: arguments_of[name] for name in ("ground_truth",) if name in arguments_of}
    call = call_reward(reward, RewardBatch(arguments_of["prompts"], completions, ids, columns))
    assert repr(call.scores) + "\n" == test.examples[-1].want


def test_multi_task():
    columns = {"task": ["math", "code", "math", "coding"]}
    batch = RewardBatch(
        [row["prompt"] for row in TASKS], ["4", "def add(): ...", "13", "def multiply(): ..."], [[1]] * 4, columns
    )
    assert call_reward(function("4", "math_reward_func"), batch).scores == [1, None, -1, None]
    assert call_reward(function("4", "coding_reward_func"), batch).scores == [None, None, None, 1]


def test_async():
    reward = function("5", "async_reward_func")
    call = asyncio.run(call_reward_async(reward, RewardBatch(["p"] * 2, ["text", ""], [[1], []])))
    assert is_async(reward) and call.scores == [1, 0]


def test_logging():
    batch = RewardBatch(["p"] * 2, [r"\boxed{2}", "6"], [[1]] * 2, {"ground_truth": ["2", "5"]})
    call = call_reward(function("6"), batch)
    assert call.scores == [1, 0]
    assert call.extra == {"golden_answer": ["2", "5"], "extracted_answer": ["2", "[none]"]}
    assert call.metrics == [("accuracy", 0.5)]
    assert function("6")([r"\boxed{2}"], ["2"]) == [1]  # by hand, without the trainer's callables


class Says:
    """Policy that returns the given texts, one per row."""

    def __init__(self, tokenizer, texts: Sequence[str]):
        self.tokenizer, self.texts = tokenizer, texts

    def __call__(self, rows: TensorDictBase) -> TensorDictBase:
        for row, text in zip(rows.unbind(0), self.texts, strict=True):
            said = torch.tensor([*self.tokenizer(text)["input_ids"], self.tokenizer.eos_token_id])
            before, log_probs = row[keys.ACTION_MASK], row[keys.LOG_PROBS]
            row.set(keys.TOKENS, torch.cat([row[keys.PROMPT_TOKENS], said]))
            row.set(keys.ACTION_MASK, torch.cat([before, torch.ones(len(said), dtype=torch.bool)]))
            row.set(keys.LOG_PROBS, torch.cat([log_probs, -torch.ones(len(said))]))
        return rows


def step(tokenizer, rewards: RewardTransform, rows: list[dict], texts: Sequence[str]) -> TensorDictBase:
    """Run one step of an environment whose policy answers ``rows`` with ``texts``."""
    dataset = load_prompts(rows, chat=False if isinstance(next(iter(rows[0].values())), str) else None)
    env = DatasetChatEnv(dataset, tokenizer, rewards=rewards, shuffle=False, prompts_per_batch=len(dataset))
    return env.step(Says(tokenizer, texts)(env.reset()))["next"]


def scores_of(rows: TensorDictBase) -> list[list[float | None]]:
    return [[None if score.isnan() else score.item() for score in row["rewards"]] for row in rows.unbind(0)]


def test_in_an_environment_text(tokenizer):
    rows = [{"query": "2x + 3 = 7, x is ", "ground_truth": "2"}, {"query": "3x - 5 = 10, x is ", "ground_truth": "5"}]
    texts = [r"\boxed{2}", r"\boxed{6}"]
    transform = RewardTransform([function("3"), function("5", "async_reward_func")])
    assert scores_of(step(tokenizer, transform, rows, texts)) == [[1, 1], [0, 1]]
    characters = step(tokenizer, RewardTransform(function("1.1")), rows, texts)
    assert scores_of(characters) == [[9], [9]]
    ids = step(tokenizer, RewardTransform(function("1")), rows, texts)
    assert scores_of(ids) == [[row[keys.ACTION_MASK].sum().item()] for row in ids.unbind(0)]


def test_in_an_environment_multi_task(tokenizer):
    names = ("math_reward_func", "coding_reward_func")
    transform = RewardTransform([function("4", name) for name in names])
    rows = [{"query": row["prompt"], "task": row["task"]} for row in [*TASKS[:3], TASKS[3] | {"task": "coding"}]]
    after = step(tokenizer, transform, rows, ["4", "def add(): ...", "13", "pass"])
    # The dataset in the documentation has "code", its function expects "coding": both abstain there
    assert scores_of(after) == [[1, None], [None, None], [-1, None], [None, -1]]
    rewards = after["reward"].flatten().tolist()
    assert rewards[0] == 1 and rewards[2:] == [-1, -1]


def test_every_function_of_the_documentation_is_tried():
    functions = [f for number in EXAMPLES for f in example(number).values() if inspect.isfunction(f)]
    assert sum(f.__name__.endswith("reward_func") for f in functions) == 8

"""Recorded behavior of TRL 1.16: inputs and outputs of its trainers' own functions, checked against ours.

Source of ``trl_cases.json``: TRL 1.16.0 with torch 2.13.0 and math-verify 0.9.0, run on small fixed tensors. It holds
inputs and outputs only, no code. Floats are float32 results written as doubles, compared with an absolute tolerance of
1e-5; ``null`` stands for None and NaN. Rows are group-major: rows ``i * G .. i * G + G - 1`` share a prompt. The
``metrics`` of the advantage cases belong to the tests of the diagnostics. The ``schedule`` and ``reward`` cases have
separate test files in this folder.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import LazyStackStorage, ReplayBuffer

from torchrl_rloo.data import keys, load_prompts, stack_rows
from torchrl_rloo.embedded import build_tokenizer
from torchrl_rloo.envs import DatasetChatEnv
from torchrl_rloo.envs.transforms import DatasetExhaustedError
from torchrl_rloo.functional import (
    ESTIMATORS,
    RATIOS,
    SURROGATES,
    Clip,
    SamplingDistribution,
    k1,
    leave_one_out,
    token_log_probs,
)
from torchrl_rloo.functional.kl import kl_penalized_reward
from torchrl_rloo.functional.policy_loss import aggregate
from torchrl_rloo.functional.ratios import sequence_log_ratio, split_among_tokens
from torchrl_rloo.functional.rewards import combine_rewards
from torchrl_rloo.functional.statistics import masked_mean, nanstd
from torchrl_rloo.replay import MCAdvantage

CASES = {case["name"]: case for case in json.loads((Path(__file__).parent / "trl_cases.json").read_text())["cases"]}
EPSILON = 0.2  # of TRL, where a case does not give its own

Inputs = dict[str, Any]


def tensor(values: Any) -> torch.Tensor:
    """Return nested lists as a float32 tensor, None as NaN."""

    def plain(value):
        return [plain(v) for v in value] if isinstance(value, list) else float("nan") if value is None else value

    return torch.tensor(plain(values), dtype=torch.float32)


def check(actual: torch.Tensor, expected: Any) -> None:
    torch.testing.assert_close(actual.float(), tensor(expected), atol=1e-5, rtol=0, equal_nan=True)


def names_of(kind: str) -> list[str]:
    return [name for name, case in CASES.items() if case["kind"] == kind]


def completion_mask(inputs: Inputs) -> torch.Tensor:
    """Return the mask ``[B, T]`` of the tokens that count."""
    rows, length = tensor(inputs["old"]).shape
    lengths = torch.tensor(inputs.get("completion_lengths", [length] * rows))
    mask = torch.arange(length) < lengths[:, None]
    if inputs.get("mask_truncated_completions"):
        mask &= ~torch.tensor(inputs["truncated"])[:, None]
    return mask


def returns(inputs: Inputs) -> torch.Tensor:
    """Return the return ``[B]`` of each row, after clip and KL."""
    rewards = tensor(inputs["rewards_per_function"]).T
    clip = inputs.get("reward_clip_range")
    total = combine_rewards(rewards, inputs.get("reward_weights", [1.0] * rewards.shape[1]), clip and tuple(clip))
    if "beta" in inputs:
        mask = completion_mask(inputs)
        kl = torch.where(mask, k1(tensor(inputs["old"]), tensor(inputs["ref"])), 0.0)
        total = kl_penalized_reward(total, kl, inputs["beta"])
    return total


def group_ids(inputs: Inputs) -> torch.Tensor:
    return torch.arange(len(inputs["rewards_per_function"][0])) // inputs["num_generations"]


def run_advantage(inputs: Inputs, outputs: dict[str, Any]) -> None:
    check(leave_one_out(returns(inputs), group_ids(inputs)), outputs["advantages"])
    if "old_logps" in outputs:
        old = torch.where(completion_mask(inputs), tensor(inputs["old"]), 0.0)
        check(old.sum(1), outputs["old_logps"])
    if "completion_mask" in outputs:
        check(completion_mask(inputs), outputs["completion_mask"])


def grpo_estimator(inputs: Inputs) -> str:
    return {"group": "grpo", "none": "dr_grpo"}[inputs.get("scale_rewards", "group")]


def run_grpo_advantage(inputs: Inputs, outputs: dict[str, Any]) -> None:
    check(ESTIMATORS[grpo_estimator(inputs)](returns(inputs), group_ids(inputs)), outputs["advantages"])


def run_loss(inputs: Inputs, outputs: dict[str, Any]) -> None:
    log_probs, mask, advantages = tensor(inputs["logps"]), tensor(inputs["mask"]).bool(), tensor(inputs["adv"])
    log_probs.requires_grad_()
    low, high = inputs.get("epsilon", EPSILON), inputs.get("epsilon_high", inputs.get("epsilon", EPSILON))
    old = torch.zeros_like(mask, dtype=torch.float32)
    old[:, 0] = tensor(inputs["old_logps_seq"])  # only the sum over a row matters
    log_ratio = sequence_log_ratio(log_probs, old, mask)
    clip, advantages = Clip(low, high), advantages[:, None]
    loss = clip(log_ratio, advantages, log_probs, old).mean()
    loss.backward()
    check(loss.detach(), outputs["loss"])
    check(log_probs.grad, outputs["grad_logps"])
    clipped = clip.clipped(log_ratio, advantages, log_probs, old)
    is_low, is_high = (clipped & (advantages < 0)).float(), (clipped & (advantages > 0)).float()
    ours = {
        "entropy": masked_mean(tensor(inputs["ent"]), mask) if "ent" in inputs else torch.tensor(1.0),
        "clip_ratio/low_mean": is_low.mean(),
        "clip_ratio/low_min": is_low.min(),
        "clip_ratio/high_mean": is_high.mean(),
        "clip_ratio/high_max": is_high.max(),
        "clip_ratio/region_mean": torch.maximum(is_low, is_high).mean(),
    }
    assert set(ours) == set(outputs["metrics"])
    for name, value in outputs["metrics"].items():
        check(ours[name], value)


# How TRL's loss types are made of our parts: ratio, surrogate, aggregation, and what epsilon_high means for it.
GRPO_LOSSES: dict[str, tuple[str, str, str]] = {
    "grpo": ("token", "clip", "sequence_mean"),
    "dapo": ("token", "clip", "token_mean"),
    "cispo": ("token", "cispo", "token_mean"),
    "vespo": ("sequence", "vespo", "token_mean"),
}


def run_grpo_loss(inputs: Inputs, outputs: dict[str, Any]) -> None:
    log_probs, old, mask = tensor(inputs["logps"]), tensor(inputs["old"]), tensor(inputs["mask"]).bool()
    advantages = tensor(inputs["adv"])[:, None]
    ratio, surrogate, aggregation = GRPO_LOSSES[inputs["loss_type"]]
    if inputs.get("importance_sampling_level") == "sequence":
        ratio = "sequence_mean"
    settings = {}
    if surrogate == "cispo":
        settings = {"high": inputs["epsilon_high"] - 1}  # TRL's is the bound itself
    log_probs.requires_grad_()
    log_ratio = RATIOS[ratio](log_probs, old, mask)
    values = split_among_tokens(SURROGATES[surrogate](**settings)(log_ratio, advantages, log_probs, old), mask)
    loss = aggregate(values, mask, aggregation)
    loss.backward()
    check(loss.detach(), outputs["loss"])
    check(log_probs.grad, outputs["grad_logps"])


def run_logprob(inputs: Inputs, outputs: dict[str, Any]) -> None:
    logits, ids = tensor(inputs["logits"]), torch.tensor(inputs["ids"])
    identity = torch.eye(logits.shape[-1])  # with it the hidden states are the logits
    distribution = SamplingDistribution(temperature=inputs.get("temperature", 1.0))
    scored = token_log_probs(logits.flatten(0, 1), identity, ids.flatten(), distribution=distribution)
    check(scored.log_probs.view_as(ids), outputs["logps"])
    check(scored.entropy.view_as(ids), outputs["entropy"])


def run_stats(inputs: Inputs, outputs: dict[str, Any]) -> None:
    values = tensor(inputs["x"])
    check(nanstd(values), outputs["std"])
    check(nanstd(values[:1]), outputs["std_one"])


RUNNERS: dict[str, Callable[[Inputs, dict[str, Any]], None]] = {
    "advantage": run_advantage,
    "grpo_advantage": run_grpo_advantage,
    "loss": run_loss,
    "grpo_loss": run_grpo_loss,
    "logprob": run_logprob,
    "stats": run_stats,
}


@pytest.mark.parametrize("name", [name for kind in RUNNERS for name in names_of(kind)])
def test_ours_gives_the_recorded_values(name):
    RUNNERS[CASES[name]["kind"]](CASES[name]["inputs"], CASES[name]["outputs"])


@pytest.mark.parametrize("name", names_of("advantage") + names_of("grpo_advantage"))
def test_advantages_of_rows_that_come_one_by_one_through_a_buffer(name):
    inputs, outputs = CASES[name]["inputs"], CASES[name]["outputs"]
    estimator = "rloo" if CASES[name]["kind"] == "advantage" else grpo_estimator(inputs)
    transform = MCAdvantage(inputs["num_generations"], estimator=estimator)
    buffer = ReplayBuffer(storage=LazyStackStorage(64), transform=transform)
    earned, groups = returns(inputs), group_ids(inputs)
    order = torch.randperm(len(earned), generator=torch.Generator().manual_seed(0)).tolist()
    for i in order:
        row = TensorDict({keys.GROUP_ID: groups[i], keys.REWARD: earned[i].reshape(1, 1), "place": torch.tensor(i)})
        buffer.extend(stack_rows([row]))
    rows = buffer[:]
    check(rows[keys.ADVANTAGE].flatten()[rows["place"].argsort()], outputs["advantages"])


def test_every_case_is_run_or_listed():
    kinds = {case["kind"] for case in CASES.values()}
    assert kinds == set(RUNNERS) | {"sampler", "schedule", "reward"}


@pytest.mark.parametrize("name", names_of("sampler"))
def test_sampler(name: str) -> None:
    """Batches have the same prompts. TRL repeats a batch ``repeat_count`` times; ours is drawn once and buffered."""
    inputs = CASES[name]["inputs"]
    prompts, copies = inputs["batch_size"], inputs["mini_repeat_count"]
    data = load_prompts([{"prompt": str(i), "index": i} for i in range(inputs["n"])])
    env = DatasetChatEnv(
        data, build_tokenizer(), prompts_per_batch=prompts, num_generations=copies, shuffle=inputs["shuffle"], epochs=1
    )
    drawn = []
    while env.primer.remaining() >= prompts:
        batch = [row["index"] for row in env.reset().unbind(0)]
        drawn += batch * inputs["repeat_count"]
    assert drawn == CASES[name]["outputs"]["indices"] and len(drawn) == CASES[name]["outputs"]["length"]
    with pytest.raises(DatasetExhaustedError):
        env.reset()

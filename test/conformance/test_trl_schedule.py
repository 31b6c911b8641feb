"""TRL's batch arithmetic, recorded: a loop of our parts does the same work in the same order.

TRL describes a run by device batches; here the same run is two loops the user writes: how many rollout batches an
optimizer step takes in, and into how many minibatches and passes one is divided.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torchrl.data import LazyStackStorage, ReplayBuffer, SamplerWithoutReplacement

from torchrl_rloo.collectors import LLMCollector
from torchrl_rloo.data import load_prompts, tensor_rows
from torchrl_rloo.data.rows import micro_batches
from torchrl_rloo.envs import DatasetChatEnv
from torchrl_rloo.modules import TransformersWrapper
from torchrl_rloo.objectives import RLOOLoss
from torchrl_rloo.replay import MCAdvantage
from torchrl_rloo.weight_update import InProcessWeightUpdater

CASES = {
    case["name"]: case
    for case in json.loads((Path(__file__).parent / "trl_cases.json").read_text())["cases"]
    if case["kind"] == "schedule"
}


@pytest.fixture
def parts(tokenizer, model):
    """``parts(rows, group, minibatches)``: collector, buffer and loss for rollout batches of ``rows``."""

    def make(rows: int, group: int, minibatches: int, n_prompts: int):
        policy = TransformersWrapper(model, tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 2, "seed": 0})
        data = load_prompts([{"prompt": f"What is {i}?"} for i in range(n_prompts)])
        env = DatasetChatEnv(
            data,
            tokenizer,
            prompts_per_batch=rows // group,
            num_generations=group,
            rewards=lambda completions, **columns: [float(i) for i in range(len(completions))],
        )
        collector = LLMCollector(env, policy, weight_updater=InProcessWeightUpdater(model, policy.model))
        buffer = ReplayBuffer(
            storage=LazyStackStorage(rows),
            sampler=SamplerWithoutReplacement(),
            transform=MCAdvantage(group),
            batch_size=rows // minibatches,
        )
        return collector, buffer, RLOOLoss(policy.get_new_version(generate=False))

    return make


@pytest.mark.parametrize("name", CASES)
def test_a_loop_of_ours_does_the_recorded_steps(name, parts, monkeypatch):
    inputs, expected = CASES[name]["inputs"], CASES[name]["outputs"]
    micro_rows, group = inputs["per_device_train_batch_size"], inputs["num_generations"]
    accumulation, reuse = inputs.get("gradient_accumulation_steps", 1), inputs.get("num_iterations", 1)
    batches_per_rollout = expected["steps_per_generation"]  # micro-batches that one rollout batch gives in one pass
    rows = micro_rows * batches_per_rollout
    assert rows == expected["generation_batch_size"]
    collector, buffer, loss_fn = parts(rows, group, batches_per_rollout, inputs["n_prompts"])

    events, rollout, optimizer_steps, accumulated = [], 0, 0, 0
    while optimizer_steps < inputs["steps"]:
        collected = collector.collect()
        events.append(["generate", rollout, len(collected)])
        buffer.extend(tensor_rows(collected))
        for _ in range(reuse):
            for batch in buffer:
                for micro in micro_batches(batch, micro_rows):
                    with torch.no_grad():
                        assert loss_fn(micro).loss.isfinite()
                    events.append(["loss", rollout, len(micro)])
                    accumulated += 1
                if accumulated == accumulation:
                    optimizer_steps, accumulated = optimizer_steps + 1, 0
                    events.append(["optimizer_step", optimizer_steps])
        buffer.empty()
        rollout += 1
    assert events == expected["events"]
